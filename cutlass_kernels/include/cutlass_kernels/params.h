// The one description of an attention problem. Every front end fills it, every backend reads it.
//
//   O[i] = sum_j P[i,j] V[j],   P = softmax_j(cap(sm_scale * q_i . k_j) visible),   cap(s) = c tanh(s/c)
//
// Row i of a request with qo_len queries and kv_len keys stands at absolute position
// p = i + kv_len - qo_len (bottom-right alignment). It sees keys [lo(p), hi(p)):
//   hi = p + 1 if causal; p + window_right + 1 if window_right >= 0; else kv_len; with chunk_size > 0 no more than
//        (floor(p / chunk_size) + 1) * chunk_size
//   lo = max(0, p - window_left) if window_left >= 0; floor(p / chunk_size) * chunk_size if chunk_size > 0
// A row that sees no key gets output 0 and LSE -inf (with a sink: LSE = sink * log2 e).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

/// The default of sizes that have no right default: a call that needs one refuses it.
constexpr std::int32_t kNotSet = -1;

/// A [tokens, heads, dim] tensor in device memory whose last dimension is contiguous. Strides are in
/// elements; the address and both strides (in bytes) must be multiples of 16.
struct ConstTensorView {
  const void* data = nullptr;
  std::int64_t stride_token = 0;
  std::int64_t stride_head = 0;
};

/// The same, to be written.
struct TensorView {
  void* data = nullptr;
  std::int64_t stride_token = 0;
  std::int64_t stride_head = 0;
};

/// Keys and values in pages of page_size tokens: k is [pages, page_size, num_kv_heads, head_dim_qk], token i of page n
/// at n * k_stride_page + i * k.stride_token; v alike. Request b owns entries [kv_indptr[b], kv_indptr[b + 1]) of
/// `indices` and fills last_page_len[b] tokens of its last page. Entries may repeat. A page that is not one of the
/// cache is not read, its keys and values count as zeros.
///
/// With a table_stride, `indices` is a table with a row per request: request b owns the table_width entries from b *
/// table_stride on, last_page_len is not used, and kv_indptr, if there is one, counts tokens. A request with more
/// tokens than its row has room for is not computed.
struct PageTable {
  const std::int32_t* indices = nullptr;        ///< page numbers, device
  const std::int32_t* v_indices = nullptr;      ///< of v, where v has other pages than k
  const std::int32_t* last_page_len = nullptr;  ///< [batch_size], device, 1 to page_size
  std::int32_t page_size = 0;                   ///< 0: no pages, k and v are ragged
  /// > 0: entries of `indices` name slots of the cache, not pages: token i of page n is slot n * slots_per_page + i.
  /// page_size, the keys of an entry, is 1. Keys of a request may then lie anywhere, in any order, and more than once.
  /// An entry that is no slot, negative or from num_pages * slots_per_page on, is no key: hidden from all rows, never
  /// read. For latent attention, requests of one row, and a table.
  std::int32_t slots_per_page = 0;
  /// Entries of `indices` (>= kv_indptr[batch_size]); of a table not used.
  std::int64_t num_indices = kNotSet;
  std::int64_t table_stride = 0;       ///< 0: requests follow one another; batch_size times it is below 2^31
  std::int32_t table_width = kNotSet;  ///< at most table_stride
  std::int32_t v_offset = 0;           ///< subtracted from the page numbers of v: those of k count further on
  std::int64_t num_pages = kNotSet;    ///< of k and of v
  std::int64_t k_stride_page = 0;
  std::int64_t v_stride_page = 0;
  std::int64_t k_rope_stride_page = 0;  ///< of AttentionParams::k_rope
};

/// A second cache of latent keys with lists of its own, beside keys by slots (PageTable::slots_per_page): a row sees
/// the keys of both lists. Keys are of kv_dtype, tokens of a quantized latent cache; strides are in bytes. A call takes
/// the time of all entries of the first list, whatever its length: lists whose lengths differ are better the second.
struct SecondSlots {
  const void* data = nullptr;  ///< device; null: there is none
  std::int64_t stride_token = 0;
  std::int64_t stride_page = 0;
  std::int64_t num_pages = 0;
  std::int32_t slots_per_page = 1;
  std::int32_t table_width = 0;           ///< entries of a list
  std::int64_t table_stride = 0;          ///< from one list to the next
  const std::int32_t* indices = nullptr;  ///< [batch_size, table_width], device: as those of the page table
  const std::int32_t* lengths = nullptr;  ///< optional, device: only so many entries of a list count; rows_per_length
};

/// A mask of any form, instead of causal and chunk_size; the window still counts. Row i of request b sees key j if bit
/// i * kv_len + j, counted from the lowest bit of byte indptr[b], is set.
struct BitMask {
  const std::uint32_t* words = nullptr;  ///< device; null: no such mask. Readable up to a multiple of four bytes
  const std::int32_t* indptr =
      nullptr;  ///< [batch_size + 1], device, in bytes; null for a single request: it starts at 0
  std::int64_t num_words = 0;
};

