// Epilogue of a decode tile (at most 16 query rows): combines the results of the warps, each of its part of the keys,
// then the partial results of the KV splits.
//
// A thread of a warp has parts of two rows and of every tile of columns. Through shared memory it gets four columns of
// one row, of all warps, and a warp a whole row. Rows that the tile does not have, mostly twelve of sixteen, are left
// out. The block that is the last of those that share the tile then merges what they have stored: a second kernel would
// take 2 us more, a third of what one request over 1k keys takes.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/finish_row.h"
#include "common/logits.h"
#include "common/numeric.h"
#include "common/ptx/atomic.h"
#include "fa2/key_sharing.h"
#include "fa2/params.h"
#include "fa2/shared_memory.h"
#include "merge/combine_row.h"
#include "merge/partial_results.h"
#include "plan/launch_params.h"
#include "schedule/tickets.h"

namespace cutlass_kernels::fa2 {

template <class Element, class Tile, bool kGeneral>
struct DecodeRows {
  using Layout = SharedLayout<Tile>;
  static constexpr int kParts = Tile::kColumnParts;
  static constexpr int kTilesD = Tile::kColumns / 8 / kParts;
  static constexpr int kRows = Tile::kBlockM;
  static constexpr int kGroups = KeySharing<Tile>::kMaxGroups;
  static constexpr int kPanels = (Tile::kHeadDim + 127) / 128;  // of 128 columns
  // 128 registers for their partial results, or 64 where ptxas would take more from the main loop. The second kernel, with
  // fewer ahead, rounds otherwise: with a fixed split size, where results must not depend on the batch, no tile combines
  // here.
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
  CUTE_DEVICE void store(const float (&o)[1][kTilesD][4], const float (&row_m)[2],
                         const float (&row_sum)[2]) const {
    const LaunchParams& p = params.attention;
    const int lane = threadIdx.x % 32;
    const int heads = int(params.pack.divisor);
    const int rows = tokens * heads;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = r * 8 + lane / 4;
      if (row >= rows) continue;
      float* to =
          columns(group, row) + part * kTilesD * 8 + lane % 4 * (Tile::kKvBytes == 1 ? 4 : 2);
      if constexpr (Tile::kKvBytes == 1) {  // of two tiles one has the even columns (fp8.h)
        CUTE_UNROLL
        for (int d = 0; d < kTilesD; d += 2) {
          *reinterpret_cast<float4*>(to + d * 8) = {o[0][d][2 * r], o[0][d + 1][2 * r],
                                                    o[0][d][2 * r + 1], o[0][d + 1][2 * r + 1]};
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
          params.stats.store(p, std::int64_t(work.q_begin) + first_token + token, of_head,
                             combined.m, combined.sum);
        }
      }
      if (!partial) {
        store_row<Element>(p, combined, work.batch,
                           std::int64_t(work.q_begin) + first_token + token, of_head);
        continue;
      }
      const std::int64_t at =
          TilePartials{work.partial_row, work.num_splits}.at(p, token, of_head, work.split);
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
      const float weight =
          max_sum[g].x == combined.m ? 1.0f : exp2_approx(max_sum[g].x - combined.m);
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
      *is_last = take_ticket<OrderingAtomics>(
                     reinterpret_cast<TicketCounter*>(p.plan.combine_counters + counter),
                     last + 1) == last;
    }
    __syncthreads();
    if (!*is_last) return;
    const TilePartials partials{work.partial_row, work.num_splits};
    for (int row = first_row(); row < rows; row += kRowsAtOnce) {
      const int token = int(params.pack.divide(row));
      const int of_head = head + row - token * heads;
      store_row<Element>(p, combine_splits<kPanels, kSplitsAhead>(p, partials, token, of_head),
                         work.batch, std::int64_t(work.q_begin) + first_token + token, of_head);
    }
  }
};

}  // namespace cutlass_kernels::fa2
