// A job is one tile of one head, or of one pack of heads. The scheduler warp publishes the jobs of the CTA in a ring
// (find_tiles.h). All producers and consumers read every job.
#pragma once

#include <cstdint>

#include "fa3/mbarrier.h"

namespace cutlass_kernels::fa3 {

struct alignas(16) Job {
  int valid;  // 0: no more tiles
  int head;   // query head; the first one of a pack
  int kv_head;
  int batch;
  int row_begin;  // first row of the tile, in its request
  int q_end;      // end of the request's rows, in the tensor
  int qo_len;
  int kv_begin;  // first key of the request, in the tensor; or first entry of its page table
  int kv_len;
  int has_hidden_keys;  // whether a custom mask may hide some of the visible keys below from every row of the tile
  int mask_begin;  // byte of the custom mask at which the request's bits begin
  int unmasked_begin;  // by the custom mask, every row of the tile sees the keys [unmasked_begin, unmasked_end)
  int unmasked_end;
  int visible_begin;  // keys outside [visible_begin, visible_end) are seen by no row of the tile
  int visible_end;
  int key_begin;  // first key of KV block 0: visible_begin, or the first key of the TMA box that contains it
  int kv_blocks;    // from key_begin on; at least 1: a tile without keys has one, all masked
  int partial_row;  // first row of the tile's partial results
  int split;        // which of its KV splits
  int num_splits;   // 1: the keys are not split
};
constexpr int kJobSlots = 4;

// The jobs of the CTA, in order, as every producer reads them, by all its threads that are counted in job_empty. A
// producer with few registers reads a job in shared memory while it works, and gives the slot back afterwards:
//   for (; jobs.next(); jobs.release()) { const Job& job = jobs.job(); ... }
// The others copy it, and give the slot back at once:
//   while (jobs.take(job)) { ... }
template <class Shared>
class JobReader {
 public:
  CUTE_DEVICE explicit JobReader(Shared& shared) : shared_(shared) {}

  // Waits for the next job. Returns false if there is none.
  CUTE_DEVICE bool next() {
    shared_.job_full[ring_.index].wait(ring_.phase);
    return job().valid != 0;
  }
  CUTE_DEVICE const Job& job() const { return shared_.jobs[ring_.index]; }
  CUTE_DEVICE void release() {
    shared_.job_empty[ring_.index].arrive();
    ring_.advance();
  }

  // All three at once.
  CUTE_DEVICE bool take(Job& copy) {
    shared_.job_full[ring_.index].wait(ring_.phase);
    copy = job();
    if (copy.valid == 0) return false;
    release();
    return true;
  }

 private:
  Shared& shared_;
  Ring<kJobSlots> ring_;
};

}  // namespace cutlass_kernels::fa3
