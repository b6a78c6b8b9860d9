// Warps that share rows, or keys.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/numeric.h"
#include "common/ptx/named_barrier.h"
#include "fa2/shared_memory.h"

namespace cutlass_kernels::fa2 {

// ---- Warps that share rows: two give head dimension 256 two row tiles, four 512.
//
// A warp has registers for the output of 16 rows of 256 columns, and with 16 rows every fragment of K and V read from
// shared memory feeds one product. Here a pair of warps has 32 rows: of S each computes 32 of a KV block's 64 keys,
// of O 128 of the 256 columns, so that a fragment feeds two products. Each has P of half the keys and needs all of
// it: the halves are handed over as fragments, through shared memory. At head dimension 512 four warps have a quarter
// each, 16 keys of S and 128 columns of O; where the device has shared memory for few rows only, two warps have halves
// of 16 rows.
//
//            +------------------------------- KV block j --------------------------------+
//  tensor    | S = Q K(j)^T, own 32 keys |               | O += P V(j), own 128 columns  |
//            |                           |               | own 32 keys | the other's 32  |
//  softmax   |                           | mask, max     | P, 16 keys ahead of products  |
//  loads     | V(j)                                      | K(j - 1)                      |
//            A                                           B             P
//
//  A  __syncthreads: K(j) has landed; all warps are done with V(j + 1)
//  B  __syncthreads_or: V(j) has landed; all warps are done with K(j); whether some row's maximum must be raised
//  P  the pair's own barriers: the other's P is in shared memory
//
// Per 128 rows and 64 keys shared memory is busy for 4352 clocks: Q 1024 (both warps of a pair read all of it), K and
// V 1024 each, P 256, loads from global memory 1024. Warps with 16 rows each, 128 per thread block, take 5120: Q 512,
// K and V 2048 each, loads 512. One stage leaves room for two thread blocks per SM (104.5 KB each), which cover each
// other's waits, starts and ends. FlashAttention-2's tile (two thread blocks, too, 16 rows per warp) is a fifth
// slower (benchmarks/results/prefill-fa2.md).

// Hardware barriers. __syncthreads() is barrier 0: all warps arrive and wait.
enum Barrier {
  // Of two warps that share rows, + warp: that warp arrives when its P is written, the other waits. Of four, + their
  // rows: each arrives when its P is written, and waits.
  kPBarrier = 1,
};

// What a warp exchanges with those that share its rows, its neighbours. P is written anew after A and B of the next
// block, when the others have read it; row values after A or B of a later one, or, after the last block, by a warp that
// has waited for the others' P, which these announce after reading them.
template <class Tile>
struct RowSharing {
  using Layout = SharedLayout<Tile>;
  static constexpr int kRowTiles = Tile::kRowTiles;
  static constexpr int kRows = 2 * kRowTiles;  // rows of which a thread holds elements
  static constexpr int kSharers = Tile::kSharers;

  int warp;
  int lane;
  uint4* own_p;          // fragments [step][row tile][lane]
  const uint4* other_p;  // of warp ^ 1
  float* row_values;     // [row][sharer]

  CUTE_DEVICE RowSharing(char* shared_memory, int warp_, int lane_) : warp(warp_), lane(lane_) {
    char* p = shared_memory + Layout::kP;
    own_p = reinterpret_cast<uint4*>(p + warp * Layout::kPWarpBytes);
    other_p = reinterpret_cast<uint4*>(p + (warp ^ 1) * Layout::kPWarpBytes);
    row_values = reinterpret_cast<float*>(shared_memory + Layout::kRowValues);
  }

  // P of 16 keys, step `step` of the warp's own.
  CUTE_DEVICE void write_p(int step, const std::uint32_t (&p)[kRowTiles][4]) const {
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      own_p[(step * kRowTiles + m) * 32 + lane] = make_uint4(p[m][0], p[m][1], p[m][2], p[m][3]);
    }
  }
  CUTE_DEVICE void p_is_written() const {
    if constexpr (kSharers == 2) named_barrier_arrive(kPBarrier + warp, 64);
  }

  CUTE_DEVICE void await_p() const {
    if constexpr (kSharers == 2) {
      named_barrier_wait(kPBarrier + (warp ^ 1), 64);
    } else {
      named_barrier_wait(kPBarrier + warp / kSharers, 32 * kSharers);
    }
  }
  // Of warp ^ other, one of those that share its rows.
  CUTE_DEVICE void read_p(int other, int step, std::uint32_t (&p)[kRowTiles][4]) const {
    constexpr int kOfWarp = Layout::kPWarpBytes / 16;
    const uint4* fragments = other == 1 ? other_p : other_p + ((warp ^ other) - (warp ^ 1)) * kOfWarp;
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      const uint4 fragment = fragments[(step * kRowTiles + m) * 32 + lane];
      p[m][0] = fragment.x;
      p[m][1] = fragment.y;
      p[m][2] = fragment.z;
      p[m][3] = fragment.w;
    }
  }

  // One number per row, which all threads of a quad know. Between writing and reading lies a barrier.
  CUTE_DEVICE float& row_value(int r, int of_warp) const {
    const int row = warp / kSharers * (kRowTiles * 16) + r / 2 * 16 + r % 2 * 8 + lane / 4;
    return row_values[row * kSharers + of_warp % kSharers];
  }
  CUTE_DEVICE void write_rows(const float (&values)[kRows]) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (lane % 4 == 0) row_value(r, warp) = values[r];
    }
  }
  CUTE_DEVICE float read_row(int r, int other) const { return row_value(r, warp ^ other); }
};

// ---- Warps that share rows and split the keys: how all four have work in a tile of 16 or 32 rows.
//
// A token of a model with few query heads per key head makes a tile of few rows. One warp would compute all of it,
// and conversion of 8-bit keys and values by one warp takes longer than loading them. Here each warp computes every
// second or fourth step of a KV block, with a maximum and a sum of its own. At the end of the tile the warps' results
// are combined like those of KV splits.

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
