// Division by a number that the host knows.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace cutlass_kernels {

// floor(n / divisor) for 0 <= n < 2^31, as a multiplication and a shift. With an integer division, a masked tile would
// spend a third of its time on the chunked mask.
struct FastDivisor {
  std::uint32_t divisor = 1;
  std::uint32_t multiplier = 0;
  std::uint32_t shift = 0;

  FastDivisor() = default;
  explicit FastDivisor(std::uint32_t d) : divisor(d) {
    if (d <= 1) return;
    std::uint32_t log2 = 0;
    while ((1u << log2) < d && log2 < 31) ++log2;
    const int power = 31 + int(log2);  // 2^power / d rounded up fits 32 bits and is exact for n < 2^31
    multiplier = std::uint32_t(((std::uint64_t(1) << power) + d - 1) / d);
    shift = power - 32;
  }

  CUTE_HOST_DEVICE std::uint32_t divide(std::uint32_t n) const {
    return divisor <= 1 ? n : std::uint32_t((std::uint64_t(n) * multiplier) >> 32) >> shift;
  }
  CUTE_HOST_DEVICE std::uint32_t modulo(std::uint32_t n) const { return n - divide(n) * divisor; }
};

}  // namespace cutlass_kernels
