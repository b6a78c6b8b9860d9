#include "call.h"

#include <algorithm>
#include <cmath>

#include "common/element_bytes.h"
#include "latent/dims.h"

namespace cutlass_kernels {
namespace {

constexpr double kE = 2.718281828459045, kLn2 = 0.6931471805599453;

/// fp8 queries read pages of a multiple of so many tokens; request_facts.FP8_PAGE.
constexpr int kPagesOfFp8 = 8;

}  // namespace

// --- queries, keys and values ---

Tensor part_of(const Tensor& tensor, int index) {
  Tensor part = tensor;
  part.data += Address(index * tensor.strides[1] * tensor.item_bytes());
  part.ndim = tensor.ndim - 1;
  std::copy(tensor.shape.begin() + 2, tensor.shape.end(), part.shape.begin() + 1);
  std::copy(tensor.strides.begin() + 2, tensor.strides.end(), part.strides.begin() + 1);
  return part;
}

bool read_cache(const Torch& torch, PyObject* object, Tensor* k, Tensor* v) {
  if (PyTuple_CheckExact(object)) {
    return PyTuple_GET_SIZE(object) == 2 && torch.read(PyTuple_GET_ITEM(object, 0), k) &&
           torch.read(PyTuple_GET_ITEM(object, 1), v);
  }
  Tensor both;
  if (!torch.read(object, &both) || both.ndim < 4 || both.shape[1] != 2) return false;
  *k = part_of(both, 0);
  *v = part_of(both, 1);
  return true;
}

bool read_rows(const Tensor& tensor, Matrix* matrix) {
  if (tensor.ndim == 3) return read_matrix(tensor, 0, /*hnd=*/false, matrix);
  Tensor rows = tensor;
  if (tensor.ndim == 2) {
    rows.shape = {1, tensor.shape[0], tensor.shape[1]};
    rows.strides = {tensor.shape[0] * tensor.strides[0], tensor.strides[0], tensor.strides[1]};
  } else if (tensor.ndim == 4) {
    const std::int64_t batch = tensor.shape[0], each = tensor.shape[1], all = batch * each;
    const std::int64_t stride = each == 1 ? tensor.strides[0] : tensor.strides[1];
    if (batch > 1 && each > 1 && tensor.strides[0] != each * stride) return false;
    rows.shape = {all, tensor.shape[2], tensor.shape[3]};
    rows.strides = {all == 1 ? tensor.shape[2] * tensor.shape[3] : stride, tensor.strides[2], tensor.strides[3]};
  } else {
    return false;
  }
  rows.ndim = 3;
  return read_matrix(rows, 0, /*hnd=*/false, matrix);
}

bool is_behind(const Matrix& rope, const Matrix& x, int item_bytes) {
  return rope.data == x.data + Address(x.dim * item_bytes) && (x.tokens == 1 || rope.stride_token == x.stride_token) &&
         (x.heads == 1 || rope.stride_head == x.stride_head);
}

bool Call::read_tensors() {
  return torch.read(at(kQ), &q) && torch.read(at(kK), &k.tensor) && torch.read(at(kV), &v.tensor);
}

bool Call::read_queries() {
  device = q.device.device_id;
  DType v_dtype{};
  if (!q.is_on_gpu(device) || !k.tensor.is_on_gpu(device) || !v.tensor.is_on_gpu(device) ||
      !dtype_of(q, &params.q_dtype) || !read_rows(q, &queries)) {
    return false;
  }
  if (token_dtype.has_value()) {
    params.kv_dtype = *token_dtype;
  } else if (!dtype_of(k.tensor, &params.kv_dtype) || !dtype_of(v.tensor, &v_dtype) || v_dtype != params.kv_dtype) {
    return false;
  }
  params.num_qo_heads = int(queries.heads);
  params.head_dim_qk = int(queries.dim);
  params.total_q = queries.tokens;
  params.q = queries.view();
  return true;
}

bool Call::read_ragged(const Tensor& tensor, bool hnd, Keys* keys) {
  return tensor.ndim == 3 && read_matrix(tensor, 0, hnd, &keys->rows);
}

/// All heads of a request lie between its rows and those of the next one where they come first.
bool Call::read_dense(const Tensor& tensor, bool hnd, Keys* keys) {
  if (tensor.ndim != 4) return false;
  const auto token = std::size_t(1 + hnd);
  const std::int64_t batch = tensor.shape[0], each = tensor.shape[token];
  Tensor rows = tensor;
  if (each == 1 && batch > 1 && tensor.strides[0] != 0) rows.strides[token] = tensor.strides[0];
  if (!read_matrix(rows, 1, hnd, &keys->rows)) return false;
  keys->count = batch;
  keys->stride = each;
  if (batch < 2 || each == 0) return true;
  if (tensor.strides[0] % keys->rows.stride_token != 0) return false;
  keys->stride = tensor.strides[0] / keys->rows.stride_token;
  keys->rows.tokens = (batch - 1) * keys->stride + each;
  return keys->rows.tokens <= kMostKeys;
}

bool Call::read_in_pages(const Tensor& tensor, bool hnd, Keys* keys) {
  keys->count = tensor.shape[0];
  keys->stride = tensor.strides[0];
  if (!is_ordinary(keys->stride, tensor.item_bytes()) || keys->count > kMostKeys) return false;
  if (tensor.ndim != 3) return tensor.ndim == 4 && read_matrix(tensor, 1, hnd, &keys->rows);
  keys->rows = {tensor.data, 1, tensor.shape[1], tensor.shape[2], keys->stride, tensor.strides[1]};
  return is_readable(tensor) && is_ordinary(keys->rows.stride_head, tensor.item_bytes());
}

bool Call::read_keys_by(Read* read) {
  const bool has_rope = is_given(kKRope);
  if (k.tensor.ndim != v.tensor.ndim || !read(k.tensor, hnd, &k) || !read(v.tensor, hnd, &v) ||
      (has_rope && (k_rope.tensor.ndim != k.tensor.ndim || !read(k_rope.tensor, hnd, &k_rope)))) {
    return false;
  }
  const auto is_beside = [&](const Keys& x) {
    return x.count == k.count && x.rows.tokens == k.rows.tokens && x.rows.heads == k.rows.heads;
  };
  const std::int64_t heads = k.rows.heads, dim_of_rope = has_rope ? mla::kRopeDim : 0;
  if (!is_beside(v) || queries.heads <= 0 || heads <= 0 || queries.heads % heads != 0 ||
      k.rows.dim + dim_of_rope != params.head_dim_qk) {
    return false;
  }
  params.num_kv_heads = int(heads);
  params.head_dim_vo = int(v.rows.dim);
  params.k = k.rows.view();
  params.v = v.rows.view();
  if (params.pages.page_size == 0) params.total_kv = k.rows.tokens;  // else a plan has said how many there are
  if (!has_rope) return true;
  if (!is_beside(k_rope) || k_rope.rows.dim != mla::kRopeDim) return false;
  const bool follows = k.count == 1 || k_rope.stride == k.stride;
  if (!follows || !is_behind(k_rope.rows, k.rows, k.tensor.item_bytes())) params.k_rope = k_rope.rows.view();
  return true;
}

bool Call::read_pages() {
  if (!read_keys_by(&read_in_pages)) return false;
  PageTable& pages = params.pages;
  pages.page_size = int(k.rows.tokens);
  pages.num_pages = k.count;
  pages.k_stride_page = k.stride;
  pages.v_stride_page = v.stride;
  if (params.k_rope.data != nullptr) pages.k_rope_stride_page = k_rope.stride;
  return size_of(params.q_dtype) != 1 || pages.page_size % kPagesOfFp8 == 0;
}

// --- options ---

bool Call::read_mask() {
  std::int64_t left = -1, right = -1, chunk = params.chunk_size;
  if (!read_flag(at(kCausal), &params.causal) || !read_integer(at(kWindowLeft), &left) ||
      !read_integer(at(kChunkSize), &chunk) || chunk < 0) {
    return false;
  }
  if (PyObject* const window = at(kWindow); window != nullptr) {
    if (!(PyTuple_Check(window) || PyList_Check(window)) || PySequence_Fast_GET_SIZE(window) != 2 ||
        !read_integer(PySequence_Fast_GET_ITEM(window, 0), &left) ||
        !read_integer(PySequence_Fast_GET_ITEM(window, 1), &right)) {
      return false;
    }
  }
  constexpr std::int64_t kNoLimit = 1 << 29;
  params.window_left = left < 0 ? -1 : limited(left);
  params.window_right = right < 0 || right > kNoLimit ? -1 : std::int32_t(right);
  params.chunk_size = limited(chunk);
  if (!is_given(kPackedCustomMask)) return true;
  Tensor bits;
  if (!torch.read(at(kPackedCustomMask), &bits) || bits.ndim != 1 || bits.strides[0] != 1 || bits.dtype.bits != 8 ||
      bits.data % 4 != 0 || !bits.is_on_gpu(device) || (params.batch_size > 1 && !is_given(kMaskIndptr)) ||
      !read_lengths_of(kMaskIndptr, params.batch_size + 1, &params.mask.indptr)) {
    return false;
  }
  params.mask.words = pointer<const std::uint32_t>(bits.data);
  params.mask.num_words = bits.shape[0] / 4;
  return bits.shape[0] % 4 == 0;  // Python pads them
}

/// A descale: a number, which multiplies `*number`, or factors on the device.
bool Call::read_descale(int row, double* number, DeviceScale* scale) const {
  double factor = 1.0;
  if (!read_number(at(row), &factor)) {
    return takes_device_scales &&
           read_factors(torch, at(row), device, params.batch_size, params.num_kv_heads, params.num_qo_heads, scale);
  }
  *number *= factor;
  return true;
}

bool Call::read_logits() {
  double cap = 0.0, scale = 1.0 / std::sqrt(double(params.head_dim_qk)), v_scale = 1.0;
  std::int64_t splits = params.num_splits;
  if (!read_number(at(kLogitsSoftCap), &cap) || !read_number(at(kSmScale), &scale) ||
      !read_integer(at(kNumSplits), &splits) || splits < 0 ||
      !read_heads(torch, at(kSinks), queries.heads, device, &params.sinks) ||
      !read_heads(torch, at(kAlibiSlopes), queries.heads, device, &params.alibi.slopes) ||
      !read_descale(kQDescale, &scale, &params.logits_scale) || !read_descale(kKDescale, &scale, &params.keys_scale) ||
      !read_descale(kVDescale, &v_scale, &params.output_scale) ||
      !read_flag(at(kBatchInvariant), &params.batch_invariant)) {
    return false;
  }
  params.logits_soft_cap = float(std::max(cap, 0.0));
  params.sm_scale = float(scale);
  params.v_scale = float(v_scale);
  params.num_splits = limited(splits);
  return true;
}

// --- results ---

bool Call::read_output() {
  if (is_given(kODtype) && !torch.find_dtype(at(kODtype), &params.o_dtype)) return false;
  if (!is_given(kOut)) return true;
  return torch.read(at(kOut), &out) && dtype_of(out, &params.o_dtype) && out.is_on_gpu(device) && out.ndim == q.ndim &&
         (q.ndim != 4 || out.shape[0] == q.shape[0]);
}

bool Call::read_max_logits() {
  if (!is_given(kMaxLogits)) return true;
  Tensor tensor;
  const std::int64_t rows = queries.tokens, heads = queries.heads;
  if (!torch.read(at(kMaxLogits), &tensor) || tensor.ndim != 2 || tensor.shape[0] != rows || tensor.shape[1] != heads ||
      (heads > 1 && tensor.strides[1] != 1) || (rows > 1 && tensor.strides[0] != heads) ||
      !has_dtype(tensor, DType::kFloat32) || !tensor.is_on_gpu(device)) {
    return false;
  }
  params.max_logits = pointer<float>(tensor.data);
  return true;
}

bool Call::prepare(Results* results) {
  bool heads_first = false;
  double lse_base = at(kLseBase) == nullptr ? 2.0 : 0.0;
  if (!read_flag(at(kReturnLse), &results->with_lse) || !read_flag(at(kLseHeadsFirst), &heads_first) ||
      !read_flag(at(kFlashMlaLse), &params.flash_mla_lse) || !read_max_logits() ||
      !read_number(at(kLseBase), &lse_base) || (lse_base != 2.0 && lse_base != kE)) {
    return false;
  }
  const std::int64_t rows = queries.tokens, heads = queries.heads, dim = params.head_dim_vo;
  Tensor lse;
  if (is_given(kLse)) {
    if (!torch.read(at(kLse), &lse) || lse.ndim != q.ndim - 1 || lse.shape[std::size_t(lse.ndim - 1)] != heads ||
        (lse.ndim > 1 && lse.shape[0] != rows) || lse.ndim > 2 || !has_dtype(lse, DType::kFloat32) ||
        !lse.is_on_gpu(device)) {
      return false;
    }
    params.lse_stride_head = lse.strides[std::size_t(lse.ndim - 1)];
    params.lse_stride_token = lse.ndim > 1 ? lse.strides[0] : heads;
    if (params.lse_stride_head <= 0 || params.lse_stride_token <= 0) return false;
    results->lse = py::reinterpret_borrow<py::object>(at(kLse));
  } else if (results->with_lse && zero) {
    return false;  // rows that no kernel writes are -inf
  }
  Shape shape = q.shape;
  shape[std::size_t(q.ndim - 1)] = dim;
  if (is_given(kOut)) {
    results->out = py::reinterpret_borrow<py::object>(at(kOut));
  } else {
    const bool like_q = is_given(kQ) && dim == queries.dim && params.o_dtype == params.q_dtype &&
                        queries.stride_head == dim && queries.stride_token == heads * dim;
    results->out = zero     ? torch.zeros(shape, q.ndim, params.o_dtype, device)
                   : like_q ? torch.empty_like(at(kQ))
                            : torch.empty(shape, q.ndim, params.o_dtype, device);
    if (!torch.read(results->out.ptr(), &out)) return false;
  }
  Matrix matrix;
  if (!read_rows(out, &matrix) || matrix.tokens != rows || matrix.heads != heads || matrix.dim != dim) return false;
  params.o = {pointer<void>(matrix.data), matrix.stride_token, matrix.stride_head};
  if (results->with_lse && !results->lse) {
    results->lse = heads_first ? torch.empty({heads, rows}, 2, DType::kFloat32, device)
                               : torch.empty(q.shape, q.ndim - 1, DType::kFloat32, device);
    if (!torch.read(results->lse.ptr(), &lse)) return false;
    params.lse_stride_token = heads_first ? 1 : heads;
    params.lse_stride_head = heads_first ? rows : 1;
    params.lse_scale = lse_base == kE ? float(kLn2) : 1.0f;
  }
  params.lse = pointer<float>(lse.data);
  return true;
}

py::object Call::launch(const Results& results, SharedSchedule* schedule) const {
  return is_launched(launch_once(torch, params, backend, device, schedule)) ? results.returned()
                                                                            : py::object(py::none());
}

}  // namespace cutlass_kernels
