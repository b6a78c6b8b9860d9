// A call of a kernel that can be made again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arguments.h"
#include "cutlass_kernels/attention.h"
#include "enqueue.h"
#include "schedule.h"

namespace cutlass_kernels {

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
    take_counters(pointer<std::int32_t>(counters), &params.schedule);
    const auto work = [&] {
      return attention(params, pointer<void>(workspace), workspace_bytes,
                       pointer<CUstream_st>(stream), backend_);
    };
    if (workspace == 0) {
      enqueue(work);
    } else {
      enqueue_together(stream, work);
    }
  }

  const AttentionParams& params() const { return params_; }

 private:
  AttentionParams params_;
  Backend backend_;
};

}  // namespace cutlass_kernels
