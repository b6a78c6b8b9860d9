// Online softmax over the accumulator fragments of m16n8 mma.sync tiles.
//
// Thread t of a warp holds, of each 16 x 8 tile, elements (t / 4, 2 (t % 4) + {0, 1}) and the same eight
// rows below. A row of kRows is thus spread over four threads; each keeps a partial sum of its own and
// the quad is reduced once, at the end.
//
// Rescaling is lazy (FlashAttention-4's observation): the reference m of 2^(x - m) need not be the
// maximum, only close to it. It is raised when some x exceeds m + 8; until then p <= 2^8, which loses nothing
// in a floating-point P. So the common tile costs one vote instead of shuffles and a pass over O. With a
// headroom of 0 in place of 8, m is the maximum.
#pragma once

#include <cute/config.hpp>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/numeric.h"

namespace cutlass_kernels {

// s = -inf unless position < extent. Spelled out, because the compiler collects the predicates of a whole tile
// first and packs them into registers, four instructions per element instead of two.
CUTE_DEVICE void mask_unless_below(float& s, std::uint32_t position, std::uint32_t extent) {
  asm volatile("{\n.reg .pred p;\nsetp.ge.u32 p, %1, %2;\nselp.f32 %0, 0fFF800000, %0, p;\n}"
               : "+f"(s)
               : "r"(position), "r"(extent));
}

// s = -inf unless limit > position, a constant.
CUTE_DEVICE void mask_unless_above(float& s, int limit, int position) {
  asm volatile("{\n.reg .pred p;\nsetp.le.s32 p, %1, %2;\nselp.f32 %0, 0fFF800000, %0, p;\n}"
               : "+f"(s)
               : "r"(limit), "r"(position));
}

// s = -inf unless bit `bit`, a constant, of `bits` is set.
CUTE_DEVICE void mask_unless_bit(float& s, std::uint32_t bits, int bit) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 t;\nand.b32 t, %1, %2;\nsetp.eq.u32 p, t, 0;\n"
      "selp.f32 %0, 0fFF800000, %0, p;\n}"
      : "+f"(s)
      : "r"(bits), "r"(1u << bit));
}

template <int kRows, bool kRowScales = false>
struct OnlineSoftmax {
  static constexpr float kHeadroom = 8.0f;  // log2: P stays below 2^8
  static constexpr float kNoKey = 1e38f;    // minus_m of a row that has seen no key

  std::conditional_t<kRowScales, float[kRows], float> scale;  // log2 units per unit of s, > 0; or (row)
  float minus_m[kRows];                                       // (row): -m in log2 units
  float partial_sum[kRows];                                   // (row): of this thread's columns

