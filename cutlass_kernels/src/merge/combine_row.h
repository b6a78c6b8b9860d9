// Combines the partial results of a tile: one row of one head, by a warp.
#pragma once

#include <cute/config.hpp>

#include <cmath>
#include <cstdint>

#include "common/element_types.h"
#include "common/finish_row.h"
#include "common/logits.h"
#include "common/numeric.h"
#include "merge/partial_results.h"

namespace cutlass_kernels {

// Where a tile's partial results are: those of row r of split i in row partial_row + i * rows + r.
struct SplitRows {
  int q_begin;  // first row, in the tensor
  int rows;
  int partial_row;
  int count;
};

// What some of the splits give: a lane has four columns of each of kPanels times 128.
template <int kPanels>
struct CombinedRow {
  float m = -INFINITY;  // the largest of theirs
  float sum = 0.0f;     // relative to 2^m, as is o
  float o[kPanels][4] = {};
};

// Combines splits [begin, end) of a row. kLoads: registers for loads that are in flight together, a float4 each: one at
// a time, a row would take a microsecond per split. The first loads do not wait for the maxima that weigh them. Reads
// past the L1 cache, which may hold what was there before other thread blocks of the same kernel wrote.
template <int kPanels, int kLoads>
CUTE_DEVICE CombinedRow<kPanels> combine_splits(const LaunchParams& p, const SplitRows& splits,
                                                int row, int head, int begin, int end) {
  constexpr int kAhead = kLoads / kPanels;  // splits
  static_assert(kAhead > 0 && 32 % kAhead == 0,
                "A lane holds the weight of one split in 32: loads must begin at each 32nd.");
  const int lane = threadIdx.x % 32;
  // Splits of this row and head lie `step` rows of one head apart.
  const std::int64_t step = std::int64_t(splits.rows) * p.num_qo_heads;
  const std::int64_t first_at =
      (std::int64_t(splits.partial_row) + row) * p.num_qo_heads + head + begin * step;
  const float2* max_sums = partial_max_sum(p, first_at);
  const float* values = partial_o(p, first_at) + lane * 4;
  const int count = end - begin;
  auto max_sum_of = [&](int i) {
    return i < count ? __ldcg(max_sums + i * step) : float2{-INFINITY, 0.0f};
  };
  CombinedRow<kPanels> combined;
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
      combined.m = own.x;
      bool has_key = own.y != 0.0f;
      for (int i = lane + 32; i < count; i += 32) {
        const float2 another = max_sum_of(i);
        combined.m = fmaxf(combined.m, another.x);
        has_key |= another.y != 0.0f;
      }
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        combined.m = fmaxf(combined.m, __shfl_xor_sync(0xffffffffu, combined.m, lanes));
      }
      if (!__any_sync(0xffffffffu, has_key)) break;
    }
    if (first % 32 == 0) {
      if (first > 0) own = max_sum_of(first + lane);
      own_weight = exp2_approx(own.x - combined.m);
      combined.sum = fmaf(own_weight, own.y, combined.sum);
    }
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (i % 8 == 0 && first + i >= count) break;
      const float weight = __shfl_sync(0xffffffffu, own_weight, first % 32 + i);
      CUTE_UNROLL
      for (int c = 0; c < kPanels; ++c) {
        combined.o[c][0] = fmaf(weight, loaded[i][c].x, combined.o[c][0]);
        combined.o[c][1] = fmaf(weight, loaded[i][c].y, combined.o[c][1]);
        combined.o[c][2] = fmaf(weight, loaded[i][c].z, combined.o[c][2]);
        combined.o[c][3] = fmaf(weight, loaded[i][c].w, combined.o[c][3]);
      }
    }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    combined.sum += __shfl_xor_sync(0xffffffffu, combined.sum, lanes);
  }
  return combined;
}

// Writes a row of the output, of request `batch`, by a warp.
template <class Element, int kPanels>
CUTE_DEVICE void store_row(const LaunchParams& p, const CombinedRow<kPanels>& combined, int batch,
                           std::int64_t token, int head) {
  const int lane = threadIdx.x % 32;
  float factor = p.v_scale * scale_of(p.output_scale, batch, head);
  const FinishedRow finished =
      finish_row(combined.m, combined.sum, p.sinks, head, [&](float weight) { factor *= weight; });
  const float scale = finished.scale(factor);
  char* out = static_cast<char*>(p.o.data) +
              Element::kBytes * (token * p.o.stride_token + head * p.o.stride_head);
  CUTE_UNROLL
  for (int c = 0; c < kPanels; ++c) {
    const int column = c * 128 + lane * 4;
    if (column < p.head_dim_vo) {
      const auto& x = combined.o[c];
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
    p.lse[token * p.lse_stride_token + head * p.lse_stride_head] = finished.lse() * p.lse_scale;
  }
}

}  // namespace cutlass_kernels
