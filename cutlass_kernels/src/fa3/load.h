// The producer warps of Q, and of K and V that lie one after the other (ragged tensors): one thread each, all by TMA.
#pragma once

#include <cute/config.hpp>

#include "fa3/pair.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"
#include "fa3/tensor_map.h"
#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

// Loads a box of rows of a request, panel by panel. Row coordinates count backwards from the request's end, so that
// rows past its end lie outside the tensor map (tensor_map.h).
template <int kPanels, int kPanelBytes, int kColumns = 64>
CUTE_DEVICE void load_rows(const CUtensorMap* map, Barrier& full, char* shared, int row, int length,
                           int head, int end, CacheHint hint, int column = 0) {
  full.arrive_and_expect(kPanels * kPanelBytes);
  CUTE_UNROLL
  for (int panel = 0; panel < kPanels; ++panel) {
    tma_load(map, full, hint, shared + panel * kPanelBytes, column + panel * kColumns,
             kMapRows - length + row, head, end, int(kMapRows));
  }
}

// Loads Q of one warpgroup of a packed tile: a box of all heads of the pack by its tokens (tensor_map.h). Unused
// rows, past the last token, keep what they contain: their results are not stored.
template <class Tile>
CUTE_DEVICE void load_packed_q(const KernelParams& params, const Job& job, Barrier& full, char* q,
                               int token) {
  full.arrive_and_expect(Shared<Tile>::kPanelsQk * 128 * params.packed.tokens *
                         int(params.packed.heads.divisor));
  CUTE_UNROLL
  for (int panel = 0; panel < Shared<Tile>::kPanelsQk; ++panel) {
    tma_load(&params.q_map, full, CacheHint::kEvictFirst, q + panel * Shared<Tile>::kPanelBytesQ,
             first_column<Tile>(Tile::kHeadDimQk) + panel * Shared<Tile>::kColumns, job.head,
             kMapRows - job.qo_len + token, job.q_end, int(kMapRows));
  }
}

// Loads Q of a tile, a buffer per warpgroup, by one thread.
template <class Tile>
CUTE_DEVICE void load_q_of_tile(const KernelParams& params, Shared<Tile>& shared, const Job& job,
                                Ring<Tile::kQBuffers>& ring) {
  using Layout = Shared<Tile>;
  const int column = first_column<Tile>(Tile::kHeadDimQk);
  if constexpr (Tile::kQBuffers < 2 * Tile::kConsumers && !Tile::kPacked) {
    // No buffer is free for the next tile's Q before the last product with this tile's: at least bring it to L2.
    for (int wg = 0; wg < Tile::kConsumers; ++wg) {
      for (int panel = 0; panel < Layout::kPanelsQk; ++panel) {
        tma_prefetch(&params.q_map, column + panel * Layout::kColumns,
                     kMapRows - job.qo_len + job.row_begin + wg * kWarpgroupRows, job.head,
                     job.q_end, int(kMapRows));
      }
    }
  }
  for (int wg = 0; wg < Tile::kConsumers; ++wg) {
    shared.q_empty[ring.index].wait(ring.phase ^ 1);
    if constexpr (Tile::kPacked) {
      load_packed_q<Tile>(params, job, shared.q_full[ring.index], shared.q[ring.index],
                          job.row_begin + wg * params.packed.tokens);
    } else {
      load_rows<Layout::kPanelsQk, Layout::kPanelBytesQ, Layout::kColumns>(
          &params.q_map, shared.q_full[ring.index], shared.q[ring.index],
          job.row_begin + wg * kWarpgroupRows, job.qo_len, job.head, job.q_end,
          CacheHint::kEvictFirst, column);
    }
    ring.advance();
  }
}

// The Q producer, by one thread.
template <class Tile>
CUTE_DEVICE void load_q(const KernelParams& params, Shared<Tile>& shared) {
  JobReader jobs(shared);
  Ring<Tile::kQBuffers> ring;
  Job job;
  while (jobs.take(job)) {
    load_q_of_tile(params, shared, job, ring);
  }
}

// The K or V producer of ragged tensors, by one thread: kPanels, kStages, map, full, empty and stages are those of
// the matrix. kWantsJobs: the K producer asks for the next tile one KV block before the last of this one.
template <class Tile, int kPanels, int kStages, bool kWantsJobs>
CUTE_DEVICE void load_keys(const KernelParams& params, Shared<Tile>& shared, const CUtensorMap* map,
                           Barrier* full, Barrier* empty, char* stages) {
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  JobReader jobs(shared);
  Ring<kStages> ring;
  if (kWantsJobs) shared.job_wanted.arrive();
  Job job;
  while (jobs.take(job)) {
    const int last_but_one = min(1, job.kv_blocks - 1);
    for (int kv_block = job.kv_blocks - 1; kv_block >= 0; --kv_block) {
      empty[ring.index].wait(ring.phase ^ 1);
      if (kWantsJobs && kv_block == last_but_one) shared.job_wanted.arrive();
      load_rows<kPanels, kPanelBytes>(
          map, full[ring.index], stages + ring.index * (kPanels * kPanelBytes),
          job.key_begin + kv_block * Tile::kBlockN, job.visible_end, job.kv_head,
          job.kv_begin + job.visible_end, CacheHint::kEvictLast, first_column<Tile>(64 * kPanels));
      ring.advance();
    }
  }
}

}  // namespace cutlass_kernels::fa3
