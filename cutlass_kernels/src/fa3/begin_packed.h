// What a CTA does before its first packed tile, by all its threads; a barrier follows.
#pragma once

#include "fa3/mbarrier.h"
#include "fa3/params.h"
#include "schedule/batch_splits.h"

namespace cutlass_kernels::fa3 {

// Unused rows of Q are never loaded. NaN in them would keep the other rows from lazy maxima.
template <class Tile, class SharedMemory>
CUTE_DEVICE void clear_unused_rows(const KernelParams& params, SharedMemory& shared) {
  if (params.packed.tokens * params.packed.heads.divisor >= kWarpgroupRows) return;
  auto* q = reinterpret_cast<uint4*>(shared.q);
  for (int i = threadIdx.x; i < int(sizeof(shared.q) / 16); i += Tile::kThreads) q[i] = {};
  fence_proxy_async();
}

template <class Tile, class SharedMemory>
CUTE_DEVICE void begin_packed(const KernelParams& params, SharedMemory& shared, int warp) {
  if (warp == 0 && splits_batch(params.attention)) shared.splits.fill(params.attention);
  clear_unused_rows<Tile>(params, shared);
}

}  // namespace cutlass_kernels::fa3
