// What the fa2 kernel is given.
#pragma once

#include <cstdint>

#include "common/logits.h"
#include "common/mask.h"
#include "common/stats.h"
#include "cutlass_kernels/params.h"
#include "schedule/find_work.h"
#include "schedule/tile_order.h"

namespace cutlass_kernels::fa2 {

// K or V of a paged cache; strides in bytes.
struct PagedMatrix {
  const std::int32_t* indices;
  const char* data;
  std::int64_t stride_page;
  std::int64_t stride_token;
  std::int64_t stride_head;
};

struct KernelParams {
  LaunchParams attention;
  LogitsTransform transform;
  MaskDivisors mask_divisors;
  int group_size;
  TileOrder order;
  RowTiles rows;
  // Pages.
  FastDivisor page_size;       // of keys by slots, slots_per_page
  std::uint32_t num_pages;     // at most 2^31: as unsigned numbers, negative indices are not below it
  PagedMatrix paged[2];        // K, V
  std::uint32_t first_v_page;  // PageTable::v_offset
  FastDivisor pack;            // by LaunchPlan::packed_heads
  // The general variant.
  GeneralTransform general;
  bool transforms;  // whether it does anything to q.k
  RowStats stats;
};

}  // namespace cutlass_kernels::fa2
