// mla: latent attention as in mma_kernel.h, over keys of 8 bits.
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
// (mma_products_fp8.h).
//
// racecheck reports hazards across A and R: where half of the warps have a named barrier of their own, it misses that
// the other half has come to a common one (benchmarks/results/build-and-tests.md).
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/cp_async.h"
#include "common/ptx/shared_address.h"
#include "common/softmax.h"
#include "latent/fa2/load.h"
#include "latent/fa2/products.h"
#include "latent/fa2/products_fp8.h"
#include "latent/fa2/scores.h"
#include "latent/fa2/store.h"

namespace cutlass_kernels::mla::mma_sync {

// By the S warps: P of all KV blocks, then maxima and sums.
template <class Element, class Kv, class Tile>
CUTE_DEVICE void compute_scores(const KernelParams& params, const TileWork& tile,
                                char* shared_memory, int warp, int lane) {
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
  const std::uint32_t k_lane = held(sixteen_fp8_keys<Tile>(
      shared + mine.pair * Tile::kPartTiles * 8 * Tile::kKeyRowBytes, lane, mine.half));
  const auto sums_of = [&](int of_warp) {
    return reinterpret_cast<float4*>(shared_memory + Tile::kSums) + of_warp * Tile::kTilesN * 32 +
           lane;
  };

  OnlineSoftmax<2> softmax(params.transform.scale);
  float s[Tile::kTilesN][4] = {};  // S (8 keys, fragment)
  bool exceeds = false;            // whether a row of s exceeds its headroom
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
    add_halves<Tile>(s, part, mine.half, mine.barrier(), sums_of(warp),
                     sums_of(warp ^ Tile::kRowTiles));
    scores.transform(s);
    scores.mask(s, last_block - i);
    exceeds = scores.exceeds(s, softmax);
    scores.write_p(s, softmax, sums, i % 2);
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
  }
  __syncthreads();  // the O warps have read the factors
  scores.finish(softmax);
  __syncthreads();
}

// By the O warps: loads all keys, computes O and writes it.
template <class Kv, class Tile, class Store>
CUTE_DEVICE void compute_output(const KernelParams& params, const TileWork& tile,
                                const Store& store, char* shared_memory, int warp, int lane) {
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
  const std::uint32_t p_lane =
      held(shared + Tile::kP + (store.row_tile * (Tile::kBlockN / 16) * 32 + lane) * 16);
  const float* factors =
      reinterpret_cast<const float*>(shared_memory + Tile::kRowFactor) + store.row_tile * 16;
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
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fp8_attention_kernel(__grid_constant__ const KernelParams params) {
  extern __shared__ __align__(128) char shared_memory[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;

  TileWork found;
  TileWork& tile = kept_tile<Tile>(shared_memory);
  if (!begin_tile<Tile>(params, found, tile)) return;
  __syncthreads();

  const int role_warp = warp % Tile::kRoleWarps;
  const WarpPart<Tile> mine(role_warp);
  const TileStore<Element, Tile> store{params, tile,          shared_memory, role_warp,
                                       lane,   mine.out_tile, mine.column};
  if (warp < Tile::kRoleWarps) {
    compute_scores<Element, Kv, Tile>(params, tile, shared_memory, role_warp, lane);
  } else {
    compute_output<Kv, Tile>(params, tile, store, shared_memory, role_warp, lane);
  }
  store.combine_if_last();
}

}  // namespace cutlass_kernels::mla::mma_sync
