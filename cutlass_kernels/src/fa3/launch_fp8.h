// Host side of the kernels of e4m3 tensors.
#pragma once

#include "fa3/launch.h"

namespace cutlass_kernels::fa3 {

// Factors that only the device knows are folded into the softmax's scale where a tile is of one head.
template <class Element, int HeadDim>
Status launch_fp8_to(const LaunchParams& params, cudaStream_t stream) {
  using Tiles = Fp8TileTable<HeadDim>;
  if (is_packed_schedule<typename Tiles::Packed>(params)) {
    return launch_packed<Element, typename Tiles::Packed>(params, stream);
  }
  using Large = typename Tiles::Large;
  if (params.plan.tile_kind != kRows || params.plan.tile_rows != Large::kBlockM) {
    return no_such_tile(params);
  }
  return LogitsTransform::needed(params) || has_logits_scale(params)
             ? launch_tile<Element, Large, Logits::kTransformed>(params, stream)
             : launch_tile<Element, Large, Logits::kPlain>(params, stream);
}

// Both kernels write e4m3, too.
template <int HeadDim>
Status launch_fp8(const LaunchParams& params, cudaStream_t stream) {
  return params.o_dtype == DType::kFloat16 ? launch_fp8_to<Fp8To<fp16>, HeadDim>(params, stream)
                                           : launch_fp8_to<Fp8To<bf16>, HeadDim>(params, stream);
}

}  // namespace cutlass_kernels::fa3
