// Rotary position embeddings of queries and keys, with cosines and sines from a table; and, in the same kernel, writing
// keys and values to slots of a paged or of a quantized latent cache.
#pragma once

#include <cstdint>

#include "cutlass_kernels/append.h"
#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"
#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

/// The first `rotary_dim` elements of each head are pairs (a, b), which become (a cos - b sin, b cos + a sin). Pair i
/// is (x[i], x[i + rotary_dim / 2]), or, where `interleaved`, (x[2 i], x[2 i + 1]). Row p of `cos_sin` has the cosines
/// of position p, one per pair, then the sines. A token whose position the table does not have is left alone.
struct RopeParams {
  DType dtype = DType::kBFloat16;  ///< of q and k: kFloat16 or kBFloat16
  std::int32_t num_qo_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t rotary_dim = 0;  ///< even, at most head_dim
  bool interleaved = false;
  std::int64_t num_tokens = kNotSet;
  const void* positions = nullptr;  ///< [num_tokens], device
  bool positions_are_64_bit = true;
  const void* cos_sin = nullptr;          ///< [num_positions, rotary_dim], device
  DType cos_sin_dtype = DType::kFloat32;  ///< kFloat32, or that of q and k
  std::int64_t stride_position = 0;       ///< of cos_sin, in elements
  std::int64_t num_positions = kNotSet;
  // [num_tokens, heads, head_dim]. Results may take the place of what they come from. Any strides and addresses of
  // whole elements: slower where 16 bytes do not divide them, or 16 head_dim or rotary_dim.
  ConstTensorView q;
  TensorView q_out;
  ConstTensorView k;
  TensorView k_out;  ///< null: rotated keys are not written but to the cache
};

/// One kernel on `stream`, for the current device. Nothing is allocated, nothing synchronises; it can be captured into
/// a CUDA graph.
CK_API Status apply_rope(const RopeParams& params, cudaStream_t stream);

/// The same kernel also writes the rotated keys, and append.v, to their slots: the same bits as apply_rope() and then
/// append_paged_kv_cache_by_slot(). Of `append`, k and what both structs have is not read: dtype, num_kv_heads,
/// head_dim_qk, num_tokens. A token whose position the table does not have is not appended.
CK_API Status apply_rope_and_append_by_slot(const RopeParams& params, const AppendBySlotParams& append,
                                            cudaStream_t stream);

/// The same for a quantized latent cache: one kernel rotates queries, and writes tokens with their last 64 columns
/// rotated, those that have them apart (kLatentV32, kLatentV4) and those that quantize them (kLatentV41ByPage and
/// ByToken). The same bits as apply_rope() and then append_quantized_by_slot(). Of `rope`, head_dim and rotary_dim are
/// 64, num_kv_heads and k are not read, and k_out is where rotated columns are written to, too, or null: they may take
/// the place of those of the tokens. Of `append`, dtype and num_tokens are not read. A token whose position the table
/// does not have is not appended. Addresses are multiples of 16 bytes, strides of 8 elements.
CK_API Status apply_rope_and_append_quantized_by_slot(const RopeParams& rope, const AppendQuantizedParams& append,
                                                      cudaStream_t stream);

}  // namespace cutlass_kernels
