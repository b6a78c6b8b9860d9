// The loading warp of e4m3: Q, K and V of one tile after the other, all by TMA. V goes to the stages that the
// transposing warps read (transpose_values.h).
//
// Nothing is copied row by row. A box may contain keys outside the visible range: their scores are masked, and the
// transposing warps write zeros in the place of their V.
#pragma once

#include "fa3/load.h"
#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

// Loads a KV block of K or V to `stage` (BLK_N, 128, panels), once that is empty. By all lanes of a warp.
template <class Tile, bool kIsK>
CUTE_DEVICE void load_block(const KernelParams& params, const Job& job, int kv_block, Barrier& full,
                            Barrier& empty, std::uint32_t parity, char* stage) {
  using Layout = Shared<Tile>;
  constexpr int kPanels = kIsK ? Layout::kPanelsQk : Layout::kPanelsVo;
  const CUtensorMap* map = kIsK ? &params.k_map : &params.v_map;
  const int lane = threadIdx.x % 32;
  const int first_key = job.key_begin + kv_block * Tile::kBlockN;
  if (params.box_rows == 0) {
    empty.wait(parity);
    if (lane == 0) {
      load_rows<kPanels, Layout::kPanelBytesKv, Layout::kColumns>(
          map, full, stage, first_key, job.visible_end, job.kv_head, job.kv_begin + job.visible_end,
          CacheHint::kEvictLast);
    }
    __syncwarp();
    return;
  }
  // A box per lane, of all that contain visible keys. The page is read before waiting for the stage, to hide the
  // latency.
  const int keys = min(job.visible_end - first_key, Tile::kBlockN);
  const int row = lane * params.box_rows;
  int page = kNoPage;
  if (row < keys) {
    page = (kIsK ? params.k_pages : params.v_pages)
               .indices[job.kv_begin + params.page_size.divide(first_key + row)];
    if constexpr (!kIsK) page = page_of_entry(params.v_pages, page);
    if (std::uint32_t(page) >= params.num_pages) page = kNoPage;
  }
  empty.wait(parity);
  if (lane == 0) {
    const int rows = max((keys + params.box_rows - 1) & -params.box_rows, 0);
    full.arrive_and_expect(rows * (128 * kPanels));
  }
  __syncwarp();
  if (row < keys) {
    const int slot = params.page_size.modulo(first_key + row);
    CUTE_NO_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      tma_load(map, full, CacheHint::kEvictLast, stage + panel * Layout::kPanelBytesKv + row * 128,
               panel * Layout::kColumns, slot, job.kv_head, page);
    }
  }
  __syncwarp();
}

// The loading warp, by all its lanes.
template <class Tile>
CUTE_DEVICE void load_tiles(const KernelParams& params, Shared<Tile>& shared) {
  const int lane = threadIdx.x % 32;
  JobReader jobs(shared);
  Ring<Tile::kQBuffers> q_ring;  // lane 0's
  Ring<Tile::kKStages> k_ring;
  Ring<Tile::kStagedStages> v_ring;
  if (lane == 0) shared.job_wanted.arrive();
  for (; jobs.next(); jobs.release()) {
    const Job& job = jobs.job();
    const int kv_blocks = job.kv_blocks;
    CUTE_NO_UNROLL
    for (int kv_block = kv_blocks - 1; kv_block >= 0; --kv_block) {
      load_block<Tile, true>(params, job, kv_block, shared.k_full[k_ring.index],
                             shared.k_empty[k_ring.index], k_ring.phase ^ 1,
                             shared.k[k_ring.index]);
      k_ring.advance();
      if (kv_block ==
          kv_blocks - 1) {  // Q is wanted as early as K, but its buffer may be free later
        if (lane == 0) load_q_of_tile(params, shared, job, q_ring);
        __syncwarp();
      }
      if (lane == 0 && kv_block == min(1, kv_blocks - 1)) shared.job_wanted.arrive();
      load_block<Tile, false>(params, job, kv_block, shared.staged_full[v_ring.index],
                              shared.staged_empty[v_ring.index], v_ring.phase ^ 1,
                              shared.staged[v_ring.index]);
      v_ring.advance();
    }
  }
}

}  // namespace cutlass_kernels::fa3
