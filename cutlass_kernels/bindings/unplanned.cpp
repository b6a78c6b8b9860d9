// _C.attention: attention without a plan, as a direct call (direct.h). Kernels read lengths and page tables on the
// device.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "call_arguments.h"  // kQ, kK, ..., kArguments: the rows of Call in call_table.py, in their order
#include "common/element_bytes.h"
#include "direct.h"
#include "functions.h"
#include "latent/dims.h"

namespace cutlass_kernels {
namespace {

constexpr double kE = 2.718281828459045, kLn2 = 0.6931471805599453;

/// Whether the columns of `rope` lie right behind those of `x`, row by row: two views of one tensor.
bool is_behind(const Matrix& rope, const Matrix& x, int item_bytes) {
  return rope.data == x.data + Address(x.dim * item_bytes) && (x.tokens == 1 || rope.stride_token == x.stride_token) &&
         (x.heads == 1 || rope.stride_head == x.stride_head);
}

/// [rows, heads, dim] of queries or of an output, or [batch, rows, heads, dim] whose rows follow one another.
bool read_rows(const Tensor& tensor, Matrix* matrix) {
  if (tensor.ndim == 3) return read_matrix(tensor, /*hnd=*/false, matrix);
  if (tensor.ndim != 4) return false;
  Tensor rows = tensor;
  const std::int64_t batch = tensor.shape[0], each = tensor.shape[1];
  const std::int64_t stride = each == 1 ? tensor.strides[0] : tensor.strides[1];
  if (batch > 1 && each > 1 && tensor.strides[0] != each * stride) return false;
  rows.ndim = 3;
  rows.shape = {batch * each, tensor.shape[2], tensor.shape[3]};
  rows.strides = {batch * each == 1 ? tensor.shape[2] * tensor.shape[3] : stride, tensor.strides[2], tensor.strides[3]};
  return read_matrix(rows, /*hnd=*/false, matrix);
}

/// [batch, tokens, heads, dim] of keys or values as rows, `stride` of them from one request to the next; `hnd`: [batch,
/// heads, tokens, dim]. All heads of a request lie between its rows and those of the next one then.
bool read_dense_keys(const Tensor& tensor, bool hnd, Matrix* matrix, std::int64_t* stride) {
  const auto token = std::size_t(1 + hnd);
  const std::int64_t batch = tensor.shape[0], each = tensor.shape[token];
  Tensor rows = tensor;
  if (each == 1 && batch > 1 && tensor.strides[0] != 0) rows.strides[token] = tensor.strides[0];
  if (!read_matrix_at(rows, 1, hnd, matrix)) return false;
  *stride = each;
  if (batch < 2 || each == 0) return true;
  if (tensor.strides[0] % matrix->stride_token != 0) return false;
  *stride = tensor.strides[0] / matrix->stride_token;
  matrix->tokens = (batch - 1) * *stride + each;
  return matrix->tokens <= kMostKeys;
}

struct Call {
  const Torch& torch;
  PyObject* const* given;
  AttentionParams params;
  Tensor q, k, v, k_rope;
  Matrix queries;
  std::int64_t dim_qk = 0;
  int device = 0;
  bool hnd = false;

  bool is_given(int argument) const { return given[argument] != Py_None; }

  bool read_lengths_of(int argument, std::int64_t count, const std::int32_t** lengths) const {
    return !is_given(argument) || read_lengths(torch, given[argument], count, device, lengths);
  }

