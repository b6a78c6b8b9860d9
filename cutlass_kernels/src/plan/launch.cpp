// Runs a plan: addresses are filled in, kernels enqueued.
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/mask.h"
#include "cuda_failure.h"
#include "mask_extents.h"
#include "merge/combine_splits.h"
#include "plan/plan.h"
#include "registry/reasons.h"
#include "registry/validate.h"
#include "schedule/requests.h"
#include "schedule/write_list.h"

namespace cutlass_kernels {
namespace {

/// Indexed by Backend. One relaxed addition per launch.
std::array<std::atomic<std::uint64_t>, static_cast<std::size_t>(Backend::kFa3) + 1> launch_counts;

/// What the plan says, with the addresses of a call.
LaunchPlan launch_plan(const PlanState& plan, const AttentionParams& params, const Memory& memory) {
  const WorkspaceLayout& layout = plan.layout;
  LaunchPlan launched;
  static_cast<TilePlan&>(launched) = plan;
  launched.tile_rows = plan.tile.rows;
  launched.tile_kind = plan.tile.kind;
  launched.packed_heads = plan.tile.packed_heads;
  launched.least_split_keys = params.num_splits > 1 ? 1 : plan.tile.least_split_keys;
  launched.most_split_keys = std::int32_t(std::min<std::int64_t>(most_keys_of_rows(params, plan.tile.rows), kMaxKeys));
  launched.partial_o = layout.partial_o.in<float>(memory.scratch);
  launched.partial_max_sum = layout.partial_max_sum.in<float>(memory.scratch);
  if (plan.source == TileSource::kList) {
    launched.list_header = layout.header.in<TileListHeader>(memory.schedule);
    launched.tile_list = layout.tile_list.in<WorkItem>(memory.schedule);
    launched.split_tiles = layout.split_tiles.in<SplitTile>(memory.schedule);
    launched.tile_counter = &layout.header.in<TileListHeader>(memory.schedule)->tile_counter;
    launched.combine_counters = layout.combine_counters.in<std::uint64_t>(memory.schedule);
    launched.num_combine_counters = plan.combine_counters;
    return launched;
  }
  launched.split_tiles = layout.split_tiles.in<SplitTile>(memory.scratch);
  launched.tile_counter = layout.tile_counter.in<std::uint64_t>(memory.scratch);
  if (memory.call_counters != nullptr) {
    launched.tile_counter = memory.call_counters;
    if (plan.combine_counters > 0) {
      launched.combine_counters = memory.call_counters + kFirstCombineCallCounter;
      launched.num_combine_counters = kCombineCallCounters;
    }
  }
  return launched;
}

/// What of `params` the plan was not made for; empty if it fits.
std::string misfit(const PlanState& plan, const AttentionParams& params) {
  const PlannedFor& planned = plan.planned_for;
  const PlannedFor given = PlannedFor::make(params);
  const auto differs = [](const char* name, std::int64_t value, std::int64_t of_plan) {
    return std::string(name) + "=" + std::to_string(value) + ", but the plan is for " + std::to_string(of_plan) +
           ": make a plan for these sizes.";
  };
  const auto appears = [](const char* name, bool is_there) {
    return std::string(name) +
           (is_there ? " is given, but the plan is for a problem without"
                     : " is missing, but the plan is for a problem with it") +
           ": make a plan for this one.";
  };
  const auto other_type = [](const char* name, DType type, DType of_plan) {
    return std::string(name) + "=" + to_string(type) + ", but the plan is for " + to_string(of_plan) +
           ": make a plan for these types.";
  };
  if (given.q_dtype != planned.q_dtype) {
    return other_type("q_dtype", given.q_dtype, planned.q_dtype);
  }
  if (given.kv_dtype != planned.kv_dtype) {
    return other_type("kv_dtype", given.kv_dtype, planned.kv_dtype);
  }
  for (const auto& [name, value, of_plan] :
       {std::tuple("num_qo_heads", given.num_qo_heads, planned.num_qo_heads),
        std::tuple("num_kv_heads", given.num_kv_heads, planned.num_kv_heads),
        std::tuple("head_dim_qk", given.head_dim_qk, planned.head_dim_qk),
        std::tuple("head_dim_vo", given.head_dim_vo, planned.head_dim_vo),
        std::tuple("batch_size", given.batch_size, planned.batch_size),
        std::tuple("page_size", given.page_size, planned.page_size),
        std::tuple("max_qo_len", given.max_qo_len, planned.max_qo_len),
        std::tuple("fixed_split_size", given.fixed_split_size, planned.fixed_split_size),
        std::tuple("num_splits", given.num_splits, planned.num_splits),
        std::tuple("disable_split_kv", int(given.disable_split_kv), int(planned.disable_split_kv)),
        std::tuple("least_rows", given.least_rows, planned.least_rows),
        std::tuple("most_rows", given.most_rows, planned.most_rows),
        std::tuple("batch_invariant", int(given.batch_invariant), int(planned.batch_invariant))}) {
    if (value != of_plan) return differs(name, value, of_plan);
  }
  if (given.has_indptrs != planned.has_indptrs) return appears("qo_indptr", given.has_indptrs);
  if (given.has_block_table != planned.has_block_table) {
    return appears("pages.table_stride", given.has_block_table);
  }
  if (plan.source != TileSource::kList && plan.tile.has_shares && (plan.equal_splits > 0) != has_lists(params)) {
    return "pages.slots_per_page=" + std::to_string(params.pages.slots_per_page) + ", but the plan is for " +
           (has_lists(params) ? "requests without" : "rows with") +
           " lists of slots: make_plan() makes a plan for these parameters.";
  }
  if (plan.equal_splits > 1 && params.batch_invariant && !has_equal_lists(params)) {
    return "Lengths of lists are given, but the plan, with batch_invariant, is for lists without: make_plan() makes a "
           "plan for these parameters.";
  }
  // A list names the rows of its tiles; without one they follow from total_q.
  if (plan.source != TileSource::kList && given.total_q != planned.total_q) {
    return differs("total_q", given.total_q, planned.total_q);
  }
  return "";
}

}  // namespace

Status fits_plan(const PlanState& plan, const AttentionParams& params, bool with_tensors) {
  if (!plan.is_made) return Status::invalid("The plan is empty: make_plan() fills it.");
  std::string fault = contradiction(params, with_tensors);
  if (fault.empty()) fault = misfit(plan, params);
  return fault.empty() ? Status::success() : Status::invalid(std::move(fault));
}

Status write_schedule(const PlanState& plan, const AttentionParams& params, void* schedule, cudaStream_t stream,
                      const VectorCopies& uploads) {
  if (plan.source != TileSource::kList || plan.kernel == nullptr) return upload(uploads, stream);
  if (params.total_q > plan.planned_for.total_q) {
    return Status::invalid("total_q=" + std::to_string(params.total_q) +
                           " may make more tiles than fit the list of a plan for total_q=" +
                           std::to_string(plan.planned_for.total_q) + ": make another plan.");
  }
  if (std::string fault = unknown_lengths(params); !fault.empty()) {
    return Status::invalid(std::move(fault));
  }
  const WorkspaceLayout& layout = plan.layout;
  const ListArgs args{params,
                      params.num_qo_heads,
                      plan.splits_of_warp,
                      plan.tile.rows,
                      plan.rule,
                      plan.tile_indices,
                      /*fills=*/!plan.kernel->is_persistent,
                      layout.header.in<TileListHeader>(schedule),
                      layout.tile_list.in<WorkItem>(schedule),
                      layout.split_tiles.in<SplitTile>(schedule),
                      layout.combine_counters.in<std::uint64_t>(schedule)};
  return launch_write_list(args, uploads, stream);
}

Status launch(const PlanState& plan, const AttentionParams& params, const Memory& memory, cudaStream_t stream) {
  if (plan.kernel == nullptr || params.total_q == 0) return Status::success();
  const bool splits = plan.split_tile_capacity > 0;
  if (splits && params.stats != nullptr) {
    return Status::invalid("stats are not combined, but the plan may split keys: make it with disable_split_kv.");
  }
  LaunchParams problem;
  static_cast<AttentionParams&>(problem) = params;
  problem.plan = launch_plan(plan, params, memory);
  if (params.mask.words != nullptr) {  // it replaces these
    problem.causal = false;
    problem.chunk_size = 0;
  }
  // Kernels look at either.
  if (problem.causal) problem.window_right = 0;
  problem.causal = problem.window_right == 0;
  if (plan.layout.tile_counter.bytes > 0 && memory.call_counters == nullptr) {
    const cudaError_t error = cudaMemsetAsync(problem.plan.tile_counter, 0, plan.layout.tile_counter.bytes, stream);
    if (error != cudaSuccess) return cuda_failure("Clearing the tile counter", error);
  }
  if (params.mask.words != nullptr && plan.kernel->uses_mask_extents) {
    auto* extents = plan.layout.mask_extents.in<MaskExtent>(memory.scratch);
    if (extents != nullptr) {
      LaunchParams of_mask = problem;
      of_mask.plan.split_tiles = nullptr;  // find_work() describes no tiles
      Status status = launch_mask_extents(of_mask, extents, stream);
      if (!status.ok()) return status;
      problem.plan.mask_extents = extents;
    }
  }
  launch_counts.at(static_cast<std::size_t>(plan.kernel->info.backend)).fetch_add(1, std::memory_order_relaxed);
  Status status = plan.kernel->launch(problem, stream);
  const bool combines = splits && problem.plan.combine_counters == nullptr;
  return status.ok() && combines ? launch_combine_splits(problem, stream) : status;
}

std::uint64_t launch_count(Backend backend) {
  return launch_counts.at(static_cast<std::size_t>(backend)).load(std::memory_order_relaxed);
}

Status run(const PlanState& plan, const AttentionParams& params, const Memory& memory, cudaStream_t stream) {
  if (Status status = fits_plan(plan, params, /*with_tensors=*/true); !status.ok()) return status;
  if (plan.kernel == nullptr || params.total_q == 0) return Status::success();
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  if (!serves(*plan.kernel, params, device.compute_capability)) {
    std::vector<std::string> reasons;
    explain(plan.kernel->info.backend, params, device.compute_capability, &reasons);
    return Status::unsupported(joined(reasons));
  }
  return launch(plan, params, memory, stream);
}

}  // namespace cutlass_kernels
