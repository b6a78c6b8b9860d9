// From scores to P: the layout of fragments, logits, the online softmax.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/logits.h"
#include "common/mask.h"
#include "common/softmax.h"
#include "fa2/packed_rows.h"
#include "fa2/params.h"
#include "fa2/shared_memory.h"
#include "fa2/tile_work.h"
#include "fa2/visible_keys.h"

namespace cutlass_kernels::fa2 {

// ---- What a thread holds of a warp's matrices, and where it finds their operands in shared memory.

// Accumulators of m16n8 mma.sync tiles: of each 16 x 8 tile thread t of a warp holds elements (t / 4, 2 (t % 4) + {0,
// 1}) and the same eight rows below.
template <class Tile>
struct Fragments {
  static constexpr int kRowTiles = Tile::kRowTiles;
  // Tiles of S along the keys of a step, and of O along the head dimension.
  static constexpr int kTilesN = Tile::kStepN / 8 / Tile::kSharers;
  static constexpr int kTilesD = Tile::kColumns / 8 / Tile::kSharers / Tile::kColumnParts;
  static constexpr int kRows = 2 * kRowTiles;  // rows of which a thread holds elements

  using S = float[kRowTiles][kTilesN][4];  // (row tile, key tile, fragment)
  using O = float[kRowTiles][kTilesD][4];  // (row tile, d tile, fragment)
  using Rows = float[kRows];
};

// Where the ldmatrix addresses of a lane begin, in the first stage. Lanes 0-15 point at rows 0-15 of a 16 x 16 tile,
// lanes 16-31 at the same rows eight columns on. For K, four 8 x 8 matrices in the order (keys 0-7, d 0-7), (0-7,
// 8-15), (8-15, 0-7), (8-15, 8-15) are the B fragments of two n8 tiles. For V, transposed, lanes are as for Q.
template <class Tile>
struct OperandAddresses {
  using Layout = SharedLayout<Tile>;

  std::uint32_t q, k, v;
  int swizzle_q, swizzle_k, swizzle_v;

