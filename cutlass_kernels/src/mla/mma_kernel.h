// mla: multi-head latent attention in its absorbed form, with mma.sync and cp.async, for sm_80 and newer.
//
// Computes O = softmax(mask(Q K^T)) V, where all heads of a token share their keys (576 columns), and V is the first 512
// columns of K: one copy in shared memory serves both products. A thread block computes one tile of rows of several
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
//   mma_config.h  the tiles: how warps share S and O       mma_products.h  S = Q K^T, O += P V
//   mma_load.h    loads of Q and keys                      mma_store.h     O, LSE, partial results
//   mma_products_fp8.h  the same of 8-bit keys
//
// Numbers. Registers: O takes 32 (Few), 64 (Some) or 128 (Many), Q 72, or 32 of Many. Of 16 rows on an H200, a KV block of
// 64 keys, 74 KB, takes 3600 cycles to arrive at 4.8 TB/s, and about 3900 by the time of a whole call. Of 64 rows, 32 keys
// take about 3800 cycles by that time; their products take the tensor cores about 1600, at 6 cycles for an mma.sync.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/util.hpp>

#include <cstdint>
#include <type_traits>

#include "common/dependent_launch.h"
#include "common/find_work.h"
#include "common/logits.h"
#include "common/mask.h"
#include "common/softmax.h"
#include "mla/mma_load.h"
#include "mla/mma_products.h"
#include "mla/mma_products_fp8.h"
#include "mla/mma_store.h"

namespace cutlass_kernels::mla::mma_sync {

// Which tile and keys a thread block has; false if none.
template <class Tile>
CUTE_DEVICE bool find_tile(const KernelParams& params, TileWork& tile) {
  const LaunchParams& p = params.attention;
  const TileOrder::Position position = params.order(blockIdx.x);
  const auto find_split = [&](int split) {
    return p.batch_size == 1 ? BatchSplits::find_in_one(p, split) : BatchSplits(p).find(p, split);
  };
  const bool found =
      p.plan.source == TileSource::kBatchBySplit
          ? find_own_split(p, params.rows, position.rank, tile.item)
          : find_work<true, false, true>(p, params.rows, find_split, position.rank, tile.item);
  if (found) tile.begin<Tile, true>(params, position);
  return found;
}

// A warp's 16 rows of S and its share of the keys. Element: of P.
template <class Element, class Tile>
struct WarpScores {
  static constexpr int kTilesN = Tile::kTilesN;
  using Fragments = float[kTilesN][4];

  const KernelParams& params;
  const TileWork& tile;
  char* shared;
  int lane;
  int row_tile;
  int group;
  int all_begin, all_end;  // every row of the tile sees keys [all_begin, all_end)
  std::uint32_t p_offset;  // of the lane's part of a fragment of P

  // Fragments (row tile, 16 keys, lane) of 16 bytes; of eight keys, the first or the second half of these.
  CUTE_DEVICE static std::uint32_t offset_of_p(int row_tile, int group, int lane) {
    const int first_key = group * kTilesN * 8;
    return Tile::kP + ((row_tile * (Tile::kBlockN / 16) + first_key / 16) * 32 + lane) * 16 +
           first_key % 16;
  }

  CUTE_DEVICE int row(int r) const { return row_tile * 16 + r * 8 + lane / 4; }
  CUTE_DEVICE int first_key() const { return group * kTilesN * 8; }

