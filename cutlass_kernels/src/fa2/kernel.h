// fa2: attention forward with mma.sync and cp.async, for sm_80 and newer.
//
// One thread block computes one query tile of one head, O = softmax(Q K^T) V, over the keys that some row of the tile
// sees, from the last KV block to the first.
//
//            +-------------------- KV block j ----------------------+
//  tensor    | S = Q K(j)^T |                        | O += P V(j)  |
//  softmax   |              | mask, max              | P = 2^(s - m), 16 keys ahead of their products
//  loads     |              | K, V of block j - (stages - 1)        |
//            +------------------------------------------------------+
//
// Each warp has whole rows of its own, so the softmax needs no exchange between warps. The two or three warps of a
// scheduler overlap the softmax of one with the products of another, in the largest tiles by turns (loops.h has
// that drawing). There are two exceptions (sharing.h): from head dimension 256 on warps share rows and split the
// columns, and in tiles of few rows they share rows and split the keys.
//
//   tile_work.h   which tile, which keys, which rows are a warp's
//   load_tiles.h  loads of Q; of K and V in rows and in pages
//   loops.h       the main loop
//   warp_tile.h   a step of it
//   products.h    S = Q K^T, O += P V
//   softmax.h     logits transform and mask, maxima, P
//   store.h       O, LSE
//
// What is scarce is registers (255 per thread) and, at one row tile per warp, shared-memory bandwidth: short live
// ranges beat fewer instructions. ptxas orders the main loop anew after small changes in front of it; compare the
// machine code after every change. What it needs to keep the order: loops see through objects held by value (an array
// in them is a reference to one outside); the calls of a variant that does nothing are not there, not empty; and
// bounds that depend on a condition are found in the kernel itself.
#pragma once

#include <cute/config.hpp>

#include <cstdint>
#include <type_traits>

#include "common/dependent_launch.h"
#include "common/logits.h"
#include "common/mask.h"
#include "common/ptx/cp_async.h"
#include "common/ptx/shared_address.h"
#include "common/softmax.h"
#include "fa2/config.h"
#include "fa2/load_pages.h"
#include "fa2/load_tiles.h"
#include "fa2/loops.h"
#include "fa2/params.h"
#include "fa2/sharing.h"
#include "fa2/softmax.h"
#include "fa2/store.h"
#include "fa2/tile_work.h"
#include "fa2/warp_tile.h"
#include "schedule/find_work.h"

