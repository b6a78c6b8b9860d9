// _C.append_paged_kv_cache and _C.get_batch_indices_positions: the kernels of append.h.
#include "cutlass_kernels/append.h"

#include <cstdint>
#include <string>

#include "arguments.h"
#include "bind.h"
#include "enqueue.h"

namespace cutlass_kernels {
namespace {

void run_append(const std::string& dtype, int num_kv_heads, int head_dim_qk, int head_dim_vo, int batch_size,
                std::int64_t num_tokens, Address batch_indices, Address positions, Address kv_indptr, Address indices,
                std::int64_t num_indices, std::int64_t num_pages, int page_size, Address k, std::int64_t k_st,
                std::int64_t k_sh, Address v, std::int64_t v_st, std::int64_t v_sh, Address k_cache, std::int64_t k_sp,
                std::int64_t k_cache_st, std::int64_t k_cache_sh, Address v_cache, std::int64_t v_sp,
                std::int64_t v_cache_st, std::int64_t v_cache_sh, Address stream) {
  AppendParams params;
  params.dtype = dtype_of(dtype);
  params.num_kv_heads = num_kv_heads;
  params.head_dim_qk = head_dim_qk;
  params.head_dim_vo = head_dim_vo;
  params.batch_size = batch_size;
  params.num_tokens = num_tokens;
  params.batch_indices = pointer<const std::int32_t>(batch_indices);
  params.positions = pointer<const std::int32_t>(positions);
  params.kv_indptr = pointer<const std::int32_t>(kv_indptr);
  params.k = {pointer<void>(k), k_st, k_sh};
  params.v = {pointer<void>(v), v_st, v_sh};
  params.k_cache = {pointer<void>(k_cache), k_cache_st, k_cache_sh};
  params.v_cache = {pointer<void>(v_cache), v_cache_st, v_cache_sh};
  params.pages.indices = pointer<const std::int32_t>(indices);
  params.pages.page_size = page_size;
  params.pages.num_indices = num_indices;
  params.pages.num_pages = num_pages;
  params.pages.k_stride_page = k_sp;
  params.pages.v_stride_page = v_sp;
  enqueue([&] { return append_paged_kv_cache(params, pointer<CUstream_st>(stream)); });
}

void run_positions(int batch_size, std::int64_t num_tokens, Address append_indptr, Address seq_lens,
                   Address batch_indices, Address positions, Address stream) {
  BatchIndicesPositionsParams params;
  params.batch_size = batch_size;
  params.num_tokens = num_tokens;
  params.append_indptr = pointer<const std::int32_t>(append_indptr);
  params.seq_lens = pointer<const std::int32_t>(seq_lens);
  params.batch_indices = pointer<std::int32_t>(batch_indices);
  params.positions = pointer<std::int32_t>(positions);
  enqueue([&] { return get_batch_indices_positions(params, pointer<CUstream_st>(stream)); });
}

}  // namespace

void bind_append(pybind11::module_& m) {
  // Positional: keywords would take 7 us, positions take 0.4.
  m.def("append_paged_kv_cache", &run_append, "Writes new keys and values into their pages; see append.h.");
  m.def("get_batch_indices_positions", &run_positions,
        "Writes the request and the position of every new token; see append.h.");
}

}  // namespace cutlass_kernels
