// Sizes of elements.
#pragma once

#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

constexpr int size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return 1;
    default:  // of tokens, whose strides are in bytes
      return 1;
  }
}

}  // namespace cutlass_kernels
