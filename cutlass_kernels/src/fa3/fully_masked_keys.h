// Keys that are not to be used: those outside what the tile sees, and those that a custom mask hides from every row
// of the tile.
//
// Scores of such keys are masked whatever K contains. Their V must be zeros: V of a masked key may be anything, NaN
// too, and 0 * NaN is not 0. So the V producer looks for fully masked keys in each KV block, and copies a block that
// has some row by row, with zeros in their place (load_masked_values.h).
#pragma once

#include "common/bit_mask.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"

namespace cutlass_kernels::fa3 {

// Rows [begin, end) of a K or V stage.
struct StageRows {
  int begin;
  int end;

  CUTE_DEVICE bool contains(int row) const { return begin <= row && row < end; }
};

// The rows of a stage, whose first key is first_key, that contain keys within the job's visible range.
template <int kRows>
CUTE_DEVICE StageRows visible_rows(const Job& job, int first_key) {
  return {max(job.visible_begin - first_key, 0), min(job.visible_end - first_key, kRows)};
}

// Keys of a KV block within the visible range that the custom mask hides from every row of the tile: a bit each, the
// same in all lanes of the warp.
template <int kRows>
struct FullyMaskedKeys {
  std::uint32_t words[kRows / 32] = {};  // (BLK_N / 32)

  CUTE_DEVICE bool any() const {
    std::uint32_t all = 0;
    CUTE_UNROLL
    for (int w = 0; w < kRows / 32; ++w) all |= words[w];
    return all != 0;
  }

  // By all lanes of a warp, each of which looks at every 32nd row of the tile.
  template <class Tile>
  CUTE_DEVICE void find(const KernelParams& params, const Job& job, int kv_block) {
    const int first_key = job.key_begin + kv_block * kRows;
    const int tile_rows = Tile::kPacked ? params.attention.plan.tile_rows : int(Tile::kBlockM);
    const int rows = min(tile_rows, job.qo_len - job.row_begin);
    const IntervalMask mask = make_mask<false>(params, job.batch, job.qo_len, job.kv_len);
    std::uint32_t seen[kRows / 32] = {};  // (BLK_N / 32)
    for (int i = threadIdx.x % 32; i < rows; i += 32) {
      const int row = job.row_begin + i;
      const std::int64_t bit =
          std::int64_t(job.mask_begin) * 8 + std::int64_t(row) * job.kv_len + first_key;
      CUTE_UNROLL
      for (int w = 0; w < kRows / 32; ++w) {
        const int key = first_key + 32 * w;
        seen[w] |= bits_at(params.attention.mask, bit + 32 * w) &
                   bits_between(mask.begin_of_all(row) - key, mask.end_of_all<true>(row) - key);
      }
    }
    const StageRows visible = visible_rows<kRows>(job, first_key);
    CUTE_UNROLL
    for (int w = 0; w < kRows / 32; ++w) {
      words[w] = ~__reduce_or_sync(0xffffffffu, seen[w]) &
                 bits_between(visible.begin - 32 * w, visible.end - 32 * w);
    }
  }
};

}  // namespace cutlass_kernels::fa3
