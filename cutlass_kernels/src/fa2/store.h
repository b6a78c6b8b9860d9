// The end of a tile: rows are normalised, staged in shared memory and written, 16 bytes per lane.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/finish_row.h"
#include "common/logits.h"
#include "common/numeric.h"
#include "fa2/decode_rows.h"
#include "fa2/fragments.h"
#include "fa2/packed_rows.h"
#include "fa2/params.h"
#include "fa2/shared_memory.h"
#include "fa2/tile_work.h"
#include "fa2/warp_share.h"

namespace cutlass_kernels::fa2 {

// By all warps with rows, when no warp reads Q, K or V any more. O is not yet divided by the sums.
template <class Element, class Tile, bool kGeneral>
CUTE_DEVICE void store_tile(const KernelParams& params, const TileWork& tile,
                            const WarpShare<Tile>& share, char* shared_memory,
                            typename Fragments<Tile>::O& o, typename Fragments<Tile>::Rows& row_m,
                            typename Fragments<Tile>::Rows& row_sum) {
  using Layout = SharedLayout<Tile>;
  constexpr int kRowTiles = Tile::kRowTiles;
  constexpr int kSharers = Tile::kSharers;
  constexpr int kTilesD = Fragments<Tile>::kTilesD;
  constexpr int kRows = Fragments<Tile>::kRows;
  const LaunchParams& p = params.attention;
  const WorkItem& work = tile.item;
  const KeySharing<Tile>& keys = share.keys;
  const WarpRows<Tile>& row_at = share.row_at;
  // The general variant computes these anew: kept in registers, they spill 68 bytes on compute capability 8.0 (hd128,
  // pages).
  const int warp = kGeneral ? int(threadIdx.x / 32) : share.warp;
  const int lane = kGeneral ? int(threadIdx.x % 32) : share.lane;
  const int part = share.sharer;
  const int warp_row = share.warp_row;
  const int head = tile.head;
  const int row_begin = tile.row_begin;
  const int row_end = tile.row_end;
  if constexpr (Tile::kDecodes) {
    DecodeRows<Element, Tile, kGeneral>{params,
                                        work,
                                        shared_memory,
                                        row_begin,
                                        row_end - row_begin,
                                        head,
                                        warp % KeySharing<Tile>::kWarps,
                                        warp / KeySharing<Tile>::kWarps}
        .store(o, row_m, row_sum);
    return;
  }
  // Masked keys have p = 0, but their V may be infinite: a row without keys is 0 whatever V is.
  bool no_key[kRows];  // (row)
  bool any_without = false;
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    no_key[r] = has_no_key(row_m[r], row_sum[r]);
    any_without |= no_key[r];
  }
  if (__any_sync(0xffffffffu, any_without)) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int d = 0; d < kTilesD; ++d) {
        if (no_key[r]) o[r / 2][d][r % 2 * 2] = o[r / 2][d][r % 2 * 2 + 1] = 0.0f;
      }
    }
  }
  if constexpr (Tile::kSharesKeys && !Tile::kDecodes) {
    if (!keys.merge(shared_memory, lane, o, row_m, row_sum)) return;
  }
  if constexpr (Tile::kPacked && !Tile::kDecodes) {
    if constexpr (kRowTiles == 1) {
      store_packed<Element, Tile, kGeneral>(params, work, shared_memory, row_at, row_end, head,
                                            part, o, row_m, row_sum);
    } else {
      CUTE_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        const WarpRows<Tile> rows{row_begin, warp_row + m * 16, params.pack};
        store_packed<Element, Tile, kGeneral>(
            params, work, shared_memory, rows, row_end, head, part,
            reinterpret_cast<const float (&)[1][kTilesD][4]>(o[m]),
            {row_m[2 * m], row_m[2 * m + 1]}, {row_sum[2 * m], row_sum[2 * m + 1]});
      }
    }
    return;
  }
  if constexpr (kGeneral) {
    if (p.stats != nullptr && part == 0 && lane % 4 == 0) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int row = row_begin + warp_row + (r / 2) * 16 + (r % 2) * 8 + lane / 4;
        if (row < row_end) {
          params.stats.store(p, std::int64_t(work.q_begin) + row, head, row_m[r], row_sum[r]);
        }
      }
    }
  }
  [[maybe_unused]] const float output_scale =
      kGeneral ? scale_of(p.output_scale, work.batch, head) : 1.0f;
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const FinishedRow finished = finish_row(row_m[r], row_sum[r], p.sinks, head, [&](float weight) {
      CUTE_UNROLL
      for (int d = 0; d < kTilesD; ++d) {
        o[r / 2][d][r % 2 * 2] *= weight;
        o[r / 2][d][r % 2 * 2 + 1] *= weight;
      }
    });
    float scale = finished.scale(p.v_scale);
    if constexpr (kGeneral) scale *= output_scale;
    const int row = warp_row + (r / 2) * 16 + (r % 2) * 8 + lane / 4;
    CUTE_UNROLL
    for (int d = 0; d < kTilesD; ++d) {
      const std::uint32_t packed =
          Element::pack(o[r / 2][d][(r % 2) * 2] * scale, o[r / 2][d][(r % 2) * 2 + 1] * scale);
      *reinterpret_cast<std::uint32_t*>(shared_memory + Layout::kQ +
                                        Layout::offset(row, part * kTilesD + d) + (lane % 4) * 4) =
          packed;
    }
    if (p.lse != nullptr && part == 0 && lane % 4 == 0 && row_begin + row < row_end) {
      p.lse[(work.q_begin + std::int64_t(row_begin + row)) * p.lse_stride_token +
            head * p.lse_stride_head] = finished.lse() * p.lse_scale;
    }
  }
  __syncwarp();
  char* out = static_cast<char*>(p.o.data) +
              2 * (std::int64_t(work.q_begin) * p.o.stride_token + head * p.o.stride_head);
  constexpr int kPartChunks = Layout::kChunks / kSharers;
  constexpr int kRowsPerStep =
      Tile::kPacked ? 1 : 32 / kPartChunks;  // packed rows are stored above
  const int out_chunk = part * kPartChunks + lane % kPartChunks;
  CUTE_UNROLL
  for (int i = 0; i < kRowTiles * 16 / kRowsPerStep; ++i) {
    const int row = warp_row + i * kRowsPerStep + lane / kPartChunks;
    if (row_begin + row < row_end && out_chunk * 8 < p.head_dim_vo) {
      const uint4 value = *reinterpret_cast<const uint4*>(shared_memory + Layout::kQ +
                                                          Layout::offset(row, out_chunk));
      *reinterpret_cast<uint4*>(out + 2 * (std::int64_t(row_begin + row) * p.o.stride_token) +
                                out_chunk * 16) = value;
    }
  }
}

}  // namespace cutlass_kernels::fa2
