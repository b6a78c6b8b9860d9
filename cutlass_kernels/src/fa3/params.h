// The parameters of the fa3 kernel.
#pragma once

#include <cuda.h>

#include "common/logits.h"
#include "common/mask.h"
#include "common/stats.h"
#include "cutlass_kernels/params.h"
#include "fa3/config.h"
#include "schedule/find_work.h"
#include "schedule/tile_order.h"

namespace cutlass_kernels::fa3 {

// The pages of K or of V.
struct PagesOfMatrix {
  const std::int32_t* indices;  // page table
  std::uint32_t first_page;     // index of the matrix's first page in its table's numbering; of K 0
  std::int64_t page_bytes;
  std::int64_t slot_bytes;
};

// Strides of pages and slots in units of their greatest common divisor: the offset of a row fits 32 bits.
struct PageUnits {
  std::uint32_t bytes;  // of a unit
  std::uint32_t page;
  std::uint32_t slot;
};

// Rows of a warpgroup of a packed tile: row r is token r / heads and query head r % heads of the pack.
struct PackedRows {
  FastDivisor heads;
  int tokens = kWarpgroupRows;          // floor(64 / heads); rows past the last token are unused
  int last_token = kWarpgroupRows - 1;  // of row 63
};

constexpr int kNoPage = 0x7fffffff;  // outside every tensor map: reads as zeros

// The page of the cache that an entry of the page table names; num_pages or more if there is none.
CUTE_DEVICE int page_of_entry(const PagesOfMatrix& pages, int entry) {
  return int(std::uint32_t(entry) - pages.first_page);
}

// A quantized latent cache, and lists of its slots.
struct SlotsOfCache {
  const char* data;
  const std::int32_t* indices;
  const std::int32_t* lengths;  // of rows: RequestParams::rows_per_length; null: width
  std::int64_t table_stride;
  std::int64_t page_bytes;
  FastDivisor page_size;
  PageUnits units;
  std::uint32_t num_slots;
  int width;
};

struct KernelParams {
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap o_map;
  LaunchParams attention;
  LogitsTransform transform;
  GeneralTransform general;
  bool changes_logits;  // GeneralTransform::changes()
  MaskDivisors mask_divisors;
  TileOrder order;
  RowTiles rows;
  FastDivisor splits_of_row;  // TilePlan::equal_splits
  FastDivisor group_size;
  int heads;  // query heads, or packs of them: each has all tiles
  PackedRows packed;
  // Pages.
  FastDivisor page_size;  // of keys by slots, slots_per_page
  PagesOfMatrix k_pages;
  PagesOfMatrix v_pages;
  int box_rows;  // keys of a TMA box of a page; 0: not paged, or gathered
  std::uint32_t num_pages;
  PageUnits k_units;  // where rows are gathered
  PageUnits v_units;
  int box_rows_log2;
  RowStats stats;  // of the general variant
  // Of quantized latent caches: keys from first_keys on are those of the second.
  SlotsOfCache caches[2];
  int first_keys;
};

template <bool kGeneral>
CUTE_DEVICE IntervalMask make_mask(const KernelParams& params, int batch, int qo_len, int kv_len) {
  return IntervalMask::make<kGeneral>(params.attention, params.mask_divisors, batch, qo_len, kv_len);
}

}  // namespace cutlass_kernels::fa3
