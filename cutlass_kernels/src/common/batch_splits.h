// KV splits of a batch without a tile list: how the splits of all requests together are dealt out to requests.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "plan/launch_params.h"

namespace cutlass_kernels {

// A request's share of the splits: `count` from `first` on.
struct RequestSplits {
  int batch;
  int first;
  int count;
};

// Every request has one split and, of the `extra` others, a share like that of its keys. So splits are about equally
// long, and a thread block finds its own by a search in kv_indptr, which takes a fifth of the time of a list. Rounding
// is spelled out: the kernel that combines partial results finds the same splits, whatever it is compiled with.
class BatchSplits {
 public:
  CUTE_DEVICE BatchSplits(const LaunchParams& p, int extra)
      : kv_indptr_(p.kv_indptr), requests_(p.batch_size), first_(float(p.kv_indptr[0])) {
    const bool in_pages = p.pages.page_size > 0 && p.pages.table_stride == 0;
    const float keys = __fsub_rn(float(p.kv_indptr[requests_]), first_);
    const float unit = in_pages ? float(p.pages.page_size) : 1.0f;
    const float most = __fdividef(__fmul_rn(keys, unit), float(p.plan.least_split_keys));
    extra_ = fmaxf(fminf(float(extra), floorf(most)), 0.0f);
    per_key_ = keys > 0.0f ? __fdividef(extra_, keys) : 0.0f;
  }

  // A request's first split, in [batch, batch + extra]. Never less than that of one before it, if kv_indptr does not
  // decrease: every step rounds monotonically. The quotient of what divides evenly may be a little less than whole.
  CUTE_DEVICE int begin(int batch) const {
    constexpr float kLittle = 1.0f / 512;
    const float before = __fmul_rn(__fsub_rn(float(kv_indptr_[batch]), first_), per_key_);
    return batch + int(fminf(fmaxf(__fadd_rn(before, kLittle), 0.0f), extra_));
  }

  // The request that a split belongs to; a count of 0 where there is none. All splits that lead to a request take the
  // same way, on which kv_indptr must agree that they are its own: where it decreases, all splits of a request find it,
  // or none.
  CUTE_DEVICE RequestSplits find(int split) const {
    int batch = 0, end = requests_;
    int first = 0, next = requests_ + int(extra_);
    int at_least = first, below = next;
    CUTE_NO_UNROLL
    while (end - batch > 1) {
      const int middle = batch + (end - batch) / 2;
      const int value = begin(middle);
      if (value <= split) {
        batch = middle;
        first = value;
        at_least = max(at_least, value);
      } else {
        end = middle;
        next = value;
        below = min(below, value);
      }
    }
    const bool agree = at_least <= first && next <= below && split < next;
    return {batch, first, agree ? next - first : 0};
  }

 private:
  const std::int32_t* kv_indptr_;
  int requests_;
  float first_, extra_, per_key_;
};

// Rows that the partial results of a split have room for.
CUTE_DEVICE int rows_of_split(const LaunchParams& p) {
  return min(p.plan.tile_rows, int(p.total_q));
}

}  // namespace cutlass_kernels
