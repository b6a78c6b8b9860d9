// mla: multi-head latent attention in its absorbed form, with mma.sync and cp.async, for sm_80 and newer.
//
// Computes O = softmax(mask(Q K^T)) V, where all heads of a token share their keys (576 columns), and V is the first
// 512 columns of K: one copy in shared memory serves both products. A thread block computes one tile of rows of several
// tokens and heads over the keys that some row sees, or over one KV split of them, from the last KV block to the first.
//
//            +------------------------------ KV block j -------------------------------+
//  tensor    | S = Q K(j)^T, half of the columns |                     | O += P V(j), own columns
//  softmax   |                                   | mask, P = 2^(s - m) |
//  loads     | K of block j - (stages - 1)       |                     |
//            A                                   S                     B
//
//  A  __syncthreads: K(j) has landed; all warps are done with K(j + 1) and its P
//  S  a pair's own barrier: the sums over the other half of the columns are in shared memory
//  B  __syncthreads_or: P is in shared memory; whether some row's maximum must be raised
//
// All warps know the m of their rows, and P is computed with the m of the block before. Only where a row exceeds its
// headroom, mostly in the first KV block alone, the warps exchange maxima and compute P anew.
//
// Keys by slots have separate kernels (BySlots): an entry of the page table is one key, or none, and has 576 columns or
// 512, which are K and V. They also write the largest logit of each row. In the kernels for pages, this would take
// registers of the main loop.
//
//   config.h  the tiles: how warps share S and O       products.h  S = Q K^T, O += P V
//   load.h    loads of Q and keys                      scores.h    from S to P
//   store.h   O, LSE, partial results
//
// Numbers. Registers: O takes 32 (Few), 64 (Some) or 128 (Many), Q 72, or 32 of Many. Of 16 rows on an H200, a KV block
// of 64 keys, 74 KB, takes 3600 cycles to arrive at 4.8 TB/s, and about 3900 by the time of a whole call. Of 64 rows,
// 32 keys take about 3800 cycles by that time; their products take the tensor cores about 1600, at 6 cycles for an
// mma.sync.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/cp_async.h"
#include "common/ptx/shared_address.h"
#include "common/softmax.h"
#include "latent/fa2/load.h"
#include "latent/fa2/products.h"
#include "latent/fa2/scores.h"
#include "latent/fa2/store.h"

