// The main loop with two stages or more: loads run kStages - 1 KV blocks ahead, and warps meet once per KV block.
#pragma once

#include <cute/config.hpp>

#include "common/ptx/cp_async.h"
#include "fa2/shared_memory.h"
#include "fa2/tile_work.h"
#include "fa2/warp_share.h"

namespace cutlass_kernels::fa2 {

// The steps of the KV block in `stage`, by warps that have rows of their own: all of them. The loads of another KV
// block are issued during the softmax of the first one.
template <class Warp, class Tile, class Loads>
CUTE_DEVICE void compute_all_steps(Warp& warp, int block, int stage, Loads& next) {
  constexpr int kSteps = Tile::kBlockN / Tile::kStepN;
  CUTE_UNROLL
  for (int sub = kSteps - 1; sub >= 0; --sub) {
    const int first_key = block * Tile::kBlockN + sub * Tile::kStepN;
    const int offset = stage * SharedLayout<Tile>::kStageBytes +
                       sub * Tile::kStepN * SharedLayout<Tile>::kKvRowBytes;
    warp.step(first_key, first_key - Tile::kStepN, offset, next, sub == kSteps - 1, false, {});
  }
}

// By warps that share their rows: every second or fourth step (key_sharing.h). The loads are issued at once: memory
// is what takes time, and the first step may be another warp's.
template <class Warp, class Tile, class Loads, class Q>
CUTE_DEVICE void compute_own_steps(Warp& warp, const WarpShare<Tile>& share, const Q& q,
                                   const char* shared_memory, int block, int stage, Loads& next,
                                   bool loads_next) {
  if (loads_next) next.issue_all();
  [[maybe_unused]] float factors[Warp::kRows];  // (row): of the scores
  [[maybe_unused]] const bool scales = q.read_factors(shared_memory, share.warp_row, factors);
  CUTE_NO_UNROLL
  for (int sub = share.keys.last_step(); sub >= 0; sub -= share.keys.groups) {
    const int first_key = block * Tile::kBlockN + sub * Tile::kStepN;
    const int offset = stage * SharedLayout<Tile>::kStageBytes +
                       sub * Tile::kStepN * SharedLayout<Tile>::kKvRowBytes;
    const int next_key = first_key - share.keys.groups * Tile::kStepN;
    warp.step(first_key, next_key, offset, next, false, scales, factors);
  }
}

template <class Warp, class KvSource, class Q, class Tile>
CUTE_DEVICE void pipelined_loop(Warp& warp, KvSource& kv, Q& q, const TileWork& tile,
                                const WarpShare<Tile>& share, char* shared_memory) {
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

}  // namespace cutlass_kernels::fa2
