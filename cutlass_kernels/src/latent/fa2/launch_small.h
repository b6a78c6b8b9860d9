// Host side of latent attention by mma.sync on devices with less shared memory than Hopper has.
#pragma once

#include "latent/fa2/launch.h"

namespace cutlass_kernels::mla::mma_sync {

template <class Element, class Kv>
Status launch_small(const LaunchParams& params, cudaStream_t stream) {
  // A plan serves both.
  static_assert(FewFp8::kBlockM == FewFp8Small::kBlockM);
  static_assert(SomeFp8::kBlockM == SomeFp8Small::kBlockM && Some::kBlockM == SomeSmall::kBlockM);
  if constexpr (std::is_same_v<Element, Kv>) {
    return params.plan.tile_kind == kSome ? launch_tile<Element, Kv, SomeSmall>(params, stream)
                                          : fa2::no_such_tile<kLatentDim + kRopeDim>(params);
  } else {
    return params.plan.tile_kind == kFew ? launch_tile<Element, Kv, FewFp8Small>(params, stream)
                                         : launch_tile<Element, Kv, SomeFp8Small>(params, stream);
  }
}

}  // namespace cutlass_kernels::mla::mma_sync
