// The scheduler warp of batches whose keys are split by even_splits.h.
#pragma once

#include "fa3/find_tiles.h"
#include "mla/even_splits.h"
#include "mla/shared_memory.h"

namespace cutlass_kernels::mla {

// Adds to a split that EvenSplits::Walk has found its rows, and where its partial results lie. False if it is not
// computed: where the request has no such rows, or does not lie inside the tensors. The first split of a tile describes
// it to the kernel that combines them.
CUTE_DEVICE bool place_split(const fa3::KernelParams& params, int tile, WorkItem& work) {
  const LaunchParams& p = params.attention;
  const RowsOfRequest rows = rows_of_request(p, work.batch);
  work.tile = tile;
  work.q_begin = rows.begin;
  work.qo_len = min(rows.length, p.max_qo_len);
  // Each tile of a request has room for the splits of all requests.
  work.partial_row =
      (tile * int(params.rows.repeats.divisor) + work.partial_row) * rows_of_split(p);
  const int first_row = tile * p.plan.tile_rows;
  if (work.split == 0 && p.plan.split_tiles != nullptr) {
    describe_split_rows(p, work, first_row, p.plan.tile_rows, work.partial_row,
                        tile * p.batch_size + work.batch);
  }
  return first_row < work.qo_len && lies_inside(p, work);
}

// Publishes the jobs of this CTA, by all lanes of a warp.
template <class Tile>
CUTE_DEVICE void find_even_splits(const fa3::KernelParams& params, Shared<Tile>& shared) {
  EvenSplits& splits = shared.splits;
  const bool publishes = threadIdx.x % 32 == 0;
  fa3::Ring<kJobSlots> jobs;
  fa3::Ring<1> wanted;
  const auto publish = [&](auto describe) {
    // load_keys() relies on it: no job before its warp 0 has waited for the last block of the one before.
    shared.job_wanted.wait(wanted.phase);
    wanted.advance();
    Job& job = shared.jobs[jobs.index];
    shared.job_empty[jobs.index].wait(jobs.phase ^ 1);
    describe(job);
    shared.job_full[jobs.index].arrive();
    jobs.advance();
  };
  // The tiles of a share follow one another: those of all packs of heads read the same keys.
  const int tiles = params.rows.tiles;
  splits.divide(params.attention, int(unsigned(gridDim.x) / unsigned(tiles * params.heads)));
  CUTE_NO_UNROLL
  for (int index = int(blockIdx.x); index < splits.count() * tiles * params.heads;
       index += int(gridDim.x)) {
    const int share_and_tile = int(unsigned(index) / unsigned(params.heads));
    const int head = index - share_and_tile * params.heads;
    const int share = int(unsigned(share_and_tile) / unsigned(tiles));
    const int tile = share_and_tile - share * tiles;
    EvenSplits::Walk walk(params.attention, splits, share);
    WorkItem work;
    SplitRange range;
    CUTE_NO_UNROLL
    while (publishes && walk.next(work, range)) {
      if (!place_split(params, tile, work)) continue;
      publish([&](Job& job) {
        const int num_splits = work.num_splits;
        work.num_splits = 1;  // describe_job() would split the tile by itself
        fa3::describe_job<Tile, true>(params, work, head, 0, job);
        job.valid = 1;
        job.num_splits = num_splits;
        if (num_splits == 1) return;
        // A mask may leave the tile fewer KV blocks than the request has.
        const auto of_tile = [&](int n) {
          return job.kv_blocks == range.all ? n : int(std::int64_t(n) * job.kv_blocks / range.all);
        };
        fa3::keep_blocks<Tile>(job, of_tile(range.begin), of_tile(range.end));
      });
    }
    __syncwarp();
  }
  if (publishes) publish([](Job& job) { job.valid = 0; });
}

}  // namespace cutlass_kernels::mla
