// The end of a row: what its sums make of the output, once all keys are in them.
//
// Sums are relative to 2^m (common/softmax.h). A sink, the logit of a head that belongs to no key and so to no value,
// is a part of the denominator alone.
#pragma once

#include <cute/config.hpp>

#include <cmath>

#include "common/numeric.h"

namespace cutlass_kernels {

// Whether a row has seen no key. A NaN in q leaves m at -inf, too: the sum is then NaN.
CUTE_DEVICE bool has_no_key(float m, float sum) { return !(m > -INFINITY) && sum == 0.0f; }

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
// (A pointer to the head's sink, or a returned weight, makes ptxas order the main loop of fa2's large tiles anew.)
template <class Rescale>
CUTE_DEVICE FinishedRow finish_row(float m, float sum, const float* sinks, int head,
                                   Rescale&& rescale) {
  if (sinks != nullptr) {
    const float top = fmaxf(m, sinks[head] * kLog2e);
    if (top > -INFINITY) {
      const float weight = exp2_approx(m - top);
      // The product is not rounded before the difference: at 2e5 that would be an error of 1 %.
      sum = sum * weight + exp2_approx(fmaf(sinks[head], kLog2e, -top));
      rescale(weight);
      m = top;
    }
  }
  // has_no_key(), but a call makes fa2 spill 76 bytes at hd128 with a logits transform.
  const bool is_empty = !(m > -INFINITY) && sum == 0.0f;
  return {is_empty, m, sum};
}

}  // namespace cutlass_kernels
