// A single call, planned and launched part by part.
#include <algorithm>

#include "plan/plan.h"

namespace cutlass_kernels {

std::size_t CallPlan::workspace_bytes() const {
  std::size_t most = 0;
  for (int i = 0; i < ranges.count; ++i) {
    most = std::max(most, plans[std::size_t(i)].layout.bytes());
  }
  return most;
}

bool CallPlan::needs_counters() const {
  return std::any_of(plans.begin(), plans.begin() + ranges.count, [](const PlanState& plan) {
    return plan.kernel != nullptr && (plan.kernel->is_persistent || plan.combine_counters > 0);
  });
}

bool CallPlan::is_empty() const {
  return std::all_of(plans.begin(), plans.begin() + ranges.count,
                     [](const PlanState& plan) { return plan.kernel == nullptr; });
}

Status plan_call(const AttentionParams& params, Backend backend, const Device& device,
                 const PlanOptions& options, CallPlan* call) {
  call->ranges = row_ranges(params, backend, device);
  for (int i = 0; i < call->ranges.count; ++i) {
    Status status = make_plan(call->ranges.parts[std::size_t(i)], backend, device, options,
                              &call->plans[std::size_t(i)]);
    if (!status.ok()) return status;
  }
  return Status::success();
}

Status launch_call(const CallPlan& call, void* workspace, std::uint64_t* call_counters,
                   cudaStream_t stream) {
  for (int i = 0; i < call.ranges.count; ++i) {
    const PlanState& plan = call.plans[std::size_t(i)];
    const AttentionParams& part = call.ranges.parts[std::size_t(i)];
    const Memory memory = Memory::in(workspace, plan.layout, call_counters);
    Status status = write_schedule(plan, part, memory.schedule, stream);
    if (status.ok()) status = launch(plan, part, memory, stream);
    if (!status.ok()) return status;
  }
  return Status::success();
}

}  // namespace cutlass_kernels
