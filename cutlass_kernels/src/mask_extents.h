// Which keys a custom mask leaves to each tile: blocks of keys before the first and behind the last one that some row of the
// tile sees need not be computed. A causal mask given as bits so costs what a causal mask costs.
#pragma once

#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"

namespace cutlass_kernels {

/// Keys [begin, end) of a request; 0, 0 where no row of the tile sees any. hides: some key between is seen by no row.
struct alignas(16) MaskExtent {
  std::int32_t begin;
  std::int32_t end;
  std::int32_t hides;
  std::int32_t unused;
};

/// Enqueues the kernel that writes one extent per entry of the work list, or per tile of a single request, in order.
Status launch_mask_extents(const AttentionParams& params, MaskExtent* extents, cudaStream_t stream);

}  // namespace cutlass_kernels
