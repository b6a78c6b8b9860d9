// The plan of a batch: what stays the same between its runs. Python makes one in plan() and runs it many times.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arguments.h"
#include "cutlass_kernels/attention.h"
#include "plan/plan.h"

namespace cutlass_kernels {

struct BatchPlan {
  Backend backend = Backend::kAuto;
  /// Types, heads, sizes, indptrs and page tables. Tensors and options are those of each run.
  AttentionParams params;
  PlanState state;
  void* schedule = nullptr;  ///< where the tile list lies
  /// Whether the tiles are those for runs with a custom mask, ALiBi or scales in device memory; they serve others, too.
  bool general = false;
};

/// Makes a problem one that needs general tiles, whichever way its runs will: never read.
inline void make_general(AttentionParams* params) {
  static const float factor = 1.0f;
  params->logits_scale.data = &factor;
}

/// Enqueues a run on a device's current stream. The scratch may be shared by plans: no kernel of another call comes
/// between those of this one.
Status run_batch(const BatchPlan& plan, const AttentionParams& params, int device, Address stream, Address scratch,
                 std::size_t scratch_bytes);

}  // namespace cutlass_kernels
