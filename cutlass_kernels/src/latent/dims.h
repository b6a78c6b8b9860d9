// Latent attention: the sizes of its keys, and the problems that all of its kernels refuse.
#pragma once

#include <string>

#include "cutlass_kernels/params.h"

namespace cutlass_kernels::mla {

// The absorbed form of DeepSeek-V2 (arXiv 2405.04434, 2.1): every head reads the same key, a compressed vector of
// kLatentDim columns followed by one of kRopeDim that carries the position, and the same value, the compressed vector.
constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;

// Empty if the problem is supported. Keys by slots may have no columns of the position, or values that have them, too
// (DeepSeek V4).
inline std::string common_refusal(const AttentionParams& p) {
  const bool narrow = p.pages.slots_per_page > 0 && p.head_dim_qk == kLatentDim && p.kv_dtype != DType::kLatentV32;
  if ((!narrow && p.head_dim_qk != kLatentDim + kRopeDim) || p.head_dim_vo != kLatentDim) {
    return "head_dim_qk=" + std::to_string(p.head_dim_qk) + " and head_dim_vo=" + std::to_string(p.head_dim_vo) +
           " are not supported: latent attention has 576 and 512, of keys by slots also 512 twice, values being "
           "columns of the keys.";
  }
  if (p.num_kv_heads != 1) {
    return "num_kv_heads=" + std::to_string(p.num_kv_heads) + ", but of latent keys all heads share one: make it 1.";
  }
  if (p.v.data != p.k.data || p.v.stride_token != p.k.stride_token || p.pages.v_stride_page != p.pages.k_stride_page ||
      p.pages.v_indices != nullptr || p.pages.v_offset != 0) {
    return "Values of 512 columns beside latent keys must be the first columns of the keys, in the same memory: pass "
           "v = k[..., :512].";
  }
  if (p.mask.words != nullptr) {
    return "A custom mask is not computed with latent keys: use causal, or a window.";
  }
  return "";
}

}  // namespace cutlass_kernels::mla
