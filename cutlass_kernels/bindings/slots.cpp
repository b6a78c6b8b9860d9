// _C.append_by_slot, and what other calls that write to slots share with it.
#include "slots.h"

#include <cmath>

#include "device.h"
#include "functions.h"

namespace cutlass_kernels {
namespace {

/// Keys or values of a cache, for new ones of `rows`.
bool read_cache(const Tensor& tensor, const Rows& rows, bool hnd, TensorView* cache, std::int64_t* stride_page) {
  const auto token = std::size_t(1 + hnd), head = std::size_t(1 + !hnd);
  if (tensor.ndim != 4 || tensor.shape[head] != rows.heads || tensor.shape[3] != rows.dim ||
      !is_contiguous(tensor, 3) || tensor.shape[token] > kMostOfRow || !tensor.is_on_gpu(rows.device)) {
    return false;
  }
  *cache = {pointer<void>(tensor.data), tensor.strides[token], tensor.strides[head]};
  *stride_page = tensor.strides[0];
  return true;
}

/// A number, or fp32 factors on the device: one, or one for each head.
bool read_scale(const Torch& torch, PyObject* object, const Rows& rows, float* number, DeviceScale* factors) {
  double given = 1.0;
  if (read_number(object, &given)) {
    *number = float(given);
    return *number != 0.0f && std::isfinite(*number);
  }
  return read_factors(torch, object, rows.device, /*requests=*/0, rows.heads, rows.heads, factors);
}

py::object append_by_slot(PyObject* const* given, Py_ssize_t count) {
  expect(count == 1 + kSlotArguments);
  const Torch& torch = Torch::get();
  Rows key, value;
  AppendBySlotParams params;
  if (!read_rows(torch, given[0], &key) || !read_append(torch, given + 1, key, &value, &params) ||
      params.num_tokens == 0 || params.num_tokens > key.tokens) {
    return py::none();
  }
  params.num_kv_heads = key.heads;
  params.head_dim_qk = key.dim;
  params.k = key.read_here();
  return launch_on(torch, key.device,
                   [&](cudaStream_t stream) { return append_paged_kv_cache_by_slot(params, stream); });
}

}  // namespace

bool read_rows(const Tensor& tensor, Rows* rows) {
  if (tensor.ndim != 3 || tensor.device.device_type != kDLCUDA || !is_contiguous(tensor, 2) ||
      tensor.shape[1] > kMostOfRow || tensor.shape[2] > kMostOfRow) {
    return false;
  }
  rows->data = tensor.data;
  rows->device = tensor.device.device_id;
  rows->tokens = tensor.shape[0];
  rows->heads = int(tensor.shape[1]);
  rows->dim = int(tensor.shape[2]);
  rows->stride_token = tensor.strides[0];
  rows->stride_head = tensor.strides[1];
  return dtype_of(tensor, &rows->dtype);
}

bool read_rows(const Torch& torch, PyObject* object, Rows* rows) {
  Tensor tensor;
  return torch.read(object, &tensor) && read_rows(tensor, rows);
}

bool read_integers(const Torch& torch, PyObject* object, int device, Integers* integers) {
  Tensor tensor;
  if (!torch.read(object, &tensor) || tensor.ndim != 1 || !is_contiguous(tensor, 0) || !tensor.is_on_gpu(device) ||
      tensor.dtype.code != kDLInt || tensor.dtype.lanes != 1 || (tensor.dtype.bits != 32 && tensor.dtype.bits != 64)) {
    return false;
  }
  *integers = {pointer<const void>(tensor.data), tensor.dtype.bits == 64, tensor.shape[0]};
  return true;
}

bool read_append(const Torch& torch, PyObject* const* given, const Rows& key, Rows* value, AppendBySlotParams* params) {
  bool hnd = false;
  Tensor k_cache, v_cache;
  DType v_cache_dtype{};
  Integers slots;
  if (!read_layout(given[kCacheLayout], &hnd) || !read_rows(torch, given[kValue], value) ||
      !torch.read(given[kKeyCache], &k_cache) || !torch.read(given[kValueCache], &v_cache) ||
      !read_integers(torch, given[kSlots], key.device, &slots)) {
    return false;
  }
  const auto token = std::size_t(1 + hnd);
  if (value->device != key.device || value->dtype != key.dtype || value->heads != key.heads ||
      slots.count > value->tokens || !dtype_of(k_cache, &params->cache_dtype) || !dtype_of(v_cache, &v_cache_dtype) ||
      v_cache_dtype != params->cache_dtype ||
      !read_cache(k_cache, key, hnd, &params->k_cache, &params->k_stride_page) ||
      !read_cache(v_cache, *value, hnd, &params->v_cache, &params->v_stride_page) ||
      k_cache.shape[0] != v_cache.shape[0] || k_cache.shape[token] != v_cache.shape[token]) {
    return false;
  }
  params->dtype = key.dtype;
  params->head_dim_vo = value->dim;
  params->num_tokens = slots.count;
  params->slots = slots.data;
  params->slots_are_64_bit = slots.are_64_bit;
  params->v = value->read_here();
  params->page_size = std::int32_t(k_cache.shape[token]);
  params->num_pages = k_cache.shape[0];
  return read_scale(torch, given[kKScale], key, &params->k_scale, &params->k_scales) &&
         read_scale(torch, given[kVScale], key, &params->v_scale, &params->v_scales);
}

bool serves_current_device() {
  Device device;
  return current_device(&device).ok() && device.compute_capability >= CK_ARCHS_MIN &&
         (CK_ARCHS_MAX == 0 || device.compute_capability <= CK_ARCHS_MAX);
}

void add_slots(const py::object& module) {
  static PyMethodDef functions[] = {function<append_by_slot>("append_by_slot")};
  add_functions(module, functions);
}

}  // namespace cutlass_kernels
