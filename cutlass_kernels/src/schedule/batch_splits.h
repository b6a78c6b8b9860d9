// KV splits of a batch without a tile list: how the splits of all requests together are dealt out to requests.
//
// Requests get splits in proportion to their keys, and each gets at least one: splits are about equally long. A warp
// adds up the lengths, a chunk of requests per lane. It can then find a split by itself (find()), or leave the sums of
// the chunks in shared memory, where single threads search them (SplitTable). For up to 32 requests, a find takes one
// load of lengths, one sum and five shuffles; a tile list would take a kernel of 4 us.
//
// Rounding is spelled out: all kernels find the same splits, whatever they are compiled with.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "plan/launch_params.h"
#include "schedule/requests.h"
#include "schedule/warp_sum.h"

namespace cutlass_kernels {

// Whether the keys of a batch without a list are split.
CK_HOST_DEVICE inline bool splits_batch(const LaunchParams& p) {
  return p.plan.source == TileSource::kBatchByLength && p.plan.num_splits > p.batch_size;
}

// Rows that the partial results of a split have room for: those of a request beyond max_qo_len are not computed.
CUTE_DEVICE int rows_of_split(const LaunchParams& p) {
  return min(min(p.plan.tile_rows, p.max_qo_len), int(p.total_q));
}

// A request's share of the splits: `count` from `first` on.
struct RequestSplits {
  int batch;
  int first;
  int count;  // 0: there is no such request
  KeysOfRequest keys;
};

// Every request has one split; `extra` more go to requests in proportion to their keys, less the one that each has. So
// plan.num_splits is extra + batch_size; of a single request it is extra alone. No more of a request's keys count than
// its rows see.
struct SplitShares {
  static constexpr unsigned kUnit = 16;  // keys: the sum of all requests is a number of 32 bits

  int extra;  // at most
  float per_unit;

  CUTE_DEVICE static unsigned units(const LaunchParams& p, const KeysOfRequest& keys) {
    return (unsigned(min(max(keys.length, 0), p.plan.most_split_keys)) + kUnit - 1) / kUnit;
  }

  SplitShares() = default;
  CUTE_DEVICE static int splits_to_share(const LaunchParams& p) {
    return p.batch_size == 1 ? p.plan.num_splits : p.plan.num_splits - p.batch_size;
  }
  CUTE_DEVICE SplitShares(const LaunchParams& p, unsigned units) {
    const float all = float(units);
    const float most = __fdividef(__fmul_rn(all, float(kUnit)), float(p.plan.least_split_keys));
    extra = max(int(fminf(float(splits_to_share(p)), most)), 0);
    per_unit = units > 0 ? __fdividef(float(extra), all) : 0.0f;
  }

  // Beside the first one. The quotient of what divides evenly may be a little less than whole.
  CUTE_DEVICE int of(unsigned units) const {
    constexpr float kLittle = 1.0f / 512;
    return max(int(__fadd_rn(__fmul_rn(float(units), per_unit), kLittle)) - 1, 0);
  }
};

// By all lanes of a warp. Lane i has requests [i * chunk, (i + 1) * chunk).
class BatchSplits {
 public:
  CUTE_DEVICE explicit BatchSplits(const LaunchParams& p)
      : chunk_((unsigned(p.batch_size) + 31) / 32), begin_(int(threadIdx.x % 32) * chunk_) {
    const int end = min(begin_ + chunk_, p.batch_size);
    if (begin_ < end) first_keys_ = keys_of_request(p, begin_);
    unsigned units = SplitShares::units(p, first_keys_);
    CUTE_NO_UNROLL
    for (int batch = begin_ + 1; batch < end; ++batch) {
      units += SplitShares::units(p, keys_of_request(p, batch));
    }
    shares_ = SplitShares(p, __reduce_add_sync(0xffffffffu, units));
    int own = shares_.of(SplitShares::units(p, first_keys_));
    CUTE_NO_UNROLL
    for (int batch = begin_ + 1; batch < end; ++batch) {
      own = min(own + shares_.of(SplitShares::units(p, keys_of_request(p, batch))), shares_.extra);
    }
    if (begin_ >= end) own = 0;
    const int inclusive = inclusive_sum(own);
    before_ = min(inclusive - own, shares_.extra);
    after_ = min(inclusive, shares_.extra);
  }

