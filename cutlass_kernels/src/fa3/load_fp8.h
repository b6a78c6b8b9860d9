// The loading warp of e4m3: Q, K and V of one tile after the other, all by TMA. V goes where the transposing warps take it.
//
// Nothing is copied row by row: whatever lies in a box beside the keys of the tile is hidden from S by the mask, and from P V
// by the transposing warps, which write zeros in its place.
#pragma once

#include "fa3/load.h"
#include "fa3/load_pages.h"

namespace cutlass_kernels::fa3 {

// One block of K or V, into `stage` once it is `empty`; by all lanes.
template <class Tile, bool kIsK>
CUTE_DEVICE void load_block(const KernelParams& params, const Job& job, int block, Barrier& full,
                            Barrier& empty, std::uint32_t parity, char* stage) {
  using Layout = Shared<Tile>;
  constexpr int kPanels = kIsK ? Layout::kPanelsQk : Layout::kPanelsVo;
  const CUtensorMap* map = kIsK ? &params.k_map : &params.v_map;
  const int lane = threadIdx.x % 32;
  const int first_key = job.key_begin + block * Tile::kBlockN;
  if (params.box_rows == 0) {
    empty.wait(parity);
    if (lane == 0) {
      load_rows<kPanels, Layout::kPanelBytesKv, Layout::kColumns>(
          map, full, stage, first_key, job.key_end, job.kv_head, job.kv_begin + job.key_end,
          CacheHint::EVICT_LAST);
    }
    __syncwarp();
    return;
  }
  // A box per lane, all that hold keys of the tile. The page is read before the stage is free, as that takes a while.
  const int keys = min(job.key_end - first_key, Tile::kBlockN);
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
      cute::SM90_TMA_LOAD_4D::copy(map, reinterpret_cast<std::uint64_t*>(&full),
                                   static_cast<std::uint64_t>(CacheHint::EVICT_LAST),
                                   stage + panel * Layout::kPanelBytesKv + row * 128,
                                   panel * Layout::kColumns, slot, job.kv_head, page);
    }
  }
  __syncwarp();
}

// By all lanes of a warp.
template <class Tile>
CUTE_DEVICE void load_tiles(const KernelParams& params, Shared<Tile>& shared) {
  const int lane = threadIdx.x % 32;
  Ring<kJobSlots> jobs;
  Ring<Tile::kQBuffers> q_ring;  // lane 0's
  Ring<Tile::kKStages> k_ring;
  Ring<Tile::kStagedStages> v_ring;
  if (lane == 0) shared.job_wanted.arrive();
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job& job = shared.jobs[jobs.index];  // read again for every block: registers are few
    if (job.valid == 0) return;
    const int blocks = job.blocks;
    CUTE_NO_UNROLL
    for (int block = blocks - 1; block >= 0; --block) {
      load_block<Tile, true>(params, job, block, shared.k_full[k_ring.index],
                             shared.k_empty[k_ring.index], k_ring.phase ^ 1,
                             shared.k[k_ring.index]);
      k_ring.advance();
      if (block == blocks - 1) {  // Q is wanted as early as K, but its buffer may be free later
        if (lane == 0) load_q_of_tile(params, shared, job, q_ring);
        __syncwarp();
      }
      if (lane == 0 && block == min(1, blocks - 1)) shared.job_wanted.arrive();
      load_block<Tile, false>(params, job, block, shared.staged_full[v_ring.index],
                              shared.staged_empty[v_ring.index], v_ring.phase ^ 1,
                              shared.staged[v_ring.index]);
      v_ring.advance();
    }
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
  }
}

}  // namespace cutlass_kernels::fa3
