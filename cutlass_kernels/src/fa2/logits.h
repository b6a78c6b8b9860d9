// From q.k to what the softmax takes: the logits transform, then the mask.
//
// One type for each variant of the kernel. Both have, for the step of keys from first_key on:
//   skips()  whether no row of the warp sees one of the keys, so that the step need not be computed
//   apply()  replaces S
// Masks of any form are read a step ahead: fetch(), or fetch_last() for the last step of the tile, which is the first
// to be computed, then find().
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/logits.h"
#include "common/mask.h"
#include "common/softmax.h"
#include "fa2/fragments.h"
#include "fa2/packed_rows.h"
#include "fa2/params.h"
#include "fa2/tile_work.h"
#include "fa2/visible_keys.h"
#include "fa2/warp_share.h"

namespace cutlass_kernels::fa2 {

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

  CUTE_DEVICE IntervalLogits(const KernelParams& params_, const TileWork& tile,
                             const WarpShare<Tile>& share_, const VisibleRange& range_)
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

  CUTE_DEVICE GeneralLogits(const KernelParams& params_, const TileWork& tile,
                            const WarpShare<Tile>& share_, const VisibleRange&)
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
          distance[half] =
              first_key + share.lane % 4 * 2 - (p.alibi.relative ? share.row_at(row) : 0);
        }
        transform.apply(reinterpret_cast<float (&)[kTilesN * 4]>(s[m]), logits_scale, slope,
                        distance);
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
        transform.apply(reinterpret_cast<float (&)[kTilesN * 4]>(s[m]),
                        {logits_scale, logits_scale}, {slope, slope},
                        {key - from_row, key - from_row_8});
      }
    }
  }
};

}  // namespace cutlass_kernels::fa2
