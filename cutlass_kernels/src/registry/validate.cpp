#include "registry/validate.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "common/element_bytes.h"
#include "common/token_format.h"
#include "latent/dims.h"
#include "plan/launch_params.h"
#include "schedule/requests.h"

namespace cutlass_kernels {
namespace {

std::string number(std::int64_t value) { return std::to_string(value); }

/// `name` was left at kNotSet, and is the number of `what`.
std::string not_set(const char* name, const char* what) {
  return std::string(name) + " is not set: it counts " + what + ", 0 where there are none.";
}

std::string misaligned(const char* name, const ConstTensorView& view, int item_bytes, bool with_pointer) {
  const std::string tensor = name;
  if ((view.stride_token * item_bytes) % 16 != 0) {
    return tensor + " has a token stride of " + number(view.stride_token * item_bytes) +
           " bytes: strides must be multiples of 16 bytes. Copy it into such a layout.";
  }
  if ((view.stride_head * item_bytes) % 16 != 0) {
    return tensor + " has a head stride of " + number(view.stride_head * item_bytes) +
           " bytes: strides must be multiples of 16 bytes. Copy it into such a layout.";
  }
  if (with_pointer && reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) {
    return tensor +
           " starts at an address that is not a multiple of 16 bytes. Copy it to an aligned "
           "buffer.";
  }
  return "";
}

std::string unknown_pages(const AttentionParams& params) {
  const PageTable& pages = params.pages;
  if (pages.table_stride > 0) {
    if (pages.table_width > 0 && pages.indices == nullptr) {
      return "table_width=" + number(pages.table_width) + " pages, but indices is null.";
    }
    if (params.kv_indptr == nullptr && params.seqused_k == nullptr && params.max_kv_len == 0 &&
        (pages.slots_per_page == 0 || pages.table_width > 0)) {
      return "A page table needs lengths, but there is neither kv_indptr nor seqused_k, nor a "
             "max_kv_len that every request has.";
    }
    return "";
  }
  if (params.kv_indptr == nullptr) {
    return "kv_indptr is null: a paged cache needs it, or a table_stride for a page table with a "
           "row per request.";
  }
  if (pages.num_indices < 0) return not_set("num_indices", "the entries of indices");
  if (pages.num_indices > 0 &&
      (pages.indices == nullptr || (pages.last_page_len == nullptr && params.seqused_k == nullptr))) {
    return "num_indices=" + number(pages.num_indices) + " pages, but indices or last_page_len is null.";
  }
  return "";
}

std::string impossible_shard(const AttentionParams& params) {
  const KvShard& shard = params.kv_shard;
  constexpr std::int64_t kMost = std::int64_t(1) << 30;
  if (shard.world < 1 || shard.rank < 0 || shard.rank >= shard.world || shard.block < 1 ||
      std::int64_t(shard.world) * shard.block >= kMost) {
    return "kv_shard={world=" + number(shard.world) + ", rank=" + number(shard.rank) +
           ", block=" + number(shard.block) +
           "}: rank must lie between 0 and world - 1, and world * block between 1 and 2^30 - 1.";
  }
  if (shard.world > 1 && (params.mask.words != nullptr || params.alibi.slopes != nullptr)) {
    return "kv_shard.world=" + number(shard.world) +
           " cannot be used with a bit mask or ALiBi: causal, window_left, window_right and "
           "chunk_size can.";
  }
  return "";
}

/// What is wrong with keys by slots (PageTable::slots_per_page). Their positions in a row of the table mean nothing, so
/// that no mask may depend on them.
std::string impossible_slots(const AttentionParams& params) {
  const PageTable& pages = params.pages;
  if (pages.slots_per_page == 0) {
    if (params.max_logits == nullptr) return "";
    return "max_logits is for keys by slots: set slots_per_page, or leave it out.";
  }
  const std::string slots = "slots_per_page=" + number(pages.slots_per_page);
  if (pages.slots_per_page < 0) return slots + " must not be negative; 0 means that indices are page numbers.";
  if (pages.page_size != 1) {
    return slots + " with page_size=" + number(pages.page_size) +
           ": an entry of indices then names one key. Set page_size to 1.";
  }
  if (pages.table_stride == 0) {
    return slots + " needs a page table with a row per request: set table_stride and table_width.";
  }
  if (params.qo_indptr != nullptr || params.max_qo_len != 1) {
    return slots + " is for requests of one row, but " +
           (params.qo_indptr != nullptr ? "qo_indptr is given" : "max_qo_len=" + number(params.max_qo_len)) +
           ": make each row a request, set max_qo_len to 1 and leave qo_indptr null.";
  }
  if (params.kv_indptr != nullptr || params.seqused_q != nullptr) {
    return slots + " is for requests that each have a row and a list, but " +
           (params.kv_indptr != nullptr ? "kv_indptr" : "seqused_q") +
           " is given: leave it null; lengths of lists are seqused_k.";
  }
  if (params.rows_per_length < 1) {
    return "rows_per_length=" + number(params.rows_per_length) + " must be positive: 1, where each row has lengths.";
  }
  const auto beside = [&](const std::string& mask) {
    return slots + " cannot be used with " + mask +
           ": listed keys have no positions. Leave keys that a row must not see out of its indices.";
  };
  if (params.causal) return beside("causal");
  if (params.window_left >= 0) return beside("window_left=" + number(params.window_left));
  if (params.window_right >= 0) return beside("window_right=" + number(params.window_right));
  if (params.chunk_size != 0) return beside("chunk_size=" + number(params.chunk_size));
  if (params.kv_shard.world > 1) return beside("kv_shard.world=" + number(params.kv_shard.world));
  if (params.mask.words != nullptr) return beside("a bit mask");
  if (params.alibi.slopes != nullptr) return beside("ALiBi");
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (pages.num_pages > kMost / pages.slots_per_page) {
    return "num_pages=" + number(pages.num_pages) + " of " + slots + " are more than the " + number(kMost) +
           " slots that 32-bit indices can name: split the cache.";
  }
  return "";
}

/// What is wrong with a second cache.
std::string impossible_second(const AttentionParams& params) {
  const SecondSlots& second = params.second;
  if (second.data == nullptr) {
    return second.table_width == 0 ? ""
                                   : "second has lists of table_width=" + number(second.table_width) +
                                         ", but no data: leave them out, too.";
  }
  const TokenFormat format = token_format(params.kv_dtype);
  const std::string type = "second, a cache of tokens of " + number(format.bytes) + " bytes,";
  if (format.bytes == 0 || params.pages.slots_per_page == 0) {
    return "second is for tokens of a quantized latent cache by slots: set kv_dtype and slots_per_page, or leave it "
           "null.";
  }
  if (second.indices == nullptr || second.table_width < 1 || second.table_stride < second.table_width) {
    return type + " has lists of table_width=" + number(second.table_width) + ", " + number(second.table_stride) +
           " apart" + (second.indices == nullptr ? ", but no indices" : "") + ": give each request a list.";
  }
  if (second.slots_per_page < 1 || second.num_pages < 0 ||
      second.num_pages > std::numeric_limits<std::int32_t>::max() / second.slots_per_page) {
    return type + " has num_pages=" + number(second.num_pages) + " of slots_per_page=" + number(second.slots_per_page) +
           ": indices of 32 bits name at least one slot of a page, and 2147483647 in all.";
  }
  if (format.by_page && second.stride_token != format.data_bytes()) {
    return type + " has a token stride of " + number(second.stride_token) + " bytes: it is " +
           number(format.data_bytes()) + ", that of their data.";
  }
  if ((second.slots_per_page > 1 && second.stride_token < format.data_bytes()) ||
      (second.num_pages > 1 && second.stride_page < std::int64_t(second.slots_per_page) * format.bytes)) {
    return type + " has tokens " + number(second.stride_token) + " bytes apart and pages " +
           number(second.stride_page) + ": they would overlap.";
  }
  const bool aligned = second.stride_token % 16 == 0 && (second.num_pages < 2 || second.stride_page % 16 == 0) &&
                       reinterpret_cast<std::uintptr_t>(second.data) % 16 == 0;
  if (!aligned) {
    return type + " has an address or strides (" + number(second.stride_token) + " and " + number(second.stride_page) +
           " bytes) that are no multiples of 16: align them.";
  }
  const std::int64_t keys = (params.pages.table_width + std::int64_t(63)) / 64 * 64 + second.table_width;
  if (params.max_kv_len != keys) {
    return "max_kv_len=" + number(params.max_kv_len) + " with second: it is " + number(keys) +
           ", pages.table_width rounded up to a multiple of 64, plus second.table_width.";
  }
  return "";
}

/// What is wrong with keys that are tokens of a quantized latent cache.
std::string impossible_tokens(const AttentionParams& params) {
  const TokenFormat format = token_format(params.kv_dtype);
  const int bytes = format.bytes;
  if (bytes == 0) return "";
  const std::string type = "kv_dtype of tokens of " + number(bytes) + " bytes";
  if (params.pages.slots_per_page == 0) {
    return type + " needs keys by slots: set slots_per_page, and name each key in indices.";
  }
  if (params.k_rope.data != nullptr) return type + " with k_rope: they have its columns. Leave it null.";
  if (format.by_page && params.k.stride_token != format.data_bytes()) {
    return type + ", by page, with a token stride of " + number(params.k.stride_token) + " bytes in k: it is " +
           number(format.data_bytes()) + ", that of their data.";
  }
  if (params.pages.num_pages > 1 && params.pages.k_stride_page < std::int64_t(params.pages.slots_per_page) * bytes) {
    return type + ", " + number(params.pages.slots_per_page) + " in a page, with pages " +
           number(params.pages.k_stride_page) + " bytes apart: they would overlap.";
  }
  if (params.pages.slots_per_page > 1 && params.k.stride_token < format.data_bytes()) {
    return type + " with a token stride of " + number(params.k.stride_token) +
           " bytes in k: tokens would overlap. Strides of such a cache are in bytes.";
  }
  return "";
}

/// What is wrong with q_rope and k_rope, of which either may be null.
std::string impossible_rope(const AttentionParams& params, bool with_tensors) {
  using mla::kLatentDim, mla::kRopeDim;
  const struct {
    const char* name;
    const ConstTensorView& view;
    int item_bytes;
  } ropes[] = {{"q_rope", params.q_rope, size_of(params.q_dtype)}, {"k_rope", params.k_rope, size_of(params.kv_dtype)}};
  for (const auto& [name, view, item_bytes] : ropes) {
    if (view.data == nullptr) continue;
    if (params.head_dim_qk != kLatentDim + kRopeDim || params.head_dim_vo != kLatentDim) {
      return std::string(name) + " is given with head_dim_qk=" + number(params.head_dim_qk) +
             " and head_dim_vo=" + number(params.head_dim_vo) +
             ": tensors for the last 64 columns are for 576 and 512 alone. Leave it null.";
    }
    if (std::string fault = misaligned(name, view, item_bytes, with_tensors); !fault.empty()) {
      return fault;
    }
  }
  if (params.k_rope.data == nullptr) return "";
  if (params.v.data != params.k.data) {
    return "k_rope is given, but v is not k: values must be the first 512 columns of the keys, in "
           "the same memory. Set v to k.";
  }
  const std::int64_t stride_page = params.pages.k_rope_stride_page;
  if (params.pages.page_size > 0 && stride_page * size_of(params.kv_dtype) % 16 != 0) {
    return "k_rope_stride_page=" + number(stride_page) +
           " elements must be a multiple of 16 bytes. Copy k_rope into such a layout.";
  }
  return "";
}

}  // namespace

std::string unknown_lengths(const AttentionParams& params) {
  if (!is_batch(params)) return "";
  const std::int64_t requests = params.batch_size;
  if (params.qo_indptr == nullptr && requests * params.max_qo_len != params.total_q) {
    return "qo_indptr is null, so every request has max_qo_len=" + number(params.max_qo_len) + " rows, but " +
           number(requests) + " requests have total_q=" + number(params.total_q) + ": pass qo_indptr.";
  }
  if (params.kv_shard.world > 1 && params.seqused_k == nullptr) {
    return "seqused_k is null although kv_shard.world=" + number(params.kv_shard.world) +
           ": it counts the keys of each request on all devices.";
  }
  const bool paged = params.pages.page_size > 0;
  if (params.kv_stride_request != kNotSet && (params.kv_indptr != nullptr || paged)) {
    return "kv_stride_request=" + number(params.kv_stride_request) +
           " is for requests without kv_indptr and pages, which say where keys are: leave it at "
           "kNotSet.";
  }
  if (paged) return unknown_pages(params);
  if (params.kv_indptr != nullptr) return "";
  const std::int64_t stride = kv_stride_request(params);
  if (stride < 0) {
    return "kv_stride_request=" + number(stride) + " must not be negative.";
  }
  if ((requests - 1) * stride + params.max_kv_len != params.total_kv) {
    return "kv_indptr is null, so every request has max_kv_len=" + number(params.max_kv_len) + " keys, " +
           number(stride) + " rows from one to the next, but " + number(requests) +
           " requests have total_kv=" + number(params.total_kv) + ": set kv_stride_request, or pass kv_indptr.";
  }
  return "";
}

std::string contradiction(const AttentionParams& params, bool with_tensors) {
  const auto not_positive = [](const char* name, std::int64_t value) {
    return std::string(name) + "=" + number(value) + " must be positive.";
  };
  if (params.num_qo_heads <= 0) return not_positive("num_qo_heads", params.num_qo_heads);
  if (params.num_kv_heads <= 0) return not_positive("num_kv_heads", params.num_kv_heads);
  if (params.head_dim_qk <= 0) return not_positive("head_dim_qk", params.head_dim_qk);
  if (params.head_dim_vo <= 0) return not_positive("head_dim_vo", params.head_dim_vo);
  if (params.batch_size <= 0) return not_positive("batch_size", params.batch_size);
  if (params.num_qo_heads % params.num_kv_heads != 0) {
    return "num_qo_heads=" + number(params.num_qo_heads) +
           " is not a multiple of num_kv_heads=" + number(params.num_kv_heads) +
           ": every key head serves the same number of query heads.";
  }
  const int columns = size_of(params.kv_dtype) == 1 ? 16 : 8;
  if (params.head_dim_qk % columns != 0 || params.head_dim_vo % columns != 0) {
    return "head_dim_qk=" + number(params.head_dim_qk) + " and head_dim_vo=" + number(params.head_dim_vo) +
           " must be multiples of " + number(columns) + ": rows are read 16 bytes at a time.";
  }
  // Below 2^31 by more than any tile, so that the end of a tile is a 32-bit number too.
  constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max() - 1023;
  const bool paged = params.pages.page_size > 0;
  if (params.total_q == kNotSet) return not_set("total_q", "the rows of q");
  if (params.total_kv == kNotSet && !paged) return not_set("total_kv", "the rows of k and v");
  if (params.total_q < 0 || params.total_q > kMaxTokens || params.total_kv < kNotSet || params.total_kv > kMaxTokens) {
    return "total_q=" + number(params.total_q) + " and total_kv=" + number(params.total_kv) +
           " must lie between 0 and " + number(kMaxTokens) + ": the offsets in qo_indptr and kv_indptr are 32-bit.";
  }
  for (const auto& [name, value] :
       {std::pair("sm_scale", params.sm_scale), std::pair("logits_soft_cap", params.logits_soft_cap),
        std::pair("lse_scale", params.lse_scale), std::pair("v_scale", params.v_scale)}) {
    if (!std::isfinite(value)) {
      return std::string(name) + "=" + std::to_string(value) + " must be finite.";
    }
  }
  if (!std::isfinite(params.skip_softmax_factor) || params.skip_softmax_factor < 0.0f) {
    return "skip_softmax_factor=" + std::to_string(params.skip_softmax_factor) +
           " must be finite and not negative: 0 skips nothing.";
  }
  if (const std::int32_t* host = params.qo_indptr_host) {
    for (int b = 0; b < params.batch_size; ++b) {
      if (host[b] < 0 || host[b + 1] < host[b]) {
        return "qo_indptr_host[" + number(b + 1) + "]=" + number(host[b + 1]) + " follows " + number(host[b]) +
               ": offsets start at 0 and never decrease.";
      }
    }
    if (host[params.batch_size] > params.total_q) {
      return "qo_indptr_host ends at " + number(host[params.batch_size]) +
             ", beyond total_q=" + number(params.total_q) + ".";
    }
  }
  if (params.mask.words != nullptr && params.batch_size > 1 && params.mask.indptr == nullptr) {
    return "mask.indptr is null although batch_size=" + number(params.batch_size) +
           ": it says where each request's bits begin.";
  }
  const PageTable& pages = params.pages;
  if (pages.page_size < 0 || (pages.page_size == 0 && pages.indices != nullptr)) {
    return not_positive("page_size", pages.page_size);
  }
  if (paged && with_tensors) {
    if (pages.num_pages < 0) return not_set("num_pages", "the pages of k and of v");
  }
  if (pages.table_stride != 0) {
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    if (pages.table_stride < 0 || pages.table_stride > kMost / params.batch_size) {
      return "table_stride=" + number(pages.table_stride) + " with batch_size=" + number(params.batch_size) +
             " makes a page table of more than " + number(kMost) + " entries, or none: split the batch.";
    }
    if (pages.table_width < 0 || pages.table_width > pages.table_stride) {
      return "table_width=" + number(pages.table_width) +
             " must lie between 0 and table_stride=" + number(pages.table_stride) + ".";
    }
  }
  if (pages.v_offset != 0 &&
      (pages.v_offset < 0 || pages.num_pages > std::numeric_limits<std::int32_t>::max() - pages.v_offset)) {
    return "v_offset=" + number(pages.v_offset) + " with num_pages=" + number(pages.num_pages) +
           ": page numbers of v are 32-bit numbers, from 0 on.";
  }
  if (pages.page_size > 0 && ((pages.k_stride_page * size_of(params.kv_dtype)) % 16 != 0 ||
                              (pages.v_stride_page * size_of(params.kv_dtype)) % 16 != 0)) {
    return "k_stride_page=" + number(pages.k_stride_page) + " and v_stride_page=" + number(pages.v_stride_page) +
           " elements must be multiples of 16 bytes. Copy the cache into such a layout.";
  }
  if (params.max_qo_len < 0) {
    return "max_qo_len=" + number(params.max_qo_len) + " must not be negative; 0 means not known.";
  }
  if (params.max_kv_len < 0) {
    return "max_kv_len=" + number(params.max_kv_len) + " must not be negative; 0 means not known.";
  }
  if (params.least_rows < 0 || params.most_rows < params.least_rows ||
      (!params.batch_invariant &&
       (params.least_rows > 0 || params.most_rows != std::numeric_limits<std::int32_t>::max()))) {
    return "least_rows=" + number(params.least_rows) + " and most_rows=" + number(params.most_rows) +
           " must be a range of row counts, and need batch_invariant: leave them as they are.";
  }
  if (std::string fault = impossible_shard(params); !fault.empty()) return fault;
  if (std::string fault = impossible_slots(params); !fault.empty()) return fault;
  if (std::string fault = impossible_tokens(params); !fault.empty()) return fault;
  if (std::string fault = impossible_second(params); !fault.empty()) return fault;
  if (params.fixed_split_size < 0) {
    return "fixed_split_size=" + number(params.fixed_split_size) + " must not be negative; 0 lets the library choose.";
  }
  if (params.num_splits < 0) {
    return "num_splits=" + number(params.num_splits) + " must not be negative; 0 lets the library choose.";
  }
  // Rows, keys and a right window are added up in 32 bits.
  constexpr std::int32_t kMaxWindow = 1 << 29;
  if (params.window_right > kMaxWindow) {
    return "window_right=" + number(params.window_right) + " must be at most " + number(kMaxWindow) +
           ": use -1 for no limit.";
  }
  for (const auto& [name, scale] :
       {std::pair("logits_scale", params.logits_scale), std::pair("keys_scale", params.keys_scale),
        std::pair("output_scale", params.output_scale)}) {
    if (scale.heads_per_entry <= 0) {
      return std::string(name) + ".heads_per_entry=" + number(scale.heads_per_entry) + " must be positive.";
    }
    if (scale.stride_request != 0 && params.stats != nullptr) {
      return std::string(name) + " differs between requests, which stats do not allow for: ask for an LSE instead.";
    }
  }
  if (params.chunk_size < 0) {
    return "chunk_size=" + number(params.chunk_size) + " must not be negative; 0 means not chunked.";
  }

  const int q_bytes = size_of(params.q_dtype);
  const int kv_bytes = size_of(params.kv_dtype);
  const int o_bytes = size_of(params.o_dtype);
  std::string fault = misaligned("q", params.q, q_bytes, with_tensors);
  if (fault.empty()) fault = misaligned("k", params.k, kv_bytes, with_tensors);
  if (fault.empty()) fault = misaligned("v", params.v, kv_bytes, with_tensors);
  if (fault.empty())
    fault = misaligned("o", {params.o.data, params.o.stride_token, params.o.stride_head}, o_bytes, with_tensors);
  if (fault.empty()) fault = impossible_rope(params, with_tensors);
  if (!fault.empty() || !with_tensors) return fault;

  if (fault = unknown_lengths(params); !fault.empty()) return fault;
  const auto missing = [](const char* name, const char* total, std::int64_t value) {
    return std::string(name) + " is null although " + total + "=" + number(value) + ".";
  };
  if (params.total_q > 0) {
    if (params.q.data == nullptr) return missing("q", "total_q", params.total_q);
    if (params.o.data == nullptr) return missing("o", "total_q", params.total_q);
  }
  // Zero strides are fine to read (a broadcast), but rows and heads must not be written to one place.
  const auto overlaps = [&](std::int64_t stride_token, std::int64_t stride_head) {
    return (stride_token == 0 && params.total_q > 1) || (stride_head == 0 && params.num_qo_heads > 1);
  };
  if (overlaps(params.o.stride_token, params.o.stride_head)) {
    return "o has a stride of 0: every row and head of the output needs a place of its own.";
  }
  if (params.lse != nullptr && overlaps(params.lse_stride_token, params.lse_stride_head)) {
    return "lse has a stride of 0: set lse_stride_token and lse_stride_head.";
  }
  if (reinterpret_cast<std::uintptr_t>(params.stats) % 8 != 0) {
    return "stats starts at an address that is not a multiple of 8 bytes.";
  }
  if (pages.page_size > 0) {
    if (pages.num_pages > 0 && params.k.data == nullptr) {
      return missing("k", "num_pages", pages.num_pages);
    }
    if (pages.num_pages > 0 && params.v.data == nullptr) {
      return missing("v", "num_pages", pages.num_pages);
    }
    return "";
  }
  if (params.total_kv > 0) {
    if (params.k.data == nullptr) return missing("k", "total_kv", params.total_kv);
    if (params.v.data == nullptr) return missing("v", "total_kv", params.total_kv);
  }
  return "";
}

}  // namespace cutlass_kernels
