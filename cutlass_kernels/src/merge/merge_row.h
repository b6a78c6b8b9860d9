// The results of a tile's pieces, put together: one row of one head.
#pragma once

#include <cute/config.hpp>

#include <cmath>
#include <cstdint>

#include "common/finish_row.h"
#include "common/logits.h"
#include "common/numeric.h"
#include "cutlass_kernels/params.h"
#include "merge/partial_results.h"

namespace cutlass_kernels {

// Of a tile: piece i of row r is row partial_row + i * rows + r of the partial results.
struct PieceRows {
  int q_begin;  // first row, in the tensor
  int rows;
  int partial_row;
  int count;
};

// What some of the pieces give: a lane has four columns of each of kPanels times 128.
template <int kPanels>
struct MergedRow {
  float m = -INFINITY;  // the largest of theirs
  float sum = 0.0f;     // relative to 2^m, as is o
  float o[kPanels][4] = {};
};

// Merges pieces [begin, end) of a row, by a warp. kLoads: registers for loads that are in flight together, a float4 each: one at
// a time, a row would take a microsecond per piece. The first of them do not wait for the maxima that tell what they count.
// Reads past the L1 cache: other blocks of the same kernel may have written what it holds another version of.
template <int kPanels, int kLoads>
CUTE_DEVICE MergedRow<kPanels> merge_pieces(const AttentionParams& p, const PieceRows& pieces,
                                            int row, int head, int begin, int end) {
  constexpr int kAhead = kLoads / kPanels;  // pieces
  static_assert(kAhead > 0 && 32 % kAhead == 0,
                "A lane holds the weight of one piece in 32: loads must begin at each 32nd.");
  const int lane = threadIdx.x % 32;
  // Pieces of this row and head lie `step` rows of one head apart.
  const std::int64_t step = std::int64_t(pieces.rows) * p.num_qo_heads;
  const std::int64_t first_at =
      (std::int64_t(pieces.partial_row) + row) * p.num_qo_heads + head + begin * step;
  const float2* max_sums = partial_max_sum(p, first_at);
  const float* values = partial_o(p, first_at) + lane * 4;
  const int count = end - begin;
  auto max_sum_of = [&](int i) {
    return i < count ? __ldcg(max_sums + i * step) : float2{-INFINITY, 0.0f};
  };
  MergedRow<kPanels> merged;
  float2 own = max_sum_of(lane);
  float own_weight = 0.0f;
  CUTE_NO_UNROLL
  for (int first = 0; first < count; first += kAhead) {
    float4 loaded[kAhead][kPanels];
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (i % 8 == 0 && first + i >= count) break;
      CUTE_UNROLL
      for (int c = 0; c < kPanels; ++c) {
        loaded[i][c] = {};
        if (first + i < count && c * 128 + lane * 4 < p.head_dim_vo) {
          loaded[i][c] = __ldcg(reinterpret_cast<const float4*>(values + c * 128));
        }
      }
      values += step * p.head_dim_vo;
    }
    if (first == 0) {
      merged.m = own.x;
      bool has_key = own.y != 0.0f;
      for (int i = lane + 32; i < count; i += 32) {
        const float2 another = max_sum_of(i);
        merged.m = fmaxf(merged.m, another.x);
        has_key |= another.y != 0.0f;
      }
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        merged.m = fmaxf(merged.m, __shfl_xor_sync(0xffffffffu, merged.m, lanes));
      }
      if (!__any_sync(0xffffffffu, has_key)) break;
    }
    if (first % 32 == 0) {
      if (first > 0) own = max_sum_of(first + lane);
      own_weight = exp2_approx(own.x - merged.m);
      merged.sum = fmaf(own_weight, own.y, merged.sum);
    }
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (i % 8 == 0 && first + i >= count) break;
      const float weight = __shfl_sync(0xffffffffu, own_weight, first % 32 + i);
      CUTE_UNROLL
      for (int c = 0; c < kPanels; ++c) {
        merged.o[c][0] = fmaf(weight, loaded[i][c].x, merged.o[c][0]);
        merged.o[c][1] = fmaf(weight, loaded[i][c].y, merged.o[c][1]);
        merged.o[c][2] = fmaf(weight, loaded[i][c].z, merged.o[c][2]);
        merged.o[c][3] = fmaf(weight, loaded[i][c].w, merged.o[c][3]);
      }
    }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    merged.sum += __shfl_xor_sync(0xffffffffu, merged.sum, lanes);
  }
  return merged;
}

// Writes a row of the output, by a warp.
template <class Element, int kPanels>
CUTE_DEVICE void store_row(const AttentionParams& p, const MergedRow<kPanels>& merged,
                           std::int64_t token, int head) {
  const int lane = threadIdx.x % 32;
  float factor = p.v_scale * scale_of(p.output_scale, head);
  const FinishedRow finished =
      finish_row(merged.m, merged.sum, p.sinks, head, [&](float weight) { factor *= weight; });
  const float scale = finished.scale(factor);
  char* out = static_cast<char*>(p.o.data) +
              Element::kBytes * (token * p.o.stride_token + head * p.o.stride_head);
  CUTE_UNROLL
  for (int c = 0; c < kPanels; ++c) {
    const int column = c * 128 + lane * 4;
    if (column < p.head_dim_vo) {
      const auto& x = merged.o[c];
      if constexpr (Element::kBytes == 1) {
        *reinterpret_cast<std::uint32_t*>(out + column) =
            Element::pack(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale);
      } else {
        *reinterpret_cast<uint2*>(out + 2 * column) = {Element::pack(x[0] * scale, x[1] * scale),
                                                       Element::pack(x[2] * scale, x[3] * scale)};
      }
    }
  }
  if (p.lse != nullptr && lane == 0) {
    p.lse[token * p.lse_stride_token + head * p.lse_stride_head] = finished.lse();
  }
}

}  // namespace cutlass_kernels
