// Whether a kernel fits a request, one property at a time: the registry chooses by them, reasons.cpp explains with
// them.
#pragma once

#include <cstdint>
#include <string>

#include "common/element_bytes.h"
#include "common/mask.h"
#include "cutlass_kernels/attention.h"

namespace cutlass_kernels {

inline std::uint32_t needed_features(const AttentionParams& params) {
  std::uint32_t bits = kFeatureIntervalMask;
  bits |= params.pages.page_size > 0 ? kFeaturePagedKv : kFeatureRaggedKv;
  if (params.logits_soft_cap > 0.0f) bits |= kFeatureSoftCap;
  if (params.sinks != nullptr) bits |= kFeatureSinks;
  if (params.mask.words != nullptr) bits |= kFeatureBitMask;
  if (needs_general_mask(params)) bits |= kFeatureGeneralMask;
  if (params.alibi.slopes != nullptr) bits |= kFeatureAlibi;
  if (params.logits_scale.data != nullptr || params.keys_scale.data != nullptr || params.output_scale.data != nullptr) {
    bits |= kFeatureDeviceScales;
  }
  if (params.stats != nullptr) bits |= kFeatureStats;
  return bits;
}

inline bool types_fit(const KernelInfo& info, const AttentionParams& params) {
  return info.q_dtype == params.q_dtype && info.kv_dtype == params.kv_dtype;
}

/// Kernels write the type of the queries, but no e5m2; those of fp8 also either type of 16 bits.
inline bool writes(DType q_dtype, DType o_dtype) {
  if (size_of(q_dtype) == 1 && size_of(o_dtype) == 2) return true;
  return o_dtype == q_dtype && o_dtype != DType::kFloat8E5M2;
}

inline bool head_dims_fit(const KernelInfo& info, const AttentionParams& params) {
  return params.head_dim_qk <= info.head_dim_qk && params.head_dim_vo <= info.head_dim_vo;
}

/// Whether the last columns of q or of k have a tensor of their own.
inline bool has_rope(const AttentionParams& params) {
  return params.q_rope.data != nullptr || params.k_rope.data != nullptr;
}

/// What is for latent kernels alone (KernelEntry::reads_slots), as the caller has set it; empty if nothing is.
inline std::string needs_latent_kernel(const AttentionParams& params) {
  if (params.pages.slots_per_page > 0) return "slots_per_page=" + std::to_string(params.pages.slots_per_page);
  if (params.max_logits != nullptr) return "max_logits";
  return params.flash_mla_lse && params.lse != nullptr ? "flash_mla_lse" : "";
}

inline bool device_fits(const KernelInfo& info, int compute_capability) {
  return compute_capability >= info.min_compute_capability &&
         (info.max_compute_capability == 0 || compute_capability <= info.max_compute_capability);
}

}  // namespace cutlass_kernels