  /// Queries, and how many requests there are.
  bool read_queries() {
    if (!torch.read(given[kQ], &q) || !torch.read(given[kK], &k) || !torch.read(given[kV], &v) ||
        !read_layout(given[kKvLayout], &hnd) || !read_rows(q, &queries)) {
      return false;
    }
    device = q.device.device_id;
    if (!q.is_on_gpu(device) || !k.is_on_gpu(device) || !v.is_on_gpu(device)) return false;
    DType v_dtype{};
    if (!dtype_of(q, &params.q_dtype) || !dtype_of(k, &params.kv_dtype) || !dtype_of(v, &v_dtype) ||
        v_dtype != params.kv_dtype) {
      return false;
    }
    params.num_qo_heads = int(queries.heads);
    params.total_q = queries.tokens;
    params.q = queries.view();
    dim_qk = queries.dim;
    if (is_given(kQRope) && !read_q_rope()) return false;
    params.head_dim_qk = int(dim_qk);
    std::int64_t batch = 1, most_rows = queries.tokens;
    if (q.ndim == 4) {
      if (is_given(kCuSeqlensQ)) return false;
      batch = q.shape[0];
      most_rows = q.shape[1];
    } else if (is_given(kCuSeqlensQ)) {
      Tensor indptr;
      if (!torch.read(given[kCuSeqlensQ], &indptr) || indptr.ndim != 1) return false;
      batch = indptr.shape[0] - 1;
      std::int64_t told = most_rows;
      if (!read_integer(given[kMaxSeqlenQ], &told) || told < 0) return false;
      most_rows = std::min(most_rows, told);
    }
    if (batch < 1 || batch > kMostKeys || queries.tokens < 1 || most_rows < 1) return false;
    params.batch_size = int(batch);
    params.max_qo_len = limited(most_rows);
    return read_lengths_of(kCuSeqlensQ, batch + 1, &params.qo_indptr) &&
           read_lengths_of(kSequsedQ, batch, &params.seqused_q) &&
           read_lengths_of(kSequsedK, batch, &params.seqused_k) && read_shard();
  }

  bool read_q_rope() {
    Tensor tensor;
    Matrix rope;
    if (!torch.read(given[kQRope], &tensor) || tensor.ndim != q.ndim || tensor.shape[0] != q.shape[0] ||
        !is_rope(tensor, params.q_dtype) || !read_rows(tensor, &rope) || rope.tokens != queries.tokens ||
        rope.heads != queries.heads || rope.dim != mla::kRopeDim) {
      return false;
    }
    if (!is_behind(rope, queries, q.item_bytes())) params.q_rope = rope.view();
    dim_qk += rope.dim;
    return true;
  }

  bool is_rope(const Tensor& tensor, DType dtype) const { return has_dtype(tensor, dtype) && tensor.is_on_gpu(device); }

  /// k_rope of keys that are no pages: read as they are.
  bool set_k_rope(const Matrix& rope, const Matrix& keys) {
    if (rope.tokens != keys.tokens || rope.heads != keys.heads || rope.dim != mla::kRopeDim) {
      return false;
    }
    if (!is_behind(rope, keys, k.item_bytes())) params.k_rope = rope.view();
    return true;
  }

  bool set_k_rope(const PagedCache& cache) {
    PagedCache rope;
    if (!read_paged_cache(k_rope, k_rope, hnd, &rope) || rope.pages != cache.pages ||
        rope.page_size != cache.page_size || rope.heads != cache.heads || rope.dim_qk != mla::kRopeDim) {
      return false;
    }
    const auto matrix = [](const PagedCache& x) {
      return Matrix{Address(x.k.data), x.page_size, x.heads, x.dim_qk, x.k.stride_token, x.k.stride_head};
    };
    const bool same_pages = cache.pages == 1 || rope.k_stride_page == cache.k_stride_page;
    if (same_pages && is_behind(matrix(rope), matrix(cache), k.item_bytes())) return true;
    params.k_rope = rope.k;
    params.pages.k_rope_stride_page = rope.k_stride_page;
    return true;
  }

  /// (world, rank, block).
  bool read_shard() {
    if (!is_given(kKvShard)) return true;
    PyObject* const shard = given[kKvShard];
    if (!PyTuple_Check(shard) || PyTuple_GET_SIZE(shard) != 3) return false;
    std::int64_t numbers[3] = {};
    for (int i = 0; i < 3; ++i) {
      if (!read_integer(PyTuple_GET_ITEM(shard, i), &numbers[i]) || numbers[i] > kMostKeys) {
        return false;
      }
    }
    const auto [world, rank, block] = numbers;
    params.kv_shard = {std::int32_t(world), std::int32_t(rank), std::int32_t(block)};
    return 0 <= rank && rank < world && block > 0;
  }

  bool set_keys(std::int64_t heads, std::int64_t dim, std::int64_t dim_vo) {
    const std::int64_t of_rope = is_given(kKRope) ? mla::kRopeDim : 0;
    if (dim + of_rope != dim_qk || heads <= 0 || queries.heads % heads != 0) return false;
    params.num_kv_heads = int(heads);
    params.head_dim_vo = int(dim_vo);
    return true;
  }

