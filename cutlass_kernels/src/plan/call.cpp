#include "plan/call.h"

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/estimate.h"
#include "plan/packing.h"
#include "registry/registry.h"
#include "registry/validate.h"

namespace cutlass_kernels {
namespace {

constexpr std::int32_t kAnyRows = std::numeric_limits<std::int32_t>::max();

/// The kernel and the tile of a part; the same for two parts: one kernel computes both.
struct PartTile {
  const KernelEntry* kernel = nullptr;
  TileShape tile;

  PartTile(const AttentionParams& part, Backend backend, const Device& device) {
    std::vector<std::string> reasons;
    kernel = choose(backend, part, device.compute_capability, &reasons);
    if (kernel != nullptr) tile = fastest(*kernel, part, device).candidate.shape;
  }
  // `combines` and `splits_without_list` decide the splits of a request, which must not depend on the parts of its
  // batch.
  bool operator==(const PartTile& other) const {
    return kernel == other.kernel && tile.kind == other.tile.kind && tile.rows == other.tile.rows &&
           tile.combines == other.tile.combines && tile.splits_without_list == other.tile.splits_without_list;
  }
};

}  // namespace

RowRanges row_ranges(const AttentionParams& params, Backend backend, const Device& device) {
  RowRanges ranges;
  ranges.parts[0] = params;
  ranges.count = 1;
  const bool chosen = params.least_rows > 0 || params.most_rows != kAnyRows;  // by the caller
  if (!params.batch_invariant || chosen) return ranges;
  // Of the rows of a request only a bound may be known.
  const bool exact = params.qo_indptr == nullptr && params.seqused_q == nullptr;
  const std::int64_t most = is_batch(params) && params.max_qo_len > 0 ? params.max_qo_len : params.total_q;
  const std::int32_t decode_rows = kDecodeRows / (params.num_qo_heads / params.num_kv_heads);
  ranges.count = 0;
  std::int32_t least = 0;
  for (const std::int32_t end : {decode_rows, std::int32_t(kPackedUpToRows), kAnyRows}) {
    if (end < std::max(least, 1) || least > most) continue;
    AttentionParams part = params;
    part.least_rows = least;
    part.most_rows = end;
    least = end == kAnyRows ? end : end + 1;
    if (ranges.count > 0) {
      AttentionParams& before = ranges.parts[std::size_t(ranges.count - 1)];
      if (PartTile(before, backend, device) == PartTile(part, backend, device)) {
        before.most_rows = end;
        continue;
      }
    }
    ranges.parts[std::size_t(ranges.count++)] = part;
  }
  if (exact) {
    for (int i = 0; i < ranges.count; ++i) {
      if (most <= ranges.parts[std::size_t(i)].most_rows) {
        ranges.parts[0] = ranges.parts[std::size_t(i)];
        break;
      }
    }
    ranges.count = 1;
  }
  return ranges;
}

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

Status plan_call(const AttentionParams& params, Backend backend, const Device& device, const PlanOptions& options,
                 CallPlan* call) {
  call->ranges = row_ranges(params, backend, device);
  for (int i = 0; i < call->ranges.count; ++i) {
    Status status =
        make_plan(call->ranges.parts[std::size_t(i)], backend, device, options, &call->plans[std::size_t(i)]);
    if (!status.ok()) return status;
  }
  return Status::success();
}

std::size_t CallPlan::schedule_bytes() const {
  std::size_t bytes = 0;
  for (int i = 0; i < ranges.count; ++i) bytes += plans[std::size_t(i)].layout.schedule_bytes;
  return bytes;
}

bool share_schedule(const CallPlan& a, const CallPlan& b) {
  const auto facts = [](const PlanState& plan) {
    const PlannedFor& sizes = plan.planned_for;
    return std::tuple(plan.kernel, plan.source, plan.tile.rows, plan.tile.kind, plan.tile.packed_heads,
                      plan.tile_indices, plan.splits_of_warp, sizes.num_qo_heads, sizes.batch_size, sizes.page_size,
                      sizes.max_qo_len, sizes.least_rows, sizes.most_rows, sizes.total_q, sizes.has_indptrs,
                      sizes.has_block_table);
  };
  // What lengths of requests are bounded by, and where their keys begin.
  const auto lengths = [](const AttentionParams& p) {
    return std::tuple(p.pages.page_size > 0 ? 0 : p.total_kv, p.max_kv_len, p.kv_stride_request, p.pages.table_stride,
                      p.pages.table_width, p.pages.slots_per_page, p.pages.num_indices, p.kv_shard.world,
                      p.kv_shard.rank, p.kv_shard.block, p.qo_indptr != nullptr, p.kv_indptr != nullptr,
                      p.seqused_q != nullptr, p.seqused_k != nullptr, p.second.data != nullptr, p.second.table_width,
                      p.second.lengths != nullptr, p.rows_per_length);
  };
  if (a.ranges.count != b.ranges.count) return false;
  for (std::size_t i = 0; i < std::size_t(a.ranges.count); ++i) {
    if (facts(a.plans[i]) != facts(b.plans[i]) || !(a.plans[i].rule == b.plans[i].rule)) return false;
    if (lengths(a.ranges.parts[i]) != lengths(b.ranges.parts[i])) return false;
  }
  return true;
}

Status launch_call(const CallPlan& call, void* workspace, std::uint64_t* call_counters, cudaStream_t stream,
                   const KeptSchedule& kept) {
  auto* schedule = static_cast<char*>(kept.memory);
  for (int i = 0; i < call.ranges.count; ++i) {
    const PlanState& plan = call.plans[std::size_t(i)];
    const AttentionParams& part = call.ranges.parts[std::size_t(i)];
    Memory memory = Memory::in(workspace, plan.layout, call_counters);
    if (schedule != nullptr) {
      memory.schedule = schedule;
      schedule += plan.layout.schedule_bytes;
    }
    Status status = Status::success();
    if (!kept.is_written) status = write_schedule(plan, part, memory.schedule, stream);
    if (status.ok()) status = launch(plan, part, memory, stream);
    if (!status.ok()) return status;
  }
  return Status::success();
}

Status plan_once(const AttentionParams& params, Backend backend, const PlanOptions& options, CallPlan* call) {
  std::string fault = contradiction(params, /*with_tensors=*/true);
  if (!fault.empty()) return Status::invalid(std::move(fault));
  if (params.total_q == 0) return Status::success();
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  return plan_call(params, backend, device, options, call);
}

Status run_once(const AttentionParams& params, Backend backend, void* workspace, std::size_t workspace_bytes,
                std::uint64_t* call_counters, cudaStream_t stream) {
  if (Status status = check_aligned("The workspace", workspace); !status.ok()) return status;
  PlanOptions options;
  options.workspace_bytes = workspace == nullptr ? 0 : workspace_bytes;
  options.call_counters = call_counters != nullptr;
  CallPlan call;
  if (Status status = plan_once(params, backend, options, &call); !status.ok()) return status;
  if (call.workspace_bytes() > options.workspace_bytes) {
    return workspace_too_small("Attention", params, call.workspace_bytes(), options.workspace_bytes);
  }
  return launch_call(call, workspace, call_counters, stream);
}

}  // namespace cutlass_kernels
