// From q.k to the exponent of 2 in the softmax.
//
// The softmax computes p = 2^(scale * s - m). Without a transform s is q.k and scale = sm_scale * log2 e, folded
// into one FFMA per element. With one, s is replaced before masking, such that scale stays positive (the
// running maximum of s is then the maximum of the exponent) and bounds stay exact:
//   soft cap c:     s = tanh(sm_scale * q.k / c), scale = c * log2 e
//   sm_scale < 0:   s = -q.k,                     scale = -sm_scale * log2 e
//   sm_scale = 0:   s = 0,                        scale = log2 e
//   ALiBi:          s = sm_scale * q.k + bias,    scale = log2 e; with a cap as above, the bias inside or outside
//                   the tanh
#pragma once

#include "common/mask.h"
#include "common/numeric.h"
#include "cutlass_kernels/params.h"

namespace cutlass_kernels {

struct LogitsTransform {
  float multiplier;  // of q.k, before tanh
  bool capped;
  float scale;  // log2 units per unit of s, > 0

  static bool needed(const AttentionParams& params) {
    return params.logits_soft_cap > 0.0f || !(params.sm_scale > 0.0f);
  }

  static CUTE_HOST_DEVICE LogitsTransform make(float sm_scale, float soft_cap) {
    if (soft_cap > 0.0f) return {sm_scale / soft_cap, true, soft_cap * kLog2e};
    if (sm_scale > 0.0f) return {1.0f, false, sm_scale * kLog2e};
    // Not sm_scale * q.k, rounded: of large logits that would lose the differences.
    if (sm_scale < 0.0f) return {-1.0f, false, -sm_scale * kLog2e};
    return {sm_scale, false, kLog2e};
  }
  static LogitsTransform make(const AttentionParams& params) { return make(params.sm_scale, params.logits_soft_cap); }

  CUTE_DEVICE bool changes_logits() const { return capped || multiplier != 1.0f; }

  // Replaces `count` values; one branch for all of them. kFewRegisters: there are none for replace_by_tanh().
  template <bool kFewRegisters = false>
  CUTE_DEVICE void apply(float* s, int count) const {
    if (kFewRegisters && capped) {
      const float to_log2 = multiplier * (2.0f * kLog2e);
      CUTE_UNROLL
      for (int i = 0; i < count; ++i) s[i] = tanh_from_log2(s[i] * to_log2);
      return;
    }
    CUTE_UNROLL
    for (int i = 0; i < count; ++i) s[i] *= multiplier;
    if (capped) replace_by_tanh(s, count);
  }
};

// What a kernel is compiled to do with q.k.
enum class Logits {
  kPlain,
  kTransformed,  // LogitsTransform
  kGeneral,      // GeneralTransform, masks of any form, and RowStats
  kSkipping,     // nothing, but blocks of keys of negligible weight are skipped
};

// The factor of a request and query head.
CUTE_DEVICE float scale_of(const DeviceScale& scale, int batch, int head) {
  if (scale.data == nullptr) return 1.0f;
  const int entry = scale.heads_per_entry > 1 ? head / scale.heads_per_entry : head;
  return __ldg(scale.data + batch * scale.stride_request + entry * scale.stride);
}

// Of logits: both factors.
CUTE_DEVICE float logits_scale_of(const AttentionParams& params, int batch, int head) {
  return scale_of(params.logits_scale, batch, head) * scale_of(params.keys_scale, batch, head);
}

inline bool has_logits_scale(const AttentionParams& params) {
  return params.logits_scale.data != nullptr || params.keys_scale.data != nullptr;
}

struct GeneralTransform {
  float multiplier;   // of q.k, beside device scales; in units of 2 log2 e where capped
  float bias_before;  // of slope * distance, before tanh, in the same units
  float bias_after;   // and after it
  bool capped;
  float scale;  // log2 units per unit of s, > 0

  static bool needed(const AttentionParams& params) {
    return params.alibi.slopes != nullptr || params.mask.words != nullptr || has_logits_scale(params) ||
           params.output_scale.data != nullptr || params.stats != nullptr || needs_general_mask(params);
  }

  // Whether q.k is changed at all: masks and statistics leave it as it is.
  static bool changes(const AttentionParams& params) {
    return params.alibi.slopes != nullptr || has_logits_scale(params) || LogitsTransform::needed(params);
  }

  static GeneralTransform make(const AttentionParams& params) {
    const LogitsTransform plain = LogitsTransform::make(params);
    const float multiplier = plain.multiplier * (plain.capped ? 2.0f * kLog2e : 1.0f);
    if (params.alibi.slopes == nullptr) {
      return {multiplier, 0.0f, 0.0f, plain.capped, plain.scale};
    }
    if (!plain.capped) return {params.sm_scale, 1.0f, 0.0f, false, kLog2e};
    const float cap = params.logits_soft_cap;
    const float before = params.alibi.after_cap ? 0.0f : 2.0f * kLog2e / cap;
    return {multiplier, before, params.alibi.after_cap ? 1.0f / cap : 0.0f, true, plain.scale};
  }

  // Replaces the accumulator fragment of kCount / 2 keys for rows r and r + 8 (s[4 i + {0, 1}] and s[4 i + {2, 3}],
  // keys 8 i + {0, 1}). Of each row: its head's logits_scale and slope, and the distance that s[0] or s[2] is biased
  // by.
  template <int kCount>
  CUTE_DEVICE void apply(float (&s)[kCount], const float (&logits_scale)[2], const float (&slope)[2],
                         const int (&distance)[2]) const {
    if (capped) {
      apply_as<true>(s, logits_scale, slope, distance);
    } else {
      apply_as<false>(s, logits_scale, slope, distance);
    }
  }

  // The same where `soft_capped` is known to be kSoftCap: one branch for all elements.
  template <bool kSoftCap, int kCount>
  CUTE_DEVICE void apply_as(float (&s)[kCount], const float (&logits_scale)[2], const float (&slope)[2],
                            const int (&distance)[2]) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float factor = multiplier * logits_scale[r];
      const float before = slope[r] * bias_before;
      const float after = slope[r] * bias_after;
      const float first = float(distance[r]);
      CUTE_UNROLL
      for (int i = r * 2; i < kCount; i += (i % 2 == 0 ? 1 : 3)) {
        const float x = first + float(i / 4 * 8 + i % 2);
        s[i] = fmaf(s[i], factor, before * x);
        // Not replace_by_tanh(): there are no registers for it.
        if constexpr (kSoftCap) s[i] = fmaf(after, x, tanh_from_log2(s[i]));
      }
    }
  }
};

}  // namespace cutlass_kernels
