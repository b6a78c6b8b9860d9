#include "registry/registry.h"

#include <algorithm>
#include <cstdint>

#include "common/element_bytes.h"
#include "cutlass_kernels/version.h"
#include "latent/dims.h"
#include "plan/packing.h"
#include "registry/backends.h"
#include "registry/fits.h"
#include "registry/is_decode.h"
#include "registry/reasons.h"
#include "registry/validate.h"

namespace cutlass_kernels {

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

bool serves(const KernelEntry& entry, const AttentionParams& params, int compute_capability) {
  const KernelInfo& info = entry.info;
  const auto has_features = [&] {
    const std::uint32_t needed = needed_features(params);
    return (info.features & needed) == needed;
  };
  return types_fit(info, params) && head_dims_fit(info, params) && writes(info.q_dtype, params.o_dtype) &&
         device_fits(info, compute_capability) && has_features() && (entry.reads_rope || !has_rope(params)) &&
         (entry.reads_slots || needs_latent_kernel(params).empty()) &&
         (entry.refusal == nullptr || entry.refusal(params).empty());
}

namespace {

/// Whether this is latent attention (src/latent), whose fa3 kernel computes 64 rows, however few there are.
bool is_latent(const AttentionParams& params) {
  return params.head_dim_qk == mla::kLatentDim + mla::kRopeDim && params.head_dim_vo == mla::kLatentDim;
}

}  // namespace

bool is_decode(const AttentionParams& params) {
  return params.q_dtype == params.kv_dtype && size_of(params.q_dtype) == 2 &&
         (params.head_dim_qk == params.head_dim_vo || is_latent(params)) && params.pages.slots_per_page == 0 &&
         decodes(params);
}

namespace {

/// Whether 16-bit queries have so few rows per key head and request, on average, that fa2 waits for the memory of an
/// 8-bit cache only (32 rows, 8 requests over 8k keys: 63 us, fa3 67; 64 rows: 103, 69). As SHORT_ROWS of the Python
/// package. Where results must not depend on the batch, those of its part count (plan/call.h).
bool has_few_rows_of_fp8(const AttentionParams& params) {
  constexpr std::int64_t kFp8ShortRows = 32;
  if (size_of(params.kv_dtype) == size_of(params.q_dtype)) return false;
  if (params.batch_invariant) return decodes(params);
  const int group_size = params.num_qo_heads / params.num_kv_heads;
  return is_alone(params) || params.total_q * group_size <= kFp8ShortRows * params.batch_size;
}

/// The backends in the order in which kAuto asks them.
std::vector<Backend> ranked(const AttentionParams& params) {
  std::vector<Backend> order;
  if (is_decode(params) || has_few_rows_of_fp8(params)) order.push_back(Backend::kFa2);
  for (const BackendName& entry : backends()) {
    if (order.empty() || entry.backend != order.front()) order.push_back(entry.backend);
  }
  return order;
}

}  // namespace

const KernelEntry* choose(Backend backend, const AttentionParams& params, int compute_capability,
                          std::vector<std::string>* reasons) {
  const auto padded_dim = [](const KernelEntry* entry) { return entry->info.head_dim_qk + entry->info.head_dim_vo; };
  for (const Backend candidate : ranked(params)) {
    if (backend != Backend::kAuto && backend != candidate) continue;
    const KernelEntry* best = nullptr;  // of a backend, the least padding wins
    for (const KernelEntry& entry : registry()) {
      if (entry.info.backend != candidate || (best != nullptr && padded_dim(&entry) >= padded_dim(best))) continue;
      if (serves(entry, params, compute_capability)) best = &entry;
    }
    if (best != nullptr) return best;
  }
  for (const BackendName& candidate : backends()) {
    const bool compiled = std::any_of(registry().begin(), registry().end(), [&](const KernelEntry& entry) {
      return entry.info.backend == candidate.backend;
    });
    if (backend == candidate.backend || (backend == Backend::kAuto && compiled)) {
      explain(candidate.backend, params, compute_capability, reasons);
    }
  }
  if (reasons->empty()) {
    reasons->push_back("Backend " + std::to_string(static_cast<int>(backend)) +
                       " is not one of this library: use kAuto, or another enumerator of Backend.");
  }
  return nullptr;
}

std::vector<std::string> not_supported_reasons(Backend backend, const AttentionParams& params, int compute_capability) {
  std::vector<std::string> reasons;
  std::string fault = contradiction(params, /*with_tensors=*/false);
  // What makes no sense, such as no heads at all, has no number of rows per key head that choose() could ask for.
  if (!fault.empty()) return {fault};
  if (choose(backend, params, compute_capability, &reasons) != nullptr) reasons.clear();
  return reasons;
}

const char* version() { return CK_VERSION; }

}  // namespace cutlass_kernels
