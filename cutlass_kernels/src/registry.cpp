#include "registry.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "cutlass_kernels/version.h"

namespace cutlass_kernels {
namespace {

std::string number(std::int64_t value) { return std::to_string(value); }

std::string capability(int value) { return number(value / 10) + "." + number(value % 10); }

/// "64, 128, 256" without repetitions.
template <typename Get>
std::string distinct(const std::vector<const KernelEntry*>& entries, Get get) {
  std::vector<std::string> seen;
  for (const KernelEntry* entry : entries) {
    std::string text = get(entry->info);
    if (std::find(seen.begin(), seen.end(), text) == seen.end()) seen.push_back(std::move(text));
  }
  std::string joined;
  for (const std::string& text : seen) joined += (joined.empty() ? "" : ", ") + text;
  return joined;
}

std::uint32_t needed_features(const AttentionParams& params) {
  std::uint32_t bits = kFeatureIntervalMask;
  bits |= params.pages.page_size > 0 ? kFeaturePagedKv : kFeatureRaggedKv;
  if (params.logits_soft_cap > 0.0f) bits |= kFeatureSoftCap;
  if (params.sinks != nullptr) bits |= kFeatureSinks;
  if (params.mask.words != nullptr) bits |= kFeatureBitMask;
  if (params.alibi.slopes != nullptr) bits |= kFeatureAlibi;
  if (params.logits_scale.data != nullptr || params.output_scale.data != nullptr) {
    bits |= kFeatureDeviceScales;
  }
  if (params.stats != nullptr) bits |= kFeatureStats;
  return bits;
}

const char* feature_name(std::uint32_t bit) {
  switch (bit) {
    case kFeatureIntervalMask:
      return "causal, window and chunk masks";
    case kFeatureSoftCap:
      return "logits_soft_cap";
    case kFeatureSinks:
      return "sinks";
    case kFeatureRaggedKv:
      return "ragged keys and values";
    case kFeatureBitMask:
      return "custom masks";
    case kFeaturePagedKv:
      return "paged keys and values";
    case kFeatureAlibi:
      return "ALiBi";
    case kFeatureDeviceScales:
      return "scales in device memory";
    case kFeatureStats:
      return "softmax statistics";
  }
  return "an unnamed feature";
}

bool types_fit(const KernelInfo& info, const AttentionParams& params) {
  return info.q_dtype == params.q_dtype && info.kv_dtype == params.kv_dtype;
}

/// Kernels write the type of the queries, but no e5m2; those of fp8 also either type of 16 bits.
bool writes(DType q_dtype, DType o_dtype) {
  if (size_of(q_dtype) == 1 && size_of(o_dtype) == 2) return true;
  return o_dtype == q_dtype && o_dtype != DType::kFloat8E5M2;
}

bool head_dims_fit(const KernelInfo& info, const AttentionParams& params) {
  return params.head_dim_qk <= info.head_dim_qk && params.head_dim_vo <= info.head_dim_vo;
}

bool device_fits(const KernelInfo& info, int compute_capability) {
  return compute_capability >= info.min_compute_capability &&
         (info.max_compute_capability == 0 || compute_capability <= info.max_compute_capability);
}

bool serves(const KernelEntry& entry, Backend backend, const AttentionParams& params,
            int compute_capability) {
  const KernelInfo& info = entry.info;
  const std::uint32_t needed = needed_features(params);
  return fits(info, backend, params) && writes(info.q_dtype, params.o_dtype) &&
         device_fits(info, compute_capability) && (info.features & needed) == needed &&
         (entry.refusal == nullptr || entry.refusal(params).empty());
}

/// Why no kernel of one backend serves the request: sieves them by one property after the other.
void explain(Backend backend, const AttentionParams& params, int compute_capability,
             std::vector<std::string>* reasons) {
  const std::string name = to_string(backend);
  std::vector<const KernelEntry*> left;
  for (const KernelEntry& entry : registry()) {
    if (entry.info.backend == backend) left.push_back(&entry);
  }
  if (left.empty()) {
    reasons->push_back("This build has no " + name + " kernels.");
    return;
  }
  const auto keep = [&](auto predicate) {
    std::vector<const KernelEntry*> kept;
    for (const KernelEntry* entry : left) {
      if (predicate(entry->info)) kept.push_back(entry);
    }
    if (kept.empty()) return false;  // nothing is left: go on with all, to name every reason
    left = std::move(kept);
    return true;
  };

  if (!keep([&](const KernelInfo& info) { return device_fits(info, compute_capability); })) {
    int lowest = std::numeric_limits<int>::max();
    int highest = 0;
    for (const KernelEntry* entry : left) {
      const int top = entry->info.max_compute_capability;
      lowest = std::min(lowest, entry->info.min_compute_capability);
      highest = std::max(highest, top == 0 ? std::numeric_limits<int>::max() : top);
    }
    std::string range = capability(lowest);
    if (highest == std::numeric_limits<int>::max()) {
      range += " and up";
    } else if (highest > lowest) {
      range += " to " + capability(highest);
    }
    reasons->push_back("The " + name + " kernels of this build run on compute capability " + range +
                       "; this device has " + capability(compute_capability) + ".");
  }
  if (!keep([&](const KernelInfo& info) { return types_fit(info, params); })) {
    reasons->push_back("q_dtype=" + std::string(to_string(params.q_dtype)) + " with kv_dtype=" +
                       to_string(params.kv_dtype) + " is not compiled for " + name + " (have " +
                       distinct(left,
                                [](const KernelInfo& info) {
                                  return std::string(to_string(info.q_dtype)) +
                                         (info.q_dtype == info.kv_dtype
                                              ? ""
                                              : std::string(" with ") + to_string(info.kv_dtype));
                                }) +
                       ").");
  }
  if (!writes(params.q_dtype, params.o_dtype)) {
    const std::string o_dtype = "o_dtype=" + std::string(to_string(params.o_dtype));
    const std::string q_dtype = to_string(params.q_dtype);
    if (size_of(params.q_dtype) == 1) {
      const bool own = writes(params.q_dtype, params.q_dtype);
      reasons->push_back(o_dtype + " is not written from " + q_dtype + " tensors: use float16" +
                         (own ? ", bfloat16 or " + q_dtype : " or bfloat16") + ".");
    } else {
      reasons->push_back(o_dtype + " differs from q_dtype=" + q_dtype + ": " + name +
                         " writes the type of the queries.");
    }
  }
  if (!keep([&](const KernelInfo& info) { return head_dims_fit(info, params); })) {
    reasons->push_back("head_dim_qk=" + number(params.head_dim_qk) + " with head_dim_vo=" +
                       number(params.head_dim_vo) + " is not compiled for " + name + " (have " +
                       distinct(left,
                                [](const KernelInfo& info) {
                                  return info.head_dim_qk == info.head_dim_vo
                                             ? number(info.head_dim_qk)
                                             : number(info.head_dim_qk) + "/" +
                                                   number(info.head_dim_vo);
                                }) +
                       "; smaller multiples of 8 are padded).");
  }
  const std::uint32_t needed = needed_features(params);
  if (!keep([&](const KernelInfo& info) { return (info.features & needed) == needed; })) {
    for (std::uint32_t bit = 1; bit != 0 && bit <= needed; bit <<= 1) {
      const bool missing = std::none_of(left.begin(), left.end(), [&](const KernelEntry* entry) {
        return (entry->info.features & bit) != 0;
      });
      if ((needed & bit) != 0 && missing) {
        reasons->push_back("The " + name + " kernels do not have " + feature_name(bit) + ".");
      }
    }
  }
  if (left.front()->refusal != nullptr) {
    std::string refusal = left.front()->refusal(params);
    if (!refusal.empty()) reasons->push_back(std::move(refusal));
  }
}

/// `name` was left at kNotSet, and is the number of `what`.
std::string not_set(const char* name, const char* what) {
  return std::string(name) + " is not set: it counts " + what + ", 0 where there are none.";
}

std::string misaligned(const char* name, const ConstTensorView& view, int item_bytes,
                       bool with_pointer) {
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

}  // namespace

int size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return 1;
  }
  return 1;
}

