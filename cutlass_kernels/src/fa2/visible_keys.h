// Which keys a warp's rows see, in the general variant: masks of any form, and intervals.
//
// A lane looks after one row and 32 keys of a step; all lanes of the warp look after all rows and keys of it: 32 x 32, or
// 16 x 64 (at head dim 256 also 16 x 32, and in steps of 16 keys 16 x 16, in duplicate). A thread gets the words of the rows that it holds parts of from
// the lanes that have them.
//
// The words of a bit mask are read a step ahead, before P V, since there are no registers for them while Q K^T is
// computed. So it is known by then which steps no row sees, and which need no mask. Those of a range of keys that all rows
// of the tile see (mask_extents.h) are not read.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/bit_mask.h"
#include "common/mask.h"
#include "cutlass_kernels/params.h"
#include "fa2/packed_rows.h"
#include "fa2/pages.h"
#include "fa2/shared.h"

namespace cutlass_kernels::fa2 {

// The lowest n bits: none for n <= 0, all from 32 on.
CUTE_DEVICE std::uint32_t low_bits(int n) { return __funnelshift_lc(~0u, 0u, max(n, 0)); }

// Which keys of a block some row of the tile sees, by a bit mask. Zeros are loaded instead of the others: they may hold
// anything, NaN too, and 0 * NaN is not 0.
template <class Tile>
struct SeenKeys {
  static constexpr int kWords = Tile::kBlockN / 32;

  const BitMask& bit_mask;
  const IntervalMask& interval;
  std::int64_t request_bit;  // the request's first bit
  int row_begin;             // the tile's, in its request
  int row_end;
  bool hides;                   // whether there may be such keys
  std::uint32_t words[kWords];  // of the block that find() was called for

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
      const bool windowed = interval.window_left >= 0;
      CUTE_UNROLL
      for (int w = 0; w < kWords; ++w) {
        const int before = windowed ? interval.lo(row) - first_key - 32 * w : 0;
        words[w] |= bits_at(bit_mask, bit + 32 * w) & ~low_bits(before);
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
template <class Tile>
struct SeenPageRows : PageRows<Tile> {
  using Rows = PageRows<Tile>;

  const SeenKeys<Tile>* seen = nullptr;  // found for v_block

  // K of another block than v_block is loaded whatever it is: scores of hidden keys become -inf.
  CUTE_DEVICE int fetch(int k_block, int v_block) const {
    const int thread = Rows::thread_index();
    const bool found = k_block == v_block || Rows::is_v(thread);
    return found && !seen->has(Rows::row_of_block(thread)) ? -1 : Rows::fetch(k_block, v_block);
  }
};

// Steps come from last to first: fetch_last(), then find() and fetch() in each.
template <class Tile>
struct VisibleKeys {
  static constexpr int kRows = 16 * Tile::kRowTiles;           // of a warp
  static constexpr int kKeys = Tile::kStepN / Tile::kSharers;  // of a warp's step
  static constexpr int kWords = kKeys < 32 ? 1 : kKeys / 32;   // that they take, of a row
  static constexpr int kTilesN = kKeys / 8;
  static constexpr std::uint32_t kAll =
      kKeys < 32 ? (1u << kKeys % 32) - 1 : ~0u;  // keys of a word
  // Whether a lane's keys of a step end where those of the step before began: words are shared.
  static constexpr bool kContiguous = Tile::kStepN == 32 && !Tile::kSharesKeys;

  const BitMask& bit_mask;
  const IntervalMask& interval;
  std::int64_t request_bit;  // the request's first bit
  WarpRows<Tile> row_at;
  int row_end;    // rows from here on, of the tile, do not exist
  int all_begin;  // keys that all rows of the tile see
  int all_end;
  std::uint32_t low = ~0u;  // the two words that a lane's bits lie in; all ones without a bit mask
  std::uint32_t high = ~0u;

  struct Lane {
    int row;
    int key;
    std::int64_t bit;
  };

  // What is a lane's, for the keys from first_key on. Computed anew each time, not kept in registers.
  CUTE_DEVICE Lane lane_at(int first_key) const {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    const int lane = thread % 32;
    const int row = row_at(lane % kRows);
    const int key = first_key + lane / kRows % kWords * 32;
    return {row, key, request_bit + std::int64_t(row) * interval.kv_len + key};
  }

  // Words past the mask's end are not read: see word_at().
  CUTE_DEVICE std::uint32_t word(std::int64_t at) const {
    std::uint32_t bits = 0;
    if (0 <= at && at < bit_mask.num_words) {
      // In its place: left alone, the compiler moves it to where its result is needed.
      asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(bits) : "l"(bit_mask.words + at) : "memory");
    }
    return bits;
  }

  // Of the warp's keys of a step.
  CUTE_DEVICE bool all_see(int first_key) const {
    return all_begin <= first_key && first_key + kWords * 32 <= all_end;
  }

  // Reads the words for the step of the keys from first_key on: the tile's last step, and the others.
  CUTE_DEVICE void fetch_last(int first_key) {
    if (bit_mask.words != nullptr) read(first_key, false);
  }
  CUTE_DEVICE void fetch(int first_key) {
    if (bit_mask.words == nullptr || all_see(first_key)) return;
    read(first_key, kContiguous && !all_see(first_key + 32));
  }
  CUTE_DEVICE void read(int first_key, bool has_high) {
    static_assert(kRows * kWords <= 32);
    const std::int64_t at = lane_at(first_key).bit >> 5;
    high = has_high ? low : word(at + 1);
    low = word(at);
  }

  // What the lane's row sees of its keys, in the step that was fetched.
  CUTE_DEVICE std::uint32_t find(int first_key) const {
    if (all_see(first_key)) return kAll;
    const Lane own = lane_at(first_key);
    std::uint32_t bits =
        __funnelshift_r(low, high, std::uint32_t(own.bit)) & low_bits(interval.kv_len - own.key);
    if (interval.causal || interval.window_left >= 0) {
      __syncwarp();  // keeps this a branch
      bits &= low_bits(interval.hi(own.row) - own.key) & ~low_bits(interval.lo(own.row) - own.key);
    }
    return own.row < row_end ? bits & kAll : 0u;
  }

  // s = -inf where the row does not see the key, from what the lanes found.
  template <int kRowTiles>
  CUTE_DEVICE static void apply(float (&s)[kRowTiles][kTilesN][4], std::uint32_t found) {
    const int lane = threadIdx.x % 32;
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowTiles * kWords; ++i) {
      const int r = i / kWords;
      const int word = i % kWords;
      const int owner = word * kRows + r * 8 + lane / 4;
      const std::uint32_t bits = __shfl_sync(0xffffffffu, found, owner) >> lane % 4 * 2;
      CUTE_UNROLL
      for (int j = 0; j < kTilesN / kWords * 2; ++j) {
        mask_unless_bit(s[r / 2][word * 4 + j / 2][r % 2 * 2 + j % 2], bits, j / 2 * 8 + j % 2);
      }
    }
  }
};

}  // namespace cutlass_kernels::fa2
