// Warps that share rows and split the keys: how all four have work in a tile of 16 or 32 rows.
//
// A token of a model with few query heads per key head makes a tile of few rows. One warp would compute all of it,
// and conversion of 8-bit keys and values by one warp takes longer than loading them. Here each warp computes every
// second or fourth step of a KV block, with a maximum and a sum of its own. At the end of the tile the warps' results
// are combined like those of KV splits.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/numeric.h"
#include "common/ptx/named_barrier.h"
#include "fa2/shared_memory.h"

namespace cutlass_kernels::fa2 {

// Each warp computes all keys of its rows.
template <class Tile, bool kSharesKeys = Tile::kSharesKeys>
struct KeySharing {
  static constexpr int groups = 1;

  int row_group;  // which of the tile's rows, kRowTiles * 16 at a time

  CUTE_DEVICE KeySharing(int, int warp) : row_group(warp / Tile::kSharers) {}
  CUTE_DEVICE bool has_part() const { return true; }
  CUTE_DEVICE int last_step() const { return Tile::kBlockN / Tile::kStepN - 1; }
};

template <class Tile>
struct KeySharing<Tile, true> {
  using Layout = SharedLayout<Tile>;
  static constexpr int kSteps = Tile::kBlockN / Tile::kStepN;  // of a KV block
  static constexpr int kTilesD = Tile::kColumns / 8 / Tile::kColumnParts;
  static constexpr int kBarrier = 1;  // of the warps that have keys; __syncthreads() is barrier 0

  static constexpr int kRowTiles = Tile::kRowTiles;
  static constexpr int kWarps = Tile::kWarps / Tile::kColumnParts;
  static constexpr int kMaxGroups = kWarps / kRowTiles < kSteps ? kWarps / kRowTiles : kSteps;

  int row_groups;  // 1, 2 or 4
  int groups;      // that the steps are dealt to
  int row_group;
  int group;

  // Of a tile of `rows` rows.
  CUTE_DEVICE KeySharing(int rows, int warp) {
    if constexpr (Tile::kDecodes) {
      row_groups = 1;
      groups = kMaxGroups;
    } else {
      row_groups = rows <= kRowTiles * 16 ? 1 : rows <= kRowTiles * 32 ? 2 : 4;
      groups = min(Tile::kWarps / row_groups, kMaxGroups);
    }
    row_group = warp & (row_groups - 1);
    group = warp % kWarps / row_groups;
  }

  CUTE_DEVICE bool has_part() const { return group < groups; }

  // The warp's last step of a KV block; -1 if it has none. The others are `groups` before it, and again.
  CUTE_DEVICE int last_step() const { return has_part() ? kSteps - groups + group : -1; }

  // Combines the results of the groups, in registers of the first; true for the warps that have them. All warps that
  // have keys call this, when no warp reads K or V any more.
  CUTE_DEVICE bool merge(char* shared_memory, int lane, float (&o)[kRowTiles][kTilesD][4],
                         float (&row_m)[2 * kRowTiles], float (&row_sum)[2 * kRowTiles]) const {
    constexpr int kResults = kRowTiles * (kTilesD + 1);
    // Of one row group there are the most: kMaxGroups - 1; of two, with two groups, as many as row groups.
    constexpr int kMost = kMaxGroups - 1 > 2 ? kMaxGroups - 1 : 2;
    static_assert(kMost * kResults * 512 <= 2 * Tile::kStages * Layout::kStageBytes);
    if (groups == 1) return true;
    // [group, row group][row tile][(m, sum), then tiles of O][lane]
    auto results = [&](int of_group, int row_tile) {
      return reinterpret_cast<float4*>(shared_memory + Layout::kK) + lane +
             (((of_group - 1) * row_groups + row_group) * kResults + row_tile * (kTilesD + 1)) * 32;
    };
    if (group > 0) {
      CUTE_UNROLL
      for (int t = 0; t < kRowTiles; ++t) {
        float4* own = results(group, t);
        own[0] = make_float4(row_m[2 * t], row_m[2 * t + 1], row_sum[2 * t], row_sum[2 * t + 1]);
        CUTE_UNROLL
        for (int d = 0; d < kTilesD; ++d) {
          own[(d + 1) * 32] = make_float4(o[t][d][0], o[t][d][1], o[t][d][2], o[t][d][3]);
        }
      }
    }
    named_barrier_wait(kBarrier, groups * row_groups * 32);
    if (group > 0) return false;
    CUTE_NO_UNROLL
    for (int other = 1; other < groups; ++other) {
      CUTE_UNROLL
      for (int t = 0; t < kRowTiles; ++t) {
        const float4* theirs = results(other, t);
        const float4 rows = theirs[0];
        const float m[2] = {rows.x, rows.y};
        const float sum[2] = {rows.z, rows.w};
        float weight[2], their_weight[2];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int r = 2 * t + i;
          const float top = fmaxf(row_m[r], m[i]);
          // 1 where both saw no key: -inf is at no distance from itself.
          weight[i] = row_m[r] == top ? 1.0f : exp2_approx(row_m[r] - top);
          their_weight[i] = m[i] == top ? 1.0f : exp2_approx(m[i] - top);
          row_m[r] = top;
          row_sum[r] = row_sum[r] * weight[i] + sum[i] * their_weight[i];
        }
        CUTE_UNROLL
        for (int d = 0; d < kTilesD; ++d) {
          const float4 part = theirs[(d + 1) * 32];
          o[t][d][0] = o[t][d][0] * weight[0] + part.x * their_weight[0];
          o[t][d][1] = o[t][d][1] * weight[0] + part.y * their_weight[0];
          o[t][d][2] = o[t][d][2] * weight[1] + part.z * their_weight[1];
          o[t][d][3] = o[t][d][3] * weight[1] + part.w * their_weight[1];
        }
      }
    }
    return true;
  }
};

}  // namespace cutlass_kernels::fa2
