// cutlass_kernels._C: the C++ API for Python. Tensors arrive as addresses and strides in elements,
// so the module works with any torch version and without torch. Every function acts on the calling
// thread's current CUDA device: the caller selects the device that its tensors and its stream
// belong to. The GIL is kept, as a call only enqueues.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cutlass_kernels/attention.h"
#include "registry.h"
#include "schedule.h"

namespace py = pybind11;
using namespace cutlass_kernels;

namespace {

using Address = std::uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

void raise_unless_ok(const Status& status) {
  if (status.ok()) return;
  if (status.code == StatusCode::kInvalidArgument) throw py::value_error(status.message);
  throw std::runtime_error(status.message);
}

DType dtype_of(const std::string& name) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3,
                      DType::kFloat8E5M2}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw py::value_error("dtype '" + name + "' is not known to the compiled kernels.");
}

Backend backend_of(const std::string& name) {
  for (Backend backend : {Backend::kAuto, Backend::kFa2, Backend::kFa3}) {
    if (name == to_string(backend)) return backend;
  }
  throw py::value_error("backend '" + name + "' is not compiled code: use 'auto', 'fa2' or 'fa3'.");
}

std::vector<std::string> feature_names(std::uint32_t bits) {
  static const std::pair<Feature, const char*> kNames[] = {{kFeatureIntervalMask, "interval_mask"},
                                                           {kFeatureSoftCap, "soft_cap"},
                                                           {kFeatureSinks, "sinks"},
                                                           {kFeatureRaggedKv, "ragged_kv"},
                                                           {kFeatureBitMask, "bit_mask"},
                                                           {kFeaturePagedKv, "paged_kv"}};
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

AttentionParams sizes(const std::string& q_dtype, const std::string& kv_dtype,
                      const std::string& o_dtype, int num_qo_heads, int num_kv_heads,
                      int head_dim_qk, int head_dim_vo, int batch_size, std::int64_t total_q) {
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
  return params;
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
    ConstTensorView* view = name == "q"   ? &params.q
                            : name == "k" ? &params.k
                            : name == "v" ? &params.v
                                          : nullptr;
    if (view == nullptr) throw py::value_error("strides of '" + name + "': use q, k, v or o.");
    // Never read; strides of an address that is null and 0 mean "not known yet".
    *view = {pointer<void>(16), token, head};
  }
}

/// What stays the same between the runs of a batch: types, heads, lengths and their work list.
class Plan {
 public:
  Plan(const std::string& backend, const std::string& q_dtype, const std::string& kv_dtype,
       const std::string& o_dtype, int num_qo_heads, int num_kv_heads, int head_dim_qk,
       int head_dim_vo, int batch_size, Address qo_indptr, Address kv_indptr, std::int64_t total_q,
       Address qo_indptr_host, std::int64_t total_kv)
      : backend_(backend_of(backend)),
        params_(sizes(q_dtype, kv_dtype, o_dtype, num_qo_heads, num_kv_heads, head_dim_qk,
                      head_dim_vo, batch_size, total_q)) {
    params_.qo_indptr = pointer<const std::int32_t>(qo_indptr);
    params_.kv_indptr = pointer<const std::int32_t>(kv_indptr);
    params_.qo_indptr_host = pointer<const std::int32_t>(qo_indptr_host);
    params_.total_kv = total_kv;
    if (std::string fault = contradiction(params_, /*with_tensors=*/false); !fault.empty()) {
      throw py::value_error(fault);
    }
  }

  // kv_indptr counts pages.
  void set_pages(Address indices, Address v_indices, Address last_page_len, int page_size,
                 std::int64_t num_indices) {
    params_.pages.indices = pointer<const std::int32_t>(indices);
    params_.pages.v_indices = pointer<const std::int32_t>(v_indices);
    params_.pages.last_page_len = pointer<const std::int32_t>(last_page_len);
    params_.pages.page_size = page_size;
    params_.pages.num_indices = num_indices;
  }

  std::size_t schedule_bytes() const { return workspace_size(params_, backend_); }

