// From O in registers to the output, or to partial results.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/logits.h"
#include "common/numeric.h"
#include "common/ptx/atomic.h"
#include "common/softmax.h"
#include "fa2/packed_rows.h"
#include "fa2/params.h"
#include "fa2/shared_memory.h"
#include "fa2/sharing.h"
#include "fa2/softmax.h"
#include "fa2/tile_work.h"
#include "merge/combine_row.h"
#include "merge/partial_results.h"
#include "plan/launch_params.h"
#include "schedule/tickets.h"

namespace cutlass_kernels::fa2 {

// ---- Epilogue of a decode tile (at most 16 query rows): combines the results of the warps, each of its part of the
// keys, then the partial results of the KV splits.
//
// A thread of a warp has parts of two rows and of every tile of columns. Through shared memory it gets four columns of
// one row, of all warps, and a warp a whole row. Rows that the tile does not have, mostly twelve of sixteen, are left
// out. The block that is the last of those that share the tile then merges what they have stored: a second kernel would
// take 2 us more, a third of what one request over 1k keys takes.

template <class Element, class Tile, bool kGeneral>
struct DecodeRows {
  using Layout = SharedLayout<Tile>;
  static constexpr int kParts = Tile::kColumnParts;
  static constexpr int kTilesD = Tile::kColumns / 8 / kParts;
  static constexpr int kRows = Tile::kBlockM;
  static constexpr int kGroups = KeySharing<Tile>::kMaxGroups;
  static constexpr int kPanels = (Tile::kHeadDim + 127) / 128;  // of 128 columns
  // 128 registers for their partial results, or 64 where ptxas would take more from the main loop. The second kernel,
  // with fewer ahead, rounds otherwise: with a fixed split size, where results must not depend on the batch, no tile
  // combines here.
  static constexpr int kSplitsAhead = (Tile::kBlocksPerSm <= 2 && kPanels <= 2 ? 32 : 16) / kPanels;
  // Floats [group][row][column], where K and V were; then (m, sum) [group][row]. Rows are eight floats apart in their
  // banks: the threads of a warp write 32 different pairs of banks, or two to each.
  static constexpr int kPitch = Tile::kHeadDim + 8;
  static constexpr int kOfRows = Layout::kK + kGroups * kRows * kPitch * 4;
  static_assert(kOfRows + kGroups * kRows * 8 <= Layout::kBytes);

  const KernelParams& params;
  const WorkItem& work;
  char* shared_memory;
  int first_token;  // of the tile, in its request
  int tokens;
  int head;   // the pack's first
  int group;  // of the keys
  int part;   // of the columns

  CUTE_DEVICE float* columns(int of_group, int row) const {
    return reinterpret_cast<float*>(shared_memory + Layout::kK) + (of_group * kRows + row) * kPitch;
  }
  CUTE_DEVICE float2& maximum_and_sum(int of_group, int row) const {
    return reinterpret_cast<float2*>(shared_memory + kOfRows)[of_group * kRows + row];
  }
  // Rows are dealt to the warps.
  CUTE_DEVICE int first_row() const { return part * kGroups + group; }
  static constexpr int kRowsAtOnce = kGroups * kParts;

  // Called by all warps that have a part of the keys, when no one reads K or V any more.
  CUTE_DEVICE void store(const float (&o)[1][kTilesD][4], const float (&row_m)[2], const float (&row_sum)[2]) const {
    const LaunchParams& p = params.attention;
    const int lane = threadIdx.x % 32;
    const int heads = int(params.pack.divisor);
    const int rows = tokens * heads;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = r * 8 + lane / 4;
      if (row >= rows) continue;
      float* to = columns(group, row) + part * kTilesD * 8 + lane % 4 * (Tile::kKvBytes == 1 ? 4 : 2);
      if constexpr (Tile::kKvBytes == 1) {  // of two tiles one has the even columns (products.h)
        CUTE_UNROLL
        for (int d = 0; d < kTilesD; d += 2) {
          *reinterpret_cast<float4*>(to + d * 8) = {o[0][d][2 * r], o[0][d + 1][2 * r], o[0][d][2 * r + 1],
                                                    o[0][d + 1][2 * r + 1]};
        }
      } else {
        CUTE_UNROLL
        for (int d = 0; d < kTilesD; ++d) {
          *reinterpret_cast<float2*>(to + d * 8) = {o[0][d][2 * r], o[0][d][2 * r + 1]};
        }
      }
      if (lane % 4 == 0 && part == 0) maximum_and_sum(group, row) = {row_m[r], row_sum[r]};
    }
    __syncthreads();
    const bool partial = work.num_splits > 1;
    for (int row = first_row(); row < rows; row += kRowsAtOnce) {
      const int token = int(params.pack.divide(row));
      const int of_head = head + row - token * heads;
      const CombinedRow<kPanels> combined = combine_groups(row);
      if constexpr (kGeneral && Tile::kKvBytes == 2) {
        if (p.stats != nullptr && lane == 0) {
          params.stats.store(p, std::int64_t(work.q_begin) + first_token + token, of_head, combined.m, combined.sum);
        }
      }
      if (!partial) {
        store_row<Element>(p, combined, work.batch, std::int64_t(work.q_begin) + first_token + token, of_head);
        continue;
      }
      const std::int64_t at = TilePartials{work.partial_row, work.num_splits}.at(p, token, of_head, work.split);
      float* to = partial_o(p, at);
      CUTE_UNROLL
      for (int c = 0; c < kPanels; ++c) {
        const int column = c * 128 + lane * 4;
        const auto& x = combined.o[c];
        if (column < p.head_dim_vo) {
          *reinterpret_cast<float4*>(to + column) = {x[0], x[1], x[2], x[3]};
        }
      }
      if (lane == 0) *partial_max_sum(p, at) = {combined.m, combined.sum};
    }
    if (partial && p.plan.combine_counters != nullptr) merge_if_last(rows, heads);
  }