namespace cutlass_kernels::mla::mma_sync {

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) attention_kernel(__grid_constant__ const KernelParams params) {
  constexpr int kStages = Tile::kStages;
  extern __shared__ __align__(128) char shared_memory[];
  const std::uint32_t shared = shared_address(shared_memory);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;

  TileWork tile;
  // For what only masks and the end of the tile ask for: Q and O leave no registers for it.
  TileWork& kept = kept_tile<Tile>(shared_memory);
  if (!begin_tile<Tile>(params, tile, kept)) return;

  // ---- The first loads. ----
  const int blocks = tile.block_end - tile.block_begin;
  const int last_block = tile.block_end - 1;
  const KeyLoader<Tile> keys(params, tile, shared, warp, lane);
  // Q passes through the last stages.
  constexpr int kFirstBlocks = kStages - Tile::kQStages;
  const std::uint32_t shared_q = shared + kFirstBlocks * Tile::kStageBytes;
  typename KeyLoader<Tile>::Places places[kStages];
  CUTE_UNROLL
  for (int i = 0; i < kStages; ++i) places[i] = keys.find(last_block - i, i < blocks);
  const auto copy = [&](int i) {
    if (i < blocks) {
      const auto copies = keys.copies(last_block - i, i, places[i]);
      CUTE_UNROLL
      for (int panel = 0; panel < Tile::kPanels; ++panel) copies(panel);
    }
    cp_async_commit();
  };
  load_q<Tile>(params, tile, shared_q, shared + Tile::kQ, warp, lane);
  cp_async_commit();
  CUTE_UNROLL
  for (int i = 0; i < kFirstBlocks; ++i) copy(i);

  // ---- What this warp computes. ----
  const WarpPart<Tile> mine(warp);
  const WarpScores<Element, Tile> scores{
      params,
      kept,
      shared_memory,
      lane,
      mine.row_tile,
      mine.group,
      tile.mask.lo<true>(tile.row_end - 1),
      tile.mask.hi<true>(tile.row_begin),
  };
  float o[Tile::kOutRowTiles][Tile::kTilesD][4];  // O (row tile, d tile, fragment)
  CUTE_UNROLL
  for (int i = 0; i < Tile::kOutRowTiles * Tile::kTilesD * 4; ++i) {
    o[i / 4 / Tile::kTilesD][i / 4 % Tile::kTilesD][i % 4] = 0.0f;
  }
  OnlineSoftmax<2> softmax(params.transform.scale);
  float largest[2] = {-INFINITY, -INFINITY};  // WarpScores::exceeds()
  const int half = mine.half;
  KeptQ<Tile> q;
  cp_async_wait<kFirstBlocks>();
  __syncthreads();
  const int q_row = mine.row_tile * 16;
  const std::uint32_t kept_rows = sixteen_rows<Tile::kRowBytes>(shared_q + q_row * Tile::kRowBytes, lane) ^ half * 64;
  CUTE_UNROLL
  for (int panel = 0; panel < Tile::kQPanels; ++panel) read_q(q[panel], kept_rows, panel);
  const std::uint32_t q_rows =
      held(sixteen_rows<Tile::kQRowBytes>(shared + Tile::kQ + q_row * Tile::kQRowBytes, lane) ^ half * 64);
  if constexpr (Tile::kQStages > 1) {
    __syncthreads();
    CUTE_UNROLL
    for (int i = kFirstBlocks; i < kStages - 1; ++i) copy(i);
  }
  const std::uint32_t k_lane =
      held(sixteen_keys<Tile>(shared + mine.pair * Tile::kPartTiles * 8 * Tile::kKeyRowBytes, lane) ^ half * 64);
  const std::uint32_t v_lane = held(sixteen_rows<Tile::kKeyRowBytes>(shared, lane) + mine.column / 64 * 128);
  const int barrier = int(held(mine.barrier()));
  const auto sums_of = [&](int of_warp) {
    return reinterpret_cast<float4*>(shared_memory + held(Tile::kSums + (of_warp * Tile::kTilesN * 32 + lane) * 16));
  };
  float4* const own_sums = sums_of(warp);
  const float4* const other_sums = sums_of(warp ^ Tile::kRowTiles);
  const auto* p = reinterpret_cast<const uint4*>(
      shared_memory + held(Tile::kP + (mine.out_tile * (Tile::kBlockN / 16) * 32 + lane) * 16));

  // ---- Main loop. ----
  int stage = 0, next_stage = kStages - 1;
  auto next = keys.copies(last_block - next_stage, next_stage, places[kStages - 1]);
  CUTE_NO_UNROLL
  for (int i = 0; i < blocks; ++i) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    const auto next_places = keys.find(last_block - (i + kStages), i + kStages < blocks);
    const bool loads = i + kStages - 1 < blocks;
    float part[Tile::kPartTiles][4];  // S of half of the columns (8 keys, fragment)
    const auto copy_next = [&](int panel) {
      if (loads) next(panel);
    };
    if constexpr (!Tile::kSpreadsCopies) {
      CUTE_UNROLL
      for (int panel = 0; panel < Tile::kPanels; ++panel) copy_next(panel);
    }
    take_scores<Element, Tile>(part, k_lane + stage * Tile::kStageBytes, q, q_rows, has_positions<Tile>(params),
                               [&](int panel) {
                                 if constexpr (Tile::kSpreadsCopies) copy_next(panel);
                               });
    cp_async_commit();
    float s[Tile::kTilesN][4];  // S (8 keys, fragment)
    add_halves<Tile>(s, part, half, barrier, own_sums, other_sums);
    scores.transform(s);
    if constexpr (Tile::kBySlots) {
      scores.hide_missing(s, stage);
    } else {
      scores.mask(s, last_block - i);
    }
    float sums[2];
    scores.write_p(s, softmax, sums);
    ValueProducts<Element, Tile> products(v_lane + stage * Tile::kStageBytes);
    if (__builtin_expect(__syncthreads_or(scores.exceeds(s, softmax, largest)), 0)) {
      scores.raise(s, softmax);
      scores.write_p(s, softmax, sums);
      __syncthreads();
      CUTE_UNROLL
      for (int r = 0; r < 2 * Tile::kOutRowTiles; ++r) {
        const float factor = scores.row_values(Tile::kRowFactor)[mine.out_tile * 16 + r * 8 + lane / 4];
        CUTE_UNROLL
        for (int d = 0; d < Tile::kTilesD; ++d) {
          o[r / 2][d][r % 2 * 2] *= factor;
          o[r / 2][d][r % 2 * 2 + 1] *= factor;
        }
      }
    }
    softmax.partial_sum[0] += sums[0];
    softmax.partial_sum[1] += sums[1];
    products.add_to(o, p);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;
    next = keys.copies(last_block - (i + kStages), next_stage, next_places);
  }

  // ---- The end of the tile. ----
  cp_async_wait<0>();
  __syncthreads();  // all warps are done with keys and factors
  scores.finish(softmax, largest);
  __syncthreads();
  const TileStore<Element, Tile> store{params, kept, shared_memory, warp, lane, mine.out_tile, mine.column};
  store(o);
  store.combine_if_last();
}

