// What the fa3 kernel is given.
#pragma once

#include <cuda.h>

#include "common/logits.h"
#include "common/mask.h"
#include "common/work.h"
#include "cutlass_kernels/params.h"

namespace cutlass_kernels::fa3 {

struct KernelParams {
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap o_map;
  AttentionParams attention;
  LogitsTransform transform;
  FastDivisor chunk;
  TileOrder order;
  int group_size;
  // Pages.
  FastDivisor page_size;
  int box_rows;  // keys that come from a page by one TMA instruction; 0: they come row by row
  std::uint32_t num_pages;
};

CUTE_DEVICE IntervalMask make_mask(const KernelParams& params, int qo_len, int kv_len) {
  const AttentionParams& p = params.attention;
  return {kv_len,        kv_len - qo_len, p.causal || p.chunk_size > 0,
          p.window_left, p.chunk_size,    params.chunk};
}

}  // namespace cutlass_kernels::fa3
