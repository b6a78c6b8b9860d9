// From q.k to the exponent of 2 in the softmax.
//
// The softmax computes p = 2^(scale * s - m). Without a transform s is q.k and scale = sm_scale * log2 e, folded
// into one FFMA per element. With one, s is replaced before masking, such that scale stays positive (the
// running maximum of s is then the maximum of the exponent) and bounds stay exact:
//   soft cap c:     s = tanh(sm_scale * q.k / c), scale = c * log2 e
//   sm_scale <= 0:  s = sm_scale * q.k,           scale = log2 e
#pragma once

#include "common/numeric.h"
#include "cutlass_kernels/params.h"

namespace cutlass_kernels {

struct LogitsTransform {
  float multiplier;  // of q.k, before tanh: in units of 2 log2 e where capped
  bool capped;
  float scale;  // log2 units per unit of s, > 0

  static bool needed(const AttentionParams& params) {
    return params.logits_soft_cap > 0.0f || !(params.sm_scale > 0.0f);
  }

  static LogitsTransform make(const AttentionParams& params) {
    if (params.logits_soft_cap > 0.0f) {
      return {2.0f * kLog2e * params.sm_scale / params.logits_soft_cap, true,
              params.logits_soft_cap * kLog2e};
    }
    if (params.sm_scale > 0.0f) return {1.0f, false, params.sm_scale * kLog2e};
    return {params.sm_scale, false, kLog2e};
  }

  // Replaces `count` values; one branch for all of them.
  CUTE_DEVICE void apply(float* s, int count) const {
    if (capped) {
      CUTE_UNROLL
      for (int i = 0; i < count; ++i) s[i] = tanh_from_log2(s[i] * multiplier);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < count; ++i) s[i] *= multiplier;
    }
  }
};

}  // namespace cutlass_kernels
