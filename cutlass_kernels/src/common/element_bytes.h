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
    case DType::kLatentV32:  // strides are in bytes
      return 1;
  }
  return 1;
}

// Bytes of a token of a quantized latent cache; 0 of other types.
constexpr int token_bytes_of(DType dtype) { return dtype == DType::kLatentV32 ? 656 : 0; }

}  // namespace cutlass_kernels
