// Slots of a batch whose requests have splits of their own (TileSource::kBatchInSlots): one for so many KV splits of a
// tile, which one CTA computes one after the other. How many, does not change a bit of what is computed: there are
// enough slots to fill the device, and no more.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/batch_splits.h"
#include "common/requests.h"
#include "plan/launch_params.h"

namespace cutlass_kernels {

CK_HOST_DEVICE inline bool is_in_slots(const LaunchParams& p) {
  return p.plan.source == TileSource::kBatchInSlots;
}

struct RequestSlots {
  int batch;
  int index;  // of the slot, among those of the request
  int count;  // of these; 0: there is no such slot
  KeysOfRequest keys;
};

// In shared memory.
class SlotTable {
 public:
  // By all lanes of a warp. Other threads may use the table after a barrier.
  CUTE_DEVICE void fill(const LaunchParams& p) {
    const int lane = threadIdx.x % 32;
    const int chunk = int(unsigned(p.batch_size) + 31) / 32;
    const int begin = lane * chunk, end = min(begin + chunk, p.batch_size);
    unsigned splits = 0;
    int own_partials = 0;
    CUTE_NO_UNROLL
    for (int batch = begin; batch < end; ++batch) {
      const Sizes sizes = sizes_of(p, batch, keys_of_request(p, batch), 1);
      splits += unsigned(sizes.slots);
      own_partials = min(own_partials + sizes.partial_rows, p.plan.partial_rows);
    }
    // Unsigned: rows that overlap may have more partial results than there is room for.
    partials_before_[lane] = int(
        min(unsigned(inclusive_sum(own_partials) - own_partials), unsigned(p.plan.partial_rows)));
    splits = __reduce_add_sync(0xffffffffu, splits);
    const unsigned wanted = unsigned(p.plan.wanted_slots);
    const int shared = max(int((splits + wanted - 1) / wanted), 1);
    int own = 0;
    CUTE_NO_UNROLL
    for (int batch = begin; batch < end; ++batch) {
      own =
          min(own + sizes_of(p, batch, keys_of_request(p, batch), shared).slots, p.plan.num_splits);
    }
    const int sum = inclusive_sum(own);
    before_[lane] = min(sum - own, p.plan.num_splits);
    if (lane == 31) {
      chunk_ = chunk;
      count_ = min(sum, p.plan.num_splits);
      splits_of_slot_ = shared;
    }
  }

  // Slots of the batch.
  CUTE_DEVICE int count() const { return count_; }

  // By one thread.
  CUTE_DEVICE RequestSlots find(const LaunchParams& p, int slot) const {
    int chunk = 0;  // the last one whose first slot is not behind this one
    CUTE_UNROLL
    for (int step = 16; step > 0; step /= 2) {
      const int next = chunk + step;
      if (next * chunk_ < p.batch_size && before_[next] <= slot) chunk = next;
    }
    const int end = min((chunk + 1) * chunk_, p.batch_size);
    int before = before_[chunk];
    CUTE_NO_UNROLL
    for (int batch = chunk * chunk_; batch < end; ++batch) {
      const KeysOfRequest keys = keys_of_request(p, batch);
      const Sizes sizes = sizes_of(p, batch, keys, splits_of_slot_);
      if (slot - before < sizes.slots) {
        return {batch, slot - before, sizes.slots, keys};
      }
      before += sizes.slots;
    }
    return {0, 0, 0, {}};
  }

  // The first row of a request's partial results, by one thread. A pass of its own: find() has no registers for it.
  CUTE_DEVICE int partial_row(const LaunchParams& p, int batch) const {
    const int chunk = int(unsigned(batch) / unsigned(chunk_));
    int row = partials_before_[chunk];
    CUTE_NO_UNROLL
    for (int other = chunk * chunk_; other < batch; ++other) {
      row = min(row + sizes_of(p, other, keys_of_request(p, other), 1).partial_rows,
                p.plan.partial_rows);
    }
    return row;
  }

 private:
  struct Sizes {
    int slots;
    int partial_rows;
  };
  // Of a request. One slot where it has no rows, too; none where this kernel leaves it to others.
  CUTE_DEVICE static Sizes sizes_of(const LaunchParams& p, int batch, const KeysOfRequest& keys,
                                    int splits_of_slot) {
    const int all_rows = rows_of_request(p, batch).length;
    if (!is_in_part(p, all_rows)) return {0, 0};
    const int rows = min(all_rows, p.max_qo_len);
    const int splits = p.plan.own_splits.of(rows, keys.length);
    return {p.plan.own_splits.tiles(rows) * ((splits + splits_of_slot - 1) / splits_of_slot),
            splits > 1 ? rows * splits : 0};
  }

  int before_[32];           // slots of the requests before each chunk
  int partials_before_[32];  // rows of their partial results
  int chunk_;                // requests of a chunk
  int count_;
  int splits_of_slot_;  // at most
};

}  // namespace cutlass_kernels