  CUTE_DEVICE void transform(Fragments& s) const {
    const LaunchParams& p = params.attention;
    // Unlikely, which moves it out of the way: what is jumped over takes time to fetch.
    if (__builtin_expect(p.logits_scale.data != nullptr || p.keys_scale.data != nullptr, 0)) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const PlaceOfRow place(params, tile, row(r));
        const float scale =
            logits_scale_of(p, tile.item.batch, place.exists ? place.head : tile.head);
        CUTE_UNROLL
        for (int i = 0; i < kTilesN * 2; ++i) s[i / 2][r * 2 + i % 2] *= scale;
      }
    }
    if (__builtin_expect(params.transform.changes_logits(), 0)) {
      params.transform.template apply<true>(&s[0][0], kTilesN * 4);
    }
  }

  CUTE_DEVICE void mask(Fragments& s, int block) const {
    const int first = block * Tile::kBlockN;
    if (__builtin_expect(first >= all_begin && first + Tile::kBlockN <= all_end, 1)) return;
    __syncwarp();  // keeps this a branch
    const int key0 = first + first_key() + lane % 4 * 2;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int token = tile.row_begin + int(params.pack.divide(row(r)));
      const int lo = tile.mask.lo<true>(token);
      const std::uint32_t from_lo = key0 - lo;
      const std::uint32_t extent = max(tile.mask.hi<true>(token) - lo, 0);
      CUTE_UNROLL
      for (int i = 0; i < kTilesN * 2; ++i) {
        mask_unless_below(s[i / 2][r * 2 + i % 2], from_lo + (i / 2 * 8 + i % 2), extent);
      }
    }
  }

  // P of the scores to shared memory, in fragments of 16 keys; adds up the rows of it.
  CUTE_DEVICE void write_p(const Fragments& s, const OnlineSoftmax<2>& softmax,
                           float (&sums)[2]) const {
    sums[0] = sums[1] = 0.0f;
    std::uint32_t packed[kTilesN][2];
    CUTE_UNROLL
    for (int i = 0; i < kTilesN * 2; ++i) {
      const int r = i % 2;
      const float* pair = &s[i / 2][r * 2];
      const float x = exp2_unordered(fmaf(pair[0], softmax.scale, softmax.minus_m[r]));
      const float y = exp2_unordered(fmaf(pair[1], softmax.scale, softmax.minus_m[r]));
      sums[r] += x + y;
      packed[i / 2][r] = Element::pack(x, y);
    }
    auto* fragments =
        reinterpret_cast<uint4*>(shared + Tile::kP) + row_tile * (Tile::kBlockN / 16) * 32 + lane;
    if constexpr (kTilesN == 2) {
      fragments[group * 32] = {packed[0][0], packed[0][1], packed[1][0], packed[1][1]};
    } else {
      reinterpret_cast<uint2*>(fragments + group / 2 * 32)[group % 2] = {packed[0][0],
                                                                         packed[0][1]};
    }
  }

  CUTE_DEVICE float* row_values(int at) const { return reinterpret_cast<float*>(shared + at); }

  // Raises m of rows beyond their headroom, by all warps. Leaves at kRowFactor what O is to be multiplied by.
  CUTE_DEVICE void raise(const float (&thread_max)[2], OnlineSoftmax<2>& softmax) const {
    float row_max[2] = {thread_max[0], thread_max[1]};
    OnlineSoftmax<2>::reduce_max(row_max);
    float* maxima = row_values(Tile::kRowMax);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (lane % 4 == 0) maxima[group * Tile::kBlockM + row(r)] = row_max[r];
    }
    __syncthreads();
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int other = 0; other < Tile::kGroups; ++other) {
        row_max[r] = fmaxf(row_max[r], maxima[other * Tile::kBlockM + row(r)]);
      }
    }
    softmax.raise(row_max, [&](int r, float factor) {
      if (group == 0 && lane % 4 == 0) row_values(Tile::kRowFactor)[row(r)] = factor;
    });
  }

  // Maxima and sums of the rows, for TileStore.
  CUTE_DEVICE void finish(const OnlineSoftmax<2>& softmax) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float m, sum;
      softmax.finish(r, m, sum);
      if (lane % 4 == 0) {
        row_values(Tile::kRowSum)[group * Tile::kBlockM + row(r)] = sum;
        if (group == 0) row_values(Tile::kRowFactor)[row(r)] = m;
      }
    }
  }
};

