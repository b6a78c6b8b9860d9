// The end of a tile: its rows are normalised and written, through shared memory, 16 bytes per lane. Those of a KV split
// go to the partial results as they are, in fp32; where there are counters, the last thread block of the tile's splits
// combines them.
#pragma once

#include <cute/config.hpp>

#include <cstdint>
#include <type_traits>

#include "common/logits.h"
#include "common/ptx/atomic.h"
#include "common/softmax.h"
#include "latent/fa2/load.h"
#include "merge/combine_row.h"
#include "merge/partial_results.h"
#include "schedule/tickets.h"

namespace cutlass_kernels::mla::mma_sync {

// Where a row of the tile belongs.
struct PlaceOfRow {
  int token;  // of the tile
  int head;
  bool exists;

  CUTE_DEVICE PlaceOfRow(const KernelParams& params, const TileWork& tile, int row) {
    token = int(params.pack.divide(row));
    head = tile.head + row - token * int(params.pack.divisor);
    exists = tile.row_begin + token < tile.row_end;
  }
};

// By the warps that compute O, after a barrier behind WarpScores::finish(), which left m of row r at kRowFactor, the
// sums of its groups at kRowSum, and of keys by slots their maxima at kRowMax.
template <class Element, class Tile>
struct TileStore {
  static constexpr int kPitch = Tile::kColumns * 2 + 16;  // bytes: lanes of 8 rows write 32 banks
  static constexpr int kWarpBytes = Tile::kOutRowTiles * 16 * kPitch;
  static_assert(Tile::kRoleWarps * kWarpBytes <= Tile::kStages * Tile::kStageBytes);

  const KernelParams& params;
  const TileWork& tile;
  char* shared;
  int warp, lane;
  int row_tile;  // the first of the warp
  int column;    // the same

  CUTE_DEVICE void operator()(const float (&o)[Tile::kOutRowTiles][Tile::kTilesD][4]) const {
    const bool partial = tile.item.num_splits > 1;
    CUTE_UNROLL
    for (int r = 0; r < 2 * Tile::kOutRowTiles; ++r) {
      const int row = row_tile * 16 + r * 8 + lane / 4;
      const PlaceOfRow place(params, tile, row);
      float m = reinterpret_cast<const float*>(shared + Tile::kRowFactor)[row];
      const float* sums = reinterpret_cast<const float*>(shared + Tile::kRowSum) + row;
      float sum = 0.0f;
      CUTE_UNROLL
      for (int group = 0; group < Tile::kGroups; ++group) sum += sums[group * Tile::kBlockM];
      float weight = 1.0f;
      if constexpr (Tile::kBySlots) weight = raise_to_maximum(row, m);
      if (partial) {
        write_partial(o, r, place, m, sum * weight, weight);
      } else {
        stage(o, r, place, m, sum * weight, weight);
      }
    }
    if (!partial) {
      __syncwarp();
      write_staged();
    }
  }

  // By all threads, after the rows have been written.
  CUTE_DEVICE void combine_if_last() const {
    constexpr int kSplitsAhead = Tile::kSplitsRoles ? 4 : 8;  // 16 registers each, of 128 or 255
    const LaunchParams& p = params.attention;
    const WorkItem& work = tile.item;
    if (work.num_splits <= 1 || p.plan.combine_counters == nullptr) return;
    volatile int* is_last = reinterpret_cast<int*>(shared);
    __syncthreads();
    if (threadIdx.x == 0) {
      const int heads = int(params.pack.divisor);
      const TicketCounter last = work.num_splits - 1;
      const int counter = combine_counter(work.partial_row, tile.head / heads, p.num_qo_heads / heads);
      // As in fa2/store.h.
      *is_last = take_ticket<OrderingAtomics>(reinterpret_cast<TicketCounter*>(p.plan.combine_counters + counter),
                                              last + 1) == last;
    }
    __syncthreads();
    if (!*is_last) return;
    const TilePartials partials{work.partial_row, work.num_splits};
    CUTE_NO_UNROLL
    for (int row = int(threadIdx.x) / 32; row < Tile::kBlockM; row += Tile::kWarps) {
      const PlaceOfRow place(params, tile, row);
      if (!place.exists) break;
      store_row<Element, true, Tile::kBySlots>(
          p, combine_splits<kLatentDim / 128, kSplitsAhead>(p, partials, place.token, place.head), work.batch,
          std::int64_t(work.q_begin) + tile.row_begin + place.token, place.head);
    }
  }

 private:
  // Of a row, a lane has kRuns runs of columns that follow one another. With 8-bit keys, two tiles have every other
  // column of 16.
  static constexpr bool kAlternates = Tile::kKeyBytes == 1;
  static constexpr int kRuns = kAlternates ? Tile::kTilesD / 2 : Tile::kTilesD;
  using Run = std::conditional_t<kAlternates, float4, float2>;

