// _C.append_paged_kv_cache and _C.get_batch_indices_positions: the kernels of append.h.
#include "cutlass_kernels/append.h"

#include "arguments.h"
#include "enqueue.h"
#include "functions.h"

namespace cutlass_kernels {
namespace {

py::object append(PyObject* const* given, Py_ssize_t count) {
  AppendParams p;
  PageTable& pages = p.pages;
  cudaStream_t stream = nullptr;
  Positional(given, count)
      .read(p.dtype, p.num_kv_heads, p.head_dim_qk, p.head_dim_vo, p.batch_size, p.num_tokens, p.batch_indices)
      .read(p.positions, p.kv_indptr, pages.indices, pages.num_indices, pages.num_pages, pages.page_size, p.k, p.v)
      .read(p.k_cache.data, pages.k_stride_page, p.k_cache.stride_token, p.k_cache.stride_head)
      .read(p.v_cache.data, pages.v_stride_page, p.v_cache.stride_token, p.v_cache.stride_head, stream)
      .end();
  return enqueue([&] { return append_paged_kv_cache(p, stream); });
}

py::object find_positions(PyObject* const* given, Py_ssize_t count) {
  BatchIndicesPositionsParams p;
  cudaStream_t stream = nullptr;
  Positional(given, count)
      .read(p.batch_size, p.num_tokens, p.append_indptr, p.seq_lens, p.batch_indices, p.positions, stream)
      .end();
  return enqueue([&] { return get_batch_indices_positions(p, stream); });
}

}  // namespace

void add_append(const py::object& module) {
  static PyMethodDef functions[] = {function<append>("append_paged_kv_cache"),
                                    function<find_positions>("get_batch_indices_positions")};
  add_functions(module, functions);
}

}  // namespace cutlass_kernels
