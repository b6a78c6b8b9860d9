// Host side of the kernels of e4m3 keys and values below 16-bit queries.
#pragma once

#include "fa3/launch.h"

namespace cutlass_kernels::fa3 {

template <class Element, int HeadDim>
Status launch_converted(const LaunchParams& params, cudaStream_t stream) {
  using Tile = typename ConvertedTileTable<HeadDim>::Packed;
  return is_packed_schedule<Tile>(params) ? launch_packed<Element, Tile>(params, stream)
                                          : no_such_tile(params);
}

}  // namespace cutlass_kernels::fa3