namespace cutlass_kernels::fa2 {

// Of a tile, per SM. A logits transform needs registers of its own: a third thread block would spill.
template <class Tile, Logits kLogits>
constexpr int blocks_per_sm() {
  return kLogits != Logits::kPlain && Tile::kBlocksPerSm > 2 && !Tile::kPacked ? 2 : Tile::kBlocksPerSm;
}

// Element: the type of Q and O. Beside 8-bit K and V (Kv) it is Any16Bit (products.h).
template <class Element, class Kv, class Tile, Logits kLogits, KvRows kKvRows>
__global__ void __launch_bounds__(Tile::kThreads, blocks_per_sm<Tile, kLogits>())
    attention_kernel(__grid_constant__ const KernelParams params) {
  static_assert(is_consistent<Tile>());
  using Warp = WarpTile<Element, Kv, Tile, kLogits>;
  constexpr bool kPaged = kKvRows != KvRows::kInTensors;
  using KvSource = std::conditional_t<kPaged, PagedKv<Tile, Warp::kGeneral, kKvRows == KvRows::kInEither>,
                                      RaggedKv<Tile, Warp::kGeneral>>;
  constexpr int kRows = Warp::kRows;
  const LaunchParams& p = params.attention;
  extern __shared__ __align__(128) char shared_memory[];
  const std::uint32_t shared = shared_address(shared_memory);

  // Decode tiles use counters, which the previous kernel may write. Then the next kernel may start: all that it reads
  // before this kernel ends was written before this kernel began.
  if constexpr (Tile::kDecodes) await_previous_kernel();
  if constexpr (Tile::kPacked) allow_next_kernel();

  // ---- Which tile of which head, and where its keys and values come from. ----
  const TileOrder::Position position = params.order(blockIdx.x);
  TileWork tile;
  constexpr bool kBatches = !Warp::kFp8 || Tile::kDecodes;
  const auto find_split = [&](int split) {
    return p.batch_size == 1 ? BatchSplits::find_in_one(p, split) : BatchSplits(p).find(p, split);
  };
  const bool found =
      find_work<kPaged, false, Tile::kDecodes, kBatches>(p, params.rows, find_split, position.rank, tile.item);
  if (!found) return;
  tile.begin<Tile, Warp::kGeneral>(params, position);
  SeenKeys<Tile> seen{p.mask, tile.mask, tile.request_bit, tile.row_begin, tile.row_end, tile.hides, {}};
  KvSource kv(params, tile, seen, shared_memory, shared);

  // ---- This warp's rows, and which keys they see. ----
  const WarpShare<Tile> share(params, tile, threadIdx.x);
  const IntervalMask mask = tile.mask;
  const VisibleRange range{share.has_rows ? mask.lo<Warp::kGeneral>(share.first_row) : 0,
                           share.has_rows ? mask.hi<Warp::kGeneral>(share.last_row) : 0,
                           share.has_rows ? mask.lo<Warp::kGeneral>(share.last_row) : 0,
                           share.has_rows ? mask.hi<Warp::kGeneral>(share.first_row) : 0};
  typename Warp::Transform logits(params, tile, share, range);

  // ---- What it computes: O, and the running maximum and sum of each row. ----
  const OperandAddresses<Tile> at(shared, share.lane, share.warp_row, share.sharer, share.part);
  float o[Warp::kRowTiles][Warp::kTilesD][4];  // (row tile, d tile, fragment)
  CUTE_UNROLL
  for (int m = 0; m < Warp::kRowTiles; ++m) {
    CUTE_UNROLL
    for (int d = 0; d < Warp::kTilesD; ++d) {
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) o[m][d][e] = 0.0f;
    }
  }
  typename Warp::Softmax softmax(params.transform.scale);
  const float headroom = Warp::kGeneral && !Warp::kFp8 ? params.stats.headroom : Warp::Softmax::kHeadroom;
  const RowSharing<Tile> neighbour(shared_memory, share.warp, share.lane);
  QLoader<Tile> q(params, share.thread);
  Warp warp{params, at, logits, softmax, o, neighbour, share.sharer, headroom};

  // ---- Main loop. ----
  if constexpr (Tile::kTakesTurns) {
    loop_in_turns(warp, kv, q, tile, share, shared_memory);
  } else if constexpr (Tile::kSharers == 1) {
    pipelined_loop(warp, kv, q, tile, share, shared_memory);
  } else {
    one_stage_loop(warp, kv, q, tile, share, shared_memory);
  }

  // ---- The end of the tile. ----
  float row_m[kRows], row_sum[kRows];  // (row): maximum in log2 units, sum relative to it
  auto finish_softmax = [&] {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) softmax.finish(r, row_m[r], row_sum[r]);
  };
  if constexpr (Tile::kSharers > 1) {
    finish_softmax();
    neighbour.write_rows(row_sum);
  }
  cp_async_wait<0>();
  __syncthreads();  // Q has landed even if there was no key; its rows become the output's
  if (!share.has_rows) return;
  if constexpr (Tile::kSharers > 1) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int other = 1; other < Tile::kSharers; ++other) row_sum[r] += neighbour.read_row(r, other);
    }
  } else {
    finish_softmax();
  }
  store_tile<Element, Tile, Warp::kGeneral>(params, tile, share, shared_memory, o, row_m, row_sum);
}

}  // namespace cutlass_kernels::fa2