const std::vector<KernelEntry>& registry() {
  static const std::vector<KernelEntry> entries = [] {
    std::vector<KernelEntry> filled;
    for (const RegistryRow& row : registry_rows()) {
      filled.push_back(row.entry());
      filled.back().info = row.info;
    }
    return filled;
  }();
  return entries;
}

const std::vector<KernelInfo>& list_kernels() {
  static const std::vector<KernelInfo> infos = [] {
    std::vector<KernelInfo> filled;
    for (const RegistryRow& row : registry_rows()) filled.push_back(row.info);
    return filled;
  }();
  return infos;
}

bool fits(const KernelInfo& info, Backend backend, const AttentionParams& params) {
  return (backend == Backend::kAuto || backend == info.backend) && types_fit(info, params) &&
         head_dims_fit(info, params);
}

const KernelEntry* choose(Backend backend, const AttentionParams& params, int compute_capability,
                          std::vector<std::string>* reasons) {
  const KernelEntry* best = nullptr;
  const auto rank = [](const KernelEntry& entry) {
    // fa3 is the faster backend wherever it runs; then the least padding wins.
    return std::make_pair(-static_cast<int>(entry.info.backend),
                          entry.info.head_dim_qk + entry.info.head_dim_vo);
  };
  for (const KernelEntry& entry : registry()) {
    if (serves(entry, backend, params, compute_capability) &&
        (best == nullptr || rank(entry) < rank(*best))) {
      best = &entry;
    }
  }
  if (best != nullptr) return best;

  for (Backend candidate : {Backend::kFa3, Backend::kFa2}) {
    const bool compiled =
        std::any_of(registry().begin(), registry().end(),
                    [&](const KernelEntry& entry) { return entry.info.backend == candidate; });
    if (backend == candidate || (backend == Backend::kAuto && compiled)) {
      explain(candidate, params, compute_capability, reasons);
    }
  }
  if (reasons->empty()) {
    reasons->push_back("Backend " + number(static_cast<int>(backend)) +
                       " is not one of this library: use kAuto, kFa2 or kFa3.");
  }
  return nullptr;
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
    return "head_dim_qk=" + number(params.head_dim_qk) +
           " and head_dim_vo=" + number(params.head_dim_vo) + " must be multiples of " +
           number(columns) + ": rows are read 16 bytes at a time.";
  }
  // Below 2^31 by more than any tile, so that the end of a tile is a 32-bit number too.
  constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max() - 1023;
  const bool paged = params.pages.page_size > 0;
  if (params.total_q == kNotSet) return not_set("total_q", "the rows of q");
  if (params.total_kv == kNotSet && !paged) return not_set("total_kv", "the rows of k and v");
  if (params.total_q < 0 || params.total_q > kMaxTokens || params.total_kv < kNotSet ||
      params.total_kv > kMaxTokens) {
    return "total_q=" + number(params.total_q) + " and total_kv=" + number(params.total_kv) +
           " must lie between 0 and " + number(kMaxTokens) +
           ": the offsets in qo_indptr and kv_indptr are 32-bit.";
  }
  for (const auto& [name, value] : {std::pair("sm_scale", params.sm_scale),
                                    std::pair("logits_soft_cap", params.logits_soft_cap),
                                    std::pair("v_scale", params.v_scale)}) {
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
        return "qo_indptr_host[" + number(b + 1) + "]=" + number(host[b + 1]) + " follows " +
               number(host[b]) + ": offsets start at 0 and never decrease.";
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
    if (pages.table_stride == 0 && pages.num_indices < 0) {
      return not_set("num_indices", "the entries of indices");
    }
  }
  if (pages.table_stride != 0) {
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    if (pages.table_stride < 0 || pages.table_stride > kMost / params.batch_size) {
      return "table_stride=" + number(pages.table_stride) +
             " with batch_size=" + number(params.batch_size) + " makes a page table of more than " +
             number(kMost) + " entries, or none: split the batch.";
    }
    if (pages.table_width < 0 || pages.table_width > pages.table_stride) {
      return "table_width=" + number(pages.table_width) +
             " must lie between 0 and table_stride=" + number(pages.table_stride) + ".";
    }
  }
  if (pages.v_offset != 0 &&
      (pages.v_offset < 0 ||
       pages.num_pages > std::numeric_limits<std::int32_t>::max() - pages.v_offset)) {
    return "v_offset=" + number(pages.v_offset) + " with num_pages=" + number(pages.num_pages) +
           ": page numbers of v are 32-bit numbers, from 0 on.";
  }
  if (pages.page_size > 0 && ((pages.k_stride_page * size_of(params.kv_dtype)) % 16 != 0 ||
                              (pages.v_stride_page * size_of(params.kv_dtype)) % 16 != 0)) {
    return "k_stride_page=" + number(pages.k_stride_page) +
           " and v_stride_page=" + number(pages.v_stride_page) +
           " elements must be multiples of 16 bytes. Copy the cache into such a layout.";
  }
  if (params.max_qo_len < 0) {
    return "max_qo_len=" + number(params.max_qo_len) + " must not be negative; 0 means not known.";
  }
  if (params.chunk_size < 0) {
    return "chunk_size=" + number(params.chunk_size) +
           " must not be negative; 0 means not chunked.";
  }

  const int q_bytes = size_of(params.q_dtype);
  const int kv_bytes = size_of(params.kv_dtype);
  const int o_bytes = size_of(params.o_dtype);
  std::string fault = misaligned("q", params.q, q_bytes, with_tensors);
  if (fault.empty()) fault = misaligned("k", params.k, kv_bytes, with_tensors);
  if (fault.empty()) fault = misaligned("v", params.v, kv_bytes, with_tensors);
  if (fault.empty())
    fault = misaligned("o", {params.o.data, params.o.stride_token, params.o.stride_head}, o_bytes,
                       with_tensors);
  if (!fault.empty() || !with_tensors) return fault;

  const bool offsets = params.qo_indptr != nullptr && params.kv_indptr != nullptr;
  const bool none = params.qo_indptr == nullptr && params.kv_indptr == nullptr;
  if (!offsets && !(none && params.batch_size == 1)) {
    return "batch_size=" + number(params.batch_size) +
           " needs qo_indptr and kv_indptr; only a single request may leave them out, both of "
           "them.";
  }
  const auto missing = [](const char* name, const char* total, std::int64_t value) {
    return std::string(name) + " is null although " + total + "=" + number(value) + ".";
  };
  if (params.total_q > 0) {
    if (params.q.data == nullptr) return missing("q", "total_q", params.total_q);
    if (params.o.data == nullptr) return missing("o", "total_q", params.total_q);
  }
  // Zero strides are fine to read (a broadcast), but rows and heads must not be written to one place.
  const auto overlaps = [&](std::int64_t stride_token, std::int64_t stride_head) {
    return (stride_token == 0 && params.total_q > 1) ||
           (stride_head == 0 && params.num_qo_heads > 1);
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
    if (pages.table_stride > 0) {
      if (pages.table_width > 0 && pages.indices == nullptr) {
        return "table_width=" + number(pages.table_width) + " pages, but indices is null.";
      }
    } else if (pages.num_indices > 0 &&
               (pages.indices == nullptr || pages.last_page_len == nullptr)) {
      return "num_indices=" + number(pages.num_indices) +
             " pages, but indices or last_page_len is null.";
    }
    if (params.kv_indptr == nullptr) return "A paged cache needs qo_indptr and kv_indptr.";
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

std::vector<std::string> not_supported_reasons(Backend backend, const AttentionParams& params,
                                               int compute_capability) {
  std::vector<std::string> reasons;
  std::string fault = contradiction(params, /*with_tensors=*/false);
  if (!fault.empty()) reasons.push_back(std::move(fault));
  std::vector<std::string> refused;
  if (choose(backend, params, compute_capability, &refused) == nullptr) {
    reasons.insert(reasons.end(), refused.begin(), refused.end());
  }
  return reasons;
}

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
  }
  return "unknown dtype";
}

const char* to_string(Backend backend) {
  switch (backend) {
    case Backend::kAuto:
      return "auto";
    case Backend::kFa2:
      return "fa2";
    case Backend::kFa3:
      return "fa3";
  }
  return "unknown backend";
}

const char* version() { return CK_VERSION; }

}  // namespace cutlass_kernels
