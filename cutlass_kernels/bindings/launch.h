// A call of a kernel that can be made again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arguments.h"
#include "cutlass_kernels/attention.h"
#include "enqueue.h"
#include "plan/plan.h"

namespace cutlass_kernels {

/// How a batch was planned, and where its schedule lies. Without a plan, of a single request, every call plans anew.
struct PlannedBatch {
  PlanState plan;
  void* schedule = nullptr;
};

/// A call that was made once, and can be made again with other addresses: all else, 16-byte alignment included, has to
/// be as it was.
class Launch {
 public:
  Launch(const AttentionParams& params, Backend backend, const PlannedBatch& batch)
      : params_(params), backend_(backend), batch_(batch) {}

  void run(Address q, Address k, Address v, Address o, Address lse, Address sinks, Address counters,
           Address stream, Address workspace, std::size_t workspace_bytes) const {
    AttentionParams params = params_;
    params.q.data = pointer<void>(q);
    params.k.data = pointer<void>(k);
    params.v.data = pointer<void>(v);
    params.o.data = pointer<void>(o);
    params.lse = pointer<float>(lse);
    params.sinks = pointer<const float>(sinks);
    const auto work = [&]() -> Status {
      auto* call_counters = pointer<std::int32_t>(counters);
      auto* cuda_stream = pointer<CUstream_st>(stream);
      if (!batch_.plan.is_made) {
        return run_once(params, backend_, pointer<void>(workspace), workspace_bytes, call_counters,
                        cuda_stream);
      }
      if (batch_.plan.layout.scratch_bytes > workspace_bytes) {
        return workspace_too_small("Attention", params, batch_.plan.layout.scratch_bytes,
                                   workspace_bytes);
      }
      return cutlass_kernels::run(batch_.plan, params,
                                  {batch_.schedule, pointer<void>(workspace), call_counters},
                                  cuda_stream);
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
  PlannedBatch batch_;
};

}  // namespace cutlass_kernels
