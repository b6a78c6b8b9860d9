// _C.single_prefill and _C.single_decode: attention of one request, as a direct call (direct.h).
#include <cmath>
#include <cstdint>

#include "direct.h"
#include "functions.h"

namespace cutlass_kernels {
namespace {

// Arguments, in this order.
enum {
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kSinks,
  kReturnLse,
  kCausal,
  kLayout,
  kWindow,
  kSoftCap,
  kSmScale,
  kQScale,
  kKScale,
  kVScale,
  kBackend,
  kArguments
};

/// `squeezed`: q and the results have no dimension of rows.
py::object attend(PyObject* const* given, Py_ssize_t count, bool squeezed) {
  const Torch& torch = Torch::get();
  const py::object no = py::none();
  if (count != kArguments) throw py::type_error("Wrong number of arguments.");
  Tensor q, k, v;
  if (!torch.read(given[kQ], &q) || !torch.read(given[kK], &k) || !torch.read(given[kV], &v)) {
    return no;
  }
  const int device = q.device.device_id;
  if (!q.is_on_gpu(device) || !k.is_on_gpu(device) || !v.is_on_gpu(device)) return no;
  if (squeezed) {
    if (q.ndim != 2) return no;
    q.ndim = 3;
    q.shape = {1, q.shape[0], q.shape[1]};
    q.strides = {q.shape[1] * q.strides[0], q.strides[0], q.strides[1]};
  }
  bool hnd = false;
  Matrix queries, keys, values;
  if (!read_layout(given[kLayout], &hnd) || !read_matrix(q, /*hnd=*/false, &queries) || !read_matrix(k, hnd, &keys) ||
      !read_matrix(v, hnd, &values)) {
    return no;
  }
  AttentionParams params;
  DType v_dtype{};
  if (!dtype_of(q, &params.q_dtype) || !dtype_of(k, &params.kv_dtype) || !dtype_of(v, &v_dtype)) {
    return no;
  }
  // fp8 may have to be converted first.
  if (params.q_dtype != params.kv_dtype || v_dtype != params.kv_dtype || q.item_bytes() != 2) {
    return no;
  }
  if (keys.tokens != values.tokens || keys.heads != values.heads || keys.dim != queries.dim || queries.heads <= 0 ||
      keys.heads <= 0 || queries.heads % keys.heads != 0) {
    return no;
  }
  params.o_dtype = params.q_dtype;
  params.num_qo_heads = int(queries.heads);
  params.num_kv_heads = int(keys.heads);
  params.head_dim_qk = int(queries.dim);
  params.head_dim_vo = int(values.dim);
  params.total_q = queries.tokens;
  params.total_kv = keys.tokens;
  params.q = queries.view();
  params.k = keys.view();
  params.v = values.view();

  DirectOptions options;
  options.sm_scale = 1.0 / std::sqrt(double(queries.dim));
  double q_scale = 1.0, k_scale = 1.0, v_scale = 1.0;
  Backend backend{};
  if (!read_flag(given[kCausal], &options.causal) || !options.read(given[kWindow], given[kSoftCap], given[kSmScale]) ||
      !read_number(given[kQScale], &q_scale) || !read_number(given[kKScale], &k_scale) ||
      !read_number(given[kVScale], &v_scale) || !read_backend(given[kBackend], &backend) ||
      !read_sinks(torch, given[kSinks], queries.heads, device, &params.sinks)) {
    return no;
  }
  options.sm_scale *= q_scale * k_scale;
  options.fill(&params);
  params.v_scale = float(v_scale);

  ResultShape shape{queries.tokens, queries.heads, values.dim, params.o_dtype, device, squeezed};
  const bool like_q = queries.dim == values.dim && queries.stride_head == queries.dim &&
                      queries.stride_token == queries.heads * queries.dim;
  Results results;
  if (!prepare_results(torch, shape, given[kOut], given[kLse], given[kReturnLse], like_q ? given[kQ] : nullptr,
                       &results, &params)) {
    return no;
  }
  return is_launched(launch_once(torch, params, backend, device)) ? results.returned() : no;
}

PyObject* single_prefill(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] { return attend(given, count, /*squeezed=*/false); });
}

PyObject* single_decode(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] { return attend(given, count, /*squeezed=*/true); });
}

}  // namespace

void add_single(const py::object& module) {
  static PyMethodDef prefill_def = fast("single_prefill", &single_prefill);
  static PyMethodDef decode_def = fast("single_decode", &single_decode);
  add_function(module, &prefill_def);
  add_function(module, &decode_def);
}

}  // namespace cutlass_kernels
