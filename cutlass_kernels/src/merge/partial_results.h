// Partial results: what a KV split leaves of a row of a head, in fp32.
//
//   O = sum_j 2^(x_j - m) V_j    sum = sum_j 2^(x_j - m)    x_j: logits of its keys, in log2 units
//
// m is the number that the exponentials were taken with: the maximum, or one close to it (common/softmax.h). So nothing
// is lost where splits are put together, at logits of any size. An LSE in place of (m, sum) would be rounded: at 2e5 to
// multiples of 2^-5, which makes weights wrong by up to 1 %. A split without keys has m = -inf, sum = 0 and O = 0; one
// with a NaN a sum of NaN.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "plan/launch_params.h"

namespace cutlass_kernels {

// The results of a tile, of `rows` rows of num_qo_heads heads in num_splits splits, begin at row `first_row`. Those of
// one row and head lie one after the other, so that what combines them reads few pages of memory.
struct TilePartials {
  int first_row;
  int num_splits;

  CUTE_DEVICE std::int64_t at(const LaunchParams& p, int row, int head, int split) const {
    return (std::int64_t(first_row) + row * num_splits) * p.num_qo_heads + head * num_splits + split;
  }
};

CUTE_DEVICE float* partial_o(const LaunchParams& p, std::int64_t at) { return p.plan.partial_o + at * p.head_dim_vo; }
CUTE_DEVICE float2* partial_max_sum(const LaunchParams& p, std::int64_t at) {
  return reinterpret_cast<float2*>(p.plan.partial_max_sum) + at;
}

}  // namespace cutlass_kernels
