// _C.direct_run: the run() of a planned batch, as a direct call (direct.h).
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>

#include "batch_plan.h"
#include "common/element_bytes.h"
#include "device.h"
#include "direct.h"
#include "enqueue.h"
#include "fields.h"
#include "functions.h"

namespace cutlass_kernels {
namespace {

// Arguments, in this order. V is None for a cache in pages.
enum { kQ, kK, kV, kQScale, kKScale, kVScale, kOut, kLse, kSinks, kReturnLse, kOptions, kArguments };

/// What the runs of a plan must be. Of the dataclass DirectRuns.
class DirectRuns {
 public:
  explicit DirectRuns(const Fields& fields)
      : owners_{fields.object("schedule"), fields.object("plan")},
        plan_(owners_[1].cast<const BatchPlan*>()),
        device_(fields.as<int>("device")),
        hnd_(fields.as<bool>("hnd")),
        rows_(fields.as<std::int64_t>("rows")),
        most_rows_(fields.as<std::int64_t>("most_rows")),
        least_kv_(fields.as<std::int64_t>("least_kv")),
        zero_(fields.as<bool>("zero")),
        captured_(fields.as<bool>("captured")),
        mode_(fields.object("pos_encoding_mode")),
        mask_is_causal_(fields.as<bool>("mask_is_causal")),
        planned_causal_(fields.as<bool>("causal")),
        alibi_(fields.object("alibi")),
        bits_(fields.object("bits")),
        bits_indptr_(fields.object("bits_indptr")) {
    params_ = plan_->params;
    params_.alibi.slopes = pointer<const float>(fields.address("alibi"));
    if (!bits_.is_none()) {
      const Tensor words = fields.tensor("bits");
      params_.mask.words = pointer<const std::uint32_t>(words.data);
      params_.mask.num_words = (words.shape[0] + 3) / 4;
      params_.mask.indptr = pointer<const std::int32_t>(fields.address("bits_indptr"));
    }
    scratch_at_ = fields.as<Address>("scratch");
    scratch_bytes_ = std::size_t(fields.as<std::int64_t>("scratch_bytes"));
    names_ = {py::str("causal"), py::str("pos_encoding_mode"), py::str("window_left"), py::str("logits_soft_cap"),
              py::str("sm_scale")};
    for (py::str& name : names_) PyUnicode_InternInPlace(&name.ptr());
  }

  /// The results, or None where the call is one for Python.
  py::object run(PyObject* const* given) const {
    const Torch& torch = Torch::get();
    const py::object no = py::none();
    AttentionParams params = params_;
    Tensor q;
    Matrix queries;
    if (!torch.read(given[kQ], &q) || !q.is_on_gpu(device_) || !has_dtype(q, params.q_dtype) ||
        !read_matrix(q, /*hnd=*/false, &queries)) {
      return no;
    }
    if (queries.heads != params.num_qo_heads || queries.dim != params.head_dim_qk) return no;
    if (rows_ >= 0 ? queries.tokens != rows_ : queries.tokens > most_rows_) return no;
    params.total_q = queries.tokens;
    params.q = queries.view();
    if (!(params.pages.page_size > 0 ? read_pages(torch, given, &params) : read_keys(torch, given, &params))) {
      return no;
    }
    if (!read_options(given, &params) || !read_sinks(torch, given[kSinks], queries.heads, device_, &params.sinks)) {
      return no;
    }
    const Address stream = torch.stream(device_);
    if (captured_ && is_capturing(pointer<CUstream_st>(stream))) return no;

    const ResultShape shape{queries.tokens, queries.heads, params.head_dim_vo, params.o_dtype, device_, false, zero_};
    const bool like_q = queries.dim == params.head_dim_vo && params.q_dtype == params.o_dtype &&
                        queries.stride_head == queries.dim && queries.stride_token == queries.heads * queries.dim;
    Results results;
    if (!prepare_results(torch, shape, given[kOut], given[kLse], given[kReturnLse], like_q ? given[kQ] : nullptr,
                         &results, &params)) {
      return no;
    }
    const Status status = run_batch(*plan_, params, device_, stream, scratch_at_, scratch_bytes_);
    return is_launched(status) ? results.returned() : no;
  }

