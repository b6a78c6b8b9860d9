// The tensor maps of a launch, and what producers need to know of pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include "common/element_bytes.h"
#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"
#include "fa3/choose_tile.h"
#include "fa3/config.h"
#include "fa3/params.h"
#include "fa3/tensor_map.h"
#include "registry/registry.h"

namespace cutlass_kernels::fa3 {

inline Status make_maps_of_rows(const LaunchParams& p, int block_n, KernelParams* kernel_params) {
  // Without keys there may be no K and V, but there must be a map, all of which is out of bounds.
  const bool keys = p.total_kv > 0;
  const void* k = keys ? p.k.data : p.q.data;
  const void* v = keys ? p.v.data : p.q.data;
  const int kv_heads = keys ? p.num_kv_heads : 1;
  const RowsOfTensor k_rows{k, p.k.stride_token, p.k.stride_head, p.total_kv, kv_heads, p.head_dim_qk};
  const RowsOfTensor v_rows{v, p.v.stride_token, p.v.stride_head, p.total_kv, kv_heads, p.head_dim_vo};
  Status made = make_tensor_map("k", k_rows, p.kv_dtype, block_n, &kernel_params->k_map);
  return made.ok() ? make_tensor_map("v", v_rows, p.kv_dtype, block_n, &kernel_params->v_map) : made;
}

// The largest unit of which both strides of a matrix are multiples, and the strides in it. The offset of a row then
// fits 32 bits: 64 GB or more, as strides are multiples of 16 bytes, and in practice of a row.
inline Status make_units(const char* name, const PagesOfMatrix& pages, const PageTable& table, PageUnits* units) {
  const std::int64_t slots = table.slots_per_page > 0 ? table.slots_per_page : table.page_size;  // of a page
  const std::int64_t slot_bytes = slots > 1 ? pages.slot_bytes : 0;
  const std::int64_t unit = std::gcd(std::gcd(pages.page_bytes, slot_bytes), std::int64_t(1) << 30);
  const std::int64_t page = pages.page_bytes / unit;
  const std::int64_t slot = slot_bytes / unit;
  // Below 2^32 - 1, which is kNoRow. As a quotient, because the product may not fit.
  const std::int64_t most = 0xfffffffe - (slots - 1) * slot;
  if (most < 0 || (page > 0 && table.num_pages - 1 > most / page)) {
    return Status::invalid("fa3 counts places of rows in 32 bits: " + std::to_string(table.num_pages) + " pages of " +
                           name + ", " + std::to_string(pages.page_bytes) + " bytes apart, and slots " +
                           std::to_string(slot_bytes) + " bytes apart are too many. " +
                           (table.slots_per_page > 0 ? "Split the cache." : "Use backend='fa2'."));
  }
  *units = {std::uint32_t(unit), std::uint32_t(page), std::uint32_t(slot)};
  return Status::success();
}

inline Status make_maps_of_pages(const LaunchParams& p, int block_n, KernelParams* kernel_params) {
  const PageTable& table = p.pages;
  const bool any = table.num_pages > 0;  // else a map that nothing is read through
  const void* k = any ? p.k.data : p.q.data;
  const void* v = any ? p.v.data : p.q.data;
  const int heads = any ? p.num_kv_heads : 1;
  const std::int64_t pages = std::max<std::int64_t>(table.num_pages, 1);
  kernel_params->page_size = FastDivisor(std::uint32_t(std::max(table.page_size, table.slots_per_page)));
  kernel_params->num_pages = std::uint32_t(std::clamp<std::int64_t>(table.num_pages, 0, kNoPage));
  const int bytes = size_of(p.kv_dtype);
  kernel_params->k_pages = {table.indices, 0, bytes * table.k_stride_page, bytes * p.k.stride_token};
  kernel_params->v_pages = {table.v_indices == nullptr ? table.indices : table.v_indices, std::uint32_t(table.v_offset),
                            bytes * table.v_stride_page, bytes * p.v.stride_token};
  if (gathers(p)) {
    Status made = make_units("k", kernel_params->k_pages, table, &kernel_params->k_units);
    return made.ok() ? make_units("v", kernel_params->v_pages, table, &kernel_params->v_units) : made;
  }
  kernel_params->box_rows = std::gcd(table.page_size, block_n & -block_n);
  while (1 << kernel_params->box_rows_log2 < kernel_params->box_rows) ++kernel_params->box_rows_log2;
  const PagesOfTensor k_pages{
      k,     p.k.stride_token, p.k.stride_head, table.k_stride_page, any ? table.page_size : 1, heads,
      pages, p.head_dim_qk};
  const PagesOfTensor v_pages{
      v,     p.v.stride_token, p.v.stride_head, table.v_stride_page, any ? table.page_size : 1, heads,
      pages, p.head_dim_vo};
  const int rows = kernel_params->box_rows;  // of an empty cache, too: its pages lie outside the map
  Status made = make_tensor_map("k", k_pages, p.kv_dtype, rows, &kernel_params->k_map);
  return made.ok() ? make_tensor_map("v", v_pages, p.kv_dtype, rows, &kernel_params->v_map) : made;
}

inline Status make_maps(const LaunchParams& p, int block_n, KernelParams* kernel_params) {
  kernel_params->box_rows = 0;
  kernel_params->box_rows_log2 = 0;
  Status made = p.pages.page_size > 0 ? make_maps_of_pages(p, block_n, kernel_params)
                                      : make_maps_of_rows(p, block_n, kernel_params);
  if (!made.ok()) return made;
  const RowsOfTensor q{p.q.data, p.q.stride_token, p.q.stride_head, p.total_q, p.num_qo_heads, p.head_dim_qk};
  const RowsOfTensor o{p.o.data, p.o.stride_token, p.o.stride_head, p.total_q, p.num_qo_heads, p.head_dim_vo};
  if (p.plan.packed_heads > 0) {  // O is not written by TMA
    return make_packed_tensor_map("q", q, p.q_dtype, p.plan.packed_heads, kernel_params->packed.tokens,
                                  &kernel_params->q_map);
  }
  if (Status of_q = make_tensor_map("q", q, p.q_dtype, kWarpgroupRows, &kernel_params->q_map); !of_q.ok()) {
    return of_q;
  }
  if (size_of(p.o_dtype) == 1) return Status::success();  // O of e4m3 neither
  return make_tensor_map("o", o, p.o_dtype, 16 /* rows of a warp */, &kernel_params->o_map);
}

}  // namespace cutlass_kernels::fa3
