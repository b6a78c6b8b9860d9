// The main loop with one stage, of warps that share rows: V of a KV block is loaded in a burst during Q K^T,
// K of the next one during P V. The letters are those of the drawing in row_sharing.h.
#pragma once

#include <cute/config.hpp>

#include "common/ptx/cp_async.h"
#include "fa2/exponentials.h"
#include "fa2/load.h"
#include "fa2/shared_memory.h"
#include "fa2/tile_work.h"
#include "fa2/warp_share.h"

namespace cutlass_kernels::fa2 {

// All warps take part in all KV blocks, even those without a row that sees a key: they meet at the same barriers.
template <class Warp, class KvSource, class Q, class Tile>
CUTE_DEVICE void one_stage_loop(Warp& warp, KvSource& kv, Q& q, const TileWork& tile,
                                const WarpShare<Tile>& share, char* shared_memory) {
  constexpr bool kGeneral = Warp::kGeneral;
  constexpr bool kPaged = KvSource::kPaged;
  constexpr int kBlockN = Tile::kBlockN;
  const int thread = share.thread;
  const int block_begin = tile.block_begin;
  const int block_end = tile.block_end;

  // ---- The first KV block: K, then V. Of pages, addresses of V are those of one KV block before K's. ----
  [[maybe_unused]] int page[2];  // (KV block): the lane's page
  if constexpr (kPaged) {
    if constexpr (kGeneral) kv.seen.find(block_end - 1);
    page[0] = kv.pages.fetch(block_end - 1, block_end - 1);
    page[1] = kv.pages.fetch(block_end - 2, block_end - 1);
  }
  if constexpr (kGeneral) warp.logits.fetch_last((block_end - 1) * kBlockN);
  q.begin(warp.params, tile, kv.shared);
  if constexpr (kPaged) kv.pages.store(page[0], block_end - 1, block_end - 1);
  if (block_begin < block_end) {
    if constexpr (kGeneral && !kPaged) kv.seen.find(block_end - 1);
    kv.k(block_end - 1, 0, thread).issue_all();
    cp_async_commit();
    kv.v(block_end - 1, 0, thread).issue_all();
  }
  cp_async_commit();
  if constexpr (kPaged) kv.pages.store(page[1], block_end - 2, block_end - 1);

  // ---- KV block after KV block. ----
  NoLoads none;
  for (int block = block_end - 1; block >= block_begin; --block) {
    cp_async_wait<1>();
    __syncthreads();  // A

    int opaque_thread = thread;  // addresses are computed anew, not kept in registers
    asm volatile("" : "+r"(opaque_thread));
    if (block + 1 < block_end) kv.v(block, 0, opaque_thread).issue_all();
    float s[Warp::kRowTiles][Warp::kTilesN][4];  // (row tile, key tile, fragment)
    float thread_max[Warp::kRows];               // (row)
    if constexpr (kGeneral) warp.logits.find(block * kBlockN);
    warp.compute_scores(s, 0, [] {});
    warp.logits.apply(s, block * kBlockN);
    take_max<Tile>(s, thread_max, none, false);
    if constexpr (kGeneral) warp.logits.fetch((block - 1) * kBlockN);
    if constexpr (kGeneral) kv.seen.find(block - 1);
    if constexpr (kPaged) page[0] = kv.pages.fetch(block - 2, block - 1);
    cp_async_commit();
    cp_async_wait<0>();
    const bool raise = __syncthreads_or(warp.softmax.exceeds(thread_max, warp.headroom));  // B

    asm volatile("" : "+r"(opaque_thread));
    if (block > block_begin) kv.k(block - 1, 0, opaque_thread).issue_all();
    cp_async_commit();
    if constexpr (kPaged) kv.pages.store(page[0], block - 2, block - 1);
    if (raise) {
      warp.softmax.reduce_max(thread_max);
      warp.neighbour.write_rows(thread_max);
      __syncthreads();
      CUTE_UNROLL
      for (int r = 0; r < Warp::kRows; ++r) {
        CUTE_UNROLL
        for (int other = 1; other < Tile::kSharers; ++other) {
          thread_max[r] = fmaxf(thread_max[r], warp.neighbour.read_row(r, other));
        }
      }
      warp.raise(thread_max);
    }
    warp.accumulate(s, 0);
    cp_async_commit();  // no loads: stands for V, which the wait at A leaves in flight
  }
}

}  // namespace cutlass_kernels::fa2
