// _C.attention, _C.single_prefill and _C.single_decode: attention without a plan, as direct calls (direct.h). Kernels
// read lengths and page tables on the device.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <utility>

#include "call.h"
#include "common/element_bytes.h"
#include "common/token_format.h"
#include "functions.h"
#include "latent/dims.h"
#include "schedule/requests.h"

namespace cutlass_kernels {
namespace {

bool is_of_bytes(const Tensor& x) {
  const auto has_type = [&](DLDataTypeCode code) { return x.dtype.code == code && x.dtype.lanes == 1; };
  return x.dtype.bits == 8 && (has_type(kDLUInt) || has_type(kDLInt) || has_type(kDLFloat8_e4m3fn));
}

/// Keys that are tokens of a quantized latent cache, bytes [pages, page_size, 1, bytes of a token], become tensors of
/// its columns. Kernels read such caches by slots alone.
bool read_quantized_cache(Call* call) {
  Tensor& k = call->k.tensor;
  Tensor& v = call->v.tensor;
  DType of_numbers, type = DType::kLatentV32;
  const auto last = std::size_t(std::max(k.ndim - 1, 0));
  if (call->is_given(kKvFormat)) {
    if (!read_kv_format(call->at(kKvFormat), &type)) return false;
  } else if (dtype_of(k, &of_numbers)) {
    return true;
  } else if (k.shape[last] == token_format(DType::kLatentV4).bytes) {
    type = DType::kLatentV4;
  }
  call->token_bytes = token_format(type).bytes;
  if (!is_of_bytes(k) || !call->is_given(kKvIndicesPerToken) || call->is_given(kKRope) ||
      k.shape[last] != call->token_bytes || v.data != k.data || v.ndim != k.ndim || v.shape != k.shape ||
      v.strides != k.strides) {
    return false;
  }
  // Queries without RoPE read only the first 528 bytes of v3.2.
  const std::int64_t columns = call->q.shape[std::size_t(std::max(call->q.ndim - 1, 0))];
  if (type == DType::kLatentV32 && columns == mla::kLatentDim && !call->is_given(kQRope)) {
    type = DType::kLatentV32Nope;
  }
  const TokenFormat format = token_format(type);
  if (format.by_page) {
    const auto token = std::size_t(1 + call->hnd), head = std::size_t(1 + !call->hnd);
    if (k.ndim != 4 || k.shape[head] != 1 || (k.shape[token] > 1 && k.strides[token] != format.bytes)) return false;
    for (const auto dimension : {token, head}) k.strides[dimension] = v.strides[dimension] = format.data_bytes();
  }
  k.shape[last] = format.columns + format.positions;
  v.shape[last] = mla::kLatentDim;
  call->token_dtype = type;
  return true;
}

/// q_rope: the last columns of the queries.
bool read_q_rope(Call* call) {
  if (!call->is_given(kQRope)) return true;
  const Tensor& q = call->q;
  Tensor tensor;
  Matrix rope;
  if (!call->torch.read(call->at(kQRope), &tensor) || tensor.ndim != q.ndim || tensor.shape[0] != q.shape[0] ||
      !has_dtype(tensor, call->params.q_dtype) || !tensor.is_on_gpu(call->device) || !read_rows(tensor, &rope) ||
      rope.tokens != call->queries.tokens || rope.heads != call->queries.heads || rope.dim != mla::kRopeDim) {
    return false;
  }
  if (!is_behind(rope, call->queries, q.item_bytes())) call->params.q_rope = rope.view();
  call->params.head_dim_qk += int(rope.dim);
  return true;
}

/// (world, rank, block).
bool read_shard(const Call& call, KvShard* kv_shard) {
  if (!call.is_given(kKvShard)) return true;
  PyObject* const shard = call.at(kKvShard);
  if (!PyTuple_Check(shard) || PyTuple_GET_SIZE(shard) != 3) return false;
  std::int64_t numbers[3] = {};
  for (int i = 0; i < 3; ++i) {
    if (!read_integer(PyTuple_GET_ITEM(shard, i), &numbers[i]) || numbers[i] > kMostKeys) return false;
  }
  const auto [world, rank, block] = numbers;
  *kv_shard = {std::int32_t(world), std::int32_t(rank), std::int32_t(block)};
  return 0 <= rank && rank < world && block > 0;
}

bool is_none_given(const Call& call, std::initializer_list<int> rows) {
  return std::none_of(rows.begin(), rows.end(), [&](int row) { return call.is_given(row); });
}

/// With kv_indices_per_token, each row of q is a request.
bool read_rows_as_requests(Call* call) {
  AttentionParams& params = call->params;
  const std::int64_t rows = call->queries.tokens;
  if (!is_none_given(*call, {kCuSeqlensQ, kSequsedQ, kMaxSeqlenQ, kCuSeqlensK, kSequsedK, kMaxSeqlenK, kKvShard}) ||
      rows < 1 || rows > kMostKeys) {
    return false;
  }
  params.batch_size = int(rows);
  params.max_qo_len = 1;
  return call->read_lengths_of(kTopkLength, rows, &params.seqused_k);
}

/// How many requests there are, and where their rows are.
bool read_requests(Call* call) {
  if (call->is_given(kKvIndicesPerToken)) return read_rows_as_requests(call);
  if (!is_none_given(*call, {kTopkLength, kMaxLogits, kExtraK, kExtraIndicesPerToken, kExtraTopkLength})) return false;
  std::int64_t batch = 1, most_rows = call->queries.tokens;
  if (call->q.ndim == 4) {
    if (call->is_given(kCuSeqlensQ)) return false;
    batch = call->q.shape[0];
    most_rows = call->q.shape[1];
  } else if (call->is_given(kCuSeqlensQ)) {
    Tensor indptr;
    if (!call->torch.read(call->at(kCuSeqlensQ), &indptr) || indptr.ndim != 1) return false;
    batch = indptr.shape[0] - 1;
    std::int64_t told = most_rows;
    if (!read_integer(call->at(kMaxSeqlenQ), &told) || told < 0) return false;
    most_rows = std::min(most_rows, told);
  }
  if (batch < 1 || batch > kMostKeys || most_rows < 1) return false;
  AttentionParams& params = call->params;
  params.batch_size = int(batch);
  params.max_qo_len = limited(most_rows);
  return call->read_lengths_of(kCuSeqlensQ, batch + 1, &params.qo_indptr) &&
         call->read_lengths_of(kSequsedQ, batch, &params.seqused_q) &&
         call->read_lengths_of(kSequsedK, batch, &params.seqused_k) && read_shard(*call, &params.kv_shard);
}

bool read_pages(Call* call, std::int64_t max_kv) {
  if (call->k.tensor.ndim != 4 || !call->read_pages()) return false;
  AttentionParams& params = call->params;
  PageTable& pages = params.pages;
  const std::int64_t batch = params.batch_size;
  const bool has_table = call->is_given(kPageTable);
  Tensor tensor;
  if (has_table) {
    if (call->is_given(kKvIndptr) || !call->torch.read(call->at(kPageTable), &tensor) ||
        !tensor.is_on_gpu(call->device) || !read_tables(tensor, /*separate=*/false, batch, &pages) ||
        !(call->is_given(kSequsedK) || call->is_given(kCuSeqlensK)) ||
        !call->read_lengths_of(kCuSeqlensK, batch + 1, &params.kv_indptr)) {
      return false;
    }
  } else {
    if (call->is_given(kCuSeqlensK) || !call->torch.read(call->at(kKvIndices), &tensor) || tensor.ndim != 1 ||
        !call->read_lengths_of(kKvIndices, tensor.shape[0], &pages.indices) ||
        !call->read_lengths_of(kKvIndptr, batch + 1, &params.kv_indptr) ||
        !(call->is_given(kSequsedK) || call->is_given(kKvLastPageLen)) ||
        !call->read_lengths_of(kKvLastPageLen, batch, &pages.last_page_len)) {
      return false;
    }
    pages.num_indices = tensor.shape[0];
  }
  const std::int64_t room = (has_table ? pages.table_width : pages.num_indices) * pages.page_size;
  max_kv = std::min({max_kv < 0 ? room : max_kv, room, kMostKeys - 1});
  params.max_kv_len = limited(max_kv);
  params.total_kv = std::min({max_kv * batch, has_table ? kMostKeys : room,
                              std::max<std::int64_t>(pages.num_pages * pages.page_size, 1) * batch, kMostKeys});
  return true;
}

/// kv_indices_per_token: slots of a cache in pages, or rows of a tensor, which are pages of one slot.
bool read_slots(Call* call) {
  AttentionParams& params = call->params;
  PageTable& pages = params.pages;
  Tensor indices;
  if (!is_none_given(*call, {kPageTable, kKvIndptr, kKvIndices, kKvLastPageLen}) ||
      !call->torch.read(call->at(kKvIndicesPerToken), &indices) || indices.ndim != 3 || indices.shape[1] != 1 ||
      !indices.is_on_gpu(call->device) ||
      !read_tables(part_of(indices, 0), /*separate=*/false, params.batch_size, &pages)) {
    return false;
  }
  for (Keys* const keys : {&call->k, &call->v, &call->k_rope}) {
    Tensor& tensor = keys->tensor;
    if (!call->hnd || tensor.ndim != 3) continue;
    std::swap(tensor.shape[0], tensor.shape[1]);
    std::swap(tensor.strides[0], tensor.strides[1]);
  }
  if (!call->read_pages() || pages.page_size < 1) return false;
  pages.slots_per_page = pages.page_size;
  pages.page_size = 1;
  params.max_kv_len = pages.table_width;
  params.total_kv = std::min(std::int64_t(pages.table_width) * params.batch_size, kMostKeys);
  return true;
}

/// The cache whose lists have lengths is to be the second: a call takes the time of all entries of the first.
void exchange_caches(AttentionParams* params) {
  SecondSlots& second = params->second;
  PageTable& pages = params->pages;
  std::swap(params->k.data, second.data);
  std::swap(params->k.stride_token, second.stride_token);
  std::swap(pages.k_stride_page, second.stride_page);
  std::swap(pages.num_pages, second.num_pages);
  std::swap(pages.slots_per_page, second.slots_per_page);
  std::swap(pages.table_width, second.table_width);
  std::swap(pages.table_stride, second.table_stride);
  std::swap(pages.indices, second.indices);
  std::swap(params->seqused_k, second.lengths);
  params->v = params->k;
  pages.v_stride_page = pages.k_stride_page;
}

/// extra_k: another cache of the same format.
bool read_second_cache(Call* call) {
  if (!call->is_given(kExtraK)) return is_none_given(*call, {kExtraIndicesPerToken, kExtraTopkLength});
  if (!call->token_dtype) return false;
  const TokenFormat format = token_format(*call->token_dtype);
  AttentionParams& params = call->params;
  Tensor cache, indices;
  if (!call->torch.read(call->at(kExtraK), &cache) || cache.ndim < 3 || cache.ndim > 4 || !is_of_bytes(cache) ||
      !cache.is_on_gpu(call->device)) {
    return false;
  }
  const bool in_pages = cache.ndim == 4;
  const auto last = std::size_t(cache.ndim - 1);
  const auto token = last - 2 + call->hnd, head = last - 2 + !call->hnd;
  if (cache.shape[last] != call->token_bytes || cache.strides[last] != 1 || cache.shape[head] != 1 ||
      (format.by_page && (!in_pages || (cache.shape[token] > 1 && cache.strides[token] != format.bytes)))) {
    return false;
  }
  SecondSlots& second = params.second;
  second.data = pointer<const void>(cache.data);
  second.slots_per_page = in_pages ? limited(cache.shape[token]) : 1;
  second.num_pages = cache.shape[in_pages ? 0 : token];
  second.stride_page = cache.strides[in_pages ? 0 : token];
  second.stride_token = format.by_page || !in_pages ? format.data_bytes() : cache.strides[token];
  if (cache.data % 16 != 0 || second.stride_page % 16 != 0 || second.stride_token % 16 != 0 ||
      second.slots_per_page < 1 || second.data == nullptr || params.k.data == nullptr) {
    return false;
  }
  PageTable lists;
  if (!call->torch.read(call->at(kExtraIndicesPerToken), &indices) || indices.ndim != 3 || indices.shape[1] != 1 ||
      !indices.is_on_gpu(call->device) ||
      !read_tables(part_of(indices, 0), /*separate=*/false, params.batch_size, &lists) || lists.table_width < 1 ||
      !call->read_lengths_of(kExtraTopkLength, params.batch_size, &second.lengths)) {
    return false;
  }
  second.indices = lists.indices;
  second.table_width = lists.table_width;
  second.table_stride = lists.table_stride;
  if (params.seqused_k != nullptr && second.lengths == nullptr) exchange_caches(&params);
  const std::int64_t keys = keys_before_second(params) + std::int64_t(second.table_width);
  params.max_kv_len = limited(keys);
  params.total_kv = std::min(keys * params.batch_size, kMostKeys);
  return keys < kMostKeys;
}

bool read_keys(Call* call) {
  AttentionParams& params = call->params;
  Tensor& rope = call->k_rope.tensor;
  std::int64_t max_kv = -1;
  if (!read_integer(call->at(kMaxSeqlenK), &max_kv) ||
      (call->is_given(kKRope) && !(call->torch.read(call->at(kKRope), &rope) && has_dtype(rope, params.kv_dtype) &&
                                   rope.is_on_gpu(call->device)))) {
    return false;
  }
  if (call->is_given(kKvIndicesPerToken)) return read_slots(call) && read_second_cache(call);
  if (call->is_given(kPageTable) || call->is_given(kKvIndptr)) return read_pages(call, max_kv);
  if (call->is_given(kKvIndices) || call->is_given(kKvLastPageLen)) return false;
  if (call->k.tensor.ndim == 3) {
    if (!call->read_ragged_keys() || !call->read_lengths_of(kCuSeqlensK, params.batch_size + 1, &params.kv_indptr) ||
        (params.kv_indptr == nullptr && params.batch_size != 1)) {
      return false;
    }
    const std::int64_t all = params.total_kv;
    if (params.kv_indptr == nullptr) {
      params.max_kv_len = limited(all);
    } else if (max_kv > 0) {
      params.max_kv_len = limited(std::min(max_kv, all));
    }
    return true;
  }
  if (call->is_given(kCuSeqlensK) || !call->read_dense_keys() || call->k.count != params.batch_size ||
      call->v.stride != call->k.stride || (call->is_given(kKRope) && call->k_rope.stride != call->k.stride)) {
    return false;
  }
  params.kv_stride_request = std::int32_t(call->k.stride);
  params.max_kv_len = limited(call->k.tensor.shape[std::size_t(1 + call->hnd)]);
  return true;
}

/// What attention() and the functions of one request read alike.
bool read_options(Call* call) {
  return read_backend(call->at(kBackend), &call->backend) && call->read_mask() && call->read_logits() &&
         call->read_output();
}

py::object attend_unplanned(PyObject* const* given, Py_ssize_t count) {
  if (count != kArguments) {
    throw py::type_error("The compiled module was built for other arguments of attention(): build the package again.");
  }
  SharedSchedule* schedule = nullptr;
  if (given[kSchedule] != Py_None) schedule = py::handle(given[kSchedule]).cast<SharedSchedule*>();
  Call call;
  std::copy_n(given, count, call.given.begin());
  call.takes_device_scales = true;
  if (!read_layout(given[kKvLayout], &call.hnd) || !call.read_tensors() || call.q.ndim == 2 ||
      !read_quantized_cache(&call) || !call.read_queries() || !read_q_rope(&call) || !read_requests(&call) ||
      !read_keys(&call)) {
    return py::none();
  }
  call.params.o_dtype = size_of(call.params.q_dtype) == 1 ? DType::kBFloat16 : call.params.q_dtype;
  Results results;
  if (!read_options(&call) || !call.prepare(&results)) return py::none();
  return call.launch(results, schedule);
}

/// A single request. Of a decode, q and the results have no dimension of rows.
template <int kDims>
py::object attend_one(PyObject* const* given, Py_ssize_t count) {
  constexpr int kOrder[] = {kQ,         kK,        kV,        kOut,        kLse,           kSinks,
                            kReturnLse, kCausal,   kKvLayout, kWindowLeft, kLogitsSoftCap, kSmScale,
                            kQDescale,  kKDescale, kVDescale, kBackend};
  Call call;
  call.take(kOrder, given, count);
  const AttentionParams& params = call.params;
  if (!read_layout(call.at(kKvLayout), &call.hnd) || !call.read_tensors() || call.q.ndim != kDims ||
      !call.read_queries() || !call.read_ragged_keys()) {
    return py::none();
  }
  // fp8 may have to be converted first.
  if (params.q_dtype != params.kv_dtype || size_of(params.q_dtype) != 2) return py::none();
  call.params.o_dtype = params.q_dtype;
  Results results;
  if (!read_options(&call) || params.o_dtype != params.q_dtype || !call.prepare(&results)) return py::none();
  return call.launch(results);
}

}  // namespace

void add_unplanned(const py::object& module) {
  module.attr("call_arguments") = kCallArguments;
  static PyMethodDef functions[] = {function<attend_unplanned>("attention"), function<attend_one<3>>("single_prefill"),
                                    function<attend_one<2>>("single_decode")};
  add_functions(module, functions);
}

}  // namespace cutlass_kernels
