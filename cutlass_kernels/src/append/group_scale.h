// Scales of groups of e4m3 columns, and columns divided by them, in a warp whose lanes have 16 columns each.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "append/slots.h"
#include "common/element_types.h"

namespace cutlass_kernels {

constexpr std::uint32_t kAllLanes = 0xffffffffu;
constexpr int kColumns = 16;             // of a lane
constexpr float kLargest = 448.0f;       // of e4m3
constexpr float kLeastOfPowers = 1e-4f;  // of a group's absmax, as vLLM's writer of 584 bytes has it

// x / divisor, rounded as a division rounds it, in three operations: `factor` is 1 / divisor, give or take two units in
// its last place. Exact for x of fp16 or bf16 and a quotient, and a remainder, that are normal numbers: compared with
// division for all of those and all scales that they can have.
__device__ inline float divide(float x, float divisor, float factor) {
  const float quotient = x * factor;
  return fmaf(-fmaf(quotient, divisor, -x), factor, quotient);
}

// The scale of a group. Numbers are divided by it in fp32, as by `/`.
template <bool kPowers>
struct GroupScale {
  float value;

  __device__ explicit GroupScale(float absmax) {
    if constexpr (kPowers) {  // the least power of two that is not below absmax / 448
      // 448 is 1.75 * 2^8: what is added carries where the mantissa is above 1.75.
      const std::uint32_t bits = __float_as_uint(fmaxf(absmax, kLeastOfPowers));
      value = absmax < INFINITY ? __uint_as_float(((bits + 0x1fffff) & 0x7f800000) - (8 << 23)) : NAN;
    } else {
      value = absmax < INFINITY ? fmaxf(divide(absmax, kLargest, 1.0f / kLargest), FLT_MIN) : INFINITY;
    }
  }
  // Of a power of two, as ue8m0: 255 is NaN.
  __device__ char exponent() const { return char(__float_as_uint(value) >> 23); }

  __device__ void divide_all(float (&x)[kColumns]) const {
    const bool is_finite = value < INFINITY;
    if constexpr (kPowers) {
      const float factor = is_finite ? __uint_as_float((254u << 23) - __float_as_uint(value)) : NAN;
      CUTE_UNROLL
      for (int i = 0; i < kColumns; ++i) x[i] *= factor;
      return;
    }
    float divisor = is_finite ? value : 1.0f;  // infinity: x * 0
    if (divisor < 0x1p-80f) {                  // remainders would be subnormal
      divisor *= 0x1p64f;
      CUTE_UNROLL
      for (int i = 0; i < kColumns; ++i) x[i] *= 0x1p64f;
    }
    float factor;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(divisor));
    factor = is_finite ? factor : 0.0f;
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) x[i] = divide(x[i], divisor, factor);
  }
};

// Both columns of a word.
template <class In>
__device__ float2 widen(std::uint32_t word) {
  if constexpr (In::kDType == DType::kBFloat16) {  // two instructions; __bfloat1622float2() takes three
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  } else {
    typename In::Pair pair;
    std::memcpy(&pair, &word, 4);
    return In::decode(pair);
  }
}

// Of the columns of 2, 4 or 8 lanes. NaN is no maximum. Shuffles beyond the group are not skipped but ignored: this
// takes no branch.
template <class In>
__device__ float absmax_of(const Unit<In, 8> (&x)[2], int lanes_log2) {
  using Pair = typename In::Pair;
  const auto pair_of = [](std::uint32_t word) {
    Pair pair;
    std::memcpy(&pair, &word, 4);
    return pair;
  };
  Pair largest = pair_of(0);
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) largest = __hmax2(largest, __habs2(pair_of(x[i / 4].chunk.words[i % 4])));
  CUTE_UNROLL
  for (int i = 0; i < 3; ++i) {
    std::uint32_t word;
    std::memcpy(&word, &largest, 4);
    const Pair other = pair_of(__shfl_xor_sync(kAllLanes, word, 1 << i));
    if (i == 0 || i < lanes_log2) largest = __hmax2(largest, other);
  }
  const float2 both = In::decode(largest);
  return fmaxf(both.x, both.y);
}

}  // namespace cutlass_kernels