  // What the groups of warps have found of a row, from shared memory.
  CUTE_DEVICE CombinedRow<kPanels> combine_groups(int row) const {
    const int lane = threadIdx.x % 32;
    float2 max_sum[kGroups];
    float4 of_group[kGroups][kPanels];
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      max_sum[g] = maximum_and_sum(g, row);
      CUTE_UNROLL
      for (int c = 0; c < kPanels; ++c) {
        const int column = c * 128 + lane * 4;
        of_group[g][c] = {};
        if (column < Tile::kColumns) {
          of_group[g][c] = *reinterpret_cast<const float4*>(columns(g, row) + column);
        }
      }
    }
    CombinedRow<kPanels> combined;
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g) combined.m = fmaxf(combined.m, max_sum[g].x);
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      // Masked keys have p = 0, but their V may be infinite: what saw no key does not count.
      if (has_no_key(max_sum[g].x, max_sum[g].y)) continue;
      const float weight = max_sum[g].x == combined.m ? 1.0f : exp2_approx(max_sum[g].x - combined.m);
      combined.add(weight, max_sum[g].y, of_group[g]);
    }
    return combined;
  }

  // By the same warps. Without counters another kernel merges.
  CUTE_DEVICE void merge_if_last(int rows, int heads) const {
    const LaunchParams& p = params.attention;
    volatile int* is_last = reinterpret_cast<int*>(shared_memory);  // where Q was
    __syncthreads();
    if (threadIdx.x == 0) {
      const TicketCounter last = work.num_splits - 1;
      const int counter = combine_counter(work.partial_row, head / heads, p.num_qo_heads / heads);
      // Releases what the barrier has shown this thread, and acquires what the others released, for the block:
      // combine_splits() reads past the L1 cache, so one thread's order is enough.
      *is_last = take_ticket<OrderingAtomics>(reinterpret_cast<TicketCounter*>(p.plan.combine_counters + counter),
                                              last + 1) == last;
    }
    __syncthreads();
    if (!*is_last) return;
    const TilePartials partials{work.partial_row, work.num_splits};
    for (int row = first_row(); row < rows; row += kRowsAtOnce) {
      const int token = int(params.pack.divide(row));
      const int of_head = head + row - token * heads;
      store_row<Element>(p, combine_splits<kPanels, kSplitsAhead>(p, partials, token, of_head), work.batch,
                         std::int64_t(work.q_begin) + first_token + token, of_head);
    }
  }
};

// ---- The end of a tile: rows are normalised, staged in shared memory and written, 16 bytes per lane.

// By all warps with rows, when no warp reads Q, K or V any more. O is not yet divided by the sums.
template <class Element, class Tile, bool kGeneral>
CUTE_DEVICE void store_tile(const KernelParams& params, const TileWork& tile, const WarpShare<Tile>& share,
                            char* shared_memory, typename Fragments<Tile>::O& o, typename Fragments<Tile>::Rows& row_m,
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
      store_packed<Element, Tile, kGeneral>(params, work, shared_memory, row_at, row_end, head, part, o, row_m,
                                            row_sum);
    } else {
      CUTE_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        const WarpRows<Tile> rows{row_begin, warp_row + m * 16, params.pack};
        store_packed<Element, Tile, kGeneral>(params, work, shared_memory, rows, row_end, head, part,
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
  [[maybe_unused]] const float output_scale = kGeneral ? scale_of(p.output_scale, work.batch, head) : 1.0f;
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
          pack_pair<Element>(p.o_dtype, o[r / 2][d][(r % 2) * 2] * scale, o[r / 2][d][(r % 2) * 2 + 1] * scale);
      *reinterpret_cast<std::uint32_t*>(shared_memory + Layout::kQ + Layout::offset(row, part * kTilesD + d) +
                                        (lane % 4) * 4) = packed;
    }
    if (p.lse != nullptr && part == 0 && lane % 4 == 0 && row_begin + row < row_end) {
      p.lse[(work.q_begin + std::int64_t(row_begin + row)) * p.lse_stride_token + head * p.lse_stride_head] =
          finished.lse() * p.lse_scale;
    }
  }
  __syncwarp();
  char* out =
      static_cast<char*>(p.o.data) + 2 * (std::int64_t(work.q_begin) * p.o.stride_token + head * p.o.stride_head);
  constexpr int kPartChunks = Layout::kChunks / kSharers;
  constexpr int kRowsPerStep = Tile::kPacked ? 1 : 32 / kPartChunks;  // packed rows are stored above
  const int out_chunk = part * kPartChunks + lane % kPartChunks;
  CUTE_UNROLL
  for (int i = 0; i < kRowTiles * 16 / kRowsPerStep; ++i) {
    const int row = warp_row + i * kRowsPerStep + lane / kPartChunks;
    if (row_begin + row < row_end && out_chunk * 8 < p.head_dim_vo) {
      const uint4 value = *reinterpret_cast<const uint4*>(shared_memory + Layout::kQ + Layout::offset(row, out_chunk));
      *reinterpret_cast<uint4*>(out + 2 * (std::int64_t(row_begin + row) * p.o.stride_token) + out_chunk * 16) = value;
    }
  }
}

}  // namespace cutlass_kernels::fa2
