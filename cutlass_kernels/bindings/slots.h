// Rows of tokens and slots of a cache, as Python passes them: addresses, and strides in elements.
#pragma once

#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "arguments.h"
#include "cutlass_kernels/append.h"

namespace cutlass_kernels {

/// Address, strides of a token and a head.
using RowsOf = std::tuple<Address, std::int64_t, std::int64_t>;
/// Address, strides of a page, a token and a head.
using CacheOf = std::tuple<Address, std::int64_t, std::int64_t, std::int64_t>;
/// A number, and the address of fp32 factors by KV head, 0 for none, with their stride.
using ScaleOf = std::tuple<float, Address, std::int32_t>;
/// Slots and whether they have 64 bits; dtype of the cache, page size, pages; the head dimension of the values, and
/// these; caches and scales of keys and values.
using SlotsOf = std::tuple<Address, bool, std::string, int, std::int64_t, int, RowsOf, CacheOf,
                           CacheOf, ScaleOf, ScaleOf>;

inline ConstTensorView const_rows(const RowsOf& x) {
  return {pointer<const void>(std::get<0>(x)), std::get<1>(x), std::get<2>(x)};
}
inline TensorView rows(const RowsOf& x) {
  return {pointer<void>(std::get<0>(x)), std::get<1>(x), std::get<2>(x)};
}
inline TensorView entries(const CacheOf& x) {
  return {pointer<void>(std::get<0>(x)), std::get<2>(x), std::get<3>(x)};
}
inline DeviceScale factors(const ScaleOf& x) {
  return {pointer<const float>(std::get<1>(x)), std::get<2>(x)};
}

/// All but the keys, and what the rest of a call says of them.
inline AppendBySlotParams append_params(const SlotsOf& slots) {
  const auto& [addresses, are_64_bit, dtype, page_size, num_pages, head_dim_vo, v, k_cache, v_cache,
               k_scale, v_scale] = slots;
  AppendBySlotParams params;
  params.slots = pointer<const void>(addresses);
  params.slots_are_64_bit = are_64_bit;
  params.cache_dtype = dtype_of(dtype);
  params.page_size = page_size;
  params.num_pages = num_pages;
  params.head_dim_vo = head_dim_vo;
  params.v = const_rows(v);
  params.k_cache = entries(k_cache);
  params.v_cache = entries(v_cache);
  params.k_stride_page = std::get<1>(k_cache);
  params.v_stride_page = std::get<1>(v_cache);
  params.k_scale = std::get<0>(k_scale);
  params.v_scale = std::get<0>(v_scale);
  params.k_scales = factors(k_scale);
  params.v_scales = factors(v_scale);
  return params;
}

}  // namespace cutlass_kernels
