// Masks of any form: one bit per row and key.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "cutlass_kernels/params.h"

namespace cutlass_kernels {

// The 32 bits from `bit` on. Words past the mask's end are not read: whatever they would say is about rows or keys that do
// not exist, or about a request whose offset, which was never checked, makes no sense.
CUTE_DEVICE std::uint32_t bits_at(const BitMask& mask, std::int64_t bit) {
  const std::int64_t at = bit >> 5;
  auto word = [&](std::int64_t i) {
    return 0 <= i && i < mask.num_words ? __ldg(mask.words + i) : 0u;
  };
  return __funnelshift_r(word(at), word(at + 1), std::uint32_t(bit) & 31);
}

// Bits [begin, end) of 32; either may lie outside.
CUTE_DEVICE std::uint32_t bits_between(int begin, int end) {
  auto from = [](int bit) { return __funnelshift_lc(0u, ~0u, min(max(bit, 0), 32)); };
  return from(begin) & ~from(end);
}

}  // namespace cutlass_kernels