// ---- The same over keys of 8 bits.
//
// 8-bit keys take half the time to load, and S, softmax and O, one after the other, do not fit into it: 64 keys of
// 16 rows took 4300 cycles, mostly spent waiting. So the S warps compute P of one KV block, while the O warps add the
// block before to O and load keys: 2600 cycles, of which the memory of an H200 needs 1800. Twice as many warps have
// half as many registers each, enough for either Q or O.
//
//              +---------- turn j ----------+-------- turn j + 1 --------+
//   S warps    | S = Q K(j)^T, mask, P(j)   | S = Q K(j + 1)^T, ...      |
//   O warps    | O += P(j - 1) V(j - 1)     | O += P(j) V(j)             |
//   loads      | K of block j + stages - 2  | K of block j + stages - 1  |
//              A (R)                        A (R)
//
//   A  __syncthreads_or: K(j) has landed; P(j - 1) is written, to one of two buffers; nobody reads K(j - 2). It votes
//      whether the maximum of some row must be raised.
//   R  __syncthreads, then alone: the S warps have written P(j - 1) anew, and the O warps multiply O.
//
// Q passes through the last two stages before turn 0. Each warp converts the keys that it reads in registers
// (products.h).
//
// racecheck reports hazards across A and R: where half of the warps have a named barrier of their own, it misses that
// the other half has come to a common one (benchmarks/results/build-and-tests.md).

// By the S warps: P of all KV blocks, then maxima and sums.
template <class Element, class Kv, class Tile>
CUTE_DEVICE void compute_scores(const KernelParams& params, const TileWork& tile, char* shared_memory, int warp,
                                int lane) {
  using Scores = WarpScores<fp16, Tile>;
  const std::uint32_t shared = shared_address(shared_memory);
  const int blocks = tile.block_end - tile.block_begin;
  const int last_block = tile.block_end - 1;
  const WarpPart<Tile> mine(warp);
  const Scores scores{
      params,
      tile,
      shared_memory,
      lane,
      mine.row_tile,
      mine.group,
      tile.mask.lo<true>(tile.row_end - 1),
      tile.mask.hi<true>(tile.row_begin),
  };
  // Q passes through the last two stages, which the O warps fill in turns 0 and 1.
  static_assert(Tile::kQStages <= 2);
  const std::uint32_t shared_q = shared + (Tile::kStages - 2) * Tile::kStageBytes;
  load_q<Tile>(params, tile, shared_q, 0, warp, lane);  // all panels are kept
  cp_async_commit();
  cp_async_wait<0>();
  Scores::sync();
  const Fp16Q<Element, Tile> q(shared_q + mine.row_tile * 16 * Tile::kRowBytes, mine.half, lane);
  const std::uint32_t k_lane =
      held(sixteen_fp8_keys<Tile>(shared + mine.pair * Tile::kPartTiles * 8 * Tile::kKeyRowBytes, lane, mine.half));
  const auto sums_of = [&](int of_warp) {
    return reinterpret_cast<float4*>(shared_memory + Tile::kSums) + of_warp * Tile::kTilesN * 32 + lane;
  };

  OnlineSoftmax<2> softmax(params.transform.scale);
  float largest[2] = {-INFINITY, -INFINITY};  // WarpScores::exceeds()
  float s[Tile::kTilesN][4] = {};             // S (8 keys, fragment)
  bool exceeds = false;                       // whether a row of s exceeds its headroom
  float sums[2] = {0.0f, 0.0f};
  int stage = 0;
  CUTE_NO_UNROLL
  for (int i = 0;; ++i) {
    if (__builtin_expect(__syncthreads_or(exceeds), 0)) {
      scores.raise(s, softmax);
      scores.write_p(s, softmax, sums, (i - 1) % 2);
      __syncthreads();
    }
    softmax.partial_sum[0] += sums[0];
    softmax.partial_sum[1] += sums[1];
    if (i == blocks) break;
    float part[Tile::kPartTiles][4];  // S of half of the columns (8 keys, fragment)
    take_scores_fp8<Kv, Tile>(part, k_lane + stage * Tile::kStageBytes, q.fragments);
    q.scale_back(part);
    add_halves<Tile>(s, part, mine.half, mine.barrier(), sums_of(warp), sums_of(warp ^ Tile::kRowTiles));
    scores.transform(s);
    if constexpr (Tile::kBySlots) {
      scores.hide_missing(s, stage);
    } else {
      scores.mask(s, last_block - i);
    }
    exceeds = scores.exceeds(s, softmax, largest);
    scores.write_p(s, softmax, sums, i % 2);
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
  }
  __syncthreads();  // the O warps have read the factors
  scores.finish(softmax, largest);
  __syncthreads();
}