  // The mask, as far as it is known, decides the size of tiles; runs may have another.
  void make_schedule(Address workspace, std::size_t bytes, Address stream, bool causal,
                     std::int64_t window_left, std::int64_t chunk_size) {
    set_mask(params_, causal, window_left, chunk_size);
    raise_unless_ok(cutlass_kernels::make_schedule(params_, pointer<void>(workspace), bytes,
                                                   pointer<CUstream_st>(stream), &params_.schedule,
                                                   backend_));
    params_.qo_indptr_host = nullptr;  // the caller's, only until here
  }

  void run(Address q, std::int64_t q_st, std::int64_t q_sh, Address k, std::int64_t k_st,
           std::int64_t k_sh, std::int64_t k_stride_page, Address v, std::int64_t v_st,
           std::int64_t v_sh, std::int64_t v_stride_page, Address o, std::int64_t o_st,
           std::int64_t o_sh, Address lse, std::int64_t lse_st, std::int64_t lse_sh,
           std::int64_t total_q, std::int64_t total_kv, std::int64_t num_pages, bool causal,
           std::int64_t window_left, std::int64_t chunk_size, float sm_scale, float soft_cap,
           Address sinks, float v_scale, Address next_tile, Address stream) const {
    AttentionParams params = params_;
    if (next_tile != 0) params.schedule.next_tile = pointer<std::int32_t>(next_tile);
    params.q = {pointer<void>(q), q_st, q_sh};
    params.k = {pointer<void>(k), k_st, k_sh};
    params.v = {pointer<void>(v), v_st, v_sh};
    params.o = {pointer<void>(o), o_st, o_sh};
    params.lse = pointer<float>(lse);
    params.lse_stride_token = lse_st;
    params.lse_stride_head = lse_sh;
    params.total_q = total_q;
    if (params.pages.page_size > 0) {
      params.pages.num_pages = num_pages;
      params.pages.k_stride_page = k_stride_page;
      params.pages.v_stride_page = v_stride_page;
    } else {
      params.total_kv = total_kv;
    }
    set_mask(params, causal, window_left, chunk_size);
    params.sm_scale = sm_scale;
    params.logits_soft_cap = soft_cap;
    params.sinks = pointer<const float>(sinks);
    params.v_scale = v_scale;
    raise_unless_ok(attention(params, nullptr, 0, pointer<CUstream_st>(stream), backend_));
  }

 private:
  static void set_mask(AttentionParams& params, bool causal, std::int64_t window_left,
                       std::int64_t chunk_size) {
    // More keys than there can be is no limit.
    constexpr std::int64_t kAll = std::numeric_limits<std::int32_t>::max();
    params.causal = causal;
    params.window_left = std::int32_t(std::min(window_left, kAll));
    params.chunk_size = std::int32_t(std::min(chunk_size, kAll));
  }

