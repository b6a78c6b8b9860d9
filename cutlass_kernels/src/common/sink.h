// Attention sinks: logits of a head that belong to no key, and so to no value.
#pragma once

#include <cute/config.hpp>

#include <cmath>

#include "common/numeric.h"

namespace cutlass_kernels {

// Adds a sink, in natural-log units, to the denominator `sum` of a row, which is relative to 2^m. Returns the factor of what has
// been summed so far.
CUTE_DEVICE float add_sink(float natural, float& m, float& sum) {
  const float sink = natural * kLog2e;
  const float top = fmaxf(m, sink);
  if (!(top > -INFINITY)) return 1.0f;
  const float weight = exp2_approx(m - top);
  sum = sum * weight + exp2_approx(sink - top);
  m = top;
  return weight;
}

}  // namespace cutlass_kernels
