// _C.direct_run: the run() of a planned batch, as a direct call (direct.h).
#include <array>
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>

#include "batch_plan.h"
#include "call.h"
#include "device.h"
#include "enqueue.h"
#include "fields.h"
#include "functions.h"

namespace cutlass_kernels {
namespace {

bool has_sizes_of(const HeadParams& a, const HeadParams& b) {
  const auto sizes = [](const HeadParams& x) {
    return std::tie(x.q_dtype, x.kv_dtype, x.o_dtype, x.num_qo_heads, x.num_kv_heads, x.head_dim_qk, x.head_dim_vo);
  };
  return sizes(a) == sizes(b);
}

/// What the runs of a plan must be.
class DirectRuns {
 public:
  DirectRuns(PyObject* const* given, Py_ssize_t count) {
    Positional(given, count)
        .read(schedule_, plan_object_, device_, hnd_, rows_, most_rows_, least_kv_, zero_, captured_, mode_)
        .read(mask_is_causal_, planned_causal_, alibi_, bits_, bits_indptr_, scratch_at_, scratch_bytes_)
        .end();
    plan_ = plan_object_.cast<const BatchPlan*>();
    params_ = plan_->params;
    params_.alibi.slopes = pointer<const float>(address_of(alibi_, "alibi"));
    if (!bits_.is_none()) {
      const Tensor words = tensor_of(bits_, "bits");
      params_.mask.words = pointer<const std::uint32_t>(words.data);
      params_.mask.num_words = (words.shape[0] + 3) / 4;
      params_.mask.indptr = pointer<const std::int32_t>(address_of(bits_indptr_, "bits_indptr"));
    }
    names_ = {py::str("causal"), py::str("window_left"), py::str("logits_soft_cap"), py::str("sm_scale"),
              py::str("pos_encoding_mode")};
    for (py::str& name : names_) PyUnicode_InternInPlace(&name.ptr());
  }

  /// The results, or None where the call is one for Python. v is None for a cache in pages.
  py::object run(PyObject* const* given, Py_ssize_t count) const {
    constexpr int kOrder[] = {kQ, kK, kV, kQDescale, kKDescale, kVDescale, kOut, kLse, kSinks, kReturnLse, kOptions};
    Call call;
    call.take(kOrder, given, count);
    call.params = params_;
    call.hnd = hnd_;
    call.zero = zero_;
    const bool paged = params_.pages.page_size > 0;
    const py::object no = py::none();
    if (!(paged ? read_caches(&call) : call.read_tensors()) || call.q.ndim != 3 || !call.read_queries() ||
        !(paged ? call.read_pages() : call.read_ragged_keys()) || !read_options(&call) || !call.read_output() ||
        !is_planned(call)) {
      return no;
    }
    const Address stream = call.torch.stream(device_);
    Results results;
    if ((captured_ && is_capturing(pointer<CUstream_st>(stream))) || !call.prepare(&results)) return no;
    const Status status = run_batch(*plan_, call.params, device_, stream, scratch_at_, scratch_bytes_);
    return is_launched(status) ? results.returned() : no;
  }

 private:
  static bool read_caches(Call* call) {
    return call->torch.read(call->at(kQ), &call->q) && !call->is_given(kV) &&
           read_cache(call->torch, call->at(kK), &call->k.tensor, &call->v.tensor);
  }

  /// Whether a call has the sizes that were planned.
  bool is_planned(const Call& call) const {
    const std::int64_t rows = call.queries.tokens, page_size = params_.pages.page_size;
    return call.device == device_ && has_sizes_of(call.params, params_) && call.params.pages.page_size == page_size &&
           (rows_ >= 0 ? rows == rows_ : rows <= most_rows_) &&
           (page_size > 0 ? call.k.count : call.k.rows.tokens) >= least_kv_;
  }

  /// Scales, and the options that are in effect, which may be others than those of the plan.
  bool read_options(Call* call) const {
    std::array<py::object, 5> values;
    for (std::size_t i = 0; i < names_.size(); ++i) {
      values[i] = py::reinterpret_steal<py::object>(PyObject_GetAttr(call->at(kOptions), names_[i].ptr()));
      if (!values[i]) throw py::error_already_set();
    }
    constexpr int kOrder[] = {kCausal, kWindowLeft, kLogitsSoftCap, kSmScale};
    for (std::size_t i = 0; i < std::size(kOrder); ++i) call->given[std::size_t(kOrder[i])] = values[i].ptr();
    const int same = PyObject_RichCompareBool(values.back().ptr(), mode_.ptr(), Py_EQ);
    if (same != 1) {
      PyErr_Clear();
      return false;
    }
    return call->read_mask() && call->read_logits() && !(mask_is_causal_ && call->params.causal != planned_causal_);
  }

  py::object schedule_, plan_object_;  // owners of the memory that the plan has addresses of, and of the plan
  const BatchPlan* plan_ = nullptr;
  AttentionParams params_;
  int device_ = 0;
  bool hnd_ = false;
  std::int64_t rows_ = 0, most_rows_ = 0;  // of q: so many, or where that is negative, at most so many
  std::int64_t least_kv_ = 0;              // rows of k and v, or pages
  bool zero_ = false;                      // new outputs have rows that no kernel writes
  bool captured_ = false;                  // captured runs are Python's: they make a tile list of their own
  py::object mode_;                        // pos_encoding_mode
  bool mask_is_causal_ = false, planned_causal_ = false;
  py::object alibi_, bits_, bits_indptr_;
  Address scratch_at_ = 0;
  std::size_t scratch_bytes_ = 0;
  std::array<py::str, 5> names_;  // of the options
};

PyObject* run(PyObject* capsule, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] { return static_cast<DirectRuns*>(PyCapsule_GetPointer(capsule, nullptr))->run(given, count); });
}

/// A function that makes direct runs of a plan. It holds what it needs.
py::object direct_run(PyObject* const* given, Py_ssize_t count) {
  static PyMethodDef run_def = fast("direct_run", &run);
  auto runs = std::make_unique<DirectRuns>(given, count);
  const py::capsule held(runs.get(), [](void* holder) { delete static_cast<DirectRuns*>(holder); });
  runs.release();
  PyObject* function = PyCFunction_New(&run_def, held.ptr());
  if (function == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

}  // namespace

void add_run(const py::object& module) {
  static PyMethodDef functions[] = {function<direct_run>("direct_run")};
  add_functions(module, functions);
}

}  // namespace cutlass_kernels