  // part: of the columns of O.
  CUTE_DEVICE OperandAddresses(std::uint32_t shared, int lane, int warp_row, int sharer, int part) {
    const int lane_row = lane % 16;
    const int lane_chunk = lane / 16;
    const int k_row = (lane % 8) + (lane / 16) * 8;
    const int k_chunk = (lane / 8) % 2;
    swizzle_q = lane_chunk ^ (lane_row & 7);
    swizzle_k = k_chunk ^ Layout::kv_swizzle(k_row);
    swizzle_v = lane_chunk ^ Layout::kv_swizzle(lane_row);
    q = shared + Layout::kQ + (warp_row + lane_row) * Layout::kRowBytes;
    k = shared + Layout::kK + (sharer * Fragments<Tile>::kTilesN * 8 + k_row) * Layout::kKvRowBytes;
    v = shared + Layout::kV + lane_row * Layout::kKvRowBytes + part * Fragments<Tile>::kTilesD * 16;
  }
};

// ---- The softmax of a step: maxima of S, and P = 2^(scale S - m) in the fragments that O += P V takes.

// Multiplies the rows of S.
template <class Tile>
CUTE_DEVICE void multiply_rows(typename Fragments<Tile>::S& s, const typename Fragments<Tile>::Rows& factors) {
  constexpr int kTilesN = Fragments<Tile>::kTilesN;
  __syncwarp();  // keeps this a branch
  CUTE_UNROLL
  for (int i = 0; i < Tile::kRowTiles * kTilesN * 4; ++i) {
    s[i / 4 / kTilesN][i / 4 % kTilesN][i % 4] *= factors[i / 4 / kTilesN * 2 + i % 4 / 2];
  }
}

// Each thread's maximum of its part of the rows. If `load`, it issues the loads of the next KV block along the way:
// in a burst before the products, they would hold up the ldmatrix behind them.
template <class Tile, class Loads>
CUTE_DEVICE void take_max(const typename Fragments<Tile>::S& s, typename Fragments<Tile>::Rows& thread_max, Loads& next,
                          bool load) {
  constexpr int kRows = Fragments<Tile>::kRows;
  constexpr int kTilesN = Fragments<Tile>::kTilesN;
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    float value = s[r / 2][0][r % 2 * 2];
    CUTE_UNROLL
    for (int n = 0; n < kTilesN; ++n) {
      value = fmaxf(value, fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
      if (load) next.issue(r * kTilesN + n, kRows * kTilesN);
    }
    thread_max[r] = value;
  }
}

// Multiplies row r of O.
template <class Tile>
CUTE_DEVICE void rescale_row(typename Fragments<Tile>::O& o, int r, float factor) {
  CUTE_UNROLL
  for (int d = 0; d < Fragments<Tile>::kTilesD; ++d) {
    o[r / 2][d][r % 2 * 2] *= factor;
    o[r / 2][d][r % 2 * 2 + 1] *= factor;
  }
}

// Two packed elements of P: tile pair k, row tile pack / 4, fragment register pack % 4, which is (tile 2k, row 0),
// (2k, row 8), (2k + 1, row 0), (2k + 1, row 8).
template <class Tile, class Factor, class Softmax>
CUTE_DEVICE std::uint32_t make_p(Softmax& softmax, const typename Fragments<Tile>::S& s, int k, int pack) {
  const int m = pack / 4;
  const int i = pack % 4;
  const int r = m * 2 + i % 2;
  const float* pair = &s[m][2 * k + i / 2][(i % 2) * 2];
  const float p0 = softmax.exponential(r, pair[0]);
  const float p1 = softmax.exponential(r, pair[1]);
  softmax.partial_sum[r] += p0;
  softmax.partial_sum[r] += p1;
  return Factor::pack(p0, p1);
}

// ---- From q.k to what the softmax takes: the logits transform, then the mask.
//
// One type for each variant of the kernel. Both have, for the step of keys from first_key on:
//   skips()  whether no row of the warp sees one of the keys, so that the step need not be computed
//   apply()  replaces S
// Masks of any form are read a step ahead: fetch(), or fetch_last() for the last step of the tile, which is the first
// to be computed, then find().

// Keys that rows of a warp see. (Found in the kernel: by a constructor, ptxas orders the main loop anew.)
struct VisibleRange {
  int any_begin;  // some row sees keys [any_begin, any_end); none if there is no row
  int any_end;
  int all_begin;  // every row sees keys [all_begin, all_end)
  int all_end;
};

// Masks that are intervals; plain logits or a LogitsTransform.
template <class Tile, bool kTransformed>
struct IntervalLogits {
  using S = typename Fragments<Tile>::S;
  static constexpr int kRowTiles = Tile::kRowTiles;
  static constexpr int kTilesN = Fragments<Tile>::kTilesN;

  const KernelParams& params;
  IntervalMask mask;
  WarpShare<Tile> share;
  VisibleRange range;

  CUTE_DEVICE IntervalLogits(const KernelParams& params_, const TileWork& tile, const WarpShare<Tile>& share_,
                             const VisibleRange& range_)
      : params(params_), mask(tile.mask), share(share_), range(range_) {}

  CUTE_DEVICE bool skips(int first_key) const {
    return first_key >= range.any_end || first_key + Tile::kStepN <= range.any_begin;
  }

  CUTE_DEVICE void apply(S& s, int first_key) const {
    if constexpr (kTransformed) {
      constexpr bool kFewRegisters = Tile::kHeadDim >= 128;
      params.transform.template apply<kFewRegisters>(&s[0][0][0], kRowTiles * kTilesN * 4);
    }
    if (first_key < range.all_begin || first_key + Tile::kStepN > range.all_end) {
      apply_mask(s, first_key + share.sharer * kTilesN * 8);
    }
  }

  CUTE_DEVICE void apply_mask(S& s, int first_key) const {
    __syncwarp();  // keeps this a branch: predicated, its selects would cost every unmasked step 10 %
    const int key0 = first_key + (share.lane % 4) * 2;
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = share.row_at(m * 16 + half * 8 + share.lane / 4);
        // Seen if lo <= key < hi: one unsigned comparison of the distance from lo.
        const int lo = mask.template lo<false>(row);
        const std::uint32_t from_lo = key0 - lo;
        const std::uint32_t extent = max(mask.template hi<false>(row) - lo, 0);
        CUTE_UNROLL
        for (int n = 0; n < kTilesN; ++n) {
          CUTE_UNROLL
          for (int e = 0; e < 2; ++e) {
            mask_unless_below(s[m][n][half * 2 + e], from_lo + (n * 8 + e), extent);
          }
        }
      }
    }
  }
};