// By the O warps: loads all keys, computes O and writes it.
template <class Kv, class Tile, class Store>
CUTE_DEVICE void compute_output(const KernelParams& params, const TileWork& tile, const Store& store,
                                char* shared_memory, int warp, int lane) {
  constexpr int kAhead = Tile::kStages - 2;  // KV blocks
  using Loader = KeyLoader<Tile>;
  const std::uint32_t shared = shared_address(shared_memory);
  const int blocks = tile.block_end - tile.block_begin;
  const int last_block = tile.block_end - 1;
  const Loader keys(params, tile, shared, warp, lane);
  const auto find = [&](int i) { return keys.find(last_block - i, i < blocks); };
  const auto copy = [&](int i, int stage, const typename Loader::Places& places) {
    if (i < blocks) {
      const auto copies = keys.copies(last_block - i, stage, places);
      CUTE_UNROLL
      for (int step = 0; step < Loader::kSteps; ++step) copies(step);
    }
    cp_async_commit();
  };
  typename Loader::Places first[kAhead + 1];
  CUTE_UNROLL
  for (int i = 0; i <= kAhead; ++i) first[i] = find(i);
  CUTE_UNROLL
  for (int i = 0; i < kAhead; ++i) copy(i, i, first[i]);

  float o[Tile::kOutRowTiles][Tile::kTilesD][4];  // O (row tile, d tile, fragment)
  CUTE_UNROLL
  for (int i = 0; i < Tile::kOutRowTiles * Tile::kTilesD * 4; ++i) {
    o[i / 4 / Tile::kTilesD][i / 4 % Tile::kTilesD][i % 4] = 0.0f;
  }
  const std::uint32_t v_lane = held(fp8_values<Tile>(shared, lane, store.column));
  const std::uint32_t p_lane = held(shared + Tile::kP + (store.row_tile * (Tile::kBlockN / 16) * 32 + lane) * 16);
  const float* factors = reinterpret_cast<const float*>(shared_memory + Tile::kRowFactor) + store.row_tile * 16;
  using Products = ValueProductsFp8<Kv, Tile>;
  // Turn i issues the copies of block i + kAhead among its products: a burst would stall every ldmatrix behind it.
  // Their addresses are computed at the end of the turn before, from page indices that are read at its beginning.
  int stage = 0, next_stage = kAhead + 1;
  auto places = find(kAhead + 1);
  cp_async_wait<kAhead - 1>();
  __syncthreads_or(false);
  copy(kAhead, kAhead, first[kAhead]);
  auto next = keys.copies(last_block - (kAhead + 1), next_stage, places);
  CUTE_NO_UNROLL
  for (int i = 1; i <= blocks; ++i) {
    cp_async_wait<kAhead - 1>();
    if (__builtin_expect(__syncthreads_or(false), 0)) {
      __syncthreads();
      CUTE_UNROLL
      for (int r = 0; r < 2 * Tile::kOutRowTiles; ++r) {
        const float factor = factors[r * 8 + lane / 4];
        CUTE_UNROLL
        for (int d = 0; d < Tile::kTilesD; ++d) {
          o[r / 2][d][r % 2 * 2] *= factor;
          o[r / 2][d][r % 2 * 2 + 1] *= factor;
        }
      }
    }
    places = find(i + kAhead + 1);
    const bool loads = i + kAhead < blocks;
    Products products(v_lane + stage * Tile::kStageBytes);
    products.add_to(o, p_lane + (i - 1) % 2 * Tile::kPBytes, [&](int read) {
      CUTE_UNROLL
      for (int step = 0; step < Loader::kSteps; ++step) {
        if (step * Products::kAllReads / Loader::kSteps == read && loads) next(step);
      }
    });
    cp_async_commit();
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
    next_stage = next_stage + 1 == Tile::kStages ? 0 : next_stage + 1;
    next = keys.copies(last_block - (i + kAhead + 1), next_stage, places);
  }
  cp_async_wait<0>();
  __syncthreads();  // all are done with keys and factors
  __syncthreads();  // maxima and sums are there
  store(o);
}

// Element: of Q and of the output. Kv: of the keys.
template <class Element, class Kv, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) fp8_attention_kernel(__grid_constant__ const KernelParams params) {
  extern __shared__ __align__(128) char shared_memory[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;

  TileWork found;
  TileWork& tile = kept_tile<Tile>(shared_memory);
  if (!begin_tile<Tile>(params, found, tile)) return;
  __syncthreads();

  const int role_warp = warp % Tile::kRoleWarps;
  const WarpPart<Tile> mine(role_warp);
  const TileStore<Element, Tile> store{params, tile, shared_memory, role_warp, lane, mine.out_tile, mine.column};
  if (warp < Tile::kRoleWarps) {
    compute_scores<Element, Kv, Tile>(params, tile, shared_memory, role_warp, lane);
  } else {
    compute_output<Kv, Tile>(params, tile, store, shared_memory, role_warp, lane);
  }
  store.combine_if_last();
}

}  // namespace cutlass_kernels::mla::mma_sync