  // Of a single request.
  CUTE_DEVICE static RequestSplits find_in_one(const LaunchParams& p, int split) {
    const KeysOfRequest keys = keys_of_request(p, 0);
    const unsigned units = SplitShares::units(p, keys);
    const int count = 1 + SplitShares(p, units).of(units);
    return {0, 0, split < count ? count : 0, keys};
  }

  // The request that a split belongs to; by all lanes, and the same split.
  CUTE_DEVICE RequestSplits find(const LaunchParams& p, int split) const {
    RequestSplits found{begin_, begin_ + before_, chunk_ + after_ - before_, first_keys_};
    int before = before_;
    int source = lane_with(p, found, split);
    if (source < 0) return {0, 0, 0, {}};
    if (chunk_ > 1) {  // 32 requests of that lane's chunk at a time
      int batch = __shfl_sync(0xffffffffu, begin_, source);
      const int end = min(batch + chunk_, p.batch_size);
      before = __shfl_sync(0xffffffffu, before, source);
      CUTE_NO_UNROLL
      do {
        found = {batch + int(threadIdx.x % 32), 0, 0, {}};
        int own = 0;
        if (found.batch < end) {
          found.keys = keys_of_request(p, found.batch);
          own = shares_.of(SplitShares::units(p, found.keys));
        }
        const int inclusive = before + inclusive_sum(own);
        const int own_before = min(inclusive - own, shares_.extra);
        found.first = found.batch + own_before;
        found.count = found.batch < end ? 1 + min(inclusive, shares_.extra) - own_before : 0;
        source = lane_with(p, found, split);
        before = __shfl_sync(0xffffffffu, min(inclusive, shares_.extra), 31);
        batch += 32;
      } while (source < 0 && batch < end);
      if (source < 0) return {0, 0, 0, {}};
    }
    return {__shfl_sync(0xffffffffu, found.batch, source),
            __shfl_sync(0xffffffffu, found.first, source),
            __shfl_sync(0xffffffffu, found.count, source),
            {__shfl_sync(0xffffffffu, found.keys.begin, source), __shfl_sync(0xffffffffu, found.keys.length, source)}};
  }

 private:
  friend class SplitTable;

  // The lane whose splits contain this one, or -1.
  CUTE_DEVICE static int lane_with(const LaunchParams& p, const RequestSplits& own, int split) {
    const bool contains = own.batch < p.batch_size && own.first <= split && split < own.first + own.count;
    return __ffs(__ballot_sync(0xffffffffu, contains)) - 1;
  }

  int chunk_;
  int begin_;                        // the lane's first request
  KeysOfRequest first_keys_{0, -1};  // of that one
  SplitShares shares_;
  int before_, after_;  // extra splits of the requests before the lane's, and with them
};

// In shared memory.
class SplitTable {
 public:
  // By all lanes of a warp. Other threads may use the table after a barrier.
  CUTE_DEVICE void fill(const LaunchParams& p) {
    const BatchSplits splits(p);
    before_[threadIdx.x % 32] = splits.before_;
    if (threadIdx.x % 32 == 0) {
      chunk_ = splits.chunk_;
      shares_ = splits.shares_;
    }
  }

  // By one thread.
  CUTE_DEVICE RequestSplits find(const LaunchParams& p, int split) const {
    int chunk = 0;  // the last one whose first split is not behind this one
    CUTE_UNROLL
    for (int step = 16; step > 0; step /= 2) {
      const int next = chunk + step;
      if (next * chunk_ < p.batch_size && next * chunk_ + before_[next] <= split) chunk = next;
    }
    const int end = min((chunk + 1) * chunk_, p.batch_size);
    int before = before_[chunk];
    CUTE_NO_UNROLL
    for (int batch = chunk * chunk_; batch < end; ++batch) {
      const KeysOfRequest keys = keys_of_request(p, batch);
      const int after = min(before + shares_.of(SplitShares::units(p, keys)), shares_.extra);
      if (split < batch + 1 + after) return {batch, batch + before, 1 + after - before, keys};
      before = after;
    }
    return {0, 0, 0, {}};
  }

 private:
  int before_[32];  // extra splits of the requests before each chunk
  int chunk_;       // requests of a chunk
  SplitShares shares_;
};

}  // namespace cutlass_kernels
