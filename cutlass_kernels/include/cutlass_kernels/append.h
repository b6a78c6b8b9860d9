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
CK_API Status get_batch_indices_positions(const BatchIndicesPositionsParams& params, cudaStream_t stream);

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
  const std::int32_t* kv_indptr = nullptr;      ///< [batch_size + 1], device, entries of pages.indices
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

/// Token i goes to entry slots[i] % page_size of page slots[i] / page_size. Tokens of a negative slot, or of one that
/// the cache does not have, are skipped. What is stored is the value over its scale, rounded to nearest in the type of
/// the cache; in 8 bits, what lies beyond the largest finite number becomes that number, and NaN stays NaN.
struct AppendBySlotParams {
  DType dtype = DType::kBFloat16;        ///< of k and v: kFloat16 or kBFloat16
  DType cache_dtype = DType::kBFloat16;  ///< that of k and v, kFloat8E4M3 or kFloat8E5M2
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
  std::int64_t num_tokens = kNotSet;
  const void* slots = nullptr;  ///< [num_tokens], device
  bool slots_are_64_bit = true;
  // [num_tokens, num_kv_heads, head_dim], and the cache as in PageTable. Any strides and addresses of whole elements:
  // slower where 16 bytes do not divide those of k and v, and 8 elements those of the cache.
  ConstTensorView k;
  ConstTensorView v;
  TensorView k_cache;
  TensorView v_cache;
  std::int32_t page_size = 0;
  std::int64_t num_pages = kNotSet;
  std::int64_t k_stride_page = 0;
  std::int64_t v_stride_page = 0;
  // Factors that dequantize: k_scale * k_scales.data[head * k_scales.stride], of which either may be left at 1.
  float k_scale = 1.0f;
  float v_scale = 1.0f;
  DeviceScale k_scales;  ///< by KV head
  DeviceScale v_scales;
};

/// See append_paged_kv_cache().
CK_API Status append_paged_kv_cache_by_slot(const AppendBySlotParams& params, cudaStream_t stream);

/// Tokens of latent attention go to slots of a quantized latent cache, as above. A group's scale is its largest absolute
/// value / 448, in fp32, and at least the least normal number; or that rounded up to a power of two, of a value of at
/// least 1e-4. Numbers are divided by it in fp32 and rounded to nearest. NaN stays NaN and counts for no scale; a group
/// with an infinity is NaN when it is read.
struct AppendQuantizedParams {
  DType dtype = DType::kBFloat16;         ///< of the tokens: kFloat16 or kBFloat16
  DType cache_dtype = DType::kLatentV32;  ///< how the cache stores a token
  bool power_of_two_scales = false;       ///< where scales are fp32; others always are
  std::int64_t num_tokens = kNotSet;
  const void* slots = nullptr;  ///< [num_tokens], device
  bool slots_are_64_bit = true;
  // [num_tokens, columns], rows of consecutive elements: the first columns of a token, and the others. The columns of
  // both are multiples of 16, and those of cache_dtype together; those of the position, if it has them apart, may be
  // missing, and are then zeros. Addresses and strides are multiples of 16 bytes.
  const void* first = nullptr;
  const void* others = nullptr;
  std::int64_t first_stride = 0;  ///< elements
  std::int64_t others_stride = 0;
  std::int32_t first_columns = 0;
  std::int32_t others_columns = 0;
  // Multiples of 16 bytes.
  void* cache = nullptr;
  std::int64_t stride_page = 0;   ///< bytes
  std::int64_t stride_token = 0;  ///< bytes; by page, those of a token
  std::int32_t page_size = 0;
  std::int64_t num_pages = kNotSet;
};

/// See append_paged_kv_cache().
CK_API Status append_quantized_by_slot(const AppendQuantizedParams& params, cudaStream_t stream);

}  // namespace cutlass_kernels
