// Which keys a custom mask leaves to each tile: blocks of keys before the first and behind the last one that some row
// of the tile sees need not be computed, and those that all of its rows see need no mask. A causal mask given as bits
// so costs what a causal mask costs.
#pragma once

#include "cutlass_kernels/status.h"
#include "plan/launch_params.h"

namespace cutlass_kernels {

/// What the rows of a tile see of the keys of their request.
struct MaskExtent {
  // Keys [begin, end): before and behind, no row sees any. 0, 0 where there is none at all.
  std::int32_t begin;
  std::int32_t end;
  // Keys [all_begin, all_end), the longest such range, in steps of 32: every row sees all of them, window aside.
  std::int32_t all_begin;
  std::int32_t all_end;
  std::int32_t hides;  // whether some key of [begin, end) is seen by no row
};

/// Enqueues the kernel that writes one extent per tile index, in the order of the tile source.
Status launch_mask_extents(const LaunchParams& params, MaskExtent* extents, cudaStream_t stream);

}  // namespace cutlass_kernels
