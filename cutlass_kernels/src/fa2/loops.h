// The main loop, in three forms.
#pragma once

#include <cute/config.hpp>

#include "common/ptx/cp_async.h"
#include "common/ptx/named_barrier.h"
#include "fa2/load.h"
#include "fa2/shared_memory.h"
#include "fa2/softmax.h"
#include "fa2/tile_work.h"

namespace cutlass_kernels::fa2 {

// ---- The main loop with one stage, of warps that share rows: V of a KV block is loaded in a burst during Q K^T,
// K of the next one during P V. The letters are those of the drawing in sharing.h.

// All warps take part in all KV blocks, even those without a row that sees a key: they meet at the same barriers.
template <class Warp, class KvSource, class Q, class Tile>
CUTE_DEVICE void one_stage_loop(Warp& warp, KvSource& kv, Q& q, const TileWork& tile, const WarpShare<Tile>& share,
                                char* shared_memory) {
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

// ---- The main loop with two stages or more: loads run kStages - 1 KV blocks ahead, and warps meet once per KV block.

// The steps of the KV block in `stage`, by warps that have rows of their own: all of them. The loads of another KV
// block are issued during the softmax of the first one.
template <class Warp, class Tile, class Loads>
CUTE_DEVICE void compute_all_steps(Warp& warp, int block, int stage, Loads& next) {
  constexpr int kSteps = Tile::kBlockN / Tile::kStepN;
  CUTE_UNROLL
  for (int sub = kSteps - 1; sub >= 0; --sub) {
    const int first_key = block * Tile::kBlockN + sub * Tile::kStepN;
    const int offset = stage * SharedLayout<Tile>::kStageBytes + sub * Tile::kStepN * SharedLayout<Tile>::kKvRowBytes;
    warp.step(first_key, first_key - Tile::kStepN, offset, next, sub == kSteps - 1, false, {});
  }
}

// By warps that share their rows: every second or fourth step (sharing.h). The loads are issued at once: memory
// is what takes time, and the first step may be another warp's.
template <class Warp, class Tile, class Loads, class Q>
CUTE_DEVICE void compute_own_steps(Warp& warp, const WarpShare<Tile>& share, const Q& q, const char* shared_memory,
                                   int block, int stage, Loads& next, bool loads_next) {
  if (loads_next) next.issue_all();
  [[maybe_unused]] float factors[Warp::kRows];  // (row): of the scores
  [[maybe_unused]] bool scales = false;
  if constexpr (Warp::kFp8 && Warp::kGeneral) {
    q.read_factors(shared_memory, share.warp_row, factors);
    CUTE_UNROLL
    for (int r = 0; r < Warp::kRows; ++r) scales |= factors[r] != 1.0f;
    scales = __any_sync(0xffffffffu, scales);
  } else if constexpr (Warp::kFp8 && !Tile::kDecodes) {  // again for each KV block: fewer registers
    warp.scale_rows(q, shared_memory, share.warp_row);
  }
  CUTE_NO_UNROLL
  for (int sub = share.keys.last_step(); sub >= 0; sub -= share.keys.groups) {
    const int first_key = block * Tile::kBlockN + sub * Tile::kStepN;
    const int offset = stage * SharedLayout<Tile>::kStageBytes + sub * Tile::kStepN * SharedLayout<Tile>::kKvRowBytes;
    const int next_key = first_key - share.keys.groups * Tile::kStepN;
    warp.step(first_key, next_key, offset, next, false, scales, factors);
  }
}

template <class Warp, class KvSource, class Q, class Tile>
CUTE_DEVICE void pipelined_loop(Warp& warp, KvSource& kv, Q& q, const TileWork& tile, const WarpShare<Tile>& share,
                                char* shared_memory) {
  constexpr bool kGeneral = Warp::kGeneral;
  constexpr bool kPaged = KvSource::kPaged;
  constexpr int kStages = Tile::kStages;
  const int thread = share.thread;
  const int block_begin = tile.block_begin;
  int block_end = tile.block_end;

  // ---- The first stages. ----
  // A KV block in pages is loaded in three steps: page indices, addresses of rows, rows. The page indices of the
  // first KV blocks are read together, to wait once.
  [[maybe_unused]] int page[kStages];  // (KV block): the lane's page
  if constexpr (kPaged) {
    CUTE_UNROLL
    for (int i = 0; i < kStages; ++i) {
      if constexpr (kGeneral) kv.seen.find(block_end - 1 - i);
      page[i] = kv.pages.fetch(block_end - 1 - i, block_end - 1 - i);
    }
  }
  if constexpr (kGeneral) {
    warp.logits.fetch_last((block_end - 1) * Tile::kBlockN + share.keys.last_step() * Tile::kStepN);
  }
  q.begin(warp.params, tile, kv.shared);
  // Past the first KV block all rows are outside [key_begin, key_end): zeros that nobody reads. A KV split of a
  // decode tile may have a KV block or two in all, and the instructions of loads that it does not need would be a
  // tenth of its time. (The general variant lacks the registers to tell.)
  constexpr bool kSkipsLoads = Tile::kDecodes && !kGeneral;
  CUTE_UNROLL
  for (int i = 0; i < kStages - 1; ++i) {
    if (!kSkipsLoads || block_end - 1 - i >= block_begin) {
      if constexpr (kPaged) {
        kv.pages.store(page[i], block_end - 1 - i, block_end - 1 - i);
      } else if constexpr (kGeneral) {
        kv.seen.find(block_end - 1 - i);
      }
      kv.k(block_end - 1 - i, i, thread).issue_all();
      kv.v(block_end - 1 - i, i, thread).issue_all();
    }
    cp_async_commit();
  }
  if constexpr (kPaged) kv.pages.store(page[kStages - 1], block_end - kStages, block_end - kStages);
  q.finish(shared_memory);
  if constexpr (kGeneral) kv.seen.find(block_end - 1 - KvSource::kFoundAhead);
  if constexpr (Warp::kFp8 && Tile::kDecodes && !kGeneral) {
    __syncthreads();  // rows of Q have their factors
    warp.scale_rows(q, shared_memory, share.warp_row);
  }

  // ---- KV block after KV block. (Counted by their end: by their begin, the loop keeps two registers for it and copies
  // one to the other while products read theirs, 4 % at hd64.) ----
  int stage = 0;
  int next_stage = kStages - 1;
  for (; block_end > block_begin; --block_end) {
    const int block = block_end - 1;
    cp_async_wait<kStages - 2>();
    __syncthreads();  // K and V of `block` have landed; all warps are done with those of the KV block before

    int opaque_thread = thread;  // addresses are computed anew, not kept in registers
    asm volatile("" : "+r"(opaque_thread));
    if constexpr (Tile::kSharesKeys) opaque_thread &= Tile::kThreads - 1;  // >= 0: cheap to divide
    typename KvSource::Loads next = kv.loads(block - kStages + 1, next_stage, opaque_thread);
    const bool loads_next = !kSkipsLoads || block - kStages + 1 >= block_begin;
    if constexpr (kPaged) {
      if (loads_next) next.fetch(kv.pages, block - kStages);
    }
    if constexpr (Tile::kSharesKeys) {
      compute_own_steps(warp, share, q, shared_memory, block, stage, next, loads_next);
      if constexpr (kPaged) {
        if (loads_next) next.store(kv.pages);
      }
    } else {
      compute_all_steps<Warp, Tile>(warp, block, stage, next);
    }
    if constexpr (kGeneral) kv.seen.find(block - 1 - KvSource::kFoundAhead);
    cp_async_commit();
    stage = stage + 1 == kStages ? 0 : stage + 1;
    next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;
  }
}

// ---- The main loop of two groups of four warps that take turns with the tensor cores.
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

template <class Tile>
struct TurnBarriers {
  static constexpr int kMayBegin = 1;  // + group; __syncthreads() is barrier 0

  int group;

  CUTE_DEVICE void await() const { named_barrier_wait(kMayBegin + group, Tile::kThreads); }
  CUTE_DEVICE void hand_over() const { named_barrier_arrive(kMayBegin + (group ^ 1), Tile::kThreads); }
};

template <class Warp, class KvSource, class Q, class Tile>
CUTE_DEVICE void loop_in_turns(Warp& warp, KvSource& kv, Q& q, const TileWork& tile, const WarpShare<Tile>& share,
                               char* shared_memory) {
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
