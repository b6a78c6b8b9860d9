// Slots of a batch whose requests have splits of their own (TileSource::kBatchInSlots): one for each tile, or for so many
// KV splits of a request's only tile, which one CTA computes one after the other. How many, does not change a bit of what
// is computed: there are enough slots to fill the device, and no more.
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
    unsigned splits = 0;  // and tiles
    CUTE_NO_UNROLL
    for (int batch = begin; batch < end; ++batch) {
      splits += unsigned(slots_of(p, batch, keys_of_request(p, batch), 1));
    }
    splits = __reduce_add_sync(0xffffffffu, splits);
    const unsigned wanted = unsigned(p.plan.wanted_slots);
    const int shared = max(int((splits + wanted - 1) / wanted), 1);
    int own = 0;
    CUTE_NO_UNROLL
    for (int batch = begin; batch < end; ++batch) {
      own = min(own + slots_of(p, batch, keys_of_request(p, batch), shared), p.plan.num_splits);
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
      const int count = slots_of(p, batch, keys, splits_of_slot_);
      if (slot - before < count) return {batch, slot - before, count, keys};
      before += count;
    }
    return {0, 0, 0, {}};
  }

 private:
  // One of a request without rows, too. None of one that this kernel leaves to others.
  CUTE_DEVICE static int slots_of(const LaunchParams& p, int batch, const KeysOfRequest& keys,
                                  int splits_of_slot) {
    const int all_rows = rows_of_request(p, batch).length;
    if (!is_in_part(p, all_rows)) return 0;
    const int rows = min(all_rows, p.max_qo_len);
    if (rows > p.plan.tile_rows) return int(unsigned(rows - 1) / unsigned(p.plan.tile_rows)) + 1;
    return (p.plan.own_splits.of(rows, keys.length) + splits_of_slot - 1) / splits_of_slot;
  }

  int before_[32];  // slots of the requests before each chunk
  int chunk_;       // requests of a chunk
  int count_;
  int splits_of_slot_;  // at most
};

}  // namespace cutlass_kernels
