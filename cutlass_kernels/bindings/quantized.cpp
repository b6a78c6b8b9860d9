// _C.append_quantized: tokens to slots of a quantized latent cache, as a direct call (direct.h).
#include <algorithm>
#include <cstdint>

#include "common/token_format.h"
#include "cutlass_kernels/rope.h"
#include "functions.h"
#include "slots.h"

namespace cutlass_kernels {
namespace {

constexpr int kRope = 64;  // columns that are rotated

/// Columns of tokens, [tokens, columns] of 16 bits.
struct TokenColumns {
  Tensor tensor;
  DType dtype{};

  std::int32_t columns() const { return std::int32_t(tensor.shape[1]); }
};
bool read_columns(const Torch& torch, PyObject* object, TokenColumns* tokens) {
  Tensor& tensor = tokens->tensor;
  return torch.read(object, &tensor) && tensor.ndim == 2 && tensor.device.device_type == kDLCUDA &&
         is_contiguous(tensor, 1) && tensor.shape[1] <= kMostOfRow && dtype_of(tensor, &tokens->dtype);
}

/// Arguments, in this order. Where there are no positions, those from the queries on are None, or flags without
/// meaning.
enum {
  kFirst,   // columns of tokens
  kOthers,  // None: the first are all
  kCache,   // bytes [pages, page_size, 1, bytes]
  kSlotsOfTokens,
  kFormat,
  kPowersOfTwo,
  kQueries,
  kPositions,
  kCosSin,
  kIsNeox,
  kUpdateKey,
  kArguments
};

/// Angles and queries of the first `count` tokens; and, where they are to be updated, the last columns of `tokens`.
bool read_rotation(const Torch& torch, PyObject* const* given, const TokenColumns& tokens, std::int64_t count,
                   RopeParams* params) {
  const int device = tokens.tensor.device.device_id;
  Integers positions;
  Tensor table;
  bool neox = false, update = false;
  if (!read_integers(torch, given[kPositions], device, &positions) || positions.count < count ||
      !torch.read(given[kCosSin], &table) || table.ndim != 2 || table.shape[1] != kRope || table.strides[1] != 1 ||
      !table.is_on_gpu(device) || !dtype_of(table, &params->cos_sin_dtype) || !read_flag(given[kIsNeox], &neox) ||
      !read_flag(given[kUpdateKey], &update)) {
    return false;
  }
  if (given[kQueries] != Py_None) {
    Rows q;
    if (!read_rows(torch, given[kQueries], &q) || q.device != device || q.dtype != tokens.dtype || q.dim != kRope ||
        q.tokens < count) {
      return false;
    }
    params->num_qo_heads = q.heads;
    params->q = q.read_here();
    params->q_out = q.written_here();
  }
  params->dtype = tokens.dtype;
  params->head_dim = params->rotary_dim = kRope;
  params->interleaved = !neox;
  params->num_tokens = count;
  params->positions = positions.data;
  params->positions_are_64_bit = positions.are_64_bit;
  params->cos_sin = pointer<const void>(table.data);
  params->stride_position = table.strides[0];
  params->num_positions = table.shape[0];
  if (update && tokens.columns() >= kRope) {
    const Address last = tokens.tensor.data + Address(tokens.columns() - kRope) * sizeof(std::uint16_t);
    params->k_out = {pointer<void>(last), tokens.tensor.strides[0], 0};
  }
  return true;
}

py::object append_quantized(PyObject* const* given, Py_ssize_t count) {
  expect(count == kArguments);
  const Torch& torch = Torch::get();
  TokenColumns first, others;
  Tensor cache;
  Integers slots;
  AppendQuantizedParams params;
  if (!read_columns(torch, given[kFirst], &first) || !torch.read(given[kCache], &cache) || cache.ndim != 4 ||
      cache.item_bytes() != 1 || !read_kv_format(given[kFormat], &params.cache_dtype)) {
    return py::none();
  }
  const int device = first.tensor.device.device_id;
  const TokenFormat format = token_format(params.cache_dtype);
  std::int64_t tokens = first.tensor.shape[0];
  if (given[kOthers] != Py_None) {
    if (!read_columns(torch, given[kOthers], &others) || others.dtype != first.dtype ||
        !others.tensor.is_on_gpu(device)) {
      return py::none();
    }
    tokens = std::min(tokens, others.tensor.shape[0]);
    params.others = pointer<const void>(others.tensor.data);
    params.others_stride = others.tensor.strides[0];
    params.others_columns = others.columns();
  }
  if (!cache.is_on_gpu(device) || cache.shape[3] != format.bytes || cache.shape[2] != 1 || !is_contiguous(cache, 3) ||
      cache.shape[1] < 1 || cache.shape[1] > kMostOfRow ||
      !read_integers(torch, given[kSlotsOfTokens], device, &slots) || slots.count > tokens ||
      (format.by_page && cache.shape[1] > 1 && cache.strides[1] != format.bytes)) {
    return py::none();
  }
  params.dtype = first.dtype;
  params.power_of_two_scales = given[kPowersOfTwo] == Py_True;
  params.num_tokens = slots.count;
  params.slots = slots.data;
  params.slots_are_64_bit = slots.are_64_bit;
  params.first = pointer<const void>(first.tensor.data);
  params.first_stride = first.tensor.strides[0];
  params.first_columns = first.columns();
  params.cache = pointer<void>(cache.data);
  params.stride_page = cache.strides[0];
  params.stride_token = format.by_page ? format.data_bytes() : cache.strides[1];
  params.page_size = std::int32_t(cache.shape[1]);
  params.num_pages = cache.shape[0];
  if (given[kPositions] == Py_None) {
    return launch_on(torch, device, [&](cudaStream_t stream) { return append_quantized_by_slot(params, stream); });
  }
  RopeParams rope;
  const TokenColumns& last = params.others_columns > 0 ? others : first;
  if (!read_rotation(torch, given, last, slots.count, &rope)) return py::none();
  return launch_on(torch, device,
                   [&](cudaStream_t stream) { return apply_rope_and_append_quantized_by_slot(rope, params, stream); });
}

}  // namespace

void add_quantized(const py::object& module) {
  static PyMethodDef functions[] = {function<append_quantized>("append_quantized")};
  add_functions(module, functions);
}

}  // namespace cutlass_kernels
