// What lies between the two products: the scores of a warp become P in shared memory, and the maxima and sums of rows.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/logits.h"
#include "common/mask.h"
#include "common/ptx/named_barrier.h"
#include "common/softmax.h"
#include "fa2/params.h"
#include "fa2/tile_work.h"
#include "latent/fa2/config.h"
#include "latent/fa2/store.h"

namespace cutlass_kernels::mla::mma_sync {

// Which part of a tile is a warp's, of the eight that compute S, and of the eight that compute O.
template <class Tile>
struct WarpPart {
  int row_tile;  // of S
  int group;     // of keys
  int half;      // of the columns of S
  int pair;      // of the warps with the same keys
  int out_tile;  // the first row tile of O
  int column;    // the first one of O

  CUTE_DEVICE explicit WarpPart(int warp)
      : row_tile(warp % Tile::kRowTiles),
        group(warp / Tile::kRowTiles),
        half(group % 2),
        pair(group / 2),
        out_tile(warp / Tile::kOutParts * Tile::kOutRowTiles),
        column(warp % Tile::kOutParts * Tile::kColumns) {}

  CUTE_DEVICE int barrier() const { return Tile::kPairBarrier + pair * Tile::kRowTiles + row_tile; }
};

// A warp's 16 rows of S and its share of the keys. Element: of P.
template <class Element, class Tile>
struct WarpScores {
  static constexpr int kTilesN = Tile::kTilesN;
  using Fragments = float[kTilesN][4];

  const KernelParams& params;
  const TileWork& tile;
  char* shared;
  int lane;
  int row_tile;
  int group;
  int all_begin, all_end;  // every row of the tile sees keys [all_begin, all_end)

  CUTE_DEVICE int row(int r) const { return row_tile * 16 + r * 8 + lane / 4; }
  CUTE_DEVICE int first_key() const { return group * kTilesN * 8; }

