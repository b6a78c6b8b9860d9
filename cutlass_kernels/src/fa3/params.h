// What the fa3 kernel is given.
#pragma once

#include <cuda.h>

#include "common/logits.h"
#include "common/mask.h"
#include "common/stats.h"
#include "common/work.h"
#include "cutlass_kernels/params.h"
#include "fa3/config.h"

namespace cutlass_kernels::fa3 {

// The pages of K or of V.
struct PagesOfMatrix {
  const std::int32_t* indices;
  std::uint32_t first_page;  // the number of the first; of K 0
  std::int64_t page_bytes;
  std::int64_t slot_bytes;
};

// Where rows of pages are, in units of what divides both strides: 32 bits say it.
struct PageUnits {
  std::uint32_t bytes;  // of a unit
  std::uint32_t page;
  std::uint32_t slot;
};

// Rows of a warpgroup of a packed tile: row r is token r / heads and query head r % heads of those that share a tile.
struct PackedRows {
  FastDivisor heads;
  int tokens = kWarpgroupRows;          // floor(64 / heads); rows past their last are nobody's
  int last_token = kWarpgroupRows - 1;  // of row 63
};

// Which page of the cache an entry of the page table is: from num_pages on where it is none.
CUTE_DEVICE int page_of_entry(const PagesOfMatrix& pages, int entry) {
  return int(std::uint32_t(entry) - pages.first_page);
}

struct KernelParams {
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap o_map;
  AttentionParams attention;
  LogitsTransform transform;
  GeneralTransform general;
  bool changes_logits;  // GeneralTransform::changes()
  FastDivisor chunk;
  TileOrder order;
  RowTiles rows;
  FastDivisor group_size;
  int heads;  // that tiles are counted for: query heads, or packs of them
  PackedRows packed;
  // Pages.
  FastDivisor page_size;
  PagesOfMatrix k_pages;
  PagesOfMatrix v_pages;
  int box_rows;  // keys that come from a page by one TMA instruction; 0: they come row by row
  std::uint32_t num_pages;
  PageUnits k_units;  // where rows are gathered
  PageUnits v_units;
  int box_rows_log2;
  RowStats stats;  // of the general variant
};

CUTE_DEVICE IntervalMask make_mask(const KernelParams& params, int qo_len, int kv_len) {
  const AttentionParams& p = params.attention;
  return {kv_len,        kv_len - qo_len, p.causal || p.chunk_size > 0,
          p.window_left, p.chunk_size,    params.chunk};
}

}  // namespace cutlass_kernels::fa3