/// Attention with linear biases: slopes[head] * (key - row), or slopes[head] * key, is added to sm_scale * q.k.
struct Alibi {
  const float* slopes = nullptr;  ///< [num_qo_heads], device; null: none
  bool relative = true;           ///< whether the row, counted in its request, is subtracted
  bool after_cap = false;         ///< whether the bias is added to the capped logit
};

/// A factor that only the device knows: request b and query head h have
/// data[b * stride_request + h / heads_per_entry * stride].
struct DeviceScale {
  const float* data = nullptr;       ///< device; null: 1
  std::int32_t stride = 0;           ///< from one entry to the next; 0: one for all heads
  std::int32_t heads_per_entry = 1;  ///< the group size, where entries are those of KV heads
  std::int64_t stride_request = 0;   ///< 0: one for all requests
};

/// Which keys of a request this device holds, where they are spread over `world` devices: block i of `block` keys is
/// device i % world's. So key j here is key (j / block * world + rank) * block + j % block of the request.
///
/// seqused_k is required and counts the keys on all devices together; masks refer to positions among these. Everything
/// else about keys (indptrs, page tables, max_kv_len, total_kv) counts those here. The output and the LSE are a partial
/// result over the keys here: combine_ranks() combines the partial results of all devices. Bit masks and ALiBi are
/// refused.
struct KvShard {
  std::int32_t world = 1;  ///< 1: all keys are here
  std::int32_t rank = 0;   ///< 0 to world - 1
  std::int32_t block = 1;  ///< world * block is below 2^30
};

/// Element types, heads and columns. q, k, v and o have one type of 16 bits; or q and o have, and k and v are
/// kFloat8E4M3 or kFloat8E5M2, for fa2; or q, k and v are kFloat8E4M3 and o is, too, or of either type of 16 bits, for
/// fa3 without a mask of bits, ALiBi and stats. An o of kFloat8E4M3 is rounded to nearest; beyond 448, infinities
/// included, it is 448, and NaN stays NaN. Factors that dequantize fp8 are part of sm_scale and v_scale, or of
/// logits_scale and output_scale.
struct HeadParams {
  DType q_dtype = DType::kBFloat16;
  DType kv_dtype = DType::kBFloat16;
  DType o_dtype = DType::kBFloat16;
  std::int32_t num_qo_heads = 0;
  std::int32_t num_kv_heads = 0;  ///< divides num_qo_heads; query head h reads kv head h / group
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
};

/// Requests. Lengths live on the device; the host knows only the totals. A request whose offsets do not lie inside the
/// totals is not computed, its output not written.
struct RequestParams {
  std::int32_t batch_size = 1;
  /// Of keys by slots (PageTable::slots_per_page): row i has the entries i / rows_per_length of seqused_k and of
  /// second.lengths, of which there are batch_size / rows_per_length, rounded up.
  std::int32_t rows_per_length = 1;
  /// [batch_size + 1], device: cu_seqlens_q. Null: every request has max_qo_len rows, and total_q is batch_size times
  /// that. (A single request with neither indptrs nor seqused is as long as q and k.)
  const std::int32_t* qo_indptr = nullptr;
  /// [batch_size + 1], device, in tokens or in entries of pages.indices. Null: every request has max_kv_len keys, and
  /// kv_stride_request rows lie between the first keys of consecutive requests. May be null with a page table that has
  /// a row per request.
  const std::int32_t* kv_indptr = nullptr;
  /// Used without kv_indptr and pages. kNotSet means max_kv_len; 0 means that all requests share their keys. total_kv
  /// is (batch_size - 1) * kv_stride_request + max_kv_len.
  std::int32_t kv_stride_request = kNotSet;
  /// Optional [batch_size], device: how many rows and keys of a request are used, from its first on, instead of all
  /// that the indptrs leave room for. With seqused_k, of a kv_indptr in tokens only the first batch_size entries are
  /// read (of one in entries of pages all, as they bound a request's pages), and last_page_len is not. Of keys by slots
  /// seqused_q is null, and seqused_k has an entry for each rows_per_length rows.
  const std::int32_t* seqused_q = nullptr;
  const std::int32_t* seqused_k = nullptr;
  KvShard kv_shard;
  /// Optional copy of qo_indptr on the host, read by make_plan() and attention() while they run. With it a tile list
  /// has an entry per tile; without, up to batch_size more, each a thread block that starts only to end.
  const std::int32_t* qo_indptr_host = nullptr;
  std::int64_t total_q = kNotSet;  ///< rows of q (>= qo_indptr[batch_size])
  /// Rows of k and v (>= kv_indptr[batch_size]). Paged: all keys, about; may be left unknown.
  std::int64_t total_kv = kNotSet;
  PageTable pages;
  /// With it, seqused_k counts entries of the first list, and max_kv_len is pages.table_width rounded up to a multiple
  /// of 64, plus second.table_width.
  SecondSlots second;
  /// Largest KV length of a request, if known: bounds the number of KV splits. Without kv_indptr the keys
  /// that every request has.
  std::int32_t max_kv_len = 0;
  /// Most rows of a request, if known. A batch then needs no tile list, but for a fixed_split_size and, on fa2, for
  /// 8-bit keys under more than a few queries of another type: one kernel reads the lengths itself. Where it splits
  /// keys, which takes a workspace, a second kernel may combine the partial results. With lengths that differ much, a
  /// list can still be faster; it is then made by the call if the workspace holds it. Rows of a request beyond so many
  /// need not be computed, nor the requests around where qo_indptr or kv_indptr decreases.
  std::int32_t max_qo_len = 0;
  /// With batch_invariant, requests of a batch with fewer or more rows are not computed: attention() makes parts of a
  /// batch, each with the kernel for its rows (plan/call.h), unless these are set.
  std::int32_t least_rows = 0;
  std::int32_t most_rows = std::numeric_limits<std::int32_t>::max();
};

