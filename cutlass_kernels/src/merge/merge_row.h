// The results of a tile's pieces, put together: one row of one head.
#pragma once

#include <cute/config.hpp>

#include <cmath>
#include <cstdint>

#include "common/logits.h"
#include "common/numeric.h"
#include "cutlass_kernels/params.h"

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
  float top = -INFINITY;  // largest LSE; NaN if one is
  float sum = 0.0f;       // of 2^(LSE - top)
  float o[kPanels][4] = {};

  CUTE_DEVICE bool has_key() const { return top != top || top > -INFINITY; }
};

// Merges pieces [begin, end) of a row, by a warp. kLoads: registers for loads that are in flight together, a float4 each: one at
// a time, a row would take a microsecond per piece. The first of them do not wait for the LSEs that tell what they count.
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
  const float* lses = p.schedule.partial_lse + first_at;
  const float* values = p.schedule.partial_o + first_at * p.head_dim_vo + lane * 4;
  const int count = end - begin;
  auto lse_of = [&](int i) { return i < count ? __ldcg(lses + i * step) : -INFINITY; };
  MergedRow<kPanels> merged;
  float lse = lse_of(lane);
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
      float top = lse;
      bool is_nan = lse != lse;
      for (int i = lane + 32; i < count; i += 32) {
        const float another = lse_of(i);
        top = fmaxf(top, another);
        is_nan |= another != another;
      }
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
      }
      merged.top = __any_sync(0xffffffffu, is_nan) ? NAN : top;
      if (!merged.has_key()) break;  // O of a piece without keys is 0
    }
    if (first % 32 == 0) {
      if (first > 0) lse = lse_of(first + lane);
      own_weight = exp2_approx(lse - merged.top);
      merged.sum += own_weight;
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
  const float sink = p.sinks == nullptr ? -INFINITY : p.sinks[head] * kLog2e;
  const bool any_key = merged.has_key();
  const float top = merged.top != merged.top ? merged.top : fmaxf(merged.top, sink);
  const float weight = any_key ? exp2_approx(merged.top - top) : 0.0f;
  const float sum = merged.sum * weight + (sink > -INFINITY ? exp2_approx(sink - top) : 0.0f);
  const float scale = any_key ? weight * p.v_scale * scale_of(p.output_scale, head) / sum : 0.0f;
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
    p.lse[token * p.lse_stride_token + head * p.lse_stride_head] =
        sum == 0.0f ? -INFINITY : top + log2f(sum);
  }
}

}  // namespace cutlass_kernels
