// The few arithmetic instructions that the kernels name directly.
#pragma once

#include <cute/config.hpp>

namespace cutlass_kernels {

constexpr float kLog2e = 1.4426950408889634f;

// 2^x, relative error 2^-22, subnormal results flushed to 0.
CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same, free to be moved by the compiler: where products run in the background it should spread exponentials among
// the additions and conversions that follow them.
CUTE_DEVICE float exp2_unordered(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x) = 1 - 2 / (1 + 2^(2 x log2 e)), near 0 by its series, as the difference would keep an absolute error of
// 6e-8, which a soft cap of 10^5 turns into 0.01 in the logits. The tanh.approx instruction is off by 5e-4: 0.02 in
// the logits at a cap of 50. `x2` is 2 x log2 e.
CUTE_DEVICE float tanh_from_log2(float x2) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0f + exp2_approx(x2)));
  const float x = x2 * (0.5f / kLog2e);
  const float series = fmaf(-x * x, x * (1.0f / 3.0f), x);  // relative error 1e-7 at 0.03
  return fabsf(x) < 0.03f ? series : fmaf(-2.0f, reciprocal, 1.0f);
}

// tanh(x) of |x| <= 1, relative error 6e-7: a minimax polynomial in x^2, seven instructions of which none goes to the
// unit that the exponentials of the softmax keep busy.
CUTE_DEVICE float tanh_of_small(float x) {
  const float z = x * x;
  float p = fmaf(z, -0.00306704f, 0.01674305f);
  p = fmaf(p, z, -0.05160561f);
  p = fmaf(p, z, 0.13281431f);
  p = fmaf(p, z, -0.33329042f);
  p = fmaf(p, z, 0.99999941f);
  return x * p;
}

// Replaces `count` values by their tanh. By all lanes of a warp: logits beyond the cap are rare, and the way is one
// for all. Whichever it is, a value's tanh depends on nothing else: there are values of keys and rows that do not
// count, from what happens to be in memory.
CUTE_DEVICE void replace_by_tanh(float* x, int count) {
  float largest = 0.0f;
  CUTE_UNROLL
  for (int i = 0; i < count; ++i) largest = fmaxf(largest, fabsf(x[i]));
  if (__any_sync(0xffffffffu, largest > 1.0f)) {
    __syncwarp();  // keeps this a branch
    CUTE_UNROLL
    for (int i = 0; i < count; ++i) {
      asm volatile("" : "+f"(x[i]));  // keeps what both ways have in common from being computed before the branch
      if (fabsf(x[i]) <= 1.0f) x[i] = tanh_of_small(x[i]);
    }
    CUTE_UNROLL
    for (int i = 0; i < count; ++i) {  // tanh is below 1: what is not was left by the first pass
      const float of_large = tanh_from_log2(x[i] * (2.0f * kLog2e));
      if (fabsf(x[i]) > 1.0f) x[i] = of_large;
    }
  } else {
    CUTE_UNROLL
    for (int i = 0; i < count; ++i) x[i] = tanh_of_small(x[i]);
  }
}

}  // namespace cutlass_kernels
