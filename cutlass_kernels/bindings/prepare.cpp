// _C.prepare and _C.round_output: the copies of prepare.h, for temporaries that Python allocates.
#include "cutlass_kernels/prepare.h"

#include "arguments.h"
#include "direct.h"
#include "enqueue.h"
#include "functions.h"

namespace cutlass_kernels {
namespace {

// rope_scale 0 stands for no rotary embedding.
py::object make_copies(PyObject* const* given, Py_ssize_t count) {
  PrepareParams p;
  PageTable& pages = p.pages;
  std::int64_t window_left = -1;
  cudaStream_t stream = nullptr;
  Positional(given, count)
      .read(p.q_dtype, p.kv_dtype, p.dtype, p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.head_dim_vo, p.batch_size)
      .read(p.qo_indptr, p.kv_indptr, p.total_q, p.total_kv, p.q, p.k, pages.k_stride_page, p.v, pages.v_stride_page)
      .read(pages.indices, pages.v_indices, pages.last_page_len, pages.page_size, pages.num_indices, pages.num_pages)
      .read(window_left, p.rope_scale, p.rope_theta, p.q_copy, p.k_copy, p.v_copy, p.tables, stream)
      .end();
  p.window_left = limited(window_left);
  p.rotate = p.rope_scale != 0.0;
  return enqueue([&] { return prepare(p, stream); });
}

py::object round_to_fp8(PyObject* const* given, Py_ssize_t count) {
  RoundParams p;
  cudaStream_t stream = nullptr;
  Positional(given, count).read(p.rows, p.num_heads, p.head_dim, p.from, p.to, stream).end();
  return enqueue([&] { return round_output(p, stream); });
}

}  // namespace

void add_prepare(const py::object& module) {
  static PyMethodDef functions[] = {function<make_copies>("prepare"), function<round_to_fp8>("round_output")};
  add_functions(module, functions);
  module.attr("unwritten_byte") = kUnwrittenByte;
}

}  // namespace cutlass_kernels
