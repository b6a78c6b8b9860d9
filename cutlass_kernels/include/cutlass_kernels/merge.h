// Merging of attention states. A state is what attention over some of the keys leaves: its output v and its base-2 LSE
// s. States over disjoint keys merge into the state over all of them (Juravsky et al., "Hydragen", 2024):
//
//   v = sum_i 2^(s_i - m) v_i / sum_i 2^(s_i - m),   s = m + log2 sum_i 2^(s_i - m),   m = max_i s_i
//
// A state with s = -inf contributes nothing, whatever its v holds; of such states alone, or of none, v is 0 and s is
// -inf. Where one state alone has another s, it passes through unchanged. A NaN among the s_i makes v and s NaN.
// Arithmetic is fp32.
#pragma once

#include <cstdint>

#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"
#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

/// fp32 LSEs in device memory, [tokens, heads] with strides in elements.
struct ConstLseView {
  const float* data = nullptr;
  std::int64_t stride_token = 0;
  std::int64_t stride_head = 0;
};

/// The same, to be written.
struct LseView {
  float* data = nullptr;
  std::int64_t stride_token = 0;
  std::int64_t stride_head = 0;
};

/// What both kinds of merging need.
struct MergeSizes {
  DType dtype = DType::kBFloat16;  ///< of all v: kFloat16, kBFloat16 or kFloat32
  std::int64_t num_tokens = 0;
  std::int32_t num_heads = 0;
  std::int32_t head_dim = 0;  ///< a multiple of 8, at most 2048 (1024 of kFloat32)
};

/// Any number of states, one tensor: v is [num_tokens, num_states, num_heads, head_dim], s the same without head_dim.
/// The views are of state 0; state i lies i times these strides (in elements) behind it. Results may not overlap
/// states.
struct MergeStatesParams {
  MergeSizes sizes;
  std::int64_t num_states = 0;
  ConstTensorView v;
  std::int64_t v_stride_state = 0;
  ConstLseView s;
  std::int64_t s_stride_state = 0;
  TensorView merged_v;
  LseView merged_s;
};

/// Two states. merged_v and merged_s may be v_a and s_a, in place.
struct MergeStateParams {
  MergeSizes sizes;
  ConstTensorView v_a;
  ConstLseView s_a;
  ConstTensorView v_b;
  ConstLseView s_b;
  TensorView merged_v;
  LseView merged_s;
  /// [num_tokens] integers of mask_bytes (1, 2, 4 or 8) each, device; null: none. Nothing is written for tokens whose
  /// element is 0.
  const void* mask = nullptr;
  std::int32_t mask_bytes = 1;
};

// One kernel on `stream`, for the current device. Nothing is allocated, nothing synchronises; both can be captured into
// a CUDA graph.
CK_API Status merge_states(const MergeStatesParams& params, cudaStream_t stream);
CK_API Status merge_state(const MergeStateParams& params, cudaStream_t stream);

}  // namespace cutlass_kernels
