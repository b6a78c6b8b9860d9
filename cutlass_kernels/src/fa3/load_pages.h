// The K and V producers of a paged cache. Consumers do not know that there are pages.
//
// Boxes of box_rows keys (the largest power of two, 8 or more, that divides a page and a block) come by TMA, a lane each.
// What no box covers comes row by row through cp.async: the rows at either end of the keys that a tile sees, where all but
// those keys must be zeros, and every row where pages are too small for boxes.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "common/ldmatrix.h"
#include "fa3/load.h"
#include "fa3/params.h"
#include "fa3/shared.h"

namespace cutlass_kernels::fa3 {

// K or V of one head of one request.
struct PagesOfHead {
  const std::int32_t* indices;  // of the request
  const char* data;             // of the head
  std::int64_t stride_page;     // bytes
  std::int64_t stride_slot;
  int head_dim;
};

// Rows [begin, end) of a block.
struct Rows {
  int begin;
  int end;

  CUTE_DEVICE bool contains(int row) const { return begin <= row && row < end; }
};

// Loads of the entries that gather_rows() is about to read, without a register to wait in: there are 32 to 40.
template <int kRows>
CUTE_DEVICE void prefetch_entries(const KernelParams& params, const PagesOfHead& source,
                                  int first_key, const Rows& wanted) {
  CUTE_NO_UNROLL
  for (int row = threadIdx.x % 32; row < kRows; row += 32) {
    if (wanted.contains(row)) {
      const auto* entry = source.indices + params.page_size.divide(first_key + row);
      asm volatile("prefetch.global.L1 [%0];" ::"l"(entry));
    }
  }
}

// Copies the rows that no box covers; those that are not wanted, or have no page in the cache, become zeros. Complete on
// return, for wgmma as well.
template <int kRows, int kPanels>
CUTE_DEVICE void gather_rows(const KernelParams& params, const PagesOfHead& source, int first_key,
                             const Rows& wanted, const Rows& boxed, char* stage) {
  const int lane = threadIdx.x % 32;
  const int chunk = lane % 8;  // of the 128 bytes of a panel's row
  const std::uint32_t base = cute::cast_smem_ptr_to_uint(stage);
  CUTE_NO_UNROLL
  for (int rows = 0; rows < kRows; rows += 32) {  // a row per lane ...
    std::int64_t offset = -1;
    if (wanted.contains(rows + lane) && !boxed.contains(rows + lane)) {
      const int key = first_key + rows + lane;
      const int entry = params.page_size.divide(key);
      const int page = source.indices[entry];
      const int slot = key - entry * params.attention.pages.page_size;
      if (std::uint32_t(page) < params.num_pages) {
        offset = page * source.stride_page + slot * source.stride_slot;
      }
    }
    CUTE_NO_UNROLL
    for (int of_lane = lane / 8; of_lane < 32; of_lane += 4) {  // ... and eight lanes per row
      const std::int64_t row_offset = __shfl_sync(0xffffffffu, offset, of_lane);
      const int row = rows + of_lane;
      if (!boxed.contains(row)) {
        const std::uint32_t to = base + row * 128 + ((chunk ^ (row & 7)) << 4);
        const char* from = source.data + row_offset + chunk * 16;
        CUTE_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
          cp_async_16(to + panel * (kRows * 128), from + panel * 128,
                      row_offset >= 0 && panel * 64 + chunk * 8 < source.head_dim);
        }
      }
    }
  }
  cute::cp_async_wait<0>();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// K or V, by all lanes of a warp: kPanels, kStages, map, full, empty and stages are that matrix's.
template <class Tile, int kPanels, int kStages, bool kIsK>
CUTE_DEVICE void load_pages(const KernelParams& params, Shared<Tile>& shared,
                            const CUtensorMap* map, Barrier* full, Barrier* empty, char* stages) {
  constexpr int kRows = Tile::kBlockN;
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  static_assert(kRows % 32 == 0 && (kRows & (kRows - 1)) == 0);
  const AttentionParams& p = params.attention;
  const ConstTensorView& view = kIsK ? p.k : p.v;
  const std::int32_t* indices =
      kIsK || p.pages.v_indices == nullptr ? p.pages.indices : p.pages.v_indices;
  const int lane = threadIdx.x % 32;
  Ring<kJobSlots> jobs;
  Ring<kStages> ring;
  if (kIsK && lane == 0) shared.job_wanted.arrive();
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    // Read again for every block: registers are few.
    const Job& job = shared.jobs[jobs.index];
    if (job.valid == 0) return;
    for (int block = job.blocks - 1; block >= 0; --block) {
      const int kv_head = job.head / params.group_size;
      const PagesOfHead source{
          indices + job.kv_begin,
          static_cast<const char*>(view.data) + 2 * (kv_head * view.stride_head),
          2 * (kIsK ? p.pages.k_stride_page : p.pages.v_stride_page), 2 * view.stride_token,
          kIsK ? p.head_dim_qk : p.head_dim_vo};
      const int first_key = job.key_begin + block * kRows;
      const Rows wanted{max(job.first_key - first_key, 0), min(job.key_end - first_key, kRows)};
      Rows boxed{0, 0};
      int page = 0;  // of the lane's box
      int slot = 0;
      if (params.box_rows > 0) {
        boxed = {(wanted.begin + params.box_rows - 1) & -params.box_rows,
                 wanted.end & -params.box_rows};
        if (boxed.begin >= boxed.end) boxed = {0, 0};
        if (boxed.contains(lane * params.box_rows)) {
          const int key = first_key + lane * params.box_rows;
          const int entry = params.page_size.divide(key);
          page = source.indices[entry];
          slot = key - entry * p.pages.page_size;
        }
      }
      const int boxed_rows = boxed.end - boxed.begin;
      if (params.box_rows == 0) prefetch_entries<kRows>(params, source, first_key, wanted);
      empty[ring.index].wait(ring.phase ^ 1);
      if (kIsK && block == min(1, job.blocks - 1) && lane == 0) shared.job_wanted.arrive();
      char* stage = stages + ring.index * (kPanels * kPanelBytes);
      if (boxed_rows < kRows) {
        gather_rows<kRows, kPanels>(params, source, first_key, wanted, boxed, stage);
      }
      if (lane == 0) full[ring.index].arrive_and_expect(boxed_rows * (128 * kPanels));
      __syncwarp();
      if (boxed.contains(lane * params.box_rows)) {
        CUTE_NO_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
          cute::SM90_TMA_LOAD_4D::copy(map, reinterpret_cast<std::uint64_t*>(&full[ring.index]),
                                       static_cast<std::uint64_t>(CacheHint::EVICT_LAST),
                                       stage + panel * kPanelBytes + lane * params.box_rows * 128,
                                       panel * 64, slot, kv_head, page);
        }
      }
      ring.advance();
    }
    __syncwarp();
    if (lane == 0) shared.job_empty[jobs.index].arrive();
    jobs.advance();
  }
}

}  // namespace cutlass_kernels::fa3
