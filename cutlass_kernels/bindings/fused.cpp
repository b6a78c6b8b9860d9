// _C.fused_prefill: trtllm_fmha_v2_prefill as a direct call (direct.h), and _C.attend_fused: the same of a Problem that
// Python has checked. Kernels read the indptrs and the block tables on the device.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/element_bytes.h"
#include "direct.h"
#include "fields.h"
#include "functions.h"

namespace cutlass_kernels {
namespace {

// Arguments, in this order.
enum {
  kQkv,
  kInputLayout,
  kMaxQLen,
  kMaxKvLen,
  kBmm1Scale,
  kBmm2Scale,
  kBatchSize,
  kCumSeqLensQ,
  kCumSeqLensKv,
  kBlockTables,
  kOut,
  kOutDtype,
  kSinks,
  kSoftCap,
  kMaskMode,
  kWindow,
  kChunk,
  kSaveStats,
  kSkipSoftmax,
  kBackend,
  kArguments
};

/// Queries, keys and values of a layout.
struct Layout {
  Matrix q;
  Matrix k, v;       // without pages
  PagedCache cache;  // with pages
  bool paged = false;
  bool separate = false;         // separate caches of keys and values, in one allocation
  PyObject* q_tensor = nullptr;  // whose empty_like() is an output; null: none
  DType dtype{};
  int device = 0;
};

bool is_sequence(PyObject* object, Py_ssize_t size) {
  return PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == size;
}

/// The matrix number `index` of [tokens, count, heads, dim].
bool read_part(const Tensor& tensor, int index, Matrix* matrix) {
  Tensor part = tensor;
  part.ndim = 3;
  part.data += Address(index * tensor.strides[1] * tensor.item_bytes());
  part.shape = {tensor.shape[0], tensor.shape[2], tensor.shape[3]};
  part.strides = {tensor.strides[0], tensor.strides[2], tensor.strides[3]};
  return read_matrix(part, /*hnd=*/false, matrix);
}

bool read_layout(const Torch& torch, PyObject* name, PyObject* qkv, Layout* layout) {
  Tensor q, k, v;
  if (is_text(name, "PACKED_QKV")) {
    if (!torch.read(qkv, &q) || q.ndim != 4 || q.shape[1] != 3) return false;
    k = v = q;
    if (!read_part(q, 0, &layout->q) || !read_part(q, 1, &layout->k) || !read_part(q, 2, &layout->v)) {
      return false;
    }
  } else if (is_text(name, "SEPARATE_Q_K_V")) {
    if (!is_sequence(qkv, 3) || !torch.read(PyTuple_GET_ITEM(qkv, 0), &q) ||
        !torch.read(PyTuple_GET_ITEM(qkv, 1), &k) || !torch.read(PyTuple_GET_ITEM(qkv, 2), &v) ||
        !read_matrix(q, false, &layout->q) || !read_matrix(k, false, &layout->k) ||
        !read_matrix(v, false, &layout->v)) {
      return false;
    }
    layout->q_tensor = PyTuple_GET_ITEM(qkv, 0);
  } else {
    if (!is_sequence(qkv, 2) || !torch.read(PyTuple_GET_ITEM(qkv, 0), &q) || !read_matrix(q, false, &layout->q)) {
      return false;
    }
    layout->q_tensor = PyTuple_GET_ITEM(qkv, 0);
    PyObject* second = PyTuple_GET_ITEM(qkv, 1);
    const bool hnd = is_text(name, "Q_PAGED_KV_HND");
    if (is_text(name, "CONTIGUOUS_Q_KV")) {
      if (!torch.read(second, &k) || k.ndim != 4 || k.shape[1] != 2) return false;
      v = k;
      if (!read_part(k, 0, &layout->k) || !read_part(k, 1, &layout->v)) return false;
    } else if (hnd || is_text(name, "Q_PAGED_KV_NHD")) {
      layout->paged = true;
      layout->separate = PyTuple_CheckExact(second);
      // Block tables count the blocks of separate caches alike: these are contiguous. A pool has five dimensions.
      if (!read_paged_cache(torch, second, hnd, &layout->cache)) return false;
      PyObject* first = layout->separate ? PyTuple_GET_ITEM(second, 0) : second;
      if (!torch.read(first, &k) || k.ndim != (layout->separate ? 4 : 5)) return false;
      v = k;
    } else {
      return false;
    }
  }
  DType others[2];
  if (!dtype_of(q, &layout->dtype) || !dtype_of(k, &others[0]) || !dtype_of(v, &others[1]) ||
      others[0] != layout->dtype || others[1] != layout->dtype) {
    return false;
  }
  layout->device = q.device.device_id;
  return q.is_on_gpu(layout->device) && k.is_on_gpu(layout->device) && v.is_on_gpu(layout->device);
}

/// Where the blocks of separate caches lie: they are contiguous, and the values follow the keys in whole blocks.
bool read_value_offset(const PagedCache& cache, bool hnd, std::int64_t* offset) {
  const std::int64_t rows = cache.page_size * cache.heads;
  const bool contiguous = [&] {
    for (const ConstTensorView* x : {&cache.k, &cache.v}) {
      const std::int64_t token = hnd ? cache.dim_qk : cache.heads * cache.dim_qk;
      const std::int64_t head = hnd ? cache.page_size * cache.dim_qk : cache.dim_qk;
      if (x->stride_token != token || x->stride_head != head) return false;
    }
    return cache.k_stride_page == rows * cache.dim_qk && cache.v_stride_page == cache.k_stride_page;
  }();
  const std::int64_t block = rows * cache.dim_qk * size_of(cache.dtype);
  const auto distance =
      std::int64_t(reinterpret_cast<Address>(cache.v.data)) - std::int64_t(reinterpret_cast<Address>(cache.k.data));
  if (!contiguous || cache.dim_qk != cache.dim_vo || block <= 0 || distance <= 0 || distance % block != 0) {
    return false;
  }
  *offset = distance / block;
  return true;
}

bool read_mask(PyObject* const* given, AttentionParams* params) {
  std::int64_t window = -1, chunk = 0;
  if (!read_integer(given[kWindow], &window) || !read_integer(given[kChunk], &chunk)) return false;
  if (chunk < 0 || (chunk & (chunk - 1)) != 0) return false;
  const bool sliding = is_text(given[kMaskMode], "sliding_window");
  if (is_text(given[kMaskMode], "padding")) return window < 0 && chunk == 0;
  const bool chunked = is_text(given[kMaskMode], "chunked");
  if (!sliding && !chunked && !is_text(given[kMaskMode], "causal")) return false;
  if (chunked && chunk == 0) return false;
  if (window == 0 && !sliding) window = -1;
  if (window >= 0 && chunk > 0) return false;
  params->causal = true;
  params->window_left = window < 0 ? -1 : limited(window);
  params->chunk_size = limited(chunk);
  return true;
}

/// The type of the output: the queries', or of e4m3 queries any of 16 bits.
bool read_output_dtype(const Torch& torch, PyObject* const* given, DType q_dtype, DType* dtype) {
  *dtype = q_dtype;
  Tensor out;
  if (given[kOut] != Py_None) {
    if (!torch.read(given[kOut], &out) || !dtype_of(out, dtype)) return false;
  } else if (given[kOutDtype] != Py_None && !torch.find_dtype(given[kOutDtype], dtype)) {
    return false;
  }
  return *dtype == q_dtype || (q_dtype == DType::kFloat8E4M3 && size_of(*dtype) == 2);
}

py::object fused_prefill(PyObject* const* given, Py_ssize_t count) {
  const Torch& torch = Torch::get();
  const py::object no = py::none();
  if (count != kArguments) throw py::type_error("Wrong number of arguments.");
  Layout layout;
  if (!read_layout(torch, given[kInputLayout], given[kQkv], &layout)) return no;
  AttentionParams params;
  const Matrix& q = layout.q;
  const PagedCache& cache = layout.cache;
  params.q_dtype = params.kv_dtype = layout.dtype;
  params.num_qo_heads = int(q.heads);
  params.num_kv_heads = int(layout.paged ? cache.heads : layout.k.heads);
  params.head_dim_qk = int(q.dim);
  params.head_dim_vo = int(layout.paged ? cache.dim_vo : layout.v.dim);
  params.total_q = q.tokens;
  params.q = q.view();
  if (q.tokens < 1 || q.heads <= 0 || params.num_kv_heads <= 0 || q.heads % params.num_kv_heads != 0 ||
      (layout.paged ? cache.dim_qk : layout.k.dim) != q.dim) {
    return no;
  }

  std::int64_t max_q = 0, max_kv = 0, batch = 0;
  if (!read_integer(given[kMaxQLen], &max_q) || !read_integer(given[kMaxKvLen], &max_kv) ||
      !read_integer(given[kBatchSize], &batch) || batch < 1 || batch > std::numeric_limits<std::int32_t>::max() - 1 ||
      max_q < 1 || max_kv < max_q || (is_text(given[kInputLayout], "PACKED_QKV") && max_kv != max_q)) {
    return no;
  }
  params.batch_size = int(batch);
  params.max_qo_len = limited(max_q);
  params.max_kv_len = limited(max_kv);
  if (!read_lengths(torch, given[kCumSeqLensQ], batch + 1, layout.device, &params.qo_indptr) ||
      !read_lengths(torch, given[kCumSeqLensKv], batch + 1, layout.device, &params.kv_indptr)) {
    return no;
  }

  if (layout.paged) {
    Tensor tables;
    std::int64_t v_offset = 0;
    if (!torch.read(given[kBlockTables], &tables) || !tables.is_on_gpu(layout.device) ||
        !read_tables(tables, layout.separate, batch, &params.pages)) {
      return no;
    }
    if (layout.separate && !read_value_offset(cache, is_text(given[kInputLayout], "Q_PAGED_KV_HND"), &v_offset)) {
      return no;
    }
    if (size_of(layout.dtype) == 1 && cache.page_size % kPagesOfFp8 != 0) return no;
    params.pages.page_size = int(cache.page_size);
    params.pages.num_pages = cache.pages;
    params.pages.k_stride_page = cache.k_stride_page;
    params.pages.v_stride_page = cache.v_stride_page;
    params.pages.v_offset = limited(v_offset);
    params.k = cache.k;
    params.v = cache.v;
    params.total_kv =
        std::min({max_kv > kMostKeys / batch ? kMostKeys : batch * max_kv, cache.pages * cache.page_size, kMostKeys});
  } else {
    if (given[kBlockTables] != Py_None || layout.k.tokens != layout.v.tokens || layout.k.heads != layout.v.heads) {
      return no;
    }
    params.k = layout.k.view();
    params.v = layout.v.view();
    params.total_kv = layout.k.tokens;
  }

  double bmm1_scale = 0.0, bmm2_scale = 0.0, soft_cap = 0.0, skip_softmax = 0.0;
  bool with_stats = false;
  Backend backend{};
  if (given[kBmm1Scale] == Py_None || given[kBmm2Scale] == Py_None || !read_number(given[kBmm1Scale], &bmm1_scale) ||
      !read_number(given[kBmm2Scale], &bmm2_scale) || !read_number(given[kSoftCap], &soft_cap) ||
      !read_number(given[kSkipSoftmax], &skip_softmax) || skip_softmax < 0.0 ||
      !read_flag(given[kSaveStats], &with_stats) || !read_backend(given[kBackend], &backend) ||
      !read_mask(given, &params) || !read_sinks(torch, given[kSinks], q.heads, layout.device, &params.sinks) ||
      !read_output_dtype(torch, given, layout.dtype, &params.o_dtype)) {
    return no;
  }
  params.sm_scale = float(bmm1_scale == 0.0 ? 1.0 / std::sqrt(double(q.dim)) : bmm1_scale);
  params.v_scale = float(bmm2_scale);
  params.logits_soft_cap = float(std::max(soft_cap, 0.0));
  params.skip_softmax_factor = float(skip_softmax);

  const ResultShape shape{q.tokens, q.heads, params.head_dim_vo, params.o_dtype, layout.device};
  const bool like_q = layout.q_tensor != nullptr && q.dim == params.head_dim_vo && params.o_dtype == layout.dtype &&
                      q.stride_head == q.dim && q.stride_token == q.heads * q.dim;
  Results results;
  if (!prepare_results(torch, shape, given[kOut], Py_None, Py_False, like_q ? layout.q_tensor : nullptr, &results,
                       &params)) {
    return no;
  }
  py::object stats;
  if (with_stats) {
    stats = torch.empty({q.tokens, q.heads, 2}, DType::kFloat32, layout.device);
    Tensor tensor;
    if (!torch.read(stats.ptr(), &tensor)) return no;
    params.stats = pointer<float>(tensor.data);
  }
  if (!is_launched(launch_once(torch, params, backend, layout.device))) return no;
  return with_stats ? py::object(py::make_tuple(results.out, stats)) : results.out;
}

// --- a problem that Python has checked ---

PyObject* fused(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] { return fused_prefill(given, count); });
}

}  // namespace

