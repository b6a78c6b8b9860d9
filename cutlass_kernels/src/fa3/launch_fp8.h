// Host side of the kernels of e4m3 tensors.
#pragma once

#include "fa3/launch.h"

namespace cutlass_kernels::fa3 {

// Factors that only the device knows are folded into the softmax's scale where a tile is of one head.
template <int HeadDim>
Status launch_fp8(const LaunchParams& params, cudaStream_t stream) {
  using Tiles = Fp8TileTable<HeadDim>;
  if (is_packed_schedule<typename Tiles::Packed>(params)) {
    return launch_packed<e4m3, typename Tiles::Packed>(params, stream);
  }
  using Large = typename Tiles::Large;
  if (params.plan.tile_kind != kRows || params.plan.tile_rows != Large::kBlockM) {
    return no_such_tile(params);
  }
  return LogitsTransform::needed(params) || has_logits_scale(params)
             ? launch_tile<e4m3, Large, Logits::kTransformed>(params, stream)
             : launch_tile<e4m3, Large, Logits::kPlain>(params, stream);
}

}  // namespace cutlass_kernels::fa3