  CUTE_DEVICE int column_of(int run) const { return kAlternates ? run * 16 + lane % 4 * 4 : run * 8 + lane % 4 * 2; }
  CUTE_DEVICE static Run run_of(const float (&o)[Tile::kTilesD][4], int r, int run) {
    const int e = r % 2 * 2;
    if constexpr (kAlternates) {
      const float (&even)[4] = o[2 * run];
      const float (&odd)[4] = o[2 * run + 1];
      return {even[e], odd[e], even[e + 1], odd[e + 1]};
    } else {
      return {o[run][e], o[run][e + 1]};
    }
  }
  CUTE_DEVICE static float2 times(const float2& x, float weight) { return {x.x * weight, x.y * weight}; }
  CUTE_DEVICE static float4 times(const float4& x, float weight) {
    return {x.x * weight, x.y * weight, x.z * weight, x.w * weight};
  }
  CUTE_DEVICE static std::uint32_t packed(const float2& x, float scale) {
    return Element::pack(x.x * scale, x.y * scale);
  }
  CUTE_DEVICE static uint2 packed(const float4& x, float scale) {
    return {packed(float2{x.x, x.y}, scale), packed(float2{x.z, x.w}, scale)};
  }

  // m becomes the row's largest logit, for max_logits. Returns what O and the sum are to be multiplied by.
  CUTE_DEVICE float raise_to_maximum(int row, float& m) const {
    if (!(m > -INFINITY)) return 1.0f;
    const float below = m;
    CUTE_UNROLL
    for (int group = 0; group < Tile::kGroups; ++group) {
      m = fmaxf(m, reinterpret_cast<const float*>(shared + Tile::kRowMax)[group * Tile::kBlockM + row]);
    }
    return exp2_approx(below - m);
  }

  CUTE_DEVICE void write_partial(const float (&o)[Tile::kOutRowTiles][Tile::kTilesD][4], int r, const PlaceOfRow& place,
                                 float m, float sum, float weight) const {
    if (!place.exists) return;
    const LaunchParams& p = params.attention;
    const WorkItem& work = tile.item;
    const std::int64_t at = TilePartials{work.partial_row, work.num_splits}.at(p, place.token, place.head, work.split);
    if (column == 0 && lane % 4 == 0) *partial_max_sum(p, at) = {m, sum};
    float* out = partial_o(p, at) + column;
    // Masked keys have p = 0, but their V may be infinite: a row without keys is 0 whatever V is.
    const bool empty = has_no_key(m, sum);
    CUTE_UNROLL
    for (int i = 0; i < kRuns; ++i) {
      *reinterpret_cast<Run*>(out + column_of(i)) = empty ? Run{} : times(run_of(o[r / 2], r, i), weight);
    }
  }

  CUTE_DEVICE char* staged() const { return shared + warp * kWarpBytes; }

  CUTE_DEVICE void stage(const float (&o)[Tile::kOutRowTiles][Tile::kTilesD][4], int r, const PlaceOfRow& place,
                         float m, float sum, float weight) const {
    const LaunchParams& p = params.attention;
    const WorkItem& work = tile.item;
    const int head = place.exists ? place.head : tile.head;
    float factor = p.v_scale * scale_of(p.output_scale, work.batch, head) * weight;
    const FinishedRow finished = finish_row<Tile::kBySlots>(m, sum, p.sinks, head, [&](float by) { factor *= by; });
    const float scale = finished.scale(factor);
    if (place.exists && column == 0 && lane % 4 == 0) {
      const std::int64_t token = std::int64_t(work.q_begin) + tile.row_begin + place.token;
      write_row_stats<Tile::kBySlots>(p, finished, m, sum, token, head);
    }
    char* out = staged() + (r * 8 + lane / 4) * kPitch;
    CUTE_UNROLL
    for (int i = 0; i < kRuns; ++i) {
      const Run x = finished.is_empty ? Run{} : run_of(o[r / 2], r, i);
      auto* place = reinterpret_cast<decltype(packed(x, scale))*>(out + column_of(i) * 2);
      *place = packed(x, finished.is_empty ? 1.0f : scale);
    }
  }

  CUTE_DEVICE void write_staged() const {
    constexpr int kChunks = Tile::kColumns / 8;
    constexpr int kRowsAtOnce = 32 / kChunks;
    const LaunchParams& p = params.attention;
    const std::int64_t first = std::int64_t(tile.item.q_begin) + tile.row_begin;
    CUTE_UNROLL
    for (int i = 0; i < Tile::kOutRowTiles * 16; i += kRowsAtOnce) {
      const int row = i + lane / kChunks;
      const PlaceOfRow place(params, tile, row_tile * 16 + row);
      if (!place.exists) continue;
      char* out = static_cast<char*>(p.o.data) + 2 * ((first + place.token) * p.o.stride_token +
                                                      place.head * p.o.stride_head + column + lane % kChunks * 8);
      *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(staged() + row * kPitch + lane % kChunks * 16);
    }
  }
};

}  // namespace cutlass_kernels::mla::mma_sync