  bool read_pages(std::int64_t max_kv) {
    PagedCache cache;
    if (k.ndim != 4 || !read_paged_cache(k, v, hnd, &cache) || !set_keys(cache.heads, cache.dim_qk, cache.dim_vo) ||
        (is_given(kKRope) && !set_k_rope(cache))) {
      return false;
    }
    if (size_of(params.q_dtype) == 1 && cache.page_size % kPagesOfFp8 != 0) return false;
    PageTable& pages = params.pages;
    pages.page_size = int(cache.page_size);
    pages.num_pages = cache.pages;
    pages.k_stride_page = cache.k_stride_page;
    pages.v_stride_page = cache.v_stride_page;
    params.k = cache.k;
    params.v = cache.v;
    const std::int64_t batch = params.batch_size;
    std::int64_t room = 0;
    if (is_given(kPageTable)) {
      Tensor table;
      if (is_given(kKvIndptr) || !torch.read(given[kPageTable], &table) || !table.is_on_gpu(device) ||
          !read_tables(table, /*separate=*/false, batch, &pages) || !(is_given(kSequsedK) || is_given(kCuSeqlensK)) ||
          !read_lengths_of(kCuSeqlensK, batch + 1, &params.kv_indptr)) {
        return false;
      }
      room = std::int64_t(pages.table_width) * pages.page_size;
    } else {
      Tensor indices;
      if (is_given(kCuSeqlensK) || !torch.read(given[kKvIndices], &indices) || indices.ndim != 1 ||
          !read_lengths(torch, given[kKvIndices], indices.shape[0], device, &pages.indices) ||
          !read_lengths(torch, given[kKvIndptr], batch + 1, device, &params.kv_indptr) ||
          !(is_given(kSequsedK) || is_given(kKvLastPageLen)) ||
          !read_lengths_of(kKvLastPageLen, batch, &pages.last_page_len)) {
        return false;
      }
      pages.num_indices = indices.shape[0];
      room = pages.num_indices * pages.page_size;
    }
    max_kv = std::min({max_kv < 0 ? room : max_kv, room, kMostKeys - 1});
    params.max_kv_len = limited(max_kv);
    params.total_kv = std::min({max_kv * batch, is_given(kPageTable) ? kMostKeys : room,
                                std::max<std::int64_t>(cache.pages * cache.page_size, 1) * batch, kMostKeys});
    return true;
  }

  bool read_keys() {
    std::int64_t max_kv = -1;
    if (!read_integer(given[kMaxSeqlenK], &max_kv) ||
        (is_given(kKRope) &&
         !(torch.read(given[kKRope], &k_rope) && k_rope.ndim == k.ndim && is_rope(k_rope, params.kv_dtype)))) {
      return false;
    }
    if (is_given(kPageTable) || is_given(kKvIndptr)) return read_pages(max_kv);
    if (is_given(kKvIndices) || is_given(kKvLastPageLen) || k.ndim != v.ndim) return false;
    const std::int64_t batch = params.batch_size;
    Matrix keys, values, rope;
    std::int64_t each = 0, stride = 0, v_stride = 0, rope_stride = 0;
    if (k.ndim == 3) {
      if (!read_matrix(k, hnd, &keys) || !read_matrix(v, hnd, &values) ||
          (is_given(kKRope) && !read_matrix(k_rope, hnd, &rope))) {
        return false;
      }
      if (!is_given(kCuSeqlensK)) {
        if (batch != 1) return false;
        each = keys.tokens;
      } else if (!read_lengths_of(kCuSeqlensK, batch + 1, &params.kv_indptr)) {
        return false;
      }
    } else {
      if (k.ndim != 4 || is_given(kCuSeqlensK) || k.shape[0] != batch || v.shape[0] != batch ||
          !read_dense_keys(k, hnd, &keys, &stride) || !read_dense_keys(v, hnd, &values, &v_stride) ||
          stride != v_stride ||
          (is_given(kKRope) &&
           (k_rope.shape[0] != batch || !read_dense_keys(k_rope, hnd, &rope, &rope_stride) || rope_stride != stride))) {
        return false;
      }
      each = k.shape[std::size_t(1 + hnd)];
      params.kv_stride_request = std::int32_t(stride);
    }
    if (keys.tokens != values.tokens || keys.heads != values.heads || !set_keys(keys.heads, keys.dim, values.dim) ||
        (is_given(kKRope) && !set_k_rope(rope, keys))) {
      return false;
    }
    params.k = keys.view();
    params.v = values.view();
    params.total_kv = keys.tokens;
    if (params.kv_indptr == nullptr) {
      params.max_kv_len = limited(each);
    } else if (max_kv > 0) {
      params.max_kv_len = limited(std::min(max_kv, keys.tokens));
    }
    return true;
  }

