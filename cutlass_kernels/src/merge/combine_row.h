// Combines the partial results of a tile: one row of one head, by a warp.
#pragma once

#include <cute/config.hpp>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/element_types.h"
#include "common/logits.h"
#include "common/numeric.h"
#include "common/softmax.h"
#include "merge/partial_results.h"

namespace cutlass_kernels {

// What some of the splits give: a lane has four columns of each of kPanels times 128.
template <int kPanels>
struct CombinedRow {
  float m = -INFINITY;  // the largest of theirs
  float sum = 0.0f;     // relative to 2^m, as is o
  float o[kPanels][4] = {};

  // Makes `top`, which is no less than m, the new m. Returns what 2^top is in weights: 1 where there is no key, so that
  // -inf is at a distance from it.
  CUTE_DEVICE float raise(float top) {
    const float reference = top == -INFINITY ? 0.0f : top;
    const float weight = exp2_approx(m - reference);
    m = top;
    sum *= weight;
    CUTE_UNROLL
    for (int i = 0; i < kPanels * 4; ++i) o[i / 4][i % 4] *= weight;
    return reference;
  }
  // Adds `weight` times sum and o of another part, whose weight relative to the own m is known.
  CUTE_DEVICE void add(float weight, float their_sum, const float4 (&their_o)[kPanels]) {
    sum = fmaf(weight, their_sum, sum);
    add(weight, their_o);
  }
  CUTE_DEVICE void add(float weight, const float4 (&their_o)[kPanels]) {
    CUTE_UNROLL
    for (int c = 0; c < kPanels; ++c) {
      o[c][0] = fmaf(weight, their_o[c].x, o[c][0]);
      o[c][1] = fmaf(weight, their_o[c].y, o[c][1]);
      o[c][2] = fmaf(weight, their_o[c].z, o[c][2]);
      o[c][3] = fmaf(weight, their_o[c].w, o[c][3]);
    }
  }
};

// Combines the `part`-th of `parts` shares of a row's splits: kAhead of them in turn, 32 at most, whose loads are in
// flight together. A lane reads the maximum and the sum of one, and hands its weight to the others. Reads past the L1
// cache, which may hold what was there before other thread blocks of the same kernel wrote.
template <int kPanels, int kAhead>
CUTE_DEVICE CombinedRow<kPanels> combine_splits(const LaunchParams& p, const TilePartials& partials, int row, int head,
                                                int part = 0, int parts = 1) {
  constexpr int kAtOnce = kAhead < 8 ? kAhead : 8;  // to one branch
  const int lane = threadIdx.x % 32;
  const int split_of_lane = lane % kAhead;
  const std::int64_t at = partials.at(p, row, head, part * kAhead);
  const auto* max_sums = reinterpret_cast<const float2*>(partial_max_sum(p, at)) + split_of_lane;
  const float* values = partial_o(p, at) + lane * 4;
  CombinedRow<kPanels> combined;
  CUTE_NO_UNROLL
  for (int first = part * kAhead; first < partials.num_splits; first += parts * kAhead) {
    const int count = partials.num_splits - first;
    float2 max_sum{-INFINITY, 0.0f};
    if (split_of_lane < count) max_sum = __ldcg(max_sums);
    float4 o[kAhead][kPanels];
    CUTE_UNROLL
    for (int some = 0; some < kAhead; some += kAtOnce) {
      if (some >= count) break;
      CUTE_UNROLL
      for (int i = some; i < some + kAtOnce; ++i) {
        CUTE_UNROLL
        for (int c = 0; c < kPanels; ++c) {
          o[i][c] = {};
          if (i < count && c * 128 + lane * 4 < p.head_dim_vo) {
            o[i][c] = __ldcg(reinterpret_cast<const float4*>(values + i * p.head_dim_vo + c * 128));
          }
        }
      }
    }
    float top = max_sum.x;
    CUTE_UNROLL
    for (int lanes = kAhead / 2; lanes > 0; lanes /= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
    }
    const float weight = exp2_approx(max_sum.x - combined.raise(fmaxf(top, combined.m)));
    float sum = weight * max_sum.y;
    CUTE_UNROLL
    for (int lanes = kAhead / 2; lanes > 0; lanes /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    combined.sum += sum;
    CUTE_UNROLL
    for (int some = 0; some < kAhead; some += kAtOnce) {
      if (some >= count) break;
      CUTE_UNROLL
      for (int i = some; i < some + kAtOnce; ++i) {
        combined.add(__shfl_sync(0xffffffffu, weight, i), o[i]);
      }
    }
    max_sums += parts * kAhead;
    values += std::int64_t(parts * kAhead) * p.head_dim_vo;
  }
  return combined;
}

// Outputs of Any16Bit or e4m3, as params.o_dtype says.
struct AnyOutput {};

// Writes four columns of the output, from this element on.
template <class Element>
CUTE_DEVICE void store_four(const LaunchParams& p, std::int64_t element, const float (&x)[4]) {
  char* out = static_cast<char*>(p.o.data);
  if constexpr (std::is_same_v<Element, AnyOutput>) {
    if (p.o_dtype == DType::kFloat8E4M3) {
      *reinterpret_cast<std::uint32_t*>(out + element) = e4m3::pack(x[0], x[1], x[2], x[3]);
    } else {
      store_four<Any16Bit>(p, element, x);
    }
  } else {
    *reinterpret_cast<uint2*>(out + 2 * element) = {pack_pair<Element>(p.o_dtype, x[0], x[1]),
                                                    pack_pair<Element>(p.o_dtype, x[2], x[3])};
  }
}

// Of latent attention, by one thread: the LSE of a row, and of keys by slots (kMaxLogits) the largest of its logits. m,
// in base 2, is that logit if it is wanted; m and sum are without the sink.
template <bool kMaxLogits = true>
CUTE_DEVICE void write_row_stats(const LaunchParams& p, const FinishedRow& finished, float m, float sum,
                                 std::int64_t token, int head) {
  if (p.lse != nullptr) {
    const float lse = p.flash_mla_lse ? flash_mla_lse(m, sum) : finished.lse();
    p.lse[token * p.lse_stride_token + head * p.lse_stride_head] = lse * p.lse_scale;
  }
  if (kMaxLogits && p.max_logits != nullptr) p.max_logits[token * p.num_qo_heads + head] = m / kLog2e;
}

// Writes a row of the output, of request `batch`, by a warp. kLatent: of latent attention, by write_row_stats(). (To
// ask for max_logits where there are none makes fa2's tile for many rows of e4m3 spill 92 bytes instead of 60.)
template <class Element, bool kLatent = false, bool kMaxLogits = kLatent, int kPanels>
CUTE_DEVICE void store_row(const LaunchParams& p, const CombinedRow<kPanels>& combined, int batch, std::int64_t token,
                           int head) {
  const int lane = threadIdx.x % 32;
  float factor = p.v_scale * scale_of(p.output_scale, batch, head);
  const FinishedRow finished =
      finish_row<kLatent>(combined.m, combined.sum, p.sinks, head, [&](float weight) { factor *= weight; });
  const float scale = finished.scale(factor);
  const std::int64_t first = token * p.o.stride_token + head * p.o.stride_head;
  CUTE_UNROLL
  for (int c = 0; c < kPanels; ++c) {
    const int column = c * 128 + lane * 4;
    if (column < p.head_dim_vo) {
      float x[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) x[i] = combined.o[c][i] * scale;
      store_four<Element>(p, first + column, x);
    }
  }
  if constexpr (kLatent) {
    if (lane == 0) write_row_stats<kMaxLogits>(p, finished, combined.m, combined.sum, token, head);
  } else if (p.lse != nullptr && lane == 0) {
    p.lse[token * p.lse_stride_token + head * p.lse_stride_head] = finished.lse() * p.lse_scale;
  }
}

}  // namespace cutlass_kernels
