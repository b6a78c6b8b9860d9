// A call without a plan of its own: planned and launched part by part.
#pragma once

#include <array>

#include "cutlass_kernels/attention.h"
#include "device.h"
#include "plan/plan.h"

namespace cutlass_kernels {

// The parts in which a batch-invariant call is computed. A request's tile must not depend on the others of its batch,
// but no tile is fast for all lengths of queries. So each part of the batch has its own kernel, which leaves other
// requests out: those of so few rows that a tile for decoding holds them, those whose heads are packed, and longer
// ones.
struct RowRanges {
  static constexpr int kMost = 3;
  int count = 0;
  std::array<AttentionParams, kMost> parts;  ///< the problem, with least_rows and most_rows

  const AttentionParams* begin() const { return parts.data(); }
  const AttentionParams* end() const { return parts.data() + count; }
};

/// The parts of `params`: one, unless batch_invariant is set, and only those that the host cannot rule out.
RowRanges row_ranges(const AttentionParams& params, Backend backend, const Device& device);

/// A single call: the plan of each of its parts. They run one after the other, in the same memory.
struct CallPlan {
  RowRanges ranges;
  std::array<PlanState, RowRanges::kMost> plans;

  CK_API std::size_t workspace_bytes() const;
  CK_API std::size_t schedule_bytes() const;  ///< of all parts
  CK_API bool needs_counters() const;
  CK_API bool is_empty() const;  ///< there is nothing to compute
};

/// Plans a single call of validated `params`.
CK_API Status plan_call(const AttentionParams& params, Backend backend, const Device& device,
                        const PlanOptions& options, CallPlan* call);

/// Where the schedules of a call's parts are kept beyond it, for calls of the same sizes and lengths.
struct KeptSchedule {
  void* memory = nullptr;  ///< schedule_bytes(), 16-byte aligned; null: they lie in the workspace
  bool is_written = false;
};

/// Whether a schedule of one call serves the other.
CK_API bool share_schedule(const CallPlan& a, const CallPlan& b);

/// Enqueues the kernels of a planned call. `workspace` has its workspace_bytes(). `call_counters` may be
/// null if it was planned without.
CK_API Status launch_call(const CallPlan& call, void* workspace, std::uint64_t* call_counters, cudaStream_t stream,
                          const KeptSchedule& kept = {});

/// The same of any `params`, for the current device: refuses those that are invalid.
CK_API Status plan_once(const AttentionParams& params, Backend backend, const PlanOptions& options, CallPlan* call);

/// Validates, plans and launches a single call. `workspace` holds both parts of the layout; `call_counters` may be
/// null.
Status run_once(const AttentionParams& params, Backend backend, void* workspace, std::size_t workspace_bytes,
                std::uint64_t* call_counters, cudaStream_t stream);

}  // namespace cutlass_kernels
