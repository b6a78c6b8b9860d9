// Masks of any form: one bit per row and key.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "cutlass_kernels/params.h"

namespace cutlass_kernels {

// Words past the mask's end are not read: whatever they would say is about rows or keys that do not exist, or about a
// request whose offset, which was never checked, makes no sense.
CUTE_DEVICE std::uint32_t word_at(const BitMask& mask, std::int64_t index) {
  return 0 <= index && index < mask.num_words ? __ldg(mask.words + index) : 0u;
}

// The 32 bits from `bit` on.
CUTE_DEVICE std::uint32_t bits_at(const BitMask& mask, std::int64_t bit) {
  const std::int64_t at = bit >> 5;
  return __funnelshift_r(word_at(mask, at), word_at(mask, at + 1), std::uint32_t(bit));
}

// The lowest n bits: none for n <= 0, all from 32 on.
CUTE_DEVICE std::uint32_t low_bits(int n) { return __funnelshift_lc(~0u, 0u, max(n, 0)); }

// Bits [begin, end) of 32; either may lie outside.
CUTE_DEVICE std::uint32_t bits_between(int begin, int end) {
  auto from = [](int bit) { return __funnelshift_lc(0u, ~0u, min(max(bit, 0), 32)); };
  return from(begin) & ~from(end);
}

}  // namespace cutlass_kernels
