// _C.append_paged_kv_cache and _C.get_batch_indices_positions: the kernels of append.h.
#include "cutlass_kernels/append.h"

#include <cstdint>
#include <string>
#include <tuple>

#include "arguments.h"
#include "bind.h"
#include "enqueue.h"

namespace cutlass_kernels {
namespace {

void run_append(const std::string& dtype, int num_kv_heads, int head_dim_qk, int head_dim_vo,
                int batch_size, std::int64_t num_tokens, Address batch_indices, Address positions,
                Address kv_indptr, Address indices, std::int64_t num_indices,
                std::int64_t num_pages, int page_size, Address k, std::int64_t k_st,
                std::int64_t k_sh, Address v, std::int64_t v_st, std::int64_t v_sh, Address k_cache,
                std::int64_t k_sp, std::int64_t k_cache_st, std::int64_t k_cache_sh,
                Address v_cache, std::int64_t v_sp, std::int64_t v_cache_st,
                std::int64_t v_cache_sh, Address stream) {
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

/// Scales: a number and the address of fp32 factors by KV head, 0 for none, with their stride. Caches: address, and
/// strides of a page, a token and a head.
using ScaleOf = std::tuple<float, Address, std::int32_t>;
using CacheOf = std::tuple<Address, std::int64_t, std::int64_t, std::int64_t>;
using RowsOf = std::tuple<Address, std::int64_t, std::int64_t>;

void run_append_by_slot(const std::string& dtype, const std::string& cache_dtype, int num_kv_heads,
                        int head_dim_qk, int head_dim_vo, std::int64_t num_tokens, Address slots,
                        bool slots_are_64_bit, int page_size, std::int64_t num_pages,
                        const RowsOf& k, const RowsOf& v, const CacheOf& k_cache,
                        const CacheOf& v_cache, const ScaleOf& k_scale, const ScaleOf& v_scale,
                        Address stream) {
  AppendBySlotParams params;
  params.dtype = dtype_of(dtype);
  params.cache_dtype = dtype_of(cache_dtype);
  params.num_kv_heads = num_kv_heads;
  params.head_dim_qk = head_dim_qk;
  params.head_dim_vo = head_dim_vo;
  params.num_tokens = num_tokens;
  params.slots = pointer<const void>(slots);
  params.slots_are_64_bit = slots_are_64_bit;
  params.page_size = page_size;
  params.num_pages = num_pages;
  const auto rows = [](const RowsOf& x) {
    return ConstTensorView{pointer<const void>(std::get<0>(x)), std::get<1>(x), std::get<2>(x)};
  };
  const auto cache = [](const CacheOf& x) {
    return TensorView{pointer<void>(std::get<0>(x)), std::get<2>(x), std::get<3>(x)};
  };
  const auto scales = [](const ScaleOf& x) {
    return DeviceScale{pointer<const float>(std::get<1>(x)), std::get<2>(x)};
  };
  params.k = rows(k);
  params.v = rows(v);
  params.k_cache = cache(k_cache);
  params.v_cache = cache(v_cache);
  params.k_stride_page = std::get<1>(k_cache);
  params.v_stride_page = std::get<1>(v_cache);
  params.k_scale = std::get<0>(k_scale);
  params.v_scale = std::get<0>(v_scale);
  params.k_scales = scales(k_scale);
  params.v_scales = scales(v_scale);
  enqueue([&] { return append_paged_kv_cache_by_slot(params, pointer<CUstream_st>(stream)); });
}

}  // namespace

void bind_append(pybind11::module_& m) {
  // Positional: keywords would take 7 us, positions take 0.4.
  m.def("append_paged_kv_cache", &run_append,
        "Writes new keys and values into their pages; see append.h.");
  m.def("append_by_slot", &run_append_by_slot,
        "Writes new keys and values to slots of a cache, converted; see append.h.");
  m.def("get_batch_indices_positions", &run_positions,
        "Writes the request and the position of every new token; see append.h.");
}

}  // namespace cutlass_kernels
