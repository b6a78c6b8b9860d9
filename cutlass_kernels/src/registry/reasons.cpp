#include "registry/reasons.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "registry/fits.h"

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

const char* feature_name(std::uint32_t bit) {
  switch (bit) {
    case kFeatureIntervalMask:
      return "causal masks with a window or chunks";
    case kFeatureSoftCap:
      return "logits_soft_cap";
    case kFeatureSinks:
      return "sinks";
    case kFeatureRaggedKv:
      return "ragged keys and values";
    case kFeatureBitMask:
      return "custom masks";
    case kFeatureGeneralMask:
      return "windows to the right, chunks without causality, and masks over spread keys";
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

}  // namespace

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
    reasons->push_back(
        "q_dtype=" + std::string(to_string(params.q_dtype)) + " with kv_dtype=" + to_string(params.kv_dtype) +
        " is not compiled for " + name + " (have " +
        distinct(left,
                 [](const KernelInfo& info) {
                   return std::string(to_string(info.q_dtype)) +
                          (info.q_dtype == info.kv_dtype ? "" : std::string(" with ") + to_string(info.kv_dtype));
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
    reasons->push_back("head_dim_qk=" + number(params.head_dim_qk) + " with head_dim_vo=" + number(params.head_dim_vo) +
                       " is not compiled for " + name + " (have " +
                       distinct(left,
                                [](const KernelInfo& info) {
                                  return info.head_dim_qk == info.head_dim_vo
                                             ? number(info.head_dim_qk)
                                             : number(info.head_dim_qk) + "/" + number(info.head_dim_vo);
                                }) +
                       "; smaller multiples of 8 are padded).");
  }
  const std::uint32_t needed = needed_features(params);
  if (!keep([&](const KernelInfo& info) { return (info.features & needed) == needed; })) {
    for (std::uint32_t bit = 1; bit != 0 && bit <= needed; bit <<= 1) {
      const bool missing = std::none_of(left.begin(), left.end(),
                                        [&](const KernelEntry* entry) { return (entry->info.features & bit) != 0; });
      if ((needed & bit) != 0 && missing) {
        reasons->push_back("The " + name + " kernels do not have " + feature_name(bit) + ".");
      }
    }
  }
  // What latent kernels alone do is a question to one of them, though a narrower kernel comes first.
  const std::string asked = needs_latent_kernel(params);
  const auto latent = std::find_if(left.begin(), left.end(), [&](const KernelEntry* entry) {
    return !asked.empty() && entry->reads_slots && entry->info.head_dim_vo == params.head_dim_vo;
  });
  const KernelEntry& nearest = latent == left.end() ? *left.front() : **latent;
  if (has_rope(params) && !nearest.reads_rope) {
    reasons->push_back(std::string(params.k_rope.data == nullptr ? "q_rope" : "k_rope") + " is not read by the " +
                       name +
                       " kernels of this build: put its columns behind the first 512 of the tensor "
                       "it belongs to, in the same rows.");
  }
  if (!asked.empty() && !nearest.reads_slots) {
    reasons->push_back(asked + " is for the kernels of latent attention (head dimensions 576 and 512), not for these " +
                       name +
                       " kernels: " + (params.pages.slots_per_page > 0 ? "give each request pages." : "leave it out."));
  }
  if (nearest.refusal != nullptr) {
    std::string refusal = nearest.refusal(params);
    if (!refusal.empty()) reasons->push_back(std::move(refusal));
  }
}

std::string joined(const std::vector<std::string>& sentences) {
  std::string text;
  for (const std::string& sentence : sentences) text += (text.empty() ? "" : " ") + sentence;
  return text;
}

}  // namespace cutlass_kernels
