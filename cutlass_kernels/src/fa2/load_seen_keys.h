// Loads that skip keys which a bit mask hides from all rows of the tile. Zeros take their place.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/bit_mask.h"
#include "common/mask.h"
#include "cutlass_kernels/params.h"
#include "fa2/load.h"
#include "fa2/load_pages.h"

namespace cutlass_kernels::fa2 {

// Which keys of a KV block some row of the tile sees, by a bit mask. Zeros are loaded instead of the others: they may
// hold anything, NaN too, and 0 * NaN is not 0.
template <class Tile>
struct SeenKeys {
  static constexpr int kWords = (Tile::kBlockN + 31) / 32;

  const BitMask& bit_mask;
  IntervalMask interval;
  std::int64_t request_bit;  // the request's first bit
  int row_begin;             // the tile's, in its request
  int row_end;
  bool hides;                   // whether there may be such keys
  std::uint32_t words[kWords];  // of the KV block that find() was called for

  // By all lanes of a warp, a row each. Warps do without each other's help: the words, of which each reads all, are few
  // beside the keys, and no barrier lies between this and the loads.
  CUTE_DEVICE void find(int block) {
    const int first_key = block * Tile::kBlockN;
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) words[w] = ~0u;
    if (!hides) return;
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) words[w] = 0;
    CUTE_NO_UNROLL
    for (int row = row_begin + int(threadIdx.x % 32); row < row_end; row += 32) {
      const std::int64_t bit = request_bit + std::int64_t(row) * interval.kv_len + first_key;
      const bool windowed = interval.hides_keys();
      CUTE_UNROLL
      for (int w = 0; w < kWords; ++w) {
        const int key = first_key + 32 * w;
        const std::uint32_t inside = windowed ? bits_between(interval.begin_of_all(row) - key,
                                                             interval.end_of_all<true>(row) - key)
                                              : ~0u;
        words[w] |= bits_at(bit_mask, bit + 32 * w) & inside;
      }
    }
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) words[w] = __reduce_or_sync(0xffffffffu, words[w]);
  }

  CUTE_DEVICE bool has(int key_of_block) const {
    static_assert(kWords <= 2);
    const std::uint32_t word = key_of_block < 32 ? words[0] : words[kWords - 1];
    return word >> key_of_block % 32 & 1;
  }
};

// RowLoader of keys of which some are not wanted.
template <class Tile>
struct SeenRowLoader : RowLoader<Tile, Tile::kBlockN, Tile::kKvBytes, Tile::kDecodes> {
  using Rows = RowLoader<Tile, Tile::kBlockN, Tile::kKvBytes, Tile::kDecodes>;
  static_assert(32 % Rows::kRowStep == 0);

  std::uint32_t seen[SeenKeys<Tile>::kWords];  // from the thread's first row on

  using Rows::Rows;
  CUTE_DEVICE void take_only(const SeenKeys<Tile>& keys, int thread) {
    CUTE_UNROLL
    for (int w = 0; w < SeenKeys<Tile>::kWords; ++w) {
      seen[w] = keys.words[w] >> thread / Rows::kChunks;
    }
  }

  CUTE_DEVICE void issue(int i) {
    const int row = i * Rows::kRowStep;
    const std::uint32_t all = Rows::extent;
    Rows::extent = seen[row / 32] >> row % 32 & 1 ? all : 0;
    Rows::issue(i);
    Rows::extent = all;
  }

  CUTE_DEVICE void issue_all() {
    CUTE_UNROLL
    for (int i = 0; i < Rows::kSteps; ++i) issue(i);
  }
};

// PageRows of such keys: they have no page.
template <class Tile, bool kTensorsToo>
struct SeenPageRows : PageRows<Tile, kTensorsToo> {
  using Rows = PageRows<Tile, kTensorsToo>;

  const SeenKeys<Tile>* seen = nullptr;  // found for v_block

  // K of another KV block than v_block is loaded whatever it is: scores of hidden keys become -inf.
  CUTE_DEVICE int fetch(int k_block, int v_block) const {
    const int thread = Rows::thread_index();
    const bool found = k_block == v_block || Rows::is_v(thread);
    return found && !seen->has(Rows::row_of_block(thread)) ? -1 : Rows::fetch(k_block, v_block);
  }
};

}  // namespace cutlass_kernels::fa2
