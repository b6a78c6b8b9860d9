// cutlass_kernels._C: the C++ API for Python. Attention reads torch's tensors itself (torch.h): direct calls (direct.h)
// check the arguments of users, batch.cpp and fused.cpp take problems that Python has checked. All else gets addresses
// and strides in elements, and acts on the calling thread's current CUDA device. What enqueues work releases the GIL
// meanwhile (enqueue.h).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "cutlass_kernels/attention.h"
#include "device.h"
#include "functions.h"
#include "plan/estimate.h"
#include "plan/plan.h"
#include "registry/backends.h"
#include "registry/is_decode.h"
#include "registry/registry.h"
#include "registry/validate.h"

namespace py = pybind11;
using namespace cutlass_kernels;

namespace cutlass_kernels {
// Of the sources when the build was configured: commit.cpp.in.
extern const char* const kCommit;
}  // namespace cutlass_kernels

namespace {

std::vector<std::string> feature_names(std::uint32_t bits) {
  static const std::pair<Feature, const char*> kNames[] = {{kFeatureIntervalMask, "interval_mask"},
                                                           {kFeatureSoftCap, "soft_cap"},
                                                           {kFeatureSinks, "sinks"},
                                                           {kFeatureRaggedKv, "ragged_kv"},
                                                           {kFeatureBitMask, "bit_mask"},
                                                           {kFeaturePagedKv, "paged_kv"},
                                                           {kFeatureAlibi, "alibi"},
                                                           {kFeatureDeviceScales, "device_scales"},
                                                           {kFeatureStats, "stats"},
                                                           {kFeatureGeneralMask, "general_mask"}};
  std::vector<std::string> names;
  for (const auto& [bit, name] : kNames) {
    if (bits & bit) names.push_back(name);
  }
  return names;
}

py::list kernels() {
  py::list rows;
  for (const KernelInfo& info : list_kernels()) {
    py::dict row;
    row["name"] = info.name;
    row["backend"] = to_string(info.backend);
    row["q_dtype"] = to_string(info.q_dtype);
    row["kv_dtype"] = to_string(info.kv_dtype);
    row["head_dim_qk"] = info.head_dim_qk;
    row["head_dim_vo"] = info.head_dim_vo;
    row["features"] = feature_names(info.features);
    row["min_compute_capability"] = info.min_compute_capability;
    row["max_compute_capability"] = info.max_compute_capability;
    rows.append(row);
  }
  return rows;
}

AttentionParams sizes(const std::string& q_dtype, const std::string& kv_dtype, const std::string& o_dtype,
                      int num_qo_heads, int num_kv_heads, int head_dim_qk, int head_dim_vo, int batch_size,
                      std::int64_t total_q) {
  AttentionParams params;
  params.q_dtype = dtype_of(q_dtype);
  params.kv_dtype = dtype_of(kv_dtype);
  params.o_dtype = dtype_of(o_dtype);
  params.num_qo_heads = num_qo_heads;
  params.num_kv_heads = num_kv_heads;
  params.head_dim_qk = head_dim_qk;
  params.head_dim_vo = head_dim_vo;
  params.batch_size = batch_size;
  params.total_q = total_q;
  params.total_kv = 0;
  return params;
}

/// Makes a problem one that needs general tiles, whichever way its runs will: never read.
void set_general(AttentionParams& params, bool general) {
  static const float factor = 1.0f;
  params.logits_scale.data = general ? &factor : nullptr;
}

/// A GPU of this compute capability, with the shared memory that those have.
Device like_device(int compute_capability, int multiprocessors) {
  Device device = compute_capability / 10 == 8 ? kA100 : kH200;
  device.compute_capability = compute_capability;
  device.multiprocessors = multiprocessors;
  const bool has_little = compute_capability == 86 || compute_capability == 89 || compute_capability / 10 == 12;
  if (has_little) device.shared_memory_per_block = 99 << 10;
  return device;
}

/// A tensor's name and its strides of a token and of a head, in elements.
using Strides = std::tuple<std::string, std::int64_t, std::int64_t>;

void set_strides(AttentionParams& params, const std::vector<Strides>& strides) {
  for (const auto& [name, token, head] : strides) {
    if (name == "o") {
      params.o.stride_token = token;
      params.o.stride_head = head;
      continue;
    }
    ConstTensorView* view = name == "q" ? &params.q : name == "k" ? &params.k : name == "v" ? &params.v : nullptr;
    if (view == nullptr) throw py::value_error("strides of '" + name + "': use q, k, v or o.");
    // Never read; strides of an address that is null and 0 mean "not known yet".
    *view = {pointer<void>(16), token, head};
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "Compiled attention kernels. Addresses and strides (in elements) stand for tensors; see "
      "params.h.";
  m.def("version", &version);
  m.def("driver_problem", &driver_problem, "A sentence where the CUDA driver is too old for this module; else empty.");
  m.attr("cutlass_version") = CK_CUTLASS_VERSION;
  m.attr("commit") = kCommit;
  m.attr("call_counters") = kCallCounterWords;
  py::list names;
  for (const BackendName& entry : backends()) names.append(entry.name);
  m.attr("backends") = py::tuple(names);  // in the order of kAuto
  // Of what is no backend's: 10 * major + minor of the oldest and the newest GPU; 0: no newest.
  m.attr("compute_capabilities") = py::make_tuple(CK_ARCHS_MIN, CK_ARCHS_MAX);
  // A GPU of another major version runs PTX, which the driver compiles.
  m.attr("machine_codes") = py::make_tuple(CK_MACHINE_CODES);
  m.def("list_kernels", &kernels, "One dict per compiled kernel, in the order of instances.cmake.");
  m.def(
      "launch_count", [](const std::string& backend) { return launch_count(backend_of(backend)); },
      "Attention kernels of this backend that the threads of this process have launched.", py::arg("backend"));
  m.def(
      "not_supported_reasons",
      [](const std::string& backend, const std::string& q_dtype, const std::string& kv_dtype,
         const std::string& o_dtype, int num_qo_heads, int num_kv_heads, int head_dim_qk, int head_dim_vo,
         bool soft_cap, bool sinks, bool paged, bool bit_mask, bool alibi, bool device_scales, bool stats,
         int compute_capability, std::int64_t total_q, std::int64_t total_kv, const std::vector<Strides>& strides) {
        AttentionParams params =
            sizes(q_dtype, kv_dtype, o_dtype, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, 1, total_q);
        params.total_kv = total_kv;
        params.pages.page_size = paged ? 8 : 0;  // of fp8, other pages are the caller's to copy
        set_strides(params, strides);
        // Only whether there are such tensors matters.
        static float number = 0.0f;
        static const std::uint32_t word = 0;
        params.logits_soft_cap = soft_cap ? 1.0f : 0.0f;
        params.sinks = sinks ? &number : nullptr;
        params.mask.words = bit_mask ? &word : nullptr;
        params.alibi.slopes = alibi ? &number : nullptr;
        params.logits_scale.data = device_scales ? &number : nullptr;
        params.stats = stats ? &number : nullptr;
        return not_supported_reasons(backend_of(backend), params, compute_capability);
      },
      "Sentences that say why the backend cannot serve the request; empty if it can. strides: (q, "
      "k, v or o; of a "
      "token; of a head) of tensors where they are known.",
      py::arg("backend"), py::arg("q_dtype"), py::arg("kv_dtype"), py::arg("o_dtype"), py::arg("num_qo_heads"),
      py::arg("num_kv_heads"), py::arg("head_dim_qk"), py::arg("head_dim_vo"), py::arg("soft_cap"), py::arg("sinks"),
      py::arg("paged"), py::arg("bit_mask"), py::arg("alibi"), py::arg("device_scales"), py::arg("stats"),
      py::arg("compute_capability"), py::arg("total_q") = 0, py::arg("total_kv") = 0,
      py::arg("strides") = std::vector<Strides>());
  m.def(
      "is_decode",
      [](std::int64_t rows, int requests, int group_size, int head_dim_qk, int head_dim_vo, bool alone) {
        AttentionParams params;
        params.num_qo_heads = group_size;
        params.num_kv_heads = 1;
        params.head_dim_qk = head_dim_qk;
        params.head_dim_vo = head_dim_vo;
        params.batch_size = requests;
        params.total_q = rows;
        params.disable_split_kv = alone;
        return is_decode(params);
      },
      "Whether fa2 comes first under auto, of 16-bit keys and values. From: rows of all requests, "
      "requests, query heads per key head, head dimensions, whether results must not depend on the "
      "batch.");
  m.def(
      "candidates",
      [](const std::string& backend, const std::string& q_dtype, const std::string& kv_dtype, int num_qo_heads,
         int num_kv_heads, int head_dim_qk, int head_dim_vo, int batch_size, std::int64_t total_q,
         std::int64_t total_kv, bool causal, int page_size, int compute_capability, int multiprocessors, bool general,
         bool has_offsets, bool soft_cap, bool stats) {
        AttentionParams params = sizes(q_dtype, kv_dtype, q_dtype, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo,
                                       batch_size, total_q);
        static std::int32_t index = 0;  // never read
        static float number = 0.0f;
        if (batch_size > 1 || has_offsets) params.qo_indptr = params.kv_indptr = &index;
        params.total_kv = total_kv;
        params.causal = causal;
        params.pages.page_size = page_size;
        params.logits_soft_cap = soft_cap ? 1.0f : 0.0f;
        params.stats = stats ? &number : nullptr;
        set_general(params, general);
        std::string text = contradiction(params, /*with_tensors=*/false);
        if (!text.empty()) throw py::value_error(text);
        const auto of_request = [&](std::int64_t all) {
          return std::int32_t(
              std::min<std::int64_t>((all + batch_size - 1) / batch_size, std::numeric_limits<std::int32_t>::max()));
        };
        params.max_qo_len = of_request(total_q);
        params.max_kv_len = of_request(total_kv);
        std::vector<std::string> reasons;
        const KernelEntry* entry = choose(backend_of(backend), params, compute_capability, &reasons);
        for (const std::string& reason : reasons) text += reason + " ";
        if (entry == nullptr) throw std::runtime_error(text);
        std::vector<Choice> all;
        const Choice best = fastest(*entry, params, like_device(compute_capability, multiprocessors),
                                    /*schedule_is_kept=*/false, &all);
        py::list found;
        for (const Choice& choice : all) {
          const TileShape& tile = choice.candidate.shape;
          py::dict row;
          row["name"] = choice.candidate.name;
          row["rows"] = tile.rows;
          row["packed_heads"] = tile.packed_heads;
          row["blocks_per_sm"] = tile.blocks_per_sm;
          row["blocks_per_tile"] = tile.blocks_per_tile;
          row["list"] = choice.source == TileSource::kList;
          row["splits"] = choice.splits;
          row["combines"] = choice.combines;
          row["us"] = choice.candidate.time.per_key > 0 ? py::object(py::float_(choice.time)) : py::object(py::none());
          row["taken"] = choice.candidate.name == best.candidate.name && choice.source == best.source;
          found.append(row);
        }
        return found;
      },
      "The tiles that may compute requests of equal lengths, their estimated times (None of one beside which there is "
      "no other), and which is taken.",
      py::arg("backend"), py::arg("q_dtype"), py::arg("kv_dtype"), py::arg("num_qo_heads"), py::arg("num_kv_heads"),
      py::arg("head_dim_qk"), py::arg("head_dim_vo"), py::arg("batch_size"), py::arg("total_q"), py::arg("total_kv"),
      py::arg("causal"), py::arg("page_size"), py::arg("compute_capability"), py::arg("multiprocessors"),
      py::arg("general") = false, py::arg("has_offsets") = false, py::arg("soft_cap") = false,
      py::arg("stats") = false);
  m.def(
      "prefer_tile", &prefer_tile,
      "From now on, takes the tile of this name wherever it may compute a problem; \"\": the fastest. For measurements "
      "and tests.",
      py::arg("name"));
  bind_attention(m);
  bind_append(m);
  bind_merge(m);
  bind_prepare(m);
  add_rope(m);
  add_slots(m);
}
