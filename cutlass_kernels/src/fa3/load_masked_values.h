// V of KV blocks with fully masked keys (fully_masked_keys.h): copied row by row, with zeros in the place of these
// keys; and the V producer of ragged tensors under a custom mask. The V producer of pages (load_pages.h) uses the
// same copy.
#pragma once

#include <cute/config.hpp>

#include "common/ptx/cp_async.h"
#include "common/ptx/shared_address.h"
#include "fa3/fully_masked_keys.h"
#include "fa3/load.h"
#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

// V of one head of one request, whose keys lie one after the other, from the CTA's first column on.
struct RaggedValues {
  const LaunchParams& p;
  const int first_column;
  const char* data;

  CUTE_DEVICE RaggedValues(const KernelParams& params, const Job& job, int first_column_)
      : p(params.attention),
        first_column(first_column_),
        data(static_cast<const char*>(p.v.data) +
             2 * (job.kv_begin * p.v.stride_token + job.kv_head * p.v.stride_head + first_column)) {
  }
  CUTE_DEVICE std::int64_t offset_of(int key) const { return 2 * (key * p.v.stride_token); }
  CUTE_DEVICE bool has_column(int column) const { return first_column + column < p.head_dim_vo; }
};

// The same, in pages.
struct PagedValues {
  const KernelParams& params;
  const int first_column;
  const std::int32_t* indices;  // page table of the request
  const char* data;             // of the head

  CUTE_DEVICE PagedValues(const KernelParams& params_, const Job& job, int first_column_)
      : params(params_),
        first_column(first_column_),
        indices(params.v_pages.indices + job.kv_begin),
        data(static_cast<const char*>(params.attention.v.data) +
             2 * (job.kv_head * params.attention.v.stride_head + first_column)) {}

  // Bytes from `data` to the row of a key; -1 if its page lies outside the cache.
  CUTE_DEVICE std::int64_t offset_of(int key) const {
    const int entry = params.page_size.divide(key);
    const int page = page_of_entry(params.v_pages, indices[entry]);
    const int slot = key - entry * params.attention.pages.page_size;
    return std::uint32_t(page) < params.num_pages
               ? page * params.v_pages.page_bytes + slot * params.v_pages.slot_bytes
               : -1;
  }

  CUTE_DEVICE bool has_column(int column) const {
    return first_column + column < params.attention.head_dim_vo;
  }
};

// Copies 32 rows from first_row on to the stage at `to`. Lane l brings the offset of row first_row + l in `offset`;
// zeros are written for a negative one.
template <int kRows, int kPanels, class Values>
CUTE_DEVICE void copy_rows(const Values& values, std::int64_t offset, int first_row,
                           std::uint32_t to) {
  const int chunk = threadIdx.x % 8;  // of the 128 bytes of a panel's row: eight lanes copy one
  const int row_of_four = threadIdx.x % 32 / 8;
  const char* data = values.data + chunk * 16;
  to += (first_row + row_of_four) * 128 + ((chunk ^ row_of_four) << 4);
  CUTE_NO_UNROLL
  for (int j = 0; j < 8; ++j) {
    const std::int64_t row_offset = __shfl_sync(0xffffffffu, offset, 4 * j + row_of_four);
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      // Rows four apart differ in the bit of 64 bytes of their swizzle.
      cp_async_16((to ^ (j % 2 * 64)) + j * (4 * 128) + panel * (kRows * 128),
                  data + row_offset + panel * 128,
                  row_offset >= 0 && values.has_column(panel * 64 + chunk * 8));
    }
  }
}

// Copies V of a KV block to `stage` (BLK_N, 64, D_VO / 64), with zeros for keys that are fully masked or outside the
// visible range. By all lanes of a warp.
template <class Tile, int kPanels, class Values>
CUTE_DEVICE void copy_visible_values(const Values& values, const Job& job, int kv_block,
                                     const FullyMaskedKeys<Tile::kBlockN>& masked, char* stage) {
  constexpr int kRows = Tile::kBlockN;
  const int lane = threadIdx.x % 32;
  const int first_key = job.key_begin + kv_block * kRows;
  const StageRows visible = visible_rows<kRows>(job, first_key);
  CUTE_UNROLL
  for (int w = 0; w < kRows / 32; ++w) {
    const int row = 32 * w + lane;
    const bool seen = visible.contains(row) && (masked.words[w] >> lane & 1) == 0;
    const std::int64_t offset = seen ? values.offset_of(first_key + row) : -1;
    copy_rows<kRows, kPanels>(values, offset, 32 * w, shared_address(stage));
  }
  cp_async_wait<0>();
  fence_proxy_async();
  __syncwarp();
}

// The V producer of ragged tensors under a custom mask, by all lanes of a warp.
template <class Tile, int kPanels, int kStages>
CUTE_DEVICE void load_masked_values(const KernelParams& params, Shared<Tile>& shared) {
  constexpr int kRows = Tile::kBlockN;
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  const int lane = threadIdx.x % 32;
  const int column = first_column<Tile>(64 * kPanels);
  JobReader jobs(shared);
  Ring<kStages> ring;
  for (; jobs.next(); jobs.release()) {
    const Job& job = jobs.job();
    for (int kv_block = job.kv_blocks - 1; kv_block >= 0; --kv_block) {
      FullyMaskedKeys<kRows> masked;
      if (job.has_hidden_keys != 0) masked.template find<Tile>(params, job, kv_block);
      shared.v_empty[ring.index].wait(ring.phase ^ 1);
      if (masked.any()) {
        copy_visible_values<Tile, kPanels>(RaggedValues(params, job, column), job, kv_block, masked,
                                           shared.v[ring.index]);
        if (lane == 0) shared.v_full[ring.index].arrive();
      } else if (lane == 0) {
        load_rows<kPanels, kPanelBytes>(
            &params.v_map, shared.v_full[ring.index], shared.v[ring.index],
            job.key_begin + kv_block * kRows, job.visible_end, job.kv_head,
            job.kv_begin + job.visible_end, CacheHint::kEvictLast, column);
      }
      __syncwarp();
      ring.advance();
    }
  }
}

}  // namespace cutlass_kernels::fa3