  CUTE_DEVICE void transform(Fragments& s) const {
    const LaunchParams& p = params.attention;
    // Unlikely, which moves it out of the way: what is jumped over takes time to fetch.
    if (__builtin_expect(p.logits_scale.data != nullptr || p.keys_scale.data != nullptr, 0)) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const PlaceOfRow place(params, tile, row(r));
        const float scale = logits_scale_of(p, tile.item.batch, place.exists ? place.head : tile.head);
        CUTE_UNROLL
        for (int i = 0; i < kTilesN * 2; ++i) s[i / 2][r * 2 + i % 2] *= scale;
      }
    }
    if (__builtin_expect(params.transform.changes_logits(), 0)) {
      params.transform.template apply<true>(&s[0][0], kTilesN * 4);
    }
  }

  CUTE_DEVICE void mask(Fragments& s, int block) const {
    const int first = block * Tile::kBlockN;
    if (__builtin_expect(first >= all_begin && first + Tile::kBlockN <= all_end, 1)) return;
    __syncwarp();  // keeps this a branch
    const int key0 = first + first_key() + lane % 4 * 2;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int token = tile.row_begin + int(params.pack.divide(row(r)));
      const int lo = tile.mask.lo<true>(token);
      const std::uint32_t from_lo = key0 - lo;
      const std::uint32_t extent = max(tile.mask.hi<true>(token) - lo, 0);
      CUTE_UNROLL
      for (int i = 0; i < kTilesN * 2; ++i) {
        mask_unless_below(s[i / 2][r * 2 + i % 2], from_lo + (i / 2 * 8 + i % 2), extent);
      }
    }
  }

  // Hides keys of `stage` that are no slots, or not of this KV split (KeyLoader::copies()). All rows see the others.
  CUTE_DEVICE void hide_missing(Fragments& s, int stage) const {
    const char* first = shared + Tile::kListed + stage * Tile::kBlockN + first_key() + lane % 4 * 2;
    const auto* listed = reinterpret_cast<const std::uint16_t*>(first);
    CUTE_UNROLL
    for (int i = 0; i < kTilesN; ++i) {
      const std::uint32_t pair = listed[i * 4];
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) mask_unless_bit(s[i][e], pair, e % 2 * 8);
    }
  }

  // P of the scores to shared memory, in fragments of 16 keys; adds up the rows of it.
  CUTE_DEVICE void write_p(const Fragments& s, const OnlineSoftmax<2>& softmax, float (&sums)[2],
                           int buffer = 0) const {
    sums[0] = sums[1] = 0.0f;
    std::uint32_t packed[kTilesN][2];
    CUTE_UNROLL
    for (int i = 0; i < kTilesN * 2; ++i) {
      const int r = i % 2;
      const float* pair = &s[i / 2][r * 2];
      const float x = exp2_unordered(fmaf(pair[0], softmax.scale, softmax.minus_m[r]));
      const float y = exp2_unordered(fmaf(pair[1], softmax.scale, softmax.minus_m[r]));
      sums[r] += x + y;
      packed[i / 2][r] = Element::pack(x, y);
    }
    auto* fragments = reinterpret_cast<uint4*>(shared + Tile::kP + buffer * Tile::kPBytes) +
                      row_tile * (Tile::kBlockN / 16) * 32 + lane;
    if constexpr (kTilesN == 2) {
      fragments[group * 32] = {packed[0][0], packed[0][1], packed[1][0], packed[1][1]};
    } else {
      reinterpret_cast<uint2*>(fragments + group / 2 * 32)[group % 2] = {packed[0][0], packed[0][1]};
    }
  }

  // All warps that compute scores.
  CUTE_DEVICE static void sync() {
    if constexpr (Tile::kSplitsRoles) {
      named_barrier_wait(Tile::kScoresBarrier, 32 * Tile::kRoleWarps);
    } else {
      __syncthreads();
    }
  }

  CUTE_DEVICE float* row_values(int at) const { return reinterpret_cast<float*>(shared + at); }

  // The lane's part of a row's maximum.
  CUTE_DEVICE static void take_max(const Fragments& s, float (&thread_max)[2]) {
    thread_max[0] = s[0][0];
    thread_max[1] = s[0][2];
    CUTE_UNROLL
    for (int e = 0; e < kTilesN * 4; ++e) {
      thread_max[e / 2 % 2] = fmaxf(thread_max[e / 2 % 2], s[e / 4][e % 4]);
    }
  }

  // Whether m of some row must be raised. Of keys by slots, keeps the `largest` s of the lane's part of a row.
  CUTE_DEVICE static bool exceeds(const Fragments& s, const OnlineSoftmax<2>& softmax, float (&largest)[2]) {
    float thread_max[2];
    take_max(s, thread_max);
    if constexpr (Tile::kBySlots) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], thread_max[r]);
    }
    return softmax.exceeds(thread_max);
  }

  // Raises m of rows beyond their headroom, by all warps that compute scores. Leaves at kRowFactor what O is to be
  // multiplied by.
  CUTE_DEVICE void raise(const Fragments& s, OnlineSoftmax<2>& softmax) const {
    float row_max[2];
    take_max(s, row_max);
    OnlineSoftmax<2>::reduce_max(row_max);
    float* maxima = row_values(Tile::kRowMax);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (lane % 4 == 0) maxima[group * Tile::kBlockM + row(r)] = row_max[r];
    }
    sync();
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int other = 0; other < Tile::kGroups; ++other) {
        row_max[r] = fmaxf(row_max[r], maxima[other * Tile::kBlockM + row(r)]);
      }
    }
    softmax.raise(row_max, [&](int r, float factor) {
      if (group == 0 && lane % 4 == 0) row_values(Tile::kRowFactor)[row(r)] = factor;
    });
  }

  // m and sums of the rows, and of keys by slots their maxima, for TileStore.
  CUTE_DEVICE void finish(const OnlineSoftmax<2>& softmax, float (&largest)[2]) const {
    if constexpr (Tile::kBySlots) OnlineSoftmax<2>::reduce_max(largest);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float m, sum;
      softmax.finish(r, m, sum);
      if (lane % 4 == 0) {
        row_values(Tile::kRowSum)[group * Tile::kBlockM + row(r)] = sum;
        if (group == 0) row_values(Tile::kRowFactor)[row(r)] = m;
        if constexpr (Tile::kBySlots) {
          row_values(Tile::kRowMax)[group * Tile::kBlockM + row(r)] = largest[r] * softmax.scale;
        }
      }
    }
  }
};

}  // namespace cutlass_kernels::mla::mma_sync
