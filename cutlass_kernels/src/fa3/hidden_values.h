// The V producer of a ragged batch whose mask may hide keys from all rows of a tile; that of pages is in load_pages.h.
#pragma once

#include "fa3/load_pages.h"

namespace cutlass_kernels::fa3 {

// V of keys that lie one after the other.
struct ValuesOfHead {
  const AttentionParams& p;
  const char* data;

  CUTE_DEVICE ValuesOfHead(const KernelParams& params, const Job& job)
      : p(params.attention),
        data(static_cast<const char*>(p.v.data) +
             2 * (job.kv_begin * p.v.stride_token + job.kv_head * p.v.stride_head)) {}
  CUTE_DEVICE std::int64_t offset_of(int key) const { return 2 * (key * p.v.stride_token); }
  CUTE_DEVICE bool has_column(int column) const { return column < p.head_dim_vo; }
};

// The V producer of a ragged batch with a custom mask, by all lanes of a warp.
template <class Tile, int kPanels, int kStages>
CUTE_DEVICE void load_visible_values(const KernelParams& params, Shared<Tile>& shared) {
  constexpr int kRows = Tile::kBlockN;
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  const int lane = threadIdx.x % 32;
  Ring<kJobSlots> jobs;
  Ring<kStages> ring;
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job& job = shared.jobs[jobs.index];
    if (job.valid == 0) return;
    for (int block = job.blocks - 1; block >= 0; --block) {
      HiddenKeys<kRows> hidden;
      if (job.hides != 0) hidden.template find<Tile>(params, job, block);
      shared.v_empty[ring.index].wait(ring.phase ^ 1);
      if (hidden.any()) {
        copy_visible<Tile, kPanels>(ValuesOfHead(params, job), job, block, hidden,
                                    shared.v[ring.index]);
        if (lane == 0) shared.v_full[ring.index].arrive();
      } else if (lane == 0) {
        load_rows<kPanels, kPanelBytes>(&params.v_map, shared.v_full[ring.index],
                                        shared.v[ring.index], job.key_begin + block * kRows,
                                        job.key_end, job.kv_head, job.kv_begin + job.key_end,
                                        CacheHint::EVICT_LAST);
      }
      __syncwarp();
      ring.advance();
    }
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
  }
}

}  // namespace cutlass_kernels::fa3