  CUTE_DEVICE explicit OnlineSoftmax(float scale_log2) {
    if constexpr (!kRowScales) scale = scale_log2;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kRowScales) scale[r] = scale_log2;
      minus_m[r] = kNoKey;
      partial_sum[r] = 0.0f;
    }
  }

  CUTE_DEVICE float scale_of(int r) const {
    if constexpr (kRowScales) {
      return scale[r];
    } else {
      return scale;
    }
  }

  // Whether a thread's maximum of its part of some row leaves too little headroom: then m must be raised. A row
  // without keys so far exceeds its headroom with any finite s, and with -inf does not.
  CUTE_DEVICE bool exceeds(const float (&thread_max)[kRows], float headroom = kHeadroom) const {
    bool any = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) any |= fmaf(thread_max[r], scale_of(r), minus_m[r]) > headroom;
    return any;
  }

  // Whether 2^(x - m) is below 2^log2_threshold for the largest x of a thread's part of a row. In a row without keys so
  // far it is not, unless these are hidden, too.
  CUTE_DEVICE bool is_below(float log2_threshold, int r, float thread_max) const {
    return fmaf(thread_max, scale_of(r), minus_m[r]) < log2_threshold;
  }

  // From a thread's part of each row to the rows' maxima, known to all four threads of a quad.
  CUTE_DEVICE static void reduce_max(float (&row_max)[kRows]) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffffu, row_max[r], 1));
      row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffffu, row_max[r], 2));
    }
  }

  // Raises m where needed and calls rescale(row, factor) on every row. Rows within their headroom keep their m, so that
  // a row's result depends on no other row. The new m is kLift below the maximum: a P of few exponents spends them
  // better if its largest numbers are 2^kLift.
  template <int kLift = 0, class Rescale>
  CUTE_DEVICE void raise(const float (&row_max)[kRows], Rescale&& rescale, float headroom = kHeadroom) {
    static_assert(kLift < kHeadroom);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const bool raised = fmaf(row_max[r], scale_of(r), minus_m[r]) > headroom;
      float minus_m_new = raised ? -row_max[r] * scale_of(r) : minus_m[r];
      if (kLift != 0 && raised) minus_m_new += float(kLift);
      const float factor = exp2_approx(minus_m_new - minus_m[r]);  // 0 at the row's first key
      minus_m[r] = minus_m_new;
      partial_sum[r] *= factor;
      rescale(r, factor);
    }
  }

  CUTE_DEVICE float exponential(int r, float s) const { return exp2_approx(fmaf(s, scale_of(r), minus_m[r])); }

  // The row's denominator as (m, sum) in log2 units, m = -inf if it saw no key. Reduces over the quad.
  CUTE_DEVICE void finish(int r, float& m, float& sum) const {
    sum = partial_sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    m = minus_m[r] < kNoKey ? -minus_m[r] : -INFINITY;
  }
};

// ---- The end of a row: what its sums make of the output, once all keys are in them.
//
// Sums are relative to 2^m. A sink, the logit of a head that belongs to no key and so to no value,
// is a part of the denominator alone.

// Whether a row has seen no key. A NaN in q leaves m at -inf, too: the sum is then NaN.
CUTE_DEVICE bool has_no_key(float m, float sum) { return !(m > -INFINITY) && sum == 0.0f; }

// LaunchParams::flash_mla_lse in base 2, before sinks.
CUTE_DEVICE float flash_mla_lse(float m, float sum) { return has_no_key(m, sum) ? INFINITY : m + log2f(sum); }

struct FinishedRow {
  bool is_empty;
  float m;
  float sum;  // with the sink

  // What O is multiplied by, where the output is `factor` times the attention.
  CUTE_DEVICE float scale(float factor) const { return is_empty ? 0.0f : factor / sum; }
  // The same in two instructions, off by two units in the last place; not for a row without keys.
  CUTE_DEVICE float fast_scale(float factor) const { return __fdividef(factor, sum); }
  // In base 2.
  CUTE_DEVICE float lse() const { return is_empty ? -INFINITY : m + log2f(sum); }
};

// Adds the sink of `head` to a row's denominator. Where there is one, rescale(weight) is called: O, or the factor that
// stands for it, is to be multiplied by `weight`. `sinks`, in natural-log units, may be null.
//
// kInfinite: a sink of +inf leaves a row an output of 0. Without, such a row is NaN.
//
// (A pointer to the head's sink, or a returned weight, makes ptxas order the main loop of fa2's large tiles anew.)
template <bool kInfinite = false, class Rescale>
CUTE_DEVICE FinishedRow finish_row(float m, float sum, const float* sinks, int head, Rescale&& rescale) {
  if (sinks != nullptr) {
    const float top = fmaxf(m, sinks[head] * kLog2e);
    if (top > -INFINITY) {
      const float weight = exp2_approx(m - top);
      // The product is not rounded before the difference: at 2e5 that would be an error of 1 %.
      const float of_sink = exp2_approx(fmaf(sinks[head], kLog2e, -top));
      sum = sum * weight + (kInfinite && top == INFINITY ? 1.0f : of_sink);
      rescale(weight);
      m = top;
    }
  }
  // has_no_key(), but a call makes fa2 spill 76 bytes at hd128 with a logits transform.
  const bool is_empty = !(m > -INFINITY) && sum == 0.0f;
  return {is_empty, m, sum};
}

}  // namespace cutlass_kernels
