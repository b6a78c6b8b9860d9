// The public calls: attention() is a plan and its launch.
#include "cutlass_kernels/attention.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "device.h"
#include "plan/call.h"
#include "registry/backends.h"
#include "registry/validate.h"

namespace cutlass_kernels {
namespace {

/// The devices that a workspace is sized for: the current one, or without any, those that most run on.
std::vector<Device> sized_devices() {
  Device current;
  if (current_device(&current).ok()) return {current};
  return {kH200, kA100};
}

}  // namespace

// ---- One call ----

Status attention(const AttentionParams& params, void* workspace, std::size_t workspace_bytes, cudaStream_t stream,
                 Backend backend) {
  return run_once(params, backend, workspace, workspace_bytes, /*call_counters=*/nullptr, stream);
}

std::size_t workspace_size(const AttentionParams& given, Backend backend) {
  if (!contradiction(given, /*with_tensors=*/false).empty()) return 0;
  AttentionParams params = given;
  static const std::int32_t unknown = 0;
  // Queries may be of any lengths, if qo_indptr is not known yet.
  if (params.batch_invariant && params.batch_size > 1 && params.qo_indptr == nullptr) {
    params.qo_indptr = &unknown;
  }
  std::size_t most = 0;
  PlanOptions options;
  options.is_logged = false;
  for (const Device& device : sized_devices()) {
    // Strides, which may not be known yet, can lead to any backend.
    for (const BackendName& candidate : backends()) {
      if (backend != Backend::kAuto && backend != candidate.backend) continue;
      for (const bool is_kept : {false, true}) {  // attention(), and a Plan
        options.schedule_is_kept = is_kept;
        CallPlan plan;
        if (!plan_call(params, candidate.backend, device, options, &plan).ok()) continue;
        most = std::max(most, plan.workspace_bytes());
      }
    }
  }
  return most;
}

// ---- A plan for many calls ----

/// Reaches the state inside the public object.
struct PlanAccess {
  static PlanState* state(Plan* plan) { return reinterpret_cast<PlanState*>(plan->state_); }
  static const PlanState& state(const Plan& plan) {
    return *std::launder(reinterpret_cast<const PlanState*>(plan.state_));
  }
  static_assert(sizeof(PlanState) <= sizeof(Plan) && alignof(PlanState) <= alignof(Plan));
  static_assert(std::is_trivially_copyable_v<PlanState>);
};

Plan::Plan() { new (state_) PlanState{}; }
std::size_t Plan::workspace_size() const { return PlanAccess::state(*this).layout.bytes(); }
bool Plan::needs_schedule() const { return PlanAccess::state(*this).layout.schedule_bytes > 0; }
const char* Plan::kernel() const {
  const KernelEntry* kernel = PlanAccess::state(*this).kernel;
  return kernel == nullptr ? "" : kernel->info.name.c_str();
}

Status make_plan(const AttentionParams& params, Plan* plan, Backend backend) {
  if (plan == nullptr) return Status::invalid("make_plan() needs a place for the plan: got null.");
  std::string fault = contradiction(params, /*with_tensors=*/false);
  if (!fault.empty()) return Status::invalid(std::move(fault));
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  PlanOptions options;
  options.schedule_is_kept = true;
  return make_plan(params, backend, device, options, PlanAccess::state(plan));
}

Status make_schedule(const Plan& plan, const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                     cudaStream_t stream) {
  const PlanState& state = PlanAccess::state(plan);
  if (Status status = fits_plan(state, params, /*with_tensors=*/false); !status.ok()) return status;
  if (state.layout.schedule_bytes == 0) return Status::success();
  if (Status status = check_aligned("The workspace", workspace); !status.ok()) return status;
  if (workspace == nullptr || workspace_bytes < state.layout.bytes()) {
    return workspace_too_small("The schedule", params, state.layout.bytes(),
                               workspace == nullptr ? 0 : workspace_bytes);
  }
  return write_schedule(state, params, workspace, stream);
}

Status attention(const Plan& plan, const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                 cudaStream_t stream) {
  const PlanState& state = PlanAccess::state(plan);
  if (Status status = check_aligned("The workspace", workspace); !status.ok()) return status;
  if (state.layout.bytes() > (workspace == nullptr ? 0 : workspace_bytes)) {
    return workspace_too_small("The plan", params, state.layout.bytes(), workspace == nullptr ? 0 : workspace_bytes);
  }
  return run(state, params, Memory::in(workspace, state.layout), stream);
}

}  // namespace cutlass_kernels