  Backend backend_;
  AttentionParams params_;
};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "Compiled attention kernels. Addresses and strides (in elements) stand for tensors; see "
      "params.h.";
  m.def("version", &version);
  m.attr("cutlass_version") = CK_CUTLASS_VERSION;
  m.def("list_kernels", &kernels, "One dict per compiled kernel, in the order of instances.cmake.");
  m.def(
      "not_supported_reasons",
      [](const std::string& backend, const std::string& q_dtype, const std::string& kv_dtype,
         const std::string& o_dtype, int num_qo_heads, int num_kv_heads, int head_dim_qk,
         int head_dim_vo, bool soft_cap, bool sinks, bool paged, int compute_capability,
         std::int64_t total_q, std::int64_t total_kv, const std::vector<Strides>& strides) {
        AttentionParams params = sizes(q_dtype, kv_dtype, o_dtype, num_qo_heads, num_kv_heads,
                                       head_dim_qk, head_dim_vo, 1, total_q);
        params.total_kv = total_kv;
        params.pages.page_size = paged ? 1 : 0;
        set_strides(params, strides);
        static const float sink = 0.0f;  // only whether there are sinks matters
        params.logits_soft_cap = soft_cap ? 1.0f : 0.0f;
        params.sinks = sinks ? &sink : nullptr;
        return not_supported_reasons(backend_of(backend), params, compute_capability);
      },
      "Sentences that say why the backend cannot serve the request; empty if it can. strides: (q, "
      "k, v or o; of a "
      "token; of a head) of tensors where they are known.",
      py::arg("backend"), py::arg("q_dtype"), py::arg("kv_dtype"), py::arg("o_dtype"),
      py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim_qk"),
      py::arg("head_dim_vo"), py::arg("soft_cap"), py::arg("sinks"), py::arg("paged"),
      py::arg("compute_capability"), py::arg("total_q") = 0, py::arg("total_kv") = 0,
      py::arg("strides") = std::vector<Strides>());
  m.def(
      "schedule_on_host",
      [](const std::vector<std::int32_t>& qo_indptr, const std::vector<std::int32_t>& kv_indptr,
         int tile_rows) {
        if (qo_indptr.empty() || qo_indptr.size() != kv_indptr.size() || tile_rows <= 0) {
          throw py::value_error(
              "qo_indptr and kv_indptr need batch_size + 1 entries each, tile_rows > 0.");
        }
        std::vector<std::pair<int, int>> list;
        for (const WorkItem& item : schedule_on_host(qo_indptr, kv_indptr, tile_rows)) {
          list.emplace_back(item.batch, item.tile);
        }
        return list;
      },
      "The work list as (request, tile) pairs, longest tile first.", py::arg("qo_indptr"),
      py::arg("kv_indptr"), py::arg("tile_rows"));
  m.def(
      "tile_rows",
      [](const std::string& backend, const std::string& dtype, int num_qo_heads, int num_kv_heads,
         int head_dim_qk, int head_dim_vo, int batch_size, std::int64_t total_q,
         int compute_capability) {
        const AttentionParams params = sizes(dtype, dtype, dtype, num_qo_heads, num_kv_heads,
                                             head_dim_qk, head_dim_vo, batch_size, total_q);
        std::string text = contradiction(params, /*with_tensors=*/false);
        if (!text.empty()) throw py::value_error(text);
        std::vector<std::string> reasons;
        const KernelEntry* entry =
            choose(backend_of(backend), params, compute_capability, &reasons);
        for (const std::string& reason : reasons) text += reason + " ";
        if (entry == nullptr) throw std::runtime_error(text);
        return entry->tile_rows(params, compute_capability);
      },
      "Query rows per tile of the kernel that would be chosen.", py::arg("backend"),
      py::arg("dtype"), py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim_qk"),
      py::arg("head_dim_vo"), py::arg("batch_size"), py::arg("total_q"),
      py::arg("compute_capability"));
  m.def(
      "workspace_size",
      [](const std::string& backend, const std::string& dtype, int num_qo_heads, int num_kv_heads,
         int head_dim_qk, int head_dim_vo, int batch_size, std::int64_t total_q) {
        return workspace_size(sizes(dtype, dtype, dtype, num_qo_heads, num_kv_heads, head_dim_qk,
                                    head_dim_vo, batch_size, total_q),
                              backend_of(backend));
      },
      "Bytes of device memory that the schedule of a batch takes.", py::arg("backend"),
      py::arg("dtype"), py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim_qk"),
      py::arg("head_dim_vo"), py::arg("batch_size"), py::arg("total_q"));

  py::class_<Plan>(m, "Plan")
      .def(py::init<const std::string&, const std::string&, const std::string&, const std::string&,
                    int, int, int, int, int, Address, Address, std::int64_t, Address,
                    std::int64_t>(),
           py::arg("backend"), py::arg("q_dtype"), py::arg("kv_dtype"), py::arg("o_dtype"),
           py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim_qk"),
           py::arg("head_dim_vo"), py::arg("batch_size"), py::arg("qo_indptr"),
           py::arg("kv_indptr"), py::arg("total_q"), py::arg("qo_indptr_host") = 0,
           py::arg("total_kv") = 0)
      .def("set_pages", &Plan::set_pages, py::arg("indices"), py::arg("v_indices"),
           py::arg("last_page_len"), py::arg("page_size"), py::arg("num_indices"))
      .def_property_readonly("schedule_bytes", &Plan::schedule_bytes)
      .def("make_schedule", &Plan::make_schedule, py::arg("workspace"), py::arg("bytes"),
           py::arg("stream"), py::arg("causal") = false, py::arg("window_left") = -1,
           py::arg("chunk_size") = 0)
      // Positional: keywords would cost 7 us a call where positions cost 0.4.
      .def("run", &Plan::run);
}
