// cutlass_kernels._C: the C++ API for Python. Tensors arrive as addresses and strides in elements,
// so the module works with any torch version and without torch. Every function acts on the calling
// thread's current CUDA device: the caller selects the device that its tensors and its stream
// belong to. What enqueues work releases the GIL meanwhile (enqueue.h); all else is done with it.
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
#include "copies.h"
#include "cutlass_kernels/attention.h"
#include "enqueue.h"
#include "launch.h"
#include "plan/schedule.h"
#include "registry/backends.h"
#include "registry/registry.h"
#include "registry/validate.h"

namespace py = pybind11;
using namespace cutlass_kernels;

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
                                                           {kFeatureStats, "stats"}};
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
  params.total_kv = 0;
  return params;
}

/// Makes a problem one that needs general tiles, whichever way its runs will: never read.
void set_general(AttentionParams& params, bool general) {
  static const float factor = 1.0f;
  params.logits_scale.data = general ? &factor : nullptr;
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

/// What stays the same between the runs of a batch: types, heads, lengths and their tile list. general: whether the
/// list is for runs with a custom mask, ALiBi or scales in device memory, which have tiles of their own.
class BoundPlan {
 public:
  BoundPlan(const std::string& backend, const std::string& q_dtype, const std::string& kv_dtype,
            const std::string& o_dtype, int num_qo_heads, int num_kv_heads, int head_dim_qk,
            int head_dim_vo, int batch_size, Address qo_indptr, Address kv_indptr,
            std::int64_t total_q, Address qo_indptr_host, std::int64_t total_kv, bool general)
      : backend_(backend_of(backend)),
        params_(sizes(q_dtype, kv_dtype, o_dtype, num_qo_heads, num_kv_heads, head_dim_qk,
                      head_dim_vo, batch_size, total_q)) {
    params_.qo_indptr = pointer<const std::int32_t>(qo_indptr);
    params_.kv_indptr = pointer<const std::int32_t>(kv_indptr);
    params_.qo_indptr_host = pointer<const std::int32_t>(qo_indptr_host);
    params_.total_kv = total_kv;
    set_general(params_, general);
    if (std::string fault = contradiction(params_, /*with_tensors=*/false); !fault.empty()) {
      throw py::value_error(fault);
    }
  }

  // The same plan for copies of keys and values, which have page tables of their own.
  BoundPlan with_tables(Address indices, Address v_indices) const {
    BoundPlan plan = *this;
    plan.params_.pages.indices = pointer<const std::int32_t>(indices);
    plan.params_.pages.v_indices = pointer<const std::int32_t>(v_indices);
    return plan;
  }

  // The same plan for one run that writes statistics of its rows.
  BoundPlan with_stats(Address stats) const {
    BoundPlan plan = *this;
    plan.params_.stats = pointer<float>(stats);
    return plan;
  }

  // Bytes of scratch that a run of a single request of these sizes can use, beside call counters.
  std::size_t scratch_bytes(std::int64_t total_q, std::int64_t total_kv) const {
    AttentionParams params = params_;
    params.total_q = total_q;
    params.total_kv = total_kv;
    return planned(params, backend_).layout.scratch_bytes;
  }

  // The plan of a batch, with the bytes of its schedule and of its scratch. The schedule is written where it fits into
  // the workspace, and the scratch into `room`: else the caller says what is missing, or has asked for nothing but the
  // sizes. page_size 0: no pages. The mask, as far as it is known, decides the size of tiles; runs may have another.
  // `copies` are made before the schedule, which is made from what they write, and after all checks: a plan that cannot
  // be made changes nothing. One call, since each through pybind11 with its arguments costs 1 to 2 us.
  static py::tuple of_batch(const std::string& backend, const std::string& q_dtype,
                            const std::string& kv_dtype, const std::string& o_dtype,
                            int num_qo_heads, int num_kv_heads, int head_dim_qk, int head_dim_vo,
                            int batch_size, Address qo_indptr, Address kv_indptr,
                            std::int64_t total_q, Address qo_indptr_host, std::int64_t total_kv,
                            bool general, Address indices, Address v_indices, Address last_page_len,
                            int page_size, std::int64_t num_indices, int fixed_split_size,
                            bool disable_split_kv, int max_kv_len, bool causal,
                            std::int64_t window_left, std::int64_t chunk_size, Address workspace,
                            std::size_t workspace_bytes, std::size_t room, const Copies& copies,
                            Address stream) {
    BoundPlan plan(backend, q_dtype, kv_dtype, o_dtype, num_qo_heads, num_kv_heads, head_dim_qk,
                   head_dim_vo, batch_size, qo_indptr, kv_indptr, total_q, qo_indptr_host, total_kv,
                   general);
    AttentionParams& params = plan.params_;
    params.pages.indices = pointer<const std::int32_t>(indices);
    params.pages.v_indices = pointer<const std::int32_t>(v_indices);
    params.pages.last_page_len = pointer<const std::int32_t>(last_page_len);
    params.pages.page_size = page_size;
    params.pages.num_indices = num_indices;
    params.fixed_split_size = fixed_split_size;
    params.disable_split_kv = disable_split_kv;
    params.max_kv_len = max_kv_len;
    set_mask(params, causal, window_left, chunk_size);
    plan.batch_ = {planned(params, plan.backend_), pointer<void>(workspace)};
    params.qo_indptr_host = nullptr;  // the caller's, only until here
    const PlanState& state = plan.batch_.plan;
    const std::size_t schedule_bytes = state.layout.schedule_bytes;
    const std::size_t scratch_bytes = state.layout.scratch_bytes;
    if (schedule_bytes <= workspace_bytes && scratch_bytes <= room) {
      if (schedule_bytes > 0) {
        raise_unless_ok(check_aligned("The workspace", plan.batch_.schedule));
      }
      const VectorCopies vectors = vector_copies(copies);
      enqueue([&] {
        auto* cuda_stream = pointer<CUstream_st>(stream);
        Status status = copy_vectors(vectors, cuda_stream);
        return status.ok() ? write_schedule(state, params, plan.batch_.schedule, cuda_stream)
                           : status;
      });
    }
    return py::make_tuple(std::move(plan), schedule_bytes, scratch_bytes);
  }

  // Returns the call, which may be repeated.
  Launch run(Address q, std::int64_t q_st, std::int64_t q_sh, Address k, std::int64_t k_st,
             std::int64_t k_sh, std::int64_t k_stride_page, Address v, std::int64_t v_st,
             std::int64_t v_sh, std::int64_t v_stride_page, Address o, std::int64_t o_st,
             std::int64_t o_sh, Address lse, std::int64_t lse_st, std::int64_t lse_sh,
             std::int64_t total_q, std::int64_t total_kv, std::int64_t num_pages, bool causal,
             std::int64_t window_left, std::int64_t chunk_size, Address mask_words,
             Address mask_indptr, std::int64_t mask_num_words, float sm_scale, float soft_cap,
             Address alibi_slopes, bool alibi_relative, bool alibi_after_cap, Address sinks,
             float v_scale, Address logits_scale, int logits_scale_stride, Address output_scale,
             int output_scale_stride, float skip_softmax_factor, Address counters, Address stream,
             Address workspace, std::size_t workspace_bytes) const {
    AttentionParams params = params_;
    params.q = {pointer<void>(q), q_st, q_sh};
    params.k = {pointer<void>(k), k_st, k_sh};
    params.v = {pointer<void>(v), v_st, v_sh};
    params.o = {pointer<void>(o), o_st, o_sh};
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
    params.mask = {pointer<const std::uint32_t>(mask_words),
                   pointer<const std::int32_t>(mask_indptr), mask_num_words};
    params.sm_scale = sm_scale;
    params.logits_soft_cap = soft_cap;
    params.alibi = {pointer<const float>(alibi_slopes), alibi_relative, alibi_after_cap};
    params.v_scale = v_scale;
    params.logits_scale = {pointer<const float>(logits_scale), logits_scale_stride};
    params.output_scale = {pointer<const float>(output_scale), output_scale_stride};
    params.skip_softmax_factor = skip_softmax_factor;
    Launch launch(params, backend_, batch_);
    launch.run(q, k, v, o, lse, sinks, counters, stream, workspace, workspace_bytes);
    return launch;
  }

  // A call of another batch, to be repeated with this one: its tensors have as many rows and pages as that one's, or
  // more than needed.
  Launch resume(const Launch& call) const {
    AttentionParams params = params_;
    params.q = call.params().q;
    params.k = call.params().k;
    params.v = call.params().v;
    params.o = call.params().o;
    params.lse_stride_token = call.params().lse_stride_token;
    params.lse_stride_head = call.params().lse_stride_head;
    params.total_q = call.params().total_q;
    params.pages.num_pages = call.params().pages.num_pages;
    params.pages.k_stride_page = call.params().pages.k_stride_page;
    params.pages.v_stride_page = call.params().pages.v_stride_page;
    if (params.pages.page_size == 0) params.total_kv = call.params().total_kv;
    params.causal = call.params().causal;
    params.window_left = call.params().window_left;
    params.chunk_size = call.params().chunk_size;
    params.mask = call.params().mask;
    params.sm_scale = call.params().sm_scale;
    params.logits_soft_cap = call.params().logits_soft_cap;
    params.alibi = call.params().alibi;
    params.v_scale = call.params().v_scale;
    params.logits_scale = call.params().logits_scale;
    params.output_scale = call.params().output_scale;
    params.skip_softmax_factor = call.params().skip_softmax_factor;
    return {params, backend_, batch_};
  }

 private:
  /// On the current device. Runs of a batch may have a mask, or options that share its tiles.
  static PlanState planned(const AttentionParams& params, Backend backend) {
    std::string fault = contradiction(params, /*with_tensors=*/false);
    if (!fault.empty()) throw py::value_error(fault);
    Device device;
    raise_unless_ok(current_device(&device));
    PlanOptions options;
    options.masked_later = true;
    options.call_counters = !is_batch(params);
    PlanState plan;
    raise_unless_ok(make_plan(params, backend, device, options, &plan));
    return plan;
  }

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
  PlannedBatch batch_;
};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "Compiled attention kernels. Addresses and strides (in elements) stand for tensors; see "
      "params.h.";
  m.def("version", &version);
  m.attr("cutlass_version") = CK_CUTLASS_VERSION;
  m.attr("call_counters") = kCallCounters;
  py::list names;
  for (const BackendName& entry : backends()) names.append(entry.name);
  m.attr("backends") = py::tuple(names);  // in the order of kAuto
  // Of what is no backend's: 10 * major + minor of the oldest and the newest GPU; 0: no newest.
  m.attr("compute_capabilities") = py::make_tuple(CK_ARCHS_MIN, CK_ARCHS_MAX);
  m.def("list_kernels", &kernels, "One dict per compiled kernel, in the order of instances.cmake.");
  m.def(
      "not_supported_reasons",
      [](const std::string& backend, const std::string& q_dtype, const std::string& kv_dtype,
         const std::string& o_dtype, int num_qo_heads, int num_kv_heads, int head_dim_qk,
         int head_dim_vo, bool soft_cap, bool sinks, bool paged, bool bit_mask, bool alibi,
         bool device_scales, bool stats, int compute_capability, std::int64_t total_q,
         std::int64_t total_kv, const std::vector<Strides>& strides) {
        AttentionParams params = sizes(q_dtype, kv_dtype, o_dtype, num_qo_heads, num_kv_heads,
                                       head_dim_qk, head_dim_vo, 1, total_q);
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
      py::arg("backend"), py::arg("q_dtype"), py::arg("kv_dtype"), py::arg("o_dtype"),
      py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim_qk"),
      py::arg("head_dim_vo"), py::arg("soft_cap"), py::arg("sinks"), py::arg("paged"),
      py::arg("bit_mask"), py::arg("alibi"), py::arg("device_scales"), py::arg("stats"),
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
      "The tile list as (request, tile) pairs, longest tile first.", py::arg("qo_indptr"),
      py::arg("kv_indptr"), py::arg("tile_rows"));
  m.def(
      "tile_rows",
      [](const std::string& backend, const std::string& dtype, int num_qo_heads, int num_kv_heads,
         int head_dim_qk, int head_dim_vo, int batch_size, std::int64_t total_q,
         int compute_capability, int multiprocessors, bool general) {
        AttentionParams params = sizes(dtype, dtype, dtype, num_qo_heads, num_kv_heads, head_dim_qk,
                                       head_dim_vo, batch_size, total_q);
        set_general(params, general);
        std::string text = contradiction(params, /*with_tensors=*/false);
        if (!text.empty()) throw py::value_error(text);
        std::vector<std::string> reasons;
        const KernelEntry* entry =
            choose(backend_of(backend), params, compute_capability, &reasons);
        for (const std::string& reason : reasons) text += reason + " ";
        if (entry == nullptr) throw std::runtime_error(text);
        Device device = kH200;
        device.compute_capability = compute_capability;
        device.multiprocessors = multiprocessors;
        return entry->tile(params, device).rows;
      },
      "Query rows per tile of the kernel that would be chosen.", py::arg("backend"),
      py::arg("dtype"), py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim_qk"),
      py::arg("head_dim_vo"), py::arg("batch_size"), py::arg("total_q"),
      py::arg("compute_capability"), py::arg("multiprocessors"), py::arg("general") = false);
  // Positional: keywords would cost 7 us a call where positions cost 0.4.
  py::class_<Launch>(m, "Launch").def("__call__", &Launch::run);
  py::class_<BoundPlan>(m, "Plan")
      .def(py::init<const std::string&, const std::string&, const std::string&, const std::string&,
                    int, int, int, int, int, Address, Address, std::int64_t, Address, std::int64_t,
                    bool>(),
           py::arg("backend"), py::arg("q_dtype"), py::arg("kv_dtype"), py::arg("o_dtype"),
           py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim_qk"),
           py::arg("head_dim_vo"), py::arg("batch_size"), py::arg("qo_indptr"),
           py::arg("kv_indptr"), py::arg("total_q"), py::arg("qo_indptr_host") = 0,
           py::arg("total_kv") = 0, py::arg("general") = false)
      .def_static("of_batch", &BoundPlan::of_batch)
      .def("with_tables", &BoundPlan::with_tables, py::arg("indices"), py::arg("v_indices"))
      .def("with_stats", &BoundPlan::with_stats, py::arg("stats"))
      .def("scratch_bytes", &BoundPlan::scratch_bytes, py::arg("total_q"), py::arg("total_kv"))
      .def("run", &BoundPlan::run)
      .def("resume", &BoundPlan::resume);
  bind_append(m);
  bind_fmha_v2(m);
  bind_indices(m);
  bind_merge(m);
  bind_prepare(m);
  bind_repeats(m);
}