/// Whether and how keys are split. Keys of a short query's tile are, so that there is work for the whole device.
struct SplitParams {
  /// With a fixed size, in keys, or none at all, results of a request do not depend on the others of its batch, bit by
  /// bit. 0: chosen from the batch.
  std::int32_t fixed_split_size = 0;
  bool disable_split_kv = false;
  /// The bits of a request's result depend on nothing but the request: its own lengths decide how its keys are split
  /// (schedule/own_splits.h), and tiles do not depend on the batch. num_splits=1 splits none; another number is not
  /// used. A Plan has one kernel for all lengths, so that its bits are others, and depend on the most keys it was made
  /// for.
  bool batch_invariant = false;
  /// KV splits of a tile, on average over a batch: 0 lets the library choose, 1 splits none, n is a request for n,
  /// which the size of the workspace bounds. Unlike the three above, tiles then still depend on the batch.
  std::int32_t num_splits = 0;
};

/// Where queries, keys, values and results lie.
struct TensorParams {
  ConstTensorView q;  ///< [total_q, num_qo_heads, head_dim_qk]
  ConstTensorView k;  ///< [total_kv, num_kv_heads, head_dim_qk]
  ConstTensorView v;  ///< [total_kv, num_kv_heads, head_dim_vo]
  /// Latent attention (head_dim_qk 576, head_dim_vo 512, num_kv_heads 1; v.data is k.data): where the last 64 columns
  /// of q and of k, those of the position, have tensors of their own. Null: they lie behind the first 512.
  ConstTensorView q_rope;  ///< [total_q, num_qo_heads, 64]
  ConstTensorView k_rope;  ///< [total_kv, 1, 64], in the same pages as k
  TensorView o;            ///< [total_q, num_qo_heads, head_dim_vo]
  float* lse = nullptr;    ///< optional
  float lse_scale = 1.0f;  ///< multiplies the LSE in base 2: ln 2 makes it natural
  /// Whether the LSE is as FlashMLA has it: without sinks, and +inf for a row without keys. Of latent attention.
  bool flash_mla_lse = false;
  std::int64_t lse_stride_token = 0;
  std::int64_t lse_stride_head = 0;
};

/// Which keys a row sees.
struct MaskParams {
  bool causal = false;
  std::int32_t window_left = -1;   ///< negative: no window
  std::int32_t window_right = -1;  ///< negative: none; 0 is causal
  std::int32_t chunk_size = 0;     ///< 0: not chunked
  BitMask mask;
};

/// What is done to logits, and to the output.
struct LogitsParams {
  float sm_scale = 1.0f;
  float logits_soft_cap = 0.0f;  ///< <= 0: off
  Alibi alibi;
  const float* sinks = nullptr;  ///< optional [num_qo_heads], natural-log units: denominator += exp(sink)
  float v_scale = 1.0f;          ///< multiplies the output
  /// Permission to skip keys: a block of keys adds nothing to its rows where all its weights, relative to the row's
  /// largest so far, are below skip_softmax_factor / kv_len. Kernels without such a variant compute all. 0: off.
  float skip_softmax_factor = 0.0f;
  DeviceScale logits_scale;  ///< multiplies sm_scale
  DeviceScale keys_scale;    ///< multiplies sm_scale, too
  DeviceScale output_scale;  ///< multiplies the output

  /// Optional, device: [total_q, num_qo_heads, 2], contiguous, 8-byte aligned; not with scales that differ between
  /// requests. Of each row the maximum of its logits
  /// over sm_scale * logits_scale * sqrt(head_dim_qk), or with a soft cap over sqrt(head_dim_qk), and the sum of
  /// exp(logit - maximum), without sinks; -FLT_MAX and 0 where it sees no key. Keys are then not split.
  float* stats = nullptr;

  /// Optional [total_q, num_qo_heads], contiguous, for keys by slots: the largest logit of each row, in natural
  /// units and without its sink; -inf where it sees no key.
  float* max_logits = nullptr;
};

struct AttentionParams : HeadParams, RequestParams, SplitParams, TensorParams, MaskParams, LogitsParams {};

}  // namespace cutlass_kernels
