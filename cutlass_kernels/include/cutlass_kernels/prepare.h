// Copies of queries, keys and values in the form that attention() computes from: 16-bit, and rotated where a rotary
// embedding encodes positions (Su et al., "RoFormer", 2021). One pass over memory, before attention(), over
//
//   q and k    where there is a rotary embedding
//   k and v    of 8 bits below 16-bit queries: converted to their type, exactly
//   q, k, v    of 8 bits: converted to the type of the output, exactly
//
// Elements d and d + head_dim_qk / 2 are a pair and turn by position * rope_theta^(-2 d / head_dim_qk) / rope_scale.
// Row i of a request stands at position kv_len - qo_len + i, which may be negative, its key j at j. Products are fp32,
// the result is rounded once, to the type of the copies. Angles are exact to 2^-25 of a turn at every position.
//
// attention() then takes the copies instead: contiguous [tokens, heads, head_dim], in pages [pages.num_indices,
// page_size, num_kv_heads, head_dim]. The copy of a paged cache has a page per entry of the page table, so that a page
// shared by requests can stand at a position of its own in each. With it go
//
//   pages.indices = tables, pages.v_indices = tables + num_indices, pages.num_pages = max(num_indices, num_pages)
//
// Keys that no row sees are neither read nor written: those of no request, of a request without rows, left of every
// window, behind the end of a last page, in a page that the cache does not have (whose entry in `tables` is -1).
#pragma once

#include <cstdint>

#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"
#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

struct PrepareParams {
  // Requests and tensors, as in AttentionParams. Addresses and strides of 8-bit tensors are multiples of 8 bytes. A
  // view is read only where it is copied.
  DType q_dtype = DType::kBFloat16;
  DType kv_dtype = DType::kBFloat16;
  std::int32_t num_qo_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
  std::int32_t batch_size = 1;
  const std::int32_t* qo_indptr = nullptr;  ///< null only for a single request
  const std::int32_t* kv_indptr = nullptr;
  std::int64_t total_q = kNotSet;
  std::int64_t total_kv = kNotSet;  ///< not used where there are pages
  PageTable pages;
  ConstTensorView q;
  ConstTensorView k;
  ConstTensorView v;
  std::int32_t window_left = -1;  ///< of every later attention() with these copies; negative: no window

  // The rotary embedding of q and k.
  bool rotate = false;  ///< false: q and k are only converted
  double rope_scale = 1.0;
  double rope_theta = 1e4;

  // Copies, 16-byte aligned, on the device. Null: none is made.
  DType dtype = DType::kBFloat16;  ///< of the copies, and of whatever has 16 bits: kFloat16 or kBFloat16
  void* q_copy = nullptr;
  void* k_copy = nullptr;
  void* v_copy = nullptr;
  /// [2, pages.num_indices]: the page tables of k_copy, and of v_copy or else of v. Where there are pages, k_copy and
  /// this are needed.
  std::int32_t* tables = nullptr;
};

/// Makes the copies on `stream`. Allocates nothing, does not synchronise; can be captured into a CUDA graph.
CK_API Status prepare(const PrepareParams& params, cudaStream_t stream);

/// The byte that marks rows of a float16 output as not written: a NaN of two such bytes is none that attention()
/// writes.
constexpr int kUnwrittenByte = 0xfd;

/// An output of e4m3 from one of float16, for queries of e4m3 where a kernel reads and writes 16 bits.
struct RoundParams {
  std::int64_t rows = 0;
  std::int32_t num_heads = 0;
  std::int32_t head_dim = 0;  ///< a multiple of 8
  ConstTensorView from;       ///< float16, filled with kUnwrittenByte before attention() wrote to it
  TensorView to;              ///< kFloat8E4M3, at any address and with any strides
};

/// Rounds to nearest, on `stream`: beyond 448, infinities included, to 448; NaN stays NaN. Rows that attention() has
/// not written, those beyond the last request, are not written here either. Can be captured into a CUDA graph.
CK_API Status round_output(const RoundParams& params, cudaStream_t stream);

}  // namespace cutlass_kernels
