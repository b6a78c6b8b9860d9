// Rows of O in e4m3, which kernels of e4m3 tensors write from registers: a quad of lanes holds eight columns in every
// eight, two of each lane, and after an exchange each lane 16 that lie side by side.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/element_types.h"
#include "common/numeric.h"

namespace cutlass_kernels::fa3 {

// Lane i of a quad brings row i of a 4 x 4 matrix of words and takes column i. By all lanes of a warp.
CUTE_DEVICE void transpose_in_quad(std::uint32_t (&x)[4]) {
  CUTE_UNROLL
  for (int distance = 1; distance <= 2; ++distance) {
    const bool upper = (threadIdx.x & distance) != 0;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) != 0) continue;
      const std::uint32_t sent = upper ? x[i] : x[i + distance];
      const std::uint32_t got = __shfl_xor_sync(0xffffffffu, sent, distance);
      x[i] = upper ? got : x[i];
      x[i + distance] = upper ? x[i + distance] : got;
    }
  }
}

// Writes o * scale, of the thread's row r of its two: beyond 448 they become 448, infinities too; NaN stays NaN. `out`
// is where the row begins, null where nobody wants it. By all lanes of a warp.
template <int kHeadDim>
CUTE_DEVICE void store_e4m3_row(const float (&o)[kHeadDim / 2], float scale, int r, char* out,
                                int head_dim) {
  // Another number to the compiler, which else computes all products ahead, for the outputs of 16 bits, too.
  asm volatile("" : "+f"(scale));
  const int first_column = threadIdx.x % 4 * 16;
  CUTE_UNROLL
  for (int panel = 0; panel < kHeadDim / 64; ++panel) {
    std::uint32_t x[4];  // two columns of 16 i + 2 lane, two of 16 i + 8 + 2 lane
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float* pair = &o[32 * panel + 8 * i + 2 * r];
      x[i] = e4m3::pack(pair[0] * scale, pair[1] * scale, pair[4] * scale, pair[5] * scale);
    }
    transpose_in_quad(x);
    const int column = panel * 64 + first_column;
    if (out != nullptr && column < head_dim) {
      *reinterpret_cast<uint4*>(out + column) = {
          __byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410),
          __byte_perm(x[0], x[1], 0x7632), __byte_perm(x[2], x[3], 0x7632)};
    }
  }
}

}  // namespace cutlass_kernels::fa3
