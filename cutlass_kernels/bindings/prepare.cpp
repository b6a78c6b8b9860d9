// _C.prepare and _C.round_output: the copies of prepare.h, for temporaries that Python allocates.
#include "cutlass_kernels/prepare.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "arguments.h"
#include "bind.h"
#include "enqueue.h"

namespace cutlass_kernels {
namespace {

// Addresses of 0 stand for tensors that are not there; rope_scale 0 for no rotary embedding.
void run_prepare(const std::string& q_dtype, const std::string& kv_dtype, const std::string& dtype, int num_qo_heads,
                 int num_kv_heads, int head_dim_qk, int head_dim_vo, int batch_size, Address qo_indptr,
                 Address kv_indptr, std::int64_t total_q, std::int64_t total_kv, Address q, std::int64_t q_st,
                 std::int64_t q_sh, Address k, std::int64_t k_st, std::int64_t k_sh, std::int64_t k_stride_page,
                 Address v, std::int64_t v_st, std::int64_t v_sh, std::int64_t v_stride_page, Address indices,
                 Address v_indices, Address last_page_len, int page_size, std::int64_t num_indices,
                 std::int64_t num_pages, std::int64_t window_left, double rope_scale, double rope_theta, Address q_copy,
                 Address k_copy, Address v_copy, Address tables, Address stream) {
  PrepareParams params;
  params.q_dtype = dtype_of(q_dtype);
  params.kv_dtype = dtype_of(kv_dtype);
  params.dtype = dtype_of(dtype);
  params.num_qo_heads = num_qo_heads;
  params.num_kv_heads = num_kv_heads;
  params.head_dim_qk = head_dim_qk;
  params.head_dim_vo = head_dim_vo;
  params.batch_size = batch_size;
  params.qo_indptr = pointer<const std::int32_t>(qo_indptr);
  params.kv_indptr = pointer<const std::int32_t>(kv_indptr);
  params.total_q = total_q;
  params.total_kv = total_kv;
  params.q = {pointer<void>(q), q_st, q_sh};
  params.k = {pointer<void>(k), k_st, k_sh};
  params.v = {pointer<void>(v), v_st, v_sh};
  params.pages.indices = pointer<const std::int32_t>(indices);
  params.pages.v_indices = pointer<const std::int32_t>(v_indices);
  params.pages.last_page_len = pointer<const std::int32_t>(last_page_len);
  params.pages.page_size = page_size;
  params.pages.num_indices = num_indices;
  params.pages.num_pages = num_pages;
  params.pages.k_stride_page = k_stride_page;
  params.pages.v_stride_page = v_stride_page;
  constexpr std::int64_t kAll = std::numeric_limits<std::int32_t>::max();
  params.window_left = std::int32_t(std::min(window_left, kAll));
  params.rotate = rope_scale != 0.0;
  params.rope_scale = rope_scale;
  params.rope_theta = rope_theta;
  params.q_copy = pointer<void>(q_copy);
  params.k_copy = pointer<void>(k_copy);
  params.v_copy = pointer<void>(v_copy);
  params.tables = pointer<std::int32_t>(tables);
  enqueue([&] { return prepare(params, pointer<CUstream_st>(stream)); });
}

void run_round_output(std::int64_t rows, int num_heads, int head_dim, Address from, std::int64_t from_st,
                      std::int64_t from_sh, Address to, std::int64_t to_st, std::int64_t to_sh, Address stream) {
  RoundParams params;
  params.rows = rows;
  params.num_heads = num_heads;
  params.head_dim = head_dim;
  params.from = {pointer<void>(from), from_st, from_sh};
  params.to = {pointer<void>(to), to_st, to_sh};
  enqueue([&] { return round_output(params, pointer<CUstream_st>(stream)); });
}

}  // namespace

void bind_prepare(pybind11::module_& m) {
  // Positional: keywords would take 7 us, positions take 0.4.
  m.def("prepare", &run_prepare, "Copies q, k and v into temporaries, rotated or converted to 16 bits; see prepare.h.");
  m.def("round_output", &run_round_output,
        "Writes an output of e4m3 from one of float16 that was filled with unwritten_byte; see "
        "prepare.h.");
  m.attr("unwritten_byte") = kUnwrittenByte;
}

}  // namespace cutlass_kernels
