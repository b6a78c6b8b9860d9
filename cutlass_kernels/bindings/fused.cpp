// _C.fused_prefill: trtllm_fmha_v2_prefill as a direct call (direct.h), and _C.attend_fused: the same of a Problem that
// Python has checked. Kernels read the indptrs and the block tables on the device.
#include <algorithm>
#include <cstdint>

#include "call.h"
#include "common/element_bytes.h"
#include "fields.h"
#include "functions.h"

namespace cutlass_kernels {
namespace {

/// How many keys there are in pages, as far as is known.
std::int64_t total_kv_of(const AttentionParams& params, std::int64_t max_kv) {
  return std::min(
      {std::min(max_kv, kMostKeys) * params.batch_size, params.pages.num_pages * params.pages.page_size, kMostKeys});
}

bool is_sequence(PyObject* object, Py_ssize_t size) {
  return PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == size;
}

/// The tensors of a layout, and whether the keys are in pages, and those in separate caches (in one allocation).
bool read_tensors(Call* call, bool* paged, bool* separate) {
  PyObject *const name = call->at(kInputLayout), *const qkv = call->at(kQkv);
  Tensor whole;
  if (is_text(name, "PACKED_QKV")) {
    if (!call->torch.read(qkv, &whole) || whole.ndim != 4 || whole.shape[1] != 3) return false;
    call->q = part_of(whole, 0);
    call->k.tensor = part_of(whole, 1);
    call->v.tensor = part_of(whole, 2);
    return true;
  }
  const bool apart = is_text(name, "SEPARATE_Q_K_V");
  if (!is_sequence(qkv, apart ? 3 : 2)) return false;
  PyObject *const q = PyTuple_GET_ITEM(qkv, 0), *const second = PyTuple_GET_ITEM(qkv, 1);
  call->given[kQ] = q;
  if (!call->torch.read(q, &call->q) || call->q.ndim != 3) return false;
  if (apart) {
    return call->torch.read(second, &call->k.tensor) && call->torch.read(PyTuple_GET_ITEM(qkv, 2), &call->v.tensor);
  }
  if (is_text(name, "CONTIGUOUS_Q_KV")) {
    if (!call->torch.read(second, &whole) || whole.ndim != 4 || whole.shape[1] != 2) return false;
    call->k.tensor = part_of(whole, 0);
    call->v.tensor = part_of(whole, 1);
    return true;
  }
  call->hnd = is_text(name, "Q_PAGED_KV_HND");
  *paged = call->hnd || is_text(name, "Q_PAGED_KV_NHD");
  *separate = PyTuple_CheckExact(second);
  return *paged && read_cache(call->torch, second, &call->k.tensor, &call->v.tensor) && call->k.tensor.ndim == 4;
}

/// Where the blocks of separate caches lie: they are contiguous, and the values follow the keys in whole blocks. Block
/// tables count the blocks of both alike.
bool read_value_offset(const Call& call, std::int64_t* offset) {
  const Matrix& keys = call.k.rows;
  const std::int64_t page = keys.tokens * keys.heads * keys.dim, block = page * call.k.tensor.item_bytes();
  for (const Keys* x : {&call.k, &call.v}) {
    const std::int64_t token = call.hnd ? keys.dim : keys.heads * keys.dim;
    const std::int64_t head = call.hnd ? keys.tokens * keys.dim : keys.dim;
    if (x->rows.stride_token != token || x->rows.stride_head != head || x->stride != page) return false;
  }
  const auto distance = std::int64_t(call.v.rows.data) - std::int64_t(keys.data);
  if (keys.dim != call.v.rows.dim || block <= 0 || distance <= 0 || distance % block != 0) return false;
  *offset = distance / block;
  return true;
}

/// Indptrs of the requests, block tables, and bounds.
bool read_requests(Call* call, bool paged, bool separate) {
  std::int64_t max_q = 0, max_kv = 0, batch = 0;
  if (!read_integer(call->at(kMaxSeqlenQ), &max_q) || !read_integer(call->at(kMaxSeqlenK), &max_kv) ||
      !read_integer(call->at(kBatchSize), &batch) || batch < 1 || batch > kMostKeys || max_q < 1 || max_kv < max_q ||
      (!call->is_given(kQ) && max_kv != max_q)) {
    return false;
  }
  AttentionParams& params = call->params;
  PageTable& pages = params.pages;
  params.batch_size = int(batch);
  params.max_qo_len = limited(max_q);
  params.max_kv_len = limited(max_kv);
  if (!read_lengths(call->torch, call->at(kCuSeqlensQ), batch + 1, call->device, &params.qo_indptr) ||
      !read_lengths(call->torch, call->at(kCuSeqlensK), batch + 1, call->device, &params.kv_indptr)) {
    return false;
  }
  if (!paged) return !call->is_given(kPageTable);
  Tensor tables;
  std::int64_t v_offset = 0;
  if (!call->torch.read(call->at(kPageTable), &tables) || !tables.is_on_gpu(call->device) ||
      !read_tables(tables, separate, batch, &pages) || (separate && !read_value_offset(*call, &v_offset))) {
    return false;
  }
  pages.v_offset = limited(v_offset);
  params.total_kv = total_kv_of(params, max_kv);
  return true;
}

bool read_mask(Call* call) {
  PyObject* const mode = call->at(kMaskMode);
  std::int64_t window = -1, chunk = 0;
  if (!read_integer(call->at(kWindowLeft), &window) || !read_integer(call->at(kChunkSize), &chunk)) return false;
  if (chunk < 0 || (chunk & (chunk - 1)) != 0) return false;
  const bool sliding = is_text(mode, "sliding_window"), chunked = is_text(mode, "chunked");
  if (is_text(mode, "padding")) return window < 0 && chunk == 0;
  if (!sliding && !chunked && !is_text(mode, "causal")) return false;
  if (chunked && chunk == 0) return false;
  if (window == 0 && !sliding) window = -1;
  if (window >= 0 && chunk > 0) return false;
  AttentionParams& params = call->params;
  params.causal = true;
  params.window_left = window < 0 ? -1 : limited(window);
  params.chunk_size = limited(chunk);
  return true;
}

/// Numbers. A scale of 0 is the default one.
bool read_options(Call* call) {
  double bmm1_scale = 0.0, skip_softmax = 0.0;
  if (!call->is_given(kSmScale) || !call->is_given(kVDescale) || !read_number(call->at(kSmScale), &bmm1_scale) ||
      !read_number(call->at(kSkipSoftmax), &skip_softmax) || skip_softmax < 0.0) {
    return false;
  }
  if (bmm1_scale == 0.0) call->given[kSmScale] = nullptr;
  call->params.skip_softmax_factor = float(skip_softmax);
  return read_backend(call->at(kBackend), &call->backend) && read_mask(call) && call->read_logits();
}

/// The output is of the queries' type, or of e4m3 queries of any of 16 bits.
bool read_output(Call* call) {
  const DType given = call->params.q_dtype, &made = call->params.o_dtype;
  call->params.o_dtype = given;
  if (call->is_given(kOut)) call->given[kODtype] = nullptr;  // it has one
  return call->read_output() && (made == given || (given == DType::kFloat8E4M3 && size_of(made) == 2));
}

py::object fused_prefill(PyObject* const* given, Py_ssize_t count) {
  constexpr int kOrder[] = {kQkv,        kInputLayout, kMaxSeqlenQ, kMaxSeqlenK,    kSmScale,
                            kVDescale,   kBatchSize,   kCuSeqlensQ, kCuSeqlensK,    kPageTable,
                            kOut,        kODtype,      kSinks,      kLogitsSoftCap, kMaskMode,
                            kWindowLeft, kChunkSize,   kSaveStats,  kSkipSoftmax,   kBackend};
  Call call;
  call.take(kOrder, given, count);
  const AttentionParams& params = call.params;
  bool paged = false, separate = false, with_stats = false;
  if (!read_tensors(&call, &paged, &separate) || !call.read_queries() || params.q_dtype != params.kv_dtype ||
      params.total_q < 1 || !(paged ? call.read_pages() : call.read_ragged_keys()) ||
      !read_requests(&call, paged, separate) || !read_options(&call) || !read_output(&call) ||
      !read_flag(call.at(kSaveStats), &with_stats)) {
    return py::none();
  }
  Results results;
  if (!call.prepare(&results)) return py::none();
  if (with_stats) {
    results.lse = call.torch.empty({params.total_q, params.num_qo_heads, 2}, 3, DType::kFloat32, call.device);
    results.with_lse = true;  // statistics take its place
    Tensor tensor;
    if (!call.torch.read(results.lse.ptr(), &tensor)) return py::none();
    call.params.stats = pointer<float>(tensor.data);
  }
  return call.launch(results);
}

// Block tables as read_tables() takes them: `tables` is None without pages. kv.indptr counts tokens.
py::object attend_fused(PyObject* const* given, Py_ssize_t count) {
  const Torch& torch = Torch::get();
  py::object object, tables;
  Backend backend{};
  std::int64_t v_offset = 0, max_q_len = 0, max_kv_len = 0;
  Positional(given, count).read(object, backend, tables, v_offset, max_q_len, max_kv_len).end();
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
    params.total_kv = total_kv_of(params, max_kv_len);
  }
  const int device = problem.tensor("q").device.device_id;
  raise_unless_ok(launch_once(torch, params, backend, device));
  return py::none();
}

}  // namespace

void add_fused(const py::object& module) {
  static PyMethodDef functions[] = {function<fused_prefill>("fused_prefill"), function<attend_fused>("attend_fused")};
  add_functions(module, functions);
}

}  // namespace cutlass_kernels