// Kv: Element, or what the keys are instead.
template <class Element, class Kv, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_kernel(__grid_constant__ const KernelParams params) {
  using Products = std::conditional_t<Tile::kKeyBytes == 1, ProductsFp8<Element, Kv, Tile>,
                                      mma_sync::Products<Element, Tile>>;
  using Scores = WarpScores<typename Products::Operand, Tile>;
  constexpr int kStages = Tile::kStages;
  extern __shared__ __align__(128) char shared_memory[];
  const std::uint32_t shared = cute::cast_smem_ptr_to_uint(shared_memory);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;

  // The previous kernel may write the counters. Then the next kernel may start: all that it reads before this kernel ends
  // was written before this kernel began.
  await_previous_kernel();
  allow_next_kernel();
  TileWork tile;
  if (!find_tile<Tile>(params, tile)) return;
  // What only masks and the end of the tile ask for lies in shared memory: Q and O leave no registers for it.
  static_assert(sizeof(TileWork) <= Tile::kBytes - Tile::kWork);
  TileWork& kept = *reinterpret_cast<TileWork*>(shared_memory + Tile::kWork);
  if (threadIdx.x == 0) kept = tile;

  // ---- The first loads. ----
  const int blocks = tile.block_end - tile.block_begin;
  const int last_block = tile.block_end - 1;
  using Loader = KeyLoader<Tile>;
  const Loader keys(params, tile, shared, warp, lane);
  // Q passes through the last stages.
  constexpr int kFirstBlocks = kStages - Tile::kQStages;
  const std::uint32_t shared_q = shared + kFirstBlocks * Tile::kStageBytes;
  typename Loader::Places places[kStages];
  CUTE_UNROLL
  for (int i = 0; i < kStages; ++i) places[i] = keys.find(last_block - i, i < blocks);
  const auto copy = [&](int i) {
    if (i < blocks) {
      const auto copies = keys.copies(last_block - i, i, places[i]);
      CUTE_UNROLL
      for (int step = 0; step < Loader::kSteps; ++step) copies(step);
    }
    cute::cp_async_fence();
  };
  load_q<Tile>(params, tile, shared_q, shared + Tile::kQ, warp, lane);
  cute::cp_async_fence();
  CUTE_UNROLL
  for (int i = 0; i < kFirstBlocks; ++i) copy(i);

  // ---- What this warp computes. ----
  const int row_tile = warp % Tile::kRowTiles;
  const int group = warp / Tile::kRowTiles;
  const Scores scores{
      params,
      kept,
      shared_memory,
      lane,
      row_tile,
      group,
      tile.mask.lo<true>(tile.row_end - 1),
      tile.mask.hi<true>(tile.row_begin),
      held(Scores::offset_of_p(row_tile, group, lane)),
  };
  const int out_tile = warp / Tile::kOutParts * Tile::kOutRowTiles;
  const int column = warp % Tile::kOutParts * Tile::kColumns;
  float o[Tile::kOutRowTiles][Tile::kTilesD][4];  // O (row tile, d tile, fragment)
  CUTE_UNROLL
  for (int i = 0; i < Tile::kOutRowTiles * Tile::kTilesD * 4; ++i) {
    o[i / 4 / Tile::kTilesD][i / 4 % Tile::kTilesD][i % 4] = 0.0f;
  }
  OnlineSoftmax<2> softmax(params.transform.scale);
  const int half = group % 2;  // of the columns of S
  KeptQ<Tile> q;
  float q_factors[2];  // of the scores of rows lane / 4 and 8 further on
  cute::cp_async_wait<kFirstBlocks>();
  __syncthreads();
  const int q_row = row_tile * 16;
  Products::keep_q(q, q_factors, shared_q + q_row * Tile::kRowBytes, half, lane);
  const std::uint32_t q_rows =
      held(sixteen_rows<Tile::kQRowBytes>(shared + Tile::kQ + q_row * Tile::kQRowBytes, lane) ^
           half * 64);
  if constexpr (Tile::kQStages > 1) {
    __syncthreads();
    CUTE_UNROLL
    for (int i = kFirstBlocks; i < kStages - 1; ++i) copy(i);
  }
  const int pair = group / 2;  // of warps with the same keys
  const std::uint32_t k_lane =
      held(Products::keys(shared + pair * Tile::kPartTiles * 8 * Tile::kKeyRowBytes, lane, half));
  const std::uint32_t v_lane = held(Products::values(shared, lane, column));
  const int barrier = int(held(1 + pair * Tile::kRowTiles + row_tile));
  const auto sums_of = [&](int of_warp) {
    return reinterpret_cast<float4*>(
        shared_memory + held(Tile::kSums + (of_warp * Tile::kTilesN * 32 + lane) * 16));
  };
  float4* const own_sums = sums_of(warp);
  const float4* const other_sums = sums_of(warp ^ Tile::kRowTiles);
  const auto* p = reinterpret_cast<const uint4*>(
      shared_memory + held(Tile::kP + (out_tile * (Tile::kBlockN / 16) * 32 + lane) * 16));

  // ---- Main loop. ----
  int stage = 0, next_stage = kStages - 1;
  auto next = keys.copies(last_block - next_stage, next_stage, places[kStages - 1]);
  CUTE_NO_UNROLL
  for (int i = 0; i < blocks; ++i) {
    cute::cp_async_wait<kStages - 2>();
    __syncthreads();
    const auto next_places = keys.find(last_block - (i + kStages), i + kStages < blocks);
    const bool loads = i + kStages - 1 < blocks;
    float part[Tile::kPartTiles][4];  // S of half of the columns (8 keys, fragment)
    const auto copy_next = [&](int step) {
      if (loads) next(step);
    };
    if constexpr (!Tile::kSpreadsCopies) {
      CUTE_UNROLL
      for (int step = 0; step < Loader::kSteps; ++step) copy_next(step);
    }
    Products::take_scores(part, k_lane + stage * Tile::kStageBytes, q, q_rows, [&](int panel) {
      if constexpr (Tile::kSpreadsCopies) copy_next(panel);
    });
    cute::cp_async_fence();
    if constexpr (Products::kScalesRows) {
      CUTE_UNROLL
      for (int e = 0; e < Tile::kPartTiles * 4; ++e) part[e / 4][e % 4] *= q_factors[e / 2 % 2];
    }
    float s[Tile::kTilesN][4];  // S (8 keys, fragment)
    add_halves<Tile>(s, part, half, barrier, own_sums, other_sums);
    scores.transform(s);
    scores.mask(s, last_block - i);
    float thread_max[2] = {s[0][0], s[0][2]};
    CUTE_UNROLL
    for (int e = 0; e < Tile::kTilesN * 4; ++e) {
      thread_max[e / 2 % 2] = fmaxf(thread_max[e / 2 % 2], s[e / 4][e % 4]);
    }
    float sums[2];
    scores.write_p(s, softmax, sums);
    typename Products::Values products(v_lane + stage * Tile::kStageBytes);
    if (__builtin_expect(__syncthreads_or(softmax.exceeds(thread_max)), 0)) {
      scores.raise(thread_max, softmax);
      scores.write_p(s, softmax, sums);
      __syncthreads();
      CUTE_UNROLL
      for (int r = 0; r < 2 * Tile::kOutRowTiles; ++r) {
        const float factor = scores.row_values(Tile::kRowFactor)[out_tile * 16 + r * 8 + lane / 4];
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
  cute::cp_async_wait<0>();
  __syncthreads();  // all warps are done with keys and factors
  scores.finish(softmax);
  __syncthreads();
  TileStore<Element, Tile>{params, kept, shared_memory, warp, lane, out_tile, column}(o);
}

}  // namespace cutlass_kernels::mla::mma_sync
