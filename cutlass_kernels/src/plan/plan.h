// A plan: which kernel computes a problem, in which tiles, where these come from, how keys are split, and where
// everything lies in the workspace. A pure function of sizes, options and device facts; holds no address.
#pragma once

#include <cstdint>
#include <limits>

#include "copy_vectors.h"
#include "cutlass_kernels/attention.h"
#include "device.h"
#include "plan/launch_params.h"
#include "plan/split.h"
#include "plan/tile_shape.h"
#include "plan/workspace.h"
#include "registry/registry.h"

namespace cutlass_kernels {

/// What a plan holds for.
struct PlannedFor {
  DType q_dtype, kv_dtype;
  std::int32_t num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, batch_size;
  std::int32_t page_size;  ///< 0: no pages
  std::int32_t max_qo_len, fixed_split_size, num_splits, least_rows, most_rows;
  std::int64_t total_q;
  bool disable_split_kv, batch_invariant, has_indptrs, has_block_table;

  static PlannedFor make(const AttentionParams& params);
};

struct PlanState : TilePlan {
  bool is_made = false;
  PlannedFor planned_for{};
  const KernelEntry* kernel = nullptr;  ///< null: there is nothing to compute
  TileShape tile;
  std::int32_t combine_counters = 0;  ///< > 0: the attention kernel combines partial results itself
  SplitRule rule;                     ///< by which make_schedule() splits the tiles of a list
  WorkspaceLayout layout;
};

/// Counters for a call without a list: the tile counter, then combine counters, a half for each partial row and pack of
/// heads. Of 64 bits, so that memory which nobody has cleared is never taken for a count (schedule/tickets.h).
constexpr int kCallCounters = 2048;
constexpr int kCallCounterWords = 2 * kCallCounters;  // of 32 bits
constexpr std::size_t kCallCounterBytes = kCallCounters * sizeof(std::uint64_t);
constexpr int kFirstCombineCallCounter = 2;  // 16-byte aligned
constexpr int kCombineCallCounters = kCallCounters - kFirstCombineCallCounter;

/// What a plan may count on.
struct PlanOptions {
  std::size_t workspace_bytes = std::numeric_limits<std::size_t>::max();
  bool call_counters = false;                     ///< the caller brings kCallCounters
  bool masked_later = false;                      ///< calls may have a custom mask although params has none
  bool schedule_is_kept = false;                  ///< many calls share the list
  bool is_logged = true;                          ///< by log_plan(): not where only its size is wanted
  std::size_t partial_bytes = kMostPartialBytes;  ///< of partial results, where the host chooses their number
};

/// Memory that a call may use: both parts of the layout, and optional counters.
struct Memory {
  void* schedule = nullptr;
  void* scratch = nullptr;
  std::uint64_t* call_counters = nullptr;

  /// Both parts in one workspace.
  static Memory in(void* workspace, const WorkspaceLayout& layout, std::uint64_t* call_counters = nullptr) {
    return {workspace, static_cast<char*>(workspace) + layout.schedule_bytes, call_counters};
  }
};

/// Plans `params`, which have been validated; leaves the plan as it was where that fails. What does not fit into the
/// workspace is left out: a list that would only be faster, and without one counters (tiles are dealt out beforehand),
/// splits, mask extents (all keys are computed); but not where results must not depend on the batch.
CK_API Status make_plan(const AttentionParams& params, Backend backend, const Device& device,
                        const PlanOptions& options, PlanState* plan);

/// Whether `params` are valid (their pointers only if `with_tensors`), and what the plan was made for.
Status fits_plan(const PlanState& plan, const AttentionParams& params, bool with_tensors);

/// Enqueues `uploads` of index vectors, and what writes the schedule of a plan with a list.
CK_API Status write_schedule(const PlanState& plan, const AttentionParams& params, void* schedule, cudaStream_t stream,
                             const VectorCopies& uploads = {});

/// Enqueues the kernels of validated `params`, for which the plan was made.
CK_API Status launch(const PlanState& plan, const AttentionParams& params, const Memory& memory, cudaStream_t stream);

/// The same for any `params`: refuses those that are invalid or do not fit the plan.
CK_API Status run(const PlanState& plan, const AttentionParams& params, const Memory& memory, cudaStream_t stream);

/// Attention kernels of `backend` that the threads of this process have launched, so that tests can prove which backend
/// ran. A replay of a CUDA graph launches none.
CK_API std::uint64_t launch_count(Backend backend);

CK_API Status workspace_too_small(const char* what, const AttentionParams& params, std::size_t needed, std::size_t got);

}  // namespace cutlass_kernels