// Masks of any form, and a GeneralTransform. Warps without rows see no key: they skip the steps.
template <class Tile>
struct GeneralLogits {
  using S = typename Fragments<Tile>::S;
  static constexpr int kTilesN = Fragments<Tile>::kTilesN;

  const KernelParams& params;
  WarpShare<Tile> share;
  int batch;
  int head;  // of packed heads the first
  VisibleKeys<Tile> visible;
  std::uint32_t found = 0;  // keys of the step that the lane found (visible_keys.h)

  CUTE_DEVICE GeneralLogits(const KernelParams& params_, const TileWork& tile, const WarpShare<Tile>& share_,
                            const VisibleRange&)
      : params(params_),
        share(share_),
        batch(tile.item.batch),
        head(tile.head),
        visible(params_.attention.mask, tile.mask, tile.request_bit, share_.row_at, tile.row_end,
                share_.has_rows ? tile.bits_begin : 0, share_.has_rows ? tile.bits_end : 0) {}

  // Of two warps that share rows, the first key of this one.
  CUTE_DEVICE int own_key(int first_key) const { return first_key + share.sharer * kTilesN * 8; }

  CUTE_DEVICE void fetch_last(int first_key) { visible.fetch_last(own_key(first_key)); }
  CUTE_DEVICE void fetch(int first_key) { visible.fetch(own_key(first_key)); }
  CUTE_DEVICE void find(int first_key) { found = visible.find(own_key(first_key)); }
  CUTE_DEVICE bool skips(int) const { return !__any_sync(0xffffffffu, found != 0); }

  CUTE_DEVICE void apply(S& s, int first_key) const {
    if (params.transforms) {
      if (params.general.capped) {
        transform(s, own_key(first_key), true);
      } else {
        transform(s, own_key(first_key), false);
      }
    }
    const bool all = found == VisibleKeys<Tile>::kAll;
    if (!__all_sync(0xffffffffu, all)) VisibleKeys<Tile>::apply(s, found);
  }

  CUTE_DEVICE void transform(S& s, int first_key, bool capped) const {
    const LaunchParams& p = params.attention;
    GeneralTransform transform = params.general;
    transform.capped = capped;  // a constant here: one branch for all logits
    if constexpr (Tile::kPacked) {
      CUTE_UNROLL
      for (int m = 0; m < Tile::kRowTiles; ++m) {
        float logits_scale[2], slope[2];
        int distance[2];  // per half (2)
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          int row = m * 16 + half * 8 + share.lane / 4;
          asm volatile("" : "+r"(row));  // computed anew in each step, not kept: registers
          const int of_head = head + share.row_at.pack_head(row);
          logits_scale[half] = logits_scale_of(p, batch, of_head);
          slope[half] = p.alibi.slopes == nullptr ? 0.0f : __ldg(p.alibi.slopes + of_head);
          distance[half] = first_key + share.lane % 4 * 2 - (p.alibi.relative ? share.row_at(row) : 0);
        }
        transform.apply(reinterpret_cast<float (&)[kTilesN * 4]>(s[m]), logits_scale, slope, distance);
      }
    } else {
      const float logits_scale = logits_scale_of(p, batch, head);
      const float slope = p.alibi.slopes == nullptr ? 0.0f : __ldg(p.alibi.slopes + head);
      CUTE_UNROLL
      for (int m = 0; m < Tile::kRowTiles; ++m) {
        const int row = share.first_row + m * 16 + share.lane / 4;
        const int key = first_key + (share.lane % 4) * 2;
        const int from_row = p.alibi.relative ? row : 0;
        const int from_row_8 = p.alibi.relative ? row + 8 : 0;
        transform.apply(reinterpret_cast<float (&)[kTilesN * 4]>(s[m]), {logits_scale, logits_scale}, {slope, slope},
                        {key - from_row, key - from_row_8});
      }
    }
  }
};

}  // namespace cutlass_kernels::fa2