 private:
  bool read_keys(const Torch& torch, PyObject* const* given, AttentionParams* params) const {
    Tensor k, v;
    Matrix keys, values;
    if (!torch.read(given[kK], &k) || !torch.read(given[kV], &v) || !k.is_on_gpu(device_) || !v.is_on_gpu(device_) ||
        !has_dtype(k, params->kv_dtype) || !has_dtype(v, params->kv_dtype) || !read_matrix(k, hnd_, &keys) ||
        !read_matrix(v, hnd_, &values)) {
      return false;
    }
    if (keys.heads != params->num_kv_heads || values.heads != params->num_kv_heads || keys.dim != params->head_dim_qk ||
        values.dim != params->head_dim_vo || keys.tokens != values.tokens || keys.tokens < least_kv_) {
      return false;
    }
    params->k = keys.view();
    params->v = values.view();
    params->total_kv = keys.tokens;
    return true;
  }

  bool read_pages(const Torch& torch, PyObject* const* given, AttentionParams* params) const {
    PagedCache cache;
    if (given[kV] != Py_None || !read_paged_cache(torch, given[kK], hnd_, &cache)) return false;
    if (cache.device != device_ || cache.dtype != params->kv_dtype || cache.page_size != params->pages.page_size ||
        cache.heads != params->num_kv_heads || cache.dim_qk != params->head_dim_qk ||
        cache.dim_vo != params->head_dim_vo || cache.pages < least_kv_) {
      return false;
    }
    if (size_of(params->q_dtype) == 1 && cache.page_size % kPagesOfFp8 != 0) return false;
    params->k = cache.k;
    params->v = cache.v;
    params->pages.num_pages = cache.pages;
    params->pages.k_stride_page = cache.k_stride_page;
    params->pages.v_stride_page = cache.v_stride_page;
    return true;
  }

  /// Scales, and the options that are in effect, which may be others than those of the plan.
  bool read_options(PyObject* const* given, AttentionParams* params) const {
    std::array<py::object, 5> values;
    for (std::size_t i = 0; i < names_.size(); ++i) {
      values[i] = py::reinterpret_steal<py::object>(PyObject_GetAttr(given[kOptions], names_[i].ptr()));
      if (!values[i]) throw py::error_already_set();
    }
    const auto& [causal, mode, window, cap, scale] = values;
    DirectOptions options;
    options.sm_scale = 1.0 / std::sqrt(double(params->head_dim_qk));
    double q_scale = 1.0, k_scale = 1.0, v_scale = 1.0;
    const int same = PyObject_RichCompareBool(mode.ptr(), mode_.ptr(), Py_EQ);
    if (same != 1) {
      PyErr_Clear();
      return false;
    }
    if (!read_flag(causal.ptr(), &options.causal) || !options.read(window.ptr(), cap.ptr(), scale.ptr()) ||
        !read_number(given[kQScale], &q_scale) || !read_number(given[kKScale], &k_scale) ||
        !read_number(given[kVScale], &v_scale)) {
      return false;
    }
    if (mask_is_causal_ && options.causal != planned_causal_) return false;
    options.sm_scale *= q_scale * k_scale;
    options.fill(params);
    params->v_scale = float(v_scale);
    return true;
  }

  std::array<py::object, 2> owners_;  // of the memory that the plan has addresses of; of the plan
  const BatchPlan* plan_;
  AttentionParams params_;
  int device_;
  bool hnd_;
  std::int64_t rows_, most_rows_;  // of q: so many, or where that is negative, at most so many
  std::int64_t least_kv_;          // rows of k and v, or pages
  bool zero_;                      // new outputs have rows that no kernel writes
  bool captured_;                  // captured runs are Python's: they make a tile list of their own
  py::object mode_;
  bool mask_is_causal_, planned_causal_;
  py::object alibi_, bits_, bits_indptr_;
  Address scratch_at_ = 0;
  std::size_t scratch_bytes_ = 0;
  std::array<py::str, 5> names_;  // of the options
};

PyObject* run(PyObject* capsule, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    if (count != kArguments) throw py::type_error("Wrong number of arguments.");
    return static_cast<DirectRuns*>(PyCapsule_GetPointer(capsule, nullptr))->run(given);
  });
}

}  // namespace

/// A function that makes direct runs of a plan. It holds what it needs.
py::object direct_run(py::object description) {
  static PyMethodDef run_def = fast("direct_run", &run);
  auto runs = std::make_unique<DirectRuns>(Fields(std::move(description)));
  PyObject* capsule = PyCapsule_New(runs.get(), nullptr, [](PyObject* holder) {
    delete static_cast<DirectRuns*>(PyCapsule_GetPointer(holder, nullptr));
  });
  if (capsule == nullptr) throw py::error_already_set();
  runs.release();
  const auto held = py::reinterpret_steal<py::object>(capsule);
  PyObject* function = PyCFunction_New(&run_def, held.ptr());
  if (function == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

}  // namespace cutlass_kernels
