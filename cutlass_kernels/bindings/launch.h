// A call of a kernel that can be made again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arguments.h"
#include "cutlass_kernels/attention.h"

namespace cutlass_kernels {

/// Zeros that a call without a schedule may count with, int32: Schedule::next_tile, then Schedule::merge_counters. 8 KB are
/// enough for the keys of 16 rows of 8 heads in 60 pieces.
constexpr int kCounters = 2048;
constexpr int kFirstMergeCounter = 4;

inline void take_counters(Address counters, Schedule* schedule) {
  if (counters == 0) return;
  schedule->next_tile = pointer<std::int32_t>(counters);
  schedule->merge_counters = schedule->next_tile + kFirstMergeCounter;
  schedule->num_merge_counters = kCounters - kFirstMergeCounter;
}

/// A call that was made once, and can be made again with other addresses: all else, 16-byte alignment included, has to be
/// as it was.
class Launch {
 public:
  Launch(const AttentionParams& params, Backend backend) : params_(params), backend_(backend) {}

  void run(Address q, Address k, Address v, Address o, Address lse, Address sinks, Address counters,
           Address stream, Address workspace, std::size_t workspace_bytes) const {
    AttentionParams params = params_;
    params.q.data = pointer<void>(q);
    params.k.data = pointer<void>(k);
    params.v.data = pointer<void>(v);
    params.o.data = pointer<void>(o);
    params.lse = pointer<float>(lse);
    params.sinks = pointer<const float>(sinks);
    take_counters(counters, &params.schedule);
    raise_unless_ok(attention(params, pointer<void>(workspace), workspace_bytes,
                              pointer<CUstream_st>(stream), backend_));
  }

  const AttentionParams& params() const { return params_; }

 private:
  AttentionParams params_;
  Backend backend_;
};

}  // namespace cutlass_kernels
