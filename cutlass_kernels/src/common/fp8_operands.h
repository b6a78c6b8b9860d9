// Operands of mma.sync where keys and values are of 8 bits, and queries of 16.
//
// Products are of fp16 whatever the queries are: it holds all finite numbers of both formats, and one or two
// instructions convert two of them, where bf16 takes four, more than the products themselves. Queries in bf16 get a
// factor per row where they do not fit (row_factor()), and P, at most 2^8, loses less than in bf16.
#pragma once

#include <cute/config.hpp>

#include <cstdint>
#include <type_traits>

#include "common/element_types.h"

namespace cutlass_kernels {

// Bytes kFirst (to the low half) and kSecond of `word` as two fp16 numbers. Below compute capability 8.9, where no
// instruction converts, NaN of e4m3 (the largest magnitude) becomes a finite number.
template <class Format, int kFirst, int kSecond>
CUTE_DEVICE std::uint32_t converted(std::uint32_t word) {
  if constexpr (std::is_same_v<Format, e5m2>) {  // the upper half of fp16
    return __byte_perm(word, 0, 0x0404 | kFirst << 4 | kSecond << 12);
  } else {
    std::uint32_t numbers;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    // A half of a register needs no instruction of its own.
    constexpr bool kIsHalf = kSecond == kFirst + 1 && kFirst % 2 == 0;
    const std::uint32_t pair = kIsHalf ? word : __byte_perm(word, 0, kFirst | kSecond << 4);
    std::uint16_t low, high;
    asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(pair));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(numbers) : "h"(kIsHalf && kFirst == 2 ? high : low));
#else
    // Each byte below eight copies of its sign; moved by 7 bits; the copies taken out, but for the highest. The
    // exponent then lacks the difference of the biases, which a factor of 2^8 makes up for, exactly, for subnormal
    // numbers too.
    std::uint32_t spread;
    asm("prmt.b32 %0, %1, 0, %2;"
        : "=r"(spread)
        : "r"(word), "n"(kFirst | (8 | kFirst) << 4 | kSecond << 8 | (8 | kSecond) << 12));
    const std::uint32_t placed = (spread << 7) & 0xbf80bf80u;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(numbers) : "r"(placed), "r"(0x5c005c00u));
#endif
    return numbers;
  }
}

// Bytes 0 and 2 of `word` as two fp16 numbers, and bytes 1 and 3.
template <class Format>
CUTE_DEVICE void convert_alternately(std::uint32_t word, std::uint32_t& even, std::uint32_t& odd) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  word = __byte_perm(word, 0, 0x3120);
  even = converted<Format, 0, 1>(word);
  odd = converted<Format, 2, 3>(word);
#else
  even = converted<Format, 0, 2>(word);
  odd = converted<Format, 1, 3>(word);
#endif
}

// bf16 as fp16: rows are scaled, by powers of two, where their largest finite number is 2^15 or more, or below 2^-6, so
// that small numbers beside it would lose digits. (What becomes subnormal is off by 2^-25 at most, 2^-19 of the
// largest.) This is what scores are then multiplied by.
CUTE_DEVICE float row_factor(std::uint32_t largest) {
  const std::uint32_t exponent = largest >> 7;  // of the bits of a bf16 number
  const bool fits = exponent - 121u <= 20u || exponent == 0;
  return fits ? 1.0f : __uint_as_float(min(exponent, 253u) << 23);
}

CUTE_DEVICE std::uint32_t scaled_to_fp16(std::uint32_t pair, float scale) {
  return fp16::pack(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
}

}  // namespace cutlass_kernels
