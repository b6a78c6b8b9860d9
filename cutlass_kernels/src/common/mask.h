// Which keys a query row sees, as a half-open interval [lo, hi): padding, causal, sliding window and
// chunked masks are all of this form, and both bounds never decrease from one row to the next.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace cutlass_kernels {

// floor(n / divisor) for 0 <= n < 2^31 by a multiplication: a masked tile would spend a third of its time
// on the integer division of the chunked mask.
struct FastDivisor {
  std::uint32_t divisor = 1;
  std::uint32_t multiplier = 0;
  std::uint32_t shift = 0;

  FastDivisor() = default;
  explicit FastDivisor(std::uint32_t d) : divisor(d) {
    if (d <= 1) return;
    std::uint32_t log2 = 0;
    while ((1u << log2) < d && log2 < 31) ++log2;
    const int power =
        31 + int(log2);  // 2^power / d rounded up fits 32 bits and is exact for n < 2^31
    multiplier = std::uint32_t(((std::uint64_t(1) << power) + d - 1) / d);
    shift = power - 32;
  }

  CUTE_HOST_DEVICE std::uint32_t divide(std::uint32_t n) const {
    return divisor <= 1 ? n : std::uint32_t((std::uint64_t(n) * multiplier) >> 32) >> shift;
  }
  CUTE_HOST_DEVICE std::uint32_t modulo(std::uint32_t n) const { return n - divide(n) * divisor; }
};

struct IntervalMask {
  int kv_len;
  int offset;   // kv_len - qo_len: row i stands at absolute position i + offset (may be negative)
  bool causal;  // hi = position + 1
  int window_left;  // < 0: none; else lo >= position - window_left
  int chunk_size;  // 0: none; else lo >= position rounded down to a multiple of it (implies causal)
  FastDivisor chunk;

  CUTE_HOST_DEVICE int lo(int row) const {
    const int position = row + offset;
    int bound = 0;
    if (window_left >= 0 && position > window_left) bound = position - window_left;
    if (chunk_size > 0 && position > 0) {
      const int chunk_begin = int(chunk.divide(position)) * chunk_size;
      bound = chunk_begin > bound ? chunk_begin : bound;
    }
    return bound;
  }

  CUTE_HOST_DEVICE int hi(int row) const {
    if (!causal) return kv_len;
    const int bound = row + offset + 1;
    return bound < 0 ? 0 : (bound < kv_len ? bound : kv_len);
  }
};

}  // namespace cutlass_kernels