// Block tables as read_tables() takes them: `tables` is None without pages. kv.indptr counts tokens.
void attend_fused(py::object object, const std::string& backend, const py::object& tables, std::int64_t v_offset,
                  std::int64_t max_q_len, std::int64_t max_kv_len) {
  const Torch& torch = Torch::get();
  const Fields problem(std::move(object)), kv = problem.at("kv");
  AttentionParams params;
  read_problem(problem, &params);
  const Tensor qo_indptr = problem.tensor("qo_indptr");
  params.batch_size = int(qo_indptr.shape[0] - 1);
  params.qo_indptr = pointer<const std::int32_t>(qo_indptr.data);
  params.kv_indptr = pointer<const std::int32_t>(kv.address("indptr"));
  params.max_qo_len = limited(max_q_len);
  params.max_kv_len = limited(max_kv_len);
  if (params.pages.page_size > 0) {
    Tensor entries;
    if (!torch.read(tables.ptr(), &entries) ||
        !read_tables(entries, entries.ndim == 3, params.batch_size, &params.pages)) {
      throw py::value_error("block_tables lie in memory as no kernel reads them.");
    }
    params.pages.v_offset = limited(v_offset);
    params.total_kv = std::min({std::min(max_kv_len, kMostKeys) * params.batch_size,
                                params.pages.num_pages * params.pages.page_size, kMostKeys});
  }
  const int device = problem.tensor("q").device.device_id;
  raise_unless_ok(launch_once(torch, params, backend_of(backend), device));
}

void add_fused(const py::object& module) {
  static PyMethodDef fused_def = fast("fused_prefill", &fused);
  add_function(module, &fused_def);
}

}  // namespace cutlass_kernels
