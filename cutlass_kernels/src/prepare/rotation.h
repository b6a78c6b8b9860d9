// The angles of a rotary embedding.
//
// They are counted in turns, as fractions of 2^64. A position is an integer, so its product with the turns of one
// position wraps around 2^64 as angles wrap around a turn: no range reduction, and no error that grows with the angle.
// What is left is that of the table, at most position * 2^-64 of a turn from its last digit.
#pragma once

#include <cmath>
#include <cstdint>

namespace cutlass_kernels {

constexpr int kMaxRotatedDim = 512;

/// Turns per position of the pairs (d, d + head_dim / 2), d < head_dim / 2: theta^(-2 d / head_dim) / scale / (2 pi).
inline void turns_per_position(int head_dim, double scale, double theta, std::uint64_t* turns) {
  // One power, then products: their errors, 2^-64 each, stay far below that of a double.
  const long double ratio = std::pow((long double)theta, -2.0L / head_dim);
  long double frequency = 1.0L / (6.283185307179586476925287L * scale);
  for (int d = 0; d < head_dim / 2; ++d) {
    // From 2^63 on, a frequency has no fraction (and infinity none either).
    const bool whole = !(frequency < 0x1p63L);
    turns[d] = whole ? 0 : std::uint64_t((frequency - std::uint64_t(frequency)) * 0x1p64L);
    frequency *= ratio;
  }
}

/// The angle at a position in half turns, in [-1, 1].
#ifdef __CUDACC__
__host__ __device__
#endif
    inline float half_turns(std::uint64_t turns, std::int32_t position) {
  const std::uint64_t angle = turns * std::uint64_t(std::int64_t(position));
  return float(std::int32_t(angle >> 32)) * 0x1p-31f;
}

}  // namespace cutlass_kernels
