// Which keys of a block are loaded, and which of them a custom mask hides from every row of the tile. Values of hidden keys may
// be anything, NaN too, and 0 * NaN is not 0: the V producer looks for such keys in each block, and where there are some it
// copies the block row by row, with zeros in their place.
#pragma once

#include "common/bit_mask.h"
#include "fa3/params.h"
#include "fa3/shared.h"

namespace cutlass_kernels::fa3 {

// Rows [begin, end) of a block.
struct Rows {
  int begin;
  int end;

  CUTE_DEVICE bool contains(int row) const { return begin <= row && row < end; }
};

// The keys of a block that some row of the tile sees.
template <int kRows>
CUTE_DEVICE Rows wanted_rows(const Job& job, int first_key) {
  return {max(job.first_key - first_key, 0), min(job.key_end - first_key, kRows)};
}

// The loaded keys of a block that no row of the tile sees: a bit each, known to all lanes of the warp.
template <int kRows>
struct HiddenKeys {
  std::uint32_t words[kRows / 32] = {};

  CUTE_DEVICE bool any() const {
    std::uint32_t all = 0;
    CUTE_UNROLL
    for (int w = 0; w < kRows / 32; ++w) all |= words[w];
    return all != 0;
  }

  // By all lanes, which take a row of the tile each.
  template <class Tile>
  CUTE_DEVICE void find(const KernelParams& params, const Job& job, int block) {
    const int first_key = job.key_begin + block * kRows;
    const int tile_rows = Tile::kPacked ? params.attention.schedule.tile_rows : int(Tile::kBlockM);
    const int rows = min(tile_rows, job.qo_len - job.row_begin);
    const IntervalMask mask = make_mask(params, job.qo_len, job.kv_len);
    std::uint32_t seen[kRows / 32] = {};
    for (int i = threadIdx.x % 32; i < rows; i += 32) {
      const int row = job.row_begin + i;
      const std::int64_t bit =
          std::int64_t(job.mask_begin) * 8 + std::int64_t(row) * job.kv_len + first_key;
      CUTE_UNROLL
      for (int w = 0; w < kRows / 32; ++w) {
        const int key = first_key + 32 * w;
        seen[w] |= bits_at(params.attention.mask, bit + 32 * w) &
                   bits_between(mask.lo(row) - key, mask.hi(row) - key);
      }
    }
    const Rows wanted = wanted_rows<kRows>(job, first_key);
    CUTE_UNROLL
    for (int w = 0; w < kRows / 32; ++w) {
      words[w] = ~__reduce_or_sync(0xffffffffu, seen[w]) &
                 bits_between(wanted.begin - 32 * w, wanted.end - 32 * w);
    }
  }
};

}  // namespace cutlass_kernels::fa3