  bool read_mask() {
    std::int64_t left = -1, right = -1, chunk = 0;
    PyObject* const window = given[kWindow];
    if (!read_flag(given[kCausal], &params.causal) || !(PyTuple_Check(window) || PyList_Check(window)) ||
        PySequence_Fast_GET_SIZE(window) != 2 || !read_integer(PySequence_Fast_GET_ITEM(window, 0), &left) ||
        !read_integer(PySequence_Fast_GET_ITEM(window, 1), &right) || !read_integer(given[kChunkSize], &chunk) ||
        chunk < 0) {
      return false;
    }
    constexpr std::int64_t kNoLimit = 1 << 29;
    params.window_left = left < 0 ? -1 : limited(left);
    params.window_right = right < 0 || right > kNoLimit ? -1 : std::int32_t(right);
    params.chunk_size = limited(chunk);
    if (!is_given(kPackedCustomMask)) return true;
    Tensor bits;
    if (!torch.read(given[kPackedCustomMask], &bits) || bits.ndim != 1 || bits.strides[0] != 1 ||
        bits.dtype.bits != 8 || bits.data % 4 != 0 || !bits.is_on_gpu(device) ||
        (params.batch_size > 1 && !is_given(kMaskIndptr)) ||
        !read_lengths_of(kMaskIndptr, params.batch_size + 1, &params.mask.indptr)) {
      return false;
    }
    params.mask.words = pointer<const std::uint32_t>(bits.data);
    params.mask.num_words = bits.shape[0] / 4;
    return bits.shape[0] % 4 == 0;  // Python pads them
  }

  /// A descale: a number, which multiplies `*number`, or fp32 on the device: of one element, [heads] or [batch, heads].
  bool read_descale(int argument, double* number, DeviceScale* scale) const {
    PyObject* object = given[argument];
    double factor = 1.0;
    if (read_number(object, &factor)) {
      *number *= factor;
      return true;
    }
    Tensor tensor;
    if (!torch.read(object, &tensor) || !has_dtype(tensor, DType::kFloat32) || !tensor.is_on_gpu(device) ||
        tensor.ndim > 2) {
      return false;
    }
    scale->data = pointer<const float>(tensor.data);
    std::int64_t heads = 1, stride = 0;
    if (tensor.ndim > 0) {
      const auto last = std::size_t(tensor.ndim - 1);
      heads = tensor.shape[last];
      stride = tensor.strides[last];
    }
    if (tensor.ndim == 2) {
      if (tensor.shape[0] != params.batch_size && tensor.shape[0] != 1) return false;
      scale->stride_request = tensor.shape[0] == 1 ? 0 : tensor.strides[0];
    }
    if (heads == params.num_kv_heads || heads == params.num_qo_heads) {
      scale->heads_per_entry = params.num_qo_heads / int(heads);
    } else if (heads == 1) {
      stride = 0;
    } else {
      return false;
    }
    scale->stride = std::int32_t(stride);
    return stride <= kMostKeys;
  }

  bool read_logits() {
    double cap = 0.0, scale = 1.0 / std::sqrt(double(dim_qk)), v_scale = 1.0;
    std::int64_t splits = 0;
    if (!read_number(given[kLogitsSoftCap], &cap) || !read_number(given[kSmScale], &scale) ||
        !read_integer(given[kNumSplits], &splits) || splits < 0 ||
        !read_sinks(torch, given[kSinks], queries.heads, device, &params.sinks) ||
        !read_sinks(torch, given[kAlibiSlopes], queries.heads, device, &params.alibi.slopes) ||
        !read_descale(kQDescale, &scale, &params.logits_scale) ||
        !read_descale(kKDescale, &scale, &params.keys_scale) ||
        !read_descale(kVDescale, &v_scale, &params.output_scale) ||
        !read_flag(given[kBatchInvariant], &params.batch_invariant)) {
      return false;
    }
    params.logits_soft_cap = float(std::max(cap, 0.0));
    params.sm_scale = float(scale);
    params.v_scale = float(v_scale);
    params.num_splits = limited(splits);
    return true;
  }

