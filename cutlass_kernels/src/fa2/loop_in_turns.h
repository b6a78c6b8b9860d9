// The main loop of two groups of four warps that take turns with the tensor cores.
//
// A scheduler has one warp of each group. Left alone, both wait for the tensor cores at the same time, or both compute
// softmax; here one group multiplies while the other one exponentiates. In its turn t a group computes two products
// without a branch between them, which would expose the latency of ldmatrix. KV blocks are counted from the last one:
//
//   group 0  | O += P V(t), S = Q K(t+1)^T | loads, mask, max, P         | O += P V(t+1), S = Q K(t+2)^T | ...
//   group 1  | loads, mask, max, P         | O += P V(t), S = Q K(t+1)^T | loads, mask, max, P           | ...
//
//   barrier       arrives                             waits
//   kMayBegin     group 1, near the end of turn t     group 0, before turn t + 1
//   kMayBegin + 1 group 0, near the end of turn t     group 1, before turn t
//
// A group arrives when an eighth of Q K^T is left: the other one's first ldmatrix take as long.
//
// Each group loads half of the rows of every KV block: in turn t V(t + 2), and K(t + 2), or K(t + 3) by group 1, as
// group 0 begins the next turn. Loads behind the products hold up no ldmatrix (8k keys: 437 TFLOP/s, among them 416),
// but have half a turn to arrive: enough where many tiles find the same keys in L2. Keys of packed rows come from
// memory, and are loaded among the products of P V (8 x 128 rows over 8k: 412 -> 362 us).
//
// There are three stages of each, and these replace
//   group 0  K(t - 1), V(t - 1): read in turn t - 1 at the latest. Of that turn group 1 has an eighth of Q K(t)^T left
//            when it arrives; K(t) stays
//   group 1  K(t), V(t - 1): read in turn t - 1, which group 0 has left when it arrives in turn t
// Before it arrives in its next turn, a thread waits for its loads, so that whoever passes a barrier finds the rows of
// both groups. (racecheck reports V(t) as overwritten in turn t + 1: it does not follow bar.arrive.)
#pragma once

#include <cute/config.hpp>

#include "common/ptx/cp_async.h"
#include "common/ptx/named_barrier.h"
#include "fa2/load.h"
#include "fa2/shared_memory.h"
#include "fa2/tile_work.h"
#include "fa2/warp_share.h"

namespace cutlass_kernels::fa2 {

template <class Tile>
struct TurnBarriers {
  static constexpr int kMayBegin = 1;  // + group; __syncthreads() is barrier 0

  int group;

  CUTE_DEVICE void await() const { named_barrier_wait(kMayBegin + group, Tile::kThreads); }
  CUTE_DEVICE void hand_over() const {
    named_barrier_arrive(kMayBegin + (group ^ 1), Tile::kThreads);
  }
};

template <class Warp, class KvSource, class Q, class Tile>
CUTE_DEVICE void loop_in_turns(Warp& warp, KvSource& kv, Q& q, const TileWork& tile,
                               const WarpShare<Tile>& share, char* shared_memory) {
  static_assert(!Warp::kGeneral && !Warp::kFp8);
  constexpr bool kPaged = KvSource::kPaged;
  constexpr int kStages = Tile::kStages;
  constexpr int kStageBytes = SharedLayout<Tile>::kStageBytes;
  const int thread = share.thread;
  const int group = share.warp / 4;
  const TurnBarriers<Tile> turn{group};
  const int block_begin = tile.block_begin;
  int block = tile.block_end - 1;  // of turn t

  // ---- The first KV blocks. ----
  [[maybe_unused]] int page[kStages];  // (KV block): the lane's page
  if constexpr (kPaged) {
    CUTE_UNROLL
    for (int t = 0; t < kStages; ++t) page[t] = kv.pages.fetch(block - t, block - t);
  }
  q.begin(warp.params, tile, kv.shared);
  CUTE_UNROLL
  for (int t = 0; t < kStages; ++t) {
    if constexpr (kPaged) kv.pages.store(page[t], block - t, block - t);
    if (t < 2 || group == 1) kv.k(block - t, t, thread).issue_all();
    if (t == 0) cp_async_commit();
    if (t < 2) kv.v(block - t, t, thread).issue_all();
  }
  cp_async_commit();
  [[maybe_unused]] int next_page = 0;
  if constexpr (kPaged) next_page = kv.pages.fetch(block - 2 - group, block - 2);
  q.finish(shared_memory);
  cp_async_wait<1>();
  __syncthreads();  // Q and K(0) have landed
  if (block < block_begin) return;

  typename Warp::S s;
  typename Warp::P p;
  int stage = 0;  // of `block`
  if (group == 1) {
    cp_async_wait<0>();
    turn.await();
  }
  warp.compute_scores(s, 0, [&] { turn.hand_over(); });

  // ---- Turn after turn. ----
  NoLoads none;
  for (;; --block) {
    warp.compute_p(s, block * Tile::kBlockN, p);
    if constexpr (kPaged) kv.pages.store(next_page, block - 2 - group, block - 2);
    const int next_stage = stage + 1 == kStages ? 0 : stage + 1;
    const int last_stage = stage == 0 ? kStages - 1 : stage - 1;
    int opaque_thread = thread;  // addresses are computed anew, not kept in registers
    asm volatile("" : "+r"(opaque_thread));
    PendingLoads<typename KvSource::Loader> next{
        {kv.k(block - 2 - group, group == 0 ? last_stage : stage, opaque_thread),
         kv.v(block - 2, last_stage, opaque_thread)}};
    next.begin();
    cp_async_wait<0>();
    turn.await();
    if (block == block_begin) break;
    if constexpr (Tile::kPacked) {
      warp.accumulate_p(p, stage * kStageBytes, next);
    } else {
      warp.accumulate_p(p, stage * kStageBytes, none);
    }
    warp.compute_scores(s, next_stage * kStageBytes, [&] { turn.hand_over(); });
    if constexpr (!Tile::kPacked) next.issue(0, 1);
    cp_async_commit();
    if constexpr (kPaged) next_page = kv.pages.fetch(block - 3 - group, block - 3);
    stage = next_stage;
  }
  if (group == 0) turn.hand_over();
  warp.accumulate_p(p, stage * kStageBytes, none);
}

}  // namespace cutlass_kernels::fa2
