// How quantized latent caches store a token.
#pragma once

#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

// Offsets are in the token's record: its data, then its scales; where they are not apart, its bytes in order.
struct TokenFormat {
  int bytes;           // of a token; 0: no such format
  int columns;         // of e4m3, first in the record
  int positions;       // columns of the position, of bfloat16
  int group;           // columns of a scale
  bool has_exponents;  // scales are ue8m0, else fp32
  int scales_at;
  int scale_bytes;  // including padding
  int positions_at;
  bool by_page;  // the scales of a page lie behind the data of all its tokens

  constexpr int data_bytes() const { return bytes - (by_page ? scale_bytes : 0); }
};

constexpr TokenFormat token_format(DType dtype) {
  switch (dtype) {
    case DType::kLatentV32:
      return {656, 512, 64, 128, false, 512, 16, 528, false};
    case DType::kLatentV32Nope:
      return {528, 512, 0, 128, false, 512, 16, 528, false};
    case DType::kLatentV4:
      return {584, 448, 64, 64, true, 576, 8, 448, true};
    case DType::kLatentV41ByPage:
      return {528, 512, 0, 32, true, 512, 16, 528, true};
    case DType::kLatentV41ByToken:
      return {528, 512, 0, 32, true, 512, 16, 528, false};
    default:
      return {};
  }
}

}  // namespace cutlass_kernels
