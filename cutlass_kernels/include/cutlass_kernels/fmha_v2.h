// Fused prefill attention of a batch, described as TensorRT-LLM's FMHAv2 plugins describe it: five layouts of the
// input, lengths and block tables on the device, one fused scale per product.
//
//   O = bmm2_scale * softmax(cap(bmm1_scale * Q K^T) + slope * key) V
//
// A call is one kernel, which reads lengths and block tables on the device and copies nothing. Where requests are so
// short and few that they would leave most of the device idle, it splits their keys, and mostly a second kernel merges
// the results. Under fa2 such requests of more than a few rows, and lengths that differ much from max_q_len, get a list
// of tiles first. Captured into a CUDA graph, a call follows whatever the graph's buffers hold at each replay, within
// the bounds that it was made with (total_q, max_q_len, max_kv_len, max_pages).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"
#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

/// Where queries, keys and values lie. All tensors are contiguous; T query tokens and Tkv key tokens of all requests
/// follow one another.
enum class FmhaV2Layout : std::int32_t {
  kPackedQkv,      ///< qkv [T, 3, num_qo_heads, head_dim]; as many key heads as query heads
  kContiguousQKv,  ///< q [T, num_qo_heads, head_dim], kv [Tkv, 2, num_kv_heads, head_dim]
  kSeparateQKV,    ///< q, k [Tkv, num_kv_heads, head_dim], v [Tkv, num_kv_heads, head_dim_vo]
  kQPagedKvHnd,    ///< q, and kv [num_pages, 2, num_kv_heads, page_size, head_dim], or k and v, see below
  kQPagedKvNhd,    ///< the same with page_size before num_kv_heads
};

/// Row i of a request stands at position p = i + kv_len - q_len.
enum class FmhaV2Mask : std::int32_t {
  kCausal,         ///< keys up to p; window_left > 0 or chunked_attention_size > 0 restrict it, too
  kPadding,        ///< all keys of the request
  kSlidingWindow,  ///< keys from p - window_left to p
  kChunked,        ///< keys from p / chunked_attention_size * chunked_attention_size to p
};

struct FmhaV2Params {
  FmhaV2Layout layout = FmhaV2Layout::kContiguousQKv;
  DType dtype = DType::kFloat16;  ///< of q, k and v: kFloat16, kBFloat16, or on Hopper kFloat8E4M3
  /// That of q; of 8-bit tensors also kFloat16 or kBFloat16. kFloat8E4M3 holds numbers up to 448, which larger ones
  /// become.
  DType o_dtype = DType::kFloat16;
  std::int32_t batch_size = kNotSet;
  std::int32_t num_qo_heads = 0;
  std::int32_t num_kv_heads = 0;  ///< divides num_qo_heads
  std::int32_t head_dim = 0;
  std::int32_t head_dim_vo = 0;     ///< 0: head_dim. Another only with kSeparateQKV
  std::int64_t total_q = kNotSet;   ///< T: rows of q, at least cum_seq_lens_q[batch_size]
  std::int64_t total_kv = kNotSet;  ///< Tkv; not of kPackedQkv, nor of pages

  // Lengths. A request whose offsets make no sense, or lie outside the tensors, is not computed, its output not
  // written.
  std::int32_t max_q_len = 0;                     ///< most rows of a request; those beyond need not be computed
  std::int32_t max_kv_len = 0;                    ///< most keys, at least max_q_len; equal with kPackedQkv
  const std::int32_t* cum_seq_lens_q = nullptr;   ///< [batch_size + 1], device
  const std::int32_t* cum_seq_lens_kv = nullptr;  ///< the same; null with kPackedQkv: those of q

  // Tensors, at addresses that are multiples of 16 bytes; which of them are read, the layout says.
  const void* qkv = nullptr;
  const void* q = nullptr;
  const void* kv = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;   ///< [T, num_qo_heads, head_dim_vo]
  float* lse = nullptr;  ///< optional [T, num_qo_heads], base 2

  // Pages. With one pool `kv`, block_tables is [batch_size, max_pages]: page numbers. With two caches k and v, each
  // [num_pages, ...] of one allocation, it is [batch_size, 2, max_pages]: blocks of keys and of values, both counted
  // from k. Entries that no key refers to are not read; blocks outside the caches count as zeros.
  const std::int32_t* block_tables = nullptr;  ///< device
  std::int32_t max_pages = kNotSet;
  std::int32_t page_size = 0;
  std::int64_t num_pages = kNotSet;

  // Mask.
  FmhaV2Mask mask_mode = FmhaV2Mask::kCausal;
  std::int32_t window_left = -1;            ///< negative: no limit
  std::int32_t chunked_attention_size = 0;  ///< a power of two; 0: none

  // Scales.
  float bmm1_scale = 0.0f;                   ///< 0: 1 / sqrt(head_dim)
  float bmm2_scale = 1.0f;                   ///< multiplies the output
  const float* bmm1_scale_device = nullptr;  ///< optional, device: multiplies bmm1_scale (or its default)
  const float* bmm2_scale_device = nullptr;  ///< optional, device: multiplies bmm2_scale
  float logits_soft_cap_scale = 0.0f;        ///< c: a logit s becomes c tanh(s / c), before ALiBi; <= 0: off
  const float* alibi_slopes = nullptr;       ///< optional [num_qo_heads], device: adds slope * key
  const float* sinks = nullptr;              ///< optional [num_qo_heads], device: denominator += exp(sink)

  /// Optional [T, num_qo_heads, 2], device, 8-byte aligned; not of 8-bit tensors. Of each row the maximum of its logits
  /// over bmm1_scale * sqrt(head_dim), device factor included, or with a soft cap over sqrt(head_dim), and the sum of
  /// exp(logit - maximum), without sinks; -FLT_MAX and 0 where it has no keys.
  float* stats = nullptr;
  /// Permission to skip keys of negligible weight, see AttentionParams::skip_softmax_factor. 0: off.
  float skip_softmax_threshold_scale_factor = 0.0f;
};

/// The workspace starts with kFmhaV2CounterBytes bytes of counters. Zero them once: every call leaves the ones it uses
/// at zero. Where others write to the workspace between calls, as TensorRT's layers do, zero them before each call.
///
/// A counter that was not cleared never leads out of memory. A call restarts it, and its results are right, unless the
/// value happens to look like a count: at most one in 10^6 random values does, and no integer of either sign below
/// 2^20. (A call does not clear them itself, since that would take 2 us.)
constexpr std::size_t kFmhaV2CounterBytes = 16384;

/// Bytes of workspace for calls of these sizes (tensors, offsets and tables may be null as yet): counters, and what
/// split keys and lists need. Calls that overlap in time need one each, others may share one, as large as the largest.
CK_API std::size_t fmha_v2_workspace_size(const FmhaV2Params& params, Backend backend = Backend::kAuto);

/// Enqueues the call on `stream`. `workspace` is device memory, 16-byte aligned. With kFmhaV2CounterBytes only, or
/// null, no keys are split; and without the counters blocks cannot share out the work as they become free, which takes
/// longer where lengths differ. `backend` as of attention().
CK_API Status fmha_v2(const FmhaV2Params& params, void* workspace, std::size_t workspace_bytes, cudaStream_t stream,
                      Backend backend = Backend::kAuto);

/// Writes the usual ALiBi slopes of `num_heads` heads (Press et al., "Train Short, Test Long", 2022) to host memory.
CK_API void fmha_v2_alibi_slopes(std::int32_t num_heads, float* slopes);

}  // namespace cutlass_kernels
