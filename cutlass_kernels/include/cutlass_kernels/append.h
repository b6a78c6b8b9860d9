// New keys and values of a ragged batch, written into the pages of their requests; and where each of them belongs.
#pragma once

#include <cstdint>

#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"
#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

struct BatchIndicesPositionsParams {
  std::int32_t batch_size = kNotSet;
  std::int64_t num_tokens = kNotSet;            ///< entries of the results
  const std::int32_t* append_indptr = nullptr;  ///< [batch_size + 1], device: the new tokens
  const std::int32_t* seq_lens = nullptr;       ///< [batch_size], device: with the new tokens
  std::int32_t* batch_indices = nullptr;        ///< [num_tokens], device
  std::int32_t* positions = nullptr;            ///< [num_tokens], device
};

/// Writes, for every new token, its request and where it stands there: the i-th of n new tokens at seq_len - n + i.
/// Entries outside of all requests become -1. One kernel on `stream`; see append_paged_kv_cache().
CK_API Status get_batch_indices_positions(const BatchIndicesPositionsParams& params,
                                          cudaStream_t stream);

/// Token i goes to entry positions[i] % page_size of page positions[i] / page_size of request batch_indices[i]. Skipped
/// are tokens of a negative request or position, or of a request that does not exist; places outside of the pages of
/// their request; page numbers that the cache does not have. So whatever the index tensors hold, no write leaves the
/// cache.
struct AppendParams {
  DType dtype = DType::kBFloat16;  ///< of k, v and the cache, which are copied bit by bit
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
  std::int32_t batch_size = kNotSet;
  std::int64_t num_tokens = kNotSet;
  const std::int32_t* batch_indices = nullptr;  ///< [num_tokens], device
  const std::int32_t* positions = nullptr;      ///< [num_tokens], device
  const std::int32_t* kv_indptr = nullptr;  ///< [batch_size + 1], device, entries of pages.indices
  // [num_tokens, num_kv_heads, head_dim], and the cache as in PageTable. Any strides and addresses: slower where 16
  // bytes do not divide all of them.
  ConstTensorView k;
  ConstTensorView v;
  TensorView k_cache;
  TensorView v_cache;
  PageTable pages;  ///< without last_page_len, and v_indices
};

/// One kernel on `stream`, for the current device. Nothing is allocated, nothing synchronises; it can be captured into
/// a CUDA graph.
CK_API Status append_paged_kv_cache(const AppendParams& params, cudaStream_t stream);

}  // namespace cutlass_kernels
