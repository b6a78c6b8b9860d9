// What LaunchParams::stats asks for: of each row the maximum of its logits, and the sum of their exponentials below it.
//
// The softmax knows both, if its reference is the maximum itself: in the general variant it then has no headroom. Keys
// are never split, since what is merged afterwards are not these numbers.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "common/logits.h"
#include "common/numeric.h"
#include "common/softmax.h"
#include "cutlass_kernels/params.h"

namespace cutlass_kernels {

struct RowStats {
  float headroom;  // of the softmax, see OnlineSoftmax
  float unit;      // of a maximum per unit of log2, but for what only the device knows

  static RowStats make(const LaunchParams& params) {
    const double scale = params.logits_soft_cap > 0.0f ? 1.0 : double(params.sm_scale);
    const double unit = 1.0 / (double(kLog2e) * scale * std::sqrt(double(params.head_dim_qk)));
    return {params.stats == nullptr ? OnlineSoftmax<1>::kHeadroom : 0.0f, float(unit)};
  }

  // Of a row of the tensor: (m, sum) of OnlineSoftmax::finish(), before a sink becomes part of them.
  CUTE_DEVICE void store(const LaunchParams& p, std::int64_t row, int head, float m, float sum) const {
    float2 stats{-FLT_MAX, 0.0f};
    if (!has_no_key(m, sum)) {
      const float known = p.logits_soft_cap > 0.0f ? 1.0f : logits_scale_of(p, 0, head);
      stats = {__fdividef(m * unit, known), sum};
    }
    reinterpret_cast<float2*>(p.stats)[row * p.num_qo_heads + head] = stats;
  }
};

}  // namespace cutlass_kernels