  /// The output, and the LSE. The last to be read: it allocates.
  bool prepare(Results* results) {
    params.o_dtype = size_of(params.q_dtype) == 1 ? DType::kBFloat16 : params.q_dtype;
    if (is_given(kODtype) && !torch.find_dtype(given[kODtype], &params.o_dtype)) return false;
    bool heads_first = false;
    double lse_base = 0.0;
    if (!read_flag(given[kReturnLse], &results->return_lse) || !read_flag(given[kLseHeadsFirst], &heads_first) ||
        !read_number(given[kLseBase], &lse_base) || (lse_base != 2.0 && lse_base != kE)) {
      return false;
    }
    const std::int64_t rows = queries.tokens, heads = queries.heads, dim = params.head_dim_vo;
    Tensor out;
    Matrix matrix;
    if (is_given(kOut)) {
      if (!torch.read(given[kOut], &out) || !dtype_of(out, &params.o_dtype) || !out.is_on_gpu(device) ||
          out.ndim != q.ndim || (q.ndim == 4 && out.shape[0] != q.shape[0])) {
        return false;
      }
      results->out = py::reinterpret_borrow<py::object>(given[kOut]);
    } else {
      const bool like_q = dim == queries.dim && params.o_dtype == params.q_dtype && queries.stride_head == dim &&
                          queries.stride_token == heads * dim;
      if (like_q) {
        results->out = torch.empty_like(given[kQ]);
      } else if (q.ndim == 4) {
        results->out = torch.empty({q.shape[0], q.shape[1], heads, dim}, params.o_dtype, device);
      } else {
        results->out = torch.empty({rows, heads, dim}, params.o_dtype, device);
      }
      if (!torch.read(results->out.ptr(), &out)) return false;
    }
    if (!read_rows(out, &matrix) || matrix.tokens != rows || matrix.heads != heads || matrix.dim != dim) {
      return false;
    }
    params.o = {pointer<void>(matrix.data), matrix.stride_token, matrix.stride_head};
    if (!results->return_lse) return true;
    if (heads_first) {
      results->lse = torch.empty({heads, rows}, DType::kFloat32, device);
    } else if (q.ndim == 4) {
      results->lse = torch.empty({q.shape[0], q.shape[1], heads}, DType::kFloat32, device);
    } else {
      results->lse = torch.empty({rows, heads}, DType::kFloat32, device);
    }
    Tensor lse;
    if (!torch.read(results->lse.ptr(), &lse)) return false;
    params.lse = pointer<float>(lse.data);
    params.lse_stride_token = heads_first ? 1 : heads;
    params.lse_stride_head = heads_first ? rows : 1;
    params.lse_scale = lse_base == kE ? float(kLn2) : 1.0f;
    return true;
  }
};

py::object attend_unplanned(PyObject* const* given, Py_ssize_t count) {
  if (count != kArguments) {
    throw py::type_error("The compiled module was built for other arguments of attention(): build the package again.");
  }
  SharedSchedule* schedule = nullptr;
  if (given[kSchedule] != Py_None) schedule = py::handle(given[kSchedule]).cast<SharedSchedule*>();
  Call call{Torch::get(), given, {}, {}, {}, {}, {}, {}};
  Backend backend{};
  Results results;
  if (!read_backend(given[kBackend], &backend) || !call.read_queries() || !call.read_keys() || !call.read_mask() ||
      !call.read_logits() || !call.prepare(&results)) {
    return py::none();
  }
  return is_launched(launch_once(call.torch, call.params, backend, call.device, schedule)) ? results.returned()
                                                                                           : py::object(py::none());
}

PyObject* attention_without_plan(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] { return attend_unplanned(given, count); });
}

}  // namespace

void add_unplanned(const py::object& module) {
  module.attr("call_arguments") = kCallArguments;
  static PyMethodDef attention_def = fast("attention", &attention_without_plan);
  add_function(module, &attention_def);
}

}  // namespace cutlass_kernels
