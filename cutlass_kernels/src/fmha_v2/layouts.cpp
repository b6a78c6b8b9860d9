#include "fmha_v2/layouts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "common/element_bytes.h"
#include "cutlass_kernels/attention.h"
#include "plan/call.h"

namespace cutlass_kernels {
namespace {

std::string number(std::int64_t value) { return std::to_string(value); }

const char* to_string(FmhaV2Layout layout) {
  switch (layout) {
    case FmhaV2Layout::kPackedQkv:
      return "PACKED_QKV";
    case FmhaV2Layout::kContiguousQKv:
      return "CONTIGUOUS_Q_KV";
    case FmhaV2Layout::kSeparateQKV:
      return "SEPARATE_Q_K_V";
    case FmhaV2Layout::kQPagedKvHnd:
      return "Q_PAGED_KV_HND";
    case FmhaV2Layout::kQPagedKvNhd:
      return "Q_PAGED_KV_NHD";
  }
  return "unknown";
}

int dim_vo(const FmhaV2Params& params) { return params.head_dim_vo == 0 ? params.head_dim : params.head_dim_vo; }

/// `elements` behind a tensor's first.
const void* behind(const void* data, std::int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * size_of(dtype);
}

Status describe_mask(const FmhaV2Params& params, AttentionParams* attention) {
  int window = std::max(params.window_left, -1);
  const int chunk = params.chunked_attention_size;
  const std::string sizes = "window_left=" + number(window) + " and chunked_attention_size=" + number(chunk);
  if (chunk < 0 || (chunk & (chunk - 1)) != 0) {
    return Status::invalid("chunked_attention_size=" + number(chunk) + " must be a power of two, or 0 for none.");
  }
  const int mode = static_cast<int>(params.mask_mode);
  if (mode < static_cast<int>(FmhaV2Mask::kCausal) || mode > static_cast<int>(FmhaV2Mask::kChunked)) {
    return Status::invalid("mask_mode=" + std::to_string(mode) + " is none of FmhaV2Mask.");
  }
  if (params.mask_mode == FmhaV2Mask::kChunked && chunk == 0) {
    return Status::invalid("mask_mode 'chunked' needs a positive chunked_attention_size.");
  }
  if (params.mask_mode == FmhaV2Mask::kPadding) {
    attention->causal = false;
    if (window < 0 && chunk == 0) return Status::success();
    return Status::invalid("mask_mode 'padding' sees all keys, but " + sizes +
                           " restrict them: use 'sliding_window' or 'chunked'.");
  }
  if (window == 0 && params.mask_mode != FmhaV2Mask::kSlidingWindow) window = -1;
  if (window >= 0 && chunk > 0) {
    return Status::invalid(sizes + " exclude each other: set one of them.");
  }
  attention->causal = true;
  attention->window_left = window;
  attention->chunk_size = chunk;
  return Status::success();
}

bool is_paged(FmhaV2Layout layout) {
  return layout == FmhaV2Layout::kQPagedKvHnd || layout == FmhaV2Layout::kQPagedKvNhd;
}

/// All keys of a batch in pages, about: as many as its bounds and its cache allow.
std::int64_t keys_in_pages(std::int32_t batch_size, std::int32_t max_kv_len, std::int64_t num_pages,
                           std::int32_t page_size) {
  constexpr std::int64_t kMost = 1 << 30;
  const std::int64_t room = num_pages < kMost / page_size ? num_pages * page_size : kMost;
  return std::min({std::int64_t(batch_size) * max_kv_len, room, kMost});
}

/// Keys and values in pages: one pool, or two caches of one allocation.
Status describe_pages(const FmhaV2Params& params, AttentionParams* attention) {
  const bool pool = params.kv != nullptr;
  const std::int64_t head = params.head_dim;
  const std::int64_t page = params.page_size;
  const std::int64_t block = page * params.num_kv_heads * head;
  PageTable& pages = attention->pages;
  if (page <= 0) return Status::invalid("page_size=" + number(page) + " must be positive.");
  if (block <= 0) {
    return Status::invalid("num_kv_heads=" + number(params.num_kv_heads) + " and head_dim=" + number(head) +
                           " must be positive.");
  }
  if (params.num_pages < 0) {
    return Status::invalid("num_pages=" + number(params.num_pages) + " is not set: it counts the pages of the cache.");
  }
  if (params.block_tables == nullptr || params.max_pages < 0) {
    return Status::invalid(std::string(to_string(params.layout)) +
                           " needs block_tables, and max_pages=" + number(params.max_pages) + " not negative.");
  }
  pages.page_size = params.page_size;
  pages.num_pages = params.num_pages;
  pages.indices = params.block_tables;
  pages.table_width = params.max_pages;
  pages.table_stride = std::max<std::int64_t>(params.max_pages, 1) * (pool ? 1 : 2);
  pages.k_stride_page = pages.v_stride_page = pool ? 2 * block : block;
  const bool hnd = params.layout == FmhaV2Layout::kQPagedKvHnd;
  const std::int64_t stride_token = hnd ? head : params.num_kv_heads * head;
  const std::int64_t stride_head = hnd ? page * head : head;
  attention->k = {pool ? params.kv : params.k, stride_token, stride_head};
  attention->v = {pool ? behind(params.kv, block, params.dtype) : params.v, stride_token, stride_head};
  attention->total_kv = keys_in_pages(params.batch_size, params.max_kv_len, params.num_pages, params.page_size);
  if (pool) return Status::success();
  pages.v_indices = params.block_tables + params.max_pages;
  const std::int64_t bytes = block * size_of(params.dtype);
  const std::int64_t distance = reinterpret_cast<std::intptr_t>(params.v) - reinterpret_cast<std::intptr_t>(params.k);
  if (params.k == nullptr || params.v == nullptr || distance <= 0 || distance % bytes != 0 ||
      distance / bytes > std::numeric_limits<std::int32_t>::max()) {
    return Status::invalid("v lies " + number(distance) +
                           " bytes behind k, which must be a positive multiple of a block (" + number(bytes) +
                           " bytes): allocate both caches in one buffer.");
  }
  pages.v_offset = std::int32_t(distance / bytes);
  return Status::success();
}

/// Sizes, bounds, mask and scales.
Status describe_options(const FmhaV2Params& params, AttentionParams* attention) {
  const bool packed = params.layout == FmhaV2Layout::kPackedQkv;
  const std::string layout = to_string(params.layout);
  const int max_q = params.max_q_len, max_kv = params.max_kv_len;
  if (max_q < 0 || (max_q == 0 && params.total_q > 0)) {
    return Status::invalid("max_q_len=" + number(max_q) + " must be positive, with total_q=" + number(params.total_q) +
                           " rows.");
  }
  if (max_kv < max_q || (packed && max_kv != max_q)) {
    return Status::invalid("max_kv_len=" + number(max_kv) + " must " + (packed ? "equal" : "be at least") +
                           " max_q_len=" + number(max_q) + " with input_layout=" + layout + ".");
  }
  if (packed && params.num_kv_heads != params.num_qo_heads) {
    return Status::invalid(layout + " has as many key heads as query heads, not num_kv_heads=" +
                           number(params.num_kv_heads) + " with num_qo_heads=" + number(params.num_qo_heads) + ".");
  }
  if (dim_vo(params) != params.head_dim && params.layout != FmhaV2Layout::kSeparateQKV) {
    return Status::invalid("head_dim_vo=" + number(params.head_dim_vo) +
                           " must be head_dim=" + number(params.head_dim) + " with input_layout=" + layout + ".");
  }
  *attention = AttentionParams{};
  attention->q_dtype = attention->kv_dtype = params.dtype;
  attention->o_dtype = params.o_dtype;
  attention->num_qo_heads = params.num_qo_heads;
  attention->num_kv_heads = params.num_kv_heads;
  attention->head_dim_qk = params.head_dim;
  attention->head_dim_vo = dim_vo(params);
  attention->batch_size = params.batch_size;
  attention->total_q = params.total_q;
  attention->total_kv = packed ? params.total_q : params.total_kv;
  attention->max_qo_len = max_q;
  attention->max_kv_len = max_kv;
  const float scale = params.bmm1_scale;
  attention->sm_scale = scale == 0.0f && params.head_dim > 0 ? 1.0f / std::sqrt(float(params.head_dim)) : scale;
  attention->v_scale = params.bmm2_scale;
  attention->logits_scale.data = params.bmm1_scale_device;
  attention->output_scale.data = params.bmm2_scale_device;
  attention->logits_soft_cap = params.logits_soft_cap_scale;
  attention->alibi = {params.alibi_slopes, /*relative=*/false, /*after_cap=*/true};
  attention->sinks = params.sinks;
  attention->skip_softmax_factor = params.skip_softmax_threshold_scale_factor;
  return describe_mask(params, attention);
}

/// The tensors of the layout, and the block tables.
Status describe_layout(const FmhaV2Params& params, AttentionParams* attention) {
  const std::int64_t q_token = std::int64_t(params.num_qo_heads) * params.head_dim;
  const std::int64_t k_token = std::int64_t(params.num_kv_heads) * params.head_dim;
  const std::int64_t v_token = std::int64_t(params.num_kv_heads) * dim_vo(params);
  const int head = params.head_dim;
  attention->qo_indptr = params.cum_seq_lens_q;
  attention->kv_indptr = params.cum_seq_lens_kv;
  attention->q = {params.q, q_token, head};
  attention->o = {params.out, std::int64_t(params.num_qo_heads) * dim_vo(params), dim_vo(params)};
  attention->lse = params.lse;
  attention->lse_stride_token = params.num_qo_heads;
  attention->lse_stride_head = 1;
  attention->stats = params.stats;
  switch (params.layout) {
    default:
      return Status::invalid("layout=" + std::to_string(static_cast<int>(params.layout)) + " is none of FmhaV2Layout.");
    case FmhaV2Layout::kPackedQkv:
      attention->q = {params.qkv, 3 * q_token, head};
      attention->k = {behind(params.qkv, q_token, params.dtype), 3 * q_token, head};
      attention->v = {behind(params.qkv, 2 * q_token, params.dtype), 3 * q_token, head};
      if (params.cum_seq_lens_kv == nullptr) attention->kv_indptr = params.cum_seq_lens_q;
      break;
    case FmhaV2Layout::kContiguousQKv:
      attention->k = {params.kv, 2 * k_token, head};
      attention->v = {behind(params.kv, k_token, params.dtype), 2 * k_token, head};
      break;
    case FmhaV2Layout::kSeparateQKV:
      attention->k = {params.k, k_token, head};
      attention->v = {params.v, v_token, dim_vo(params)};
      break;
    case FmhaV2Layout::kQPagedKvHnd:
    case FmhaV2Layout::kQPagedKvNhd:
      if (Status status = describe_pages(params, attention); !status.ok()) return status;
      break;
  }
  if (params.total_q > 0 && (attention->qo_indptr == nullptr || attention->kv_indptr == nullptr)) {
    return Status::invalid("cum_seq_lens_q and cum_seq_lens_kv are needed, but one of them is null.");
  }
  return Status::success();
}

}  // namespace

Status describe(const FmhaV2Params& params, AttentionParams* attention) {
  Status status = describe_options(params, attention);
  return status.ok() ? describe_layout(params, attention) : status;
}

std::size_t fmha_v2_workspace_size(const FmhaV2Params& params, Backend backend) {
  static_assert(kFmhaV2CounterBytes == kCallCounterBytes);
  AttentionParams sizes;
  if (!describe_options(params, &sizes).ok()) return kFmhaV2CounterBytes;
  if (is_paged(params.layout)) {
    sizes.total_kv =
        keys_in_pages(params.batch_size, params.max_kv_len, params.num_pages, std::max(params.page_size, 1));
  }
  // Whatever is still to be told: a single request has indptrs, too, and options may ask for other tiles.
  const std::int32_t indptr = 0;
  const float option = 0.0f;
  sizes.qo_indptr = sizes.kv_indptr = &indptr;
  std::size_t most = workspace_size(sizes, backend);
  sizes.alibi.slopes = &option;
  most = std::max(most, workspace_size(sizes, backend));
  return kFmhaV2CounterBytes + most;
}

Status fmha_v2(const FmhaV2Params& params, void* workspace, std::size_t workspace_bytes, cudaStream_t stream,
               Backend backend) {
  AttentionParams problem;
  if (Status status = describe(params, &problem); !status.ok()) return status;
  if (params.total_q == 0) return Status::success();
  if (Status status = check_aligned("The workspace of fmha_v2()", workspace); !status.ok()) {
    return status;
  }
  if (workspace != nullptr && workspace_bytes < kFmhaV2CounterBytes) {
    return {StatusCode::kWorkspaceTooSmall, "fmha_v2() needs a workspace of " + number(kFmhaV2CounterBytes) +
                                                " bytes or more, got " + number(workspace_bytes) +
                                                "; fmha_v2_workspace_size() tells how many it can use."};
  }
  auto* counters = static_cast<std::uint64_t*>(workspace);
  if (workspace == nullptr) return run_once(problem, backend, nullptr, 0, counters, stream);
  return run_once(problem, backend, static_cast<char*>(workspace) + kFmhaV2CounterBytes,
                  workspace_bytes - kFmhaV2CounterBytes, counters, stream);
}

void fmha_v2_alibi_slopes(std::int32_t num_heads, float* slopes) {
  int power = 1;
  while (2 * power <= num_heads) power *= 2;
  for (int h = 0; h < num_heads; ++h) {
    const double exponent = h < power ? -8.0 * (h + 1) / power : -4.0 * (2 * (h - power) + 1) / power;
    slopes[h] = float(std::exp2(exponent));
  }
}

}  // namespace cutlass_kernels
