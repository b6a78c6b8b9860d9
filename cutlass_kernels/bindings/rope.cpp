// _C.rope and _C.rope_append_by_slot: the kernels of rope.h, as direct calls (direct.h).
#include "cutlass_kernels/rope.h"

#include <cstdint>

#include "functions.h"
#include "slots.h"

namespace cutlass_kernels {
namespace {

/// [tokens, heads, head_size], or [tokens, heads * head_size].
bool read_heads(const Torch& torch, PyObject* object, std::int64_t head_size, Rows* rows) {
  Tensor tensor;
  if (!torch.read(object, &tensor)) return false;
  if (tensor.ndim == 2) {
    if (head_size <= 0 || tensor.shape[1] % head_size != 0) return false;
    const std::int64_t step = tensor.strides[1];
    tensor.ndim = 3;
    tensor.shape = {tensor.shape[0], tensor.shape[1] / head_size, head_size};
    tensor.strides = {tensor.strides[0], head_size * step, step};
  }
  return read_rows(tensor, rows) && rows->dim == head_size;
}

/// What both calls say of queries, keys and angles.
bool read_rope(const Torch& torch, const Rows& q, const Rows& k, PyObject* positions, PyObject* cos_sin,
               PyObject* is_neox, RopeParams* params) {
  Integers places;
  Tensor table;
  bool neox = false;
  if (q.device != k.device || q.dtype != k.dtype || q.tokens != k.tokens || q.dim != k.dim || q.tokens == 0 ||
      !read_integers(torch, positions, q.device, &places) || places.count != q.tokens || !torch.read(cos_sin, &table) ||
      table.ndim != 2 || table.strides[1] != 1 || !table.is_on_gpu(q.device) || table.shape[1] > q.dim ||
      !dtype_of(table, &params->cos_sin_dtype) || !read_flag(is_neox, &neox)) {
    return false;
  }
  params->dtype = q.dtype;
  params->num_qo_heads = q.heads;
  params->num_kv_heads = k.heads;
  params->head_dim = q.dim;
  params->rotary_dim = std::int32_t(table.shape[1]);
  params->interleaved = !neox;
  params->num_tokens = q.tokens;
  params->positions = places.data;
  params->positions_are_64_bit = places.are_64_bit;
  params->cos_sin = pointer<const void>(table.data);
  params->stride_position = table.strides[0];
  params->num_positions = table.shape[0];
  params->q = q.read_here();
  params->q_out = q.written_here();
  params->k = k.read_here();
  return true;
}

py::object rope(PyObject* const* given, Py_ssize_t count) {
  enum { kPositions, kQuery, kKey, kHeadSize, kCosSin, kIsNeox, kArguments };
  expect(count == kArguments);
  const Torch& torch = Torch::get();
  std::int64_t head_size = 0;
  Rows q, k;
  RopeParams params;
  if (!read_integer(given[kHeadSize], &head_size) || !read_heads(torch, given[kQuery], head_size, &q) ||
      !read_heads(torch, given[kKey], head_size, &k) ||
      !read_rope(torch, q, k, given[kPositions], given[kCosSin], given[kIsNeox], &params)) {
    return py::none();
  }
  params.k_out = k.written_here();
  return launch_on(torch, q.device, [&](cudaStream_t stream) { return apply_rope(params, stream); });
}

py::object rope_append_by_slot(PyObject* const* given, Py_ssize_t count) {
  enum { kQuery, kKey, kPositions, kCosSin, kIsNeox, kUpdateKey, kFirstOfSlots };
  expect(count == kFirstOfSlots + kSlotArguments);
  const Torch& torch = Torch::get();
  Rows q, k, v;
  bool update_key = false;
  RopeParams params;
  AppendBySlotParams append;
  if (!read_rows(torch, given[kQuery], &q) || !read_rows(torch, given[kKey], &k) ||
      !read_flag(given[kUpdateKey], &update_key) ||
      !read_rope(torch, q, k, given[kPositions], given[kCosSin], given[kIsNeox], &params) ||
      !read_append(torch, given + kFirstOfSlots, k, &v, &append) || append.num_tokens != k.tokens ||
      v.tokens != k.tokens) {
    return py::none();
  }
  if (update_key) params.k_out = k.written_here();
  return launch_on(torch, q.device,
                   [&](cudaStream_t stream) { return apply_rope_and_append_by_slot(params, append, stream); });
}

}  // namespace

void add_rope(const py::object& module) {
  static PyMethodDef functions[] = {function<rope>("rope"), function<rope_append_by_slot>("rope_append_by_slot")};
  add_functions(module, functions);
}

}  // namespace cutlass_kernels
