// From a problem and a device to a plan: kernel -> tile -> source of tiles -> KV splits -> workspace.
#include <algorithm>
#include <string>

#include "mask_extents.h"
#include "merge/combine_splits.h"
#include "plan/estimate.h"
#include "plan/plan.h"
#include "plan/tile_source.h"
#include "registry/reasons.h"

namespace cutlass_kernels {
namespace {

/// A thread block computes at least one tile of one head. Thread blocks are counted in 32 bits, and running ones count
/// up to one more each (65536 are more than any device has).
Status check_tiles(const AttentionParams& params, std::int64_t tile_indices) {
  const std::int64_t tiles = (tile_indices + 1) * params.num_qo_heads;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 65536;
  if (tiles <= kMost) return Status::success();
  return Status::invalid("total_q=" + std::to_string(params.total_q) + " with num_qo_heads=" +
                         std::to_string(params.num_qo_heads) + " makes " + std::to_string(tiles) +
                         " tiles, more than the " + std::to_string(kMost) + " of one call: split the batch.");
}

Status check_partial_rows(const AttentionParams& params, std::int64_t rows) {
  if (rows <= std::numeric_limits<std::int32_t>::max()) return Status::success();
  const std::string what = params.fixed_split_size > 0 ? "fixed_split_size=" + std::to_string(params.fixed_split_size)
                                                       : std::string("The plan");
  return Status::invalid(what + " splits total_q=" + std::to_string(params.total_q) + " rows into " +
                         std::to_string(rows) +
                         ", too many to count: " + (params.fixed_split_size > 0 ? "enlarge it." : "split the batch."));
}

void add_partial_results(const AttentionParams& params, std::int64_t rows, RegionStack* stack,
                         WorkspaceLayout* layout) {
  const std::size_t heads = std::size_t(rows) * params.num_qo_heads;
  layout->partial_o = stack->add(heads * params.head_dim_vo * sizeof(float));
  layout->partial_max_sum = stack->add(heads * 2 * sizeof(float));
}

/// A mask is given, or may be given later: then an option of the same tiles (ALiBi, device scales) is set in its place.
bool may_be_masked(const AttentionParams& params, const PlanOptions& options) {
  if (params.mask.words != nullptr) return true;
  return options.masked_later && (params.alibi.slopes != nullptr || params.logits_scale.data != nullptr ||
                                  params.keys_scale.data != nullptr || params.output_scale.data != nullptr);
}

/// Ends the scratch. Its last region are the extents of masks: without room for them all keys are computed. Not where
/// results must not depend on the batch, as KV blocks begin where the extent of a tile does.
Status finish_scratch(const AttentionParams& params, const PlanOptions& options, PlanState* plan,
                      const RegionStack& scratch) {
  WorkspaceLayout& layout = plan->layout;
  layout.scratch_bytes = scratch.bytes();
  if (!plan->kernel->uses_mask_extents || !may_be_masked(params, options)) return Status::success();
  RegionStack with_extents = scratch;
  const Region extents = with_extents.add(std::size_t(plan->tile_indices) * sizeof(MaskExtent));
  const std::size_t bytes = layout.schedule_bytes + with_extents.bytes();
  if (bytes <= options.workspace_bytes) {
    layout.mask_extents = extents;
    layout.scratch_bytes = with_extents.bytes();
  } else if (params.batch_invariant) {
    return workspace_too_small("A custom mask", params, bytes, options.workspace_bytes);
  }
  return Status::success();
}

Status plan_with_list(const AttentionParams& params, const Device& device, const PlanOptions& options,
                      PlanState* plan) {
  plan->source = TileSource::kList;
  plan->rule = split_rule(params, plan->tile, plan->source, device, options.partial_bytes);
  const SplitRule& rule = plan->rule;
  const std::int64_t tiles = tile_index_count(plan->source, params, plan->tile.rows);
  const std::int64_t tile_indices = tiles + rule.extra_tiles;
  if (Status status = check_tiles(params, tile_indices); !status.ok()) return status;
  if (Status status = check_partial_rows(params, rule.partial_rows); !status.ok()) return status;
  plan->tile_indices = std::int32_t(tile_indices);
  plan->split_tile_capacity = std::int32_t(rule.split_tile_capacity);
  plan->partial_rows = std::int32_t(rule.partial_rows);
  plan->combine_counters = std::int32_t(rule.combine_counters);

  WorkspaceLayout& layout = plan->layout;
  RegionStack schedule;
  layout.header = schedule.add(sizeof(TileListHeader));
  layout.tile_list = schedule.add(tile_indices * sizeof(WorkItem));
  layout.split_tiles = schedule.add(rule.split_tile_capacity * sizeof(SplitTile));
  layout.combine_counters = schedule.add(rule.combine_counters * sizeof(std::uint64_t));
  layout.schedule_bytes = schedule.bytes();
  RegionStack scratch;
  if (rule.split_tile_capacity > 0) add_partial_results(params, rule.partial_rows, &scratch, &layout);
  return finish_scratch(params, options, plan, scratch);
}

Status plan_without_list(const AttentionParams& params, const Device& device, const PlanOptions& options,
                         PlanState* plan) {
  const TileShape& tile = plan->tile;
  std::int64_t tile_indices = tile_index_count(plan->source, params, tile.rows);
  if (Status status = check_tiles(params, tile_indices); !status.ok()) return status;
  WorkspaceLayout& layout = plan->layout;
  RegionStack scratch;
  if (plan->kernel->is_persistent && !options.call_counters && 2 * sizeof(std::uint64_t) <= options.workspace_bytes) {
    layout.tile_counter = scratch.add(2 * sizeof(std::uint64_t));
  }

  std::size_t partial_bytes = options.partial_bytes;
  if (splits_rows_equally(params, tile)) {  // as many as the workspace has room for
    plan->equal_splits = 1;
    const std::size_t taken = scratch.bytes() + 16;
    partial_bytes = std::min(partial_bytes, std::max(options.workspace_bytes, taken) - taken);
  }
  const SplitRule rule = split_rule(params, tile, plan->source, device, partial_bytes);
  const std::int64_t splits = splits_without_list(rule, params, tile, plan->source);
  const std::int64_t rows = partial_rows_without_list(params, tile, plan->source, splits);
  if (Status status = check_partial_rows(params, rows); !status.ok()) return status;
  if (rows > 0) {
    RegionStack with_partials = scratch;
    WorkspaceLayout split_layout = layout;
    add_partial_results(params, rows, &with_partials, &split_layout);
    const std::int64_t longest = is_batch(params) ? tiles_of_longest(params, tile.rows) : tile_indices;
    // Of a batch whose requests differ, one per request more than are shared out.
    const bool are_shared_out = params.batch_size > 1 && rule.per_request == 0;
    const std::int64_t of_request = splits / params.batch_size - (are_shared_out ? 1 : 0);
    const std::int64_t counters = combine_counters(params, tile, rows);
    const bool combines =
        options.call_counters && counters <= kCombineCallCounters && combines_in_kernel(params, tile, of_request);
    if (are_shared_out && !combines) {
      split_layout.split_tiles = with_partials.add(std::size_t(longest) * params.batch_size * sizeof(SplitTile));
    }
    if (with_partials.bytes() <= options.workspace_bytes) {
      scratch = with_partials;
      layout = split_layout;
      if (is_batch(params)) plan->source = TileSource::kBatchByLength;
      tile_indices = longest * splits;
      if (Status status = check_tiles(params, tile_indices); !status.ok()) return status;
      plan->num_splits = std::int32_t(splits);
      plan->equal_splits = rule.per_request;
      plan->partial_rows = std::int32_t(rows);
      plan->split_tile_capacity = std::int32_t(longest * params.batch_size);
      plan->combine_counters = combines ? std::int32_t(counters) : 0;
    } else if (rule.fixed > 0 || rule.own.most > 1) {
      return workspace_too_small("Splitting the keys", params, with_partials.bytes(), options.workspace_bytes);
    }
  }
  plan->tile_indices = std::int32_t(tile_indices);
  return finish_scratch(params, options, plan, scratch);
}

/// Of a batch without a list whose requests have splits of their own.
Status plan_own_splits(const AttentionParams& params, const Device& device, const PlanOptions& options,
                       PlanState* plan) {
  const SplitRule rule = split_rule(params, plan->tile, plan->source, device, options.partial_bytes);
  const OwnBounds bounds = own_bounds(rule, params, plan->tile);
  if (Status status = check_tiles(params, bounds.tile_indices); !status.ok()) return status;
  if (Status status = check_partial_rows(params, bounds.partial_rows); !status.ok()) return status;
  WorkspaceLayout& layout = plan->layout;
  RegionStack scratch;
  plan->own_splits.tile_rows = plan->tile.rows;
  if (bounds.partial_rows > 0) {
    add_partial_results(params, bounds.partial_rows, &scratch, &layout);
    layout.split_tiles = scratch.add(std::size_t(params.batch_size) * sizeof(SplitTile));
    plan->own_splits = rule.own;
    plan->partial_rows = std::int32_t(bounds.partial_rows);
    plan->split_tile_capacity = params.batch_size;
  }
  if (scratch.bytes() > options.workspace_bytes) {
    return workspace_too_small("Splitting the keys", params, scratch.bytes(), options.workspace_bytes);
  }
  plan->tile_indices = std::int32_t(bounds.tile_indices);
  plan->num_splits = std::max(rule.most_splits, 1);
  return finish_scratch(params, options, plan, scratch);
}

/// Where results must not depend on the batch, as many as a warp loads at once. With more warps than run at once, those
/// that share rows only wait for each other (16 rows of 32 heads in 16 splits: 14.0 -> 10.5 us in all).
std::int32_t splits_of_warp(const AttentionParams& params, std::int64_t partial_rows, const Device& device) {
  const std::int64_t ahead = combined_ahead(params.head_dim_vo);
  if (params.batch_invariant || params.fixed_split_size > 0) return std::int32_t(ahead);
  const std::int64_t warps = std::int64_t(2) * CombineUnits::kWarps * device.multiprocessors;
  const std::int64_t fair = (partial_rows * params.num_qo_heads + warps - 1) / std::max<std::int64_t>(warps, 1);
  return std::int32_t(std::clamp<std::int64_t>(fair, ahead, 1 << 16));
}

/// Limits total_q to max_qo_len * batch_size: q may have unused rows between requests, which choose no tile.
AttentionParams with_rows_of_requests(AttentionParams params) {
  const std::int64_t most = std::int64_t(params.max_qo_len) * params.batch_size;
  if (most > 0) params.total_q = std::min(params.total_q, most);
  return params;
}

/// From the kernel on, of a problem with rows.
Status plan_kernel(const AttentionParams& params, Backend backend, const Device& device, const PlanOptions& options,
                   PlanState* plan) {
  std::vector<std::string> reasons;
  const KernelEntry* kernel = choose(backend, params, device.compute_capability, &reasons);
  if (kernel == nullptr) return Status::unsupported(joined(reasons));
  plan->kernel = kernel;
  const Choice choice = fastest(*kernel, with_rows_of_requests(params), device, options.schedule_is_kept);
  plan->tile = choice.candidate.shape;
  plan->source = tile_source(params, *kernel, plan->tile);
  if (plan->source == TileSource::kList) return plan_with_list(params, device, options, plan);
  if (plan->source == TileSource::kBatchBySplit) {
    return plan_own_splits(params, device, options, plan);
  }
  if (choice.source == TileSource::kList) {
    // Even shares take up to twice partial_bytes: where the workspace holds less, there are fewer of them.
    for (const std::size_t bytes : {options.partial_bytes, options.workspace_bytes / 5 * 2}) {
      PlanState listed = *plan;
      PlanOptions some = options;
      some.partial_bytes = std::min(bytes, options.partial_bytes);
      const bool fits =
          plan_with_list(params, device, some, &listed).ok() && listed.layout.bytes() <= options.workspace_bytes;
      if (fits && (listed.rule.most_splits > 1 || wastes_tile_indices(params, plan->tile.rows))) {
        *plan = listed;
        return Status::success();
      }
    }
  }
  return plan_without_list(params, device, options, plan);
}

}  // namespace

PlannedFor PlannedFor::make(const AttentionParams& params) {
  PlannedFor made{};
  made.q_dtype = params.q_dtype;
  made.kv_dtype = params.kv_dtype;
  made.num_qo_heads = params.num_qo_heads;
  made.num_kv_heads = params.num_kv_heads;
  made.head_dim_qk = params.head_dim_qk;
  made.head_dim_vo = params.head_dim_vo;
  made.batch_size = params.batch_size;
  made.page_size = params.pages.page_size;
  made.max_qo_len = params.max_qo_len;
  made.fixed_split_size = params.fixed_split_size;
  made.num_splits = params.num_splits;
  made.total_q = params.total_q;
  made.disable_split_kv = params.disable_split_kv;
  made.batch_invariant = params.batch_invariant;
  made.least_rows = params.least_rows;
  made.most_rows = params.most_rows;
  made.has_indptrs = is_batch(params);
  made.has_block_table = params.pages.table_stride > 0;
  return made;
}

Status make_plan(const AttentionParams& params, Backend backend, const Device& device, const PlanOptions& options,
                 PlanState* plan) {
  PlanState made;
  made.planned_for = PlannedFor::make(params);
  if (params.total_q > 0) {
    Status status = plan_kernel(params, backend, device, options, &made);
    if (!status.ok()) return status;
    if (options.is_logged && logs_plans()) {
      log_plan(with_rows_of_requests(params), device, made, options.schedule_is_kept);
    }
  }
  made.splits_of_warp = splits_of_warp(params, made.partial_rows, device);
  made.is_made = true;
  *plan = made;
  return Status::success();
}

Status workspace_too_small(const char* what, const AttentionParams& params, std::size_t needed, std::size_t got) {
  return {StatusCode::kWorkspaceTooSmall, std::string(what) + " of " + std::to_string(params.batch_size) +
                                              " requests with total_q=" + std::to_string(params.total_q) +
                                              " needs a workspace of " + std::to_string(needed) + " bytes, got " +
                                              std::to_string(got) + "; workspace_size() tells how many."};
}

}  // namespace cutlass_kernels
