// cutlass_kernels._C: the C++ API for Python. Attention reads torch's tensors itself (torch.h): direct calls (direct.h)
// check the arguments of users, batch.cpp and fused.cpp take problems that Python has checked. All else gets addresses
// and strides in elements, and acts on the calling thread's current CUDA device. What enqueues work releases the GIL
// meanwhile (enqueue.h).
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "batch_plan.h"
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
using namespace pybind11::literals;

namespace cutlass_kernels {
// Of the sources when the build was configured: commit.cpp.in.
extern const char* const kCommit;
}  // namespace cutlass_kernels

namespace {

py::list list_of(const std::vector<std::string>& texts) {
  py::list list;
  for (const std::string& text : texts) list.append(text);
  return list;
}

py::list feature_names(std::uint32_t bits) {
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
  py::list names;
  for (const auto& [bit, name] : kNames) {
    if (bits & bit) names.append(name);
  }
  return names;
}

/// One dict per compiled kernel, in the order of instances.cmake.
py::object kernels(PyObject* const*, Py_ssize_t) {
  py::list rows;
  for (const KernelInfo& info : list_kernels()) {
    rows.append(py::dict(
        "name"_a = info.name, "backend"_a = to_string(info.backend), "q_dtype"_a = to_string(info.q_dtype),
        "kv_dtype"_a = to_string(info.kv_dtype), "head_dim_qk"_a = info.head_dim_qk, "head_dim_vo"_a = info.head_dim_vo,
        "features"_a = feature_names(info.features), "min_compute_capability"_a = info.min_compute_capability,
        "max_compute_capability"_a = info.max_compute_capability));
  }
  return std::move(rows);
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

void set_strides(AttentionParams& params, const py::sequence& all) {
  for (const py::handle of_tensor : all) {
    std::string name;
    std::int64_t token = 0, head = 0;
    Positional(PySequence_Fast_ITEMS(of_tensor.ptr()), PySequence_Fast_GET_SIZE(of_tensor.ptr()))
        .read(name, token, head)
        .end();
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

// Never read: only whether there are such tensors matters.
float a_number = 0.0f;
const std::uint32_t a_word = 0;
const std::int32_t an_index = 0;

/// Sentences that say why the backend cannot serve the request; empty if it can. The last argument: (q, k, v or o;
/// stride of a token; of a head) of tensors where they are known.
py::object reasons_of(PyObject* const* given, Py_ssize_t count) {
  AttentionParams p;
  Backend backend{};
  bool soft_cap = false, sinks = false, paged = false, bit_mask = false, alibi = false, scales = false, stats = false;
  int compute_capability = 0;
  py::sequence strides = py::tuple();
  p.total_q = p.total_kv = 0;
  Positional(given, count)
      .read(backend, p.q_dtype, p.kv_dtype, p.o_dtype, p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.head_dim_vo)
      .read(soft_cap, sinks, paged, bit_mask, alibi, scales, stats, compute_capability)
      .maybe(p.total_q, p.total_kv, strides)
      .end();
  p.pages.page_size = paged ? 8 : 0;  // of fp8, other pages are the caller's to copy
  set_strides(p, strides);
  p.logits_soft_cap = soft_cap ? 1.0f : 0.0f;
  p.sinks = sinks ? &a_number : nullptr;
  p.mask.words = bit_mask ? &a_word : nullptr;
  p.alibi.slopes = alibi ? &a_number : nullptr;
  p.logits_scale.data = scales ? &a_number : nullptr;
  p.stats = stats ? &a_number : nullptr;
  return list_of(not_supported_reasons(backend, p, compute_capability));
}

/// Whether fa2 comes first under auto, of 16-bit keys and values. num_qo_heads is the number per key head.
py::object is_decode_of(PyObject* const* given, Py_ssize_t count) {
  AttentionParams p;
  p.num_kv_heads = 1;
  Positional(given, count)
      .read(p.total_q, p.batch_size, p.num_qo_heads, p.head_dim_qk, p.head_dim_vo, p.disable_split_kv)
      .end();
  return py::bool_(is_decode(p));
}

/// The tiles that may compute requests of equal lengths, their estimated times (None of one beside which there is no
/// other), and which is taken.
py::object candidates_of(PyObject* const* given, Py_ssize_t count) {
  AttentionParams p;
  Backend backend{};
  int compute_capability = 0, multiprocessors = 0;
  bool general = false, has_offsets = false, soft_cap = false, stats = false;
  Positional(given, count)
      .read(backend, p.q_dtype, p.kv_dtype, p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.head_dim_vo)
      .read(p.batch_size, p.total_q, p.total_kv, p.causal, p.pages.page_size, compute_capability, multiprocessors)
      .maybe(general, has_offsets, soft_cap, stats)
      .end();
  p.o_dtype = p.q_dtype;
  if (p.batch_size > 1 || has_offsets) p.qo_indptr = p.kv_indptr = &an_index;
  p.logits_soft_cap = soft_cap ? 1.0f : 0.0f;
  p.stats = stats ? &a_number : nullptr;
  if (general) make_general(&p);
  std::string text = contradiction(p, /*with_tensors=*/false);
  if (!text.empty()) throw py::value_error(text);
  const auto of_request = [&](std::int64_t all) {
    return std::int32_t(
        std::min<std::int64_t>((all + p.batch_size - 1) / p.batch_size, std::numeric_limits<std::int32_t>::max()));
  };
  p.max_qo_len = of_request(p.total_q);
  p.max_kv_len = of_request(p.total_kv);
  std::vector<std::string> reasons;
  const KernelEntry* entry = choose(backend, p, compute_capability, &reasons);
  for (const std::string& reason : reasons) text += reason + " ";
  if (entry == nullptr) throw std::runtime_error(text);
  std::vector<Choice> all;
  const Choice best =
      fastest(*entry, p, like_device(compute_capability, multiprocessors), /*schedule_is_kept=*/false, &all);
  py::list found;
  for (const Choice& choice : all) {
    const TileShape& tile = choice.candidate.shape;
    const bool is_best = choice.candidate.name == best.candidate.name && choice.source == best.source;
    const bool is_alone = choice.candidate.time.per_key <= 0;
    found.append(py::dict(
        "name"_a = choice.candidate.name, "rows"_a = tile.rows, "packed_heads"_a = tile.packed_heads,
        "blocks_per_sm"_a = tile.blocks_per_sm, "blocks_per_tile"_a = tile.blocks_per_tile,
        "list"_a = choice.source == TileSource::kList, "splits"_a = choice.splits, "combines"_a = choice.combines,
        "us"_a = is_alone ? py::object(py::none()) : py::object(py::float_(choice.time)), "taken"_a = is_best));
  }
  return std::move(found);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "Compiled attention kernels. Addresses and strides (in elements) stand for tensors; see "
      "params.h.";
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
  static PyMethodDef functions[] = {
      function<version>("version"),           function<driver_problem>("driver_problem"),
      function<launch_count>("launch_count"),
      function<prefer_tile>("prefer_tile"),  // for measurements and tests
      function<kernels>("list_kernels"),      function<reasons_of>("not_supported_reasons"),
      function<is_decode_of>("is_decode"),    function<candidates_of>("candidates")};
  add_functions(m, functions);
  add_attention(m);
  for (auto* add : {&add_append, &add_merge, &add_prepare, &add_quantized, &add_rope, &add_slots}) add(m);
}
