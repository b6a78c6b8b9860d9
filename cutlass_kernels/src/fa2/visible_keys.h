// Which keys a warp's rows see, in the general variant: masks of any form, and intervals.
//
// A lane finds the mask of one row and 32 keys of a step, and the lanes of a warp that of all rows and keys of the
// step: 32 x 32, or 16 x 64 (at head dimension 256 also 16 x 32, and in steps of 16 keys 16 x 16, in duplicate). A
// thread gets the words of the rows of which it holds elements from the lanes that have them.
//
// The words of a bit mask are read a step ahead, before P V, since there are no registers for them while Q K^T is
// computed. So the warp knows by then which steps no row sees, and which need no mask. Words of a range of keys that
// all rows of the tile see (mask_extents.h) are not read.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/bit_mask.h"
#include "common/mask.h"
#include "cutlass_kernels/params.h"
#include "fa2/packed_rows.h"
#include "fa2/shared_memory.h"

namespace cutlass_kernels::fa2 {

// Steps come from last to first: fetch_last(), then find() and fetch() in each.
template <class Tile>
struct VisibleKeys {
  static constexpr int kRows = 16 * Tile::kRowTiles;           // of a warp
  static constexpr int kKeys = Tile::kStepN / Tile::kSharers;  // of a warp's step
  static constexpr int kWords = kKeys < 32 ? 1 : kKeys / 32;   // that they take, of a row
  static constexpr int kTilesN = kKeys / 8;
  static constexpr std::uint32_t kAll = kKeys < 32 ? (1u << kKeys % 32) - 1 : ~0u;  // keys of a word
  // Whether a lane's keys of a step end where those of the step before began: words are shared.
  static constexpr bool kContiguous = Tile::kStepN == 32 && !Tile::kSharesKeys;

  const BitMask& bit_mask;
  int all_begin;  // keys that all rows of the tile see
  int all_end;
  // Of the lane's row:
  int lo;  // its interval, which is empty if the row does not exist
  int hi;
  std::int64_t row_bit;     // its first bit
  std::uint32_t low = ~0u;  // the two words that a lane's bits lie in; all ones without a bit mask
  std::uint32_t high = ~0u;

  // request_bit: the request's first bit. Rows of the tile from row_end on do not exist.
  CUTE_DEVICE VisibleKeys(const BitMask& bit_mask_, const IntervalMask& interval, std::int64_t request_bit,
                          const WarpRows<Tile>& row_at, int row_end, int all_begin_, int all_end_)
      : bit_mask(bit_mask_), all_begin(all_begin_), all_end(all_end_) {
    const int row = row_at(threadIdx.x % kRows);
    lo = interval.lo<true>(row);
    hi = row < row_end ? min(interval.hi<true>(row), interval.kv_len) : 0;
    row_bit = request_bit + std::int64_t(row) * interval.kv_len;
  }

  // The first of a lane's keys, for those from first_key on. Computed anew each time, not kept in registers.
  CUTE_DEVICE int key_at(int first_key) const {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return first_key + thread % 32 / kRows % kWords * 32;
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
  CUTE_DEVICE bool all_see(int first_key) const { return all_begin <= first_key && first_key + kWords * 32 <= all_end; }

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
    const std::int64_t at = (row_bit + key_at(first_key)) >> 5;
    high = has_high ? low : word(at + 1);
    low = word(at);
  }

  // What the lane's row sees of its keys, in the step that was fetched.
  CUTE_DEVICE std::uint32_t find(int first_key) const {
    if (all_see(first_key)) return kAll;
    const int key = key_at(first_key);
    return __funnelshift_r(low, high, std::uint32_t(row_bit + key)) & low_bits(hi - key) & ~low_bits(lo - key) & kAll;
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
