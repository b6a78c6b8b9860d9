// Prefix sums over a warp.
#pragma once

#include <cute/config.hpp>

namespace cutlass_kernels {

// The sum of the values of all lanes up to each, and with it; by all lanes.
template <class T>
CUTE_DEVICE T inclusive_sum(T value) {
  CUTE_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, value, step);
    if (int(threadIdx.x % 32) >= step) value += other;
  }
  return value;
}

}  // namespace cutlass_kernels
