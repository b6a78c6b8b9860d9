// The epilogue of a tile: its rows lie in the rows of several tokens and heads. Those of a KV split go to the partial
// results instead, as they are, in fp32.
#pragma once

#include "common/finish_row.h"
#include "common/softmax.h"
#include "merge/partial_results.h"
#include "mla/shared_memory.h"

namespace cutlass_kernels::mla {

// From four lanes that hold columns 2 l and 2 l + 1 of four groups of eight columns to lanes that hold group l.
CUTE_DEVICE uint4 transpose_quad(const std::uint32_t (&words)[4]) {
  const int l = threadIdx.x % 4;
  std::uint32_t out[4];
  CUTE_UNROLL
  for (int step = 0; step < 4; ++step) {  // with lane l ^ step
    const int to = l ^ step;
    const std::uint32_t word = to == 0   ? words[0]
                               : to == 1 ? words[1]
                               : to == 2 ? words[2]
                                         : words[3];
    const std::uint32_t got = __shfl_xor_sync(0xffffffffu, word, step);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) out[i] = i == to ? got : out[i];
  }
  return {out[0], out[1], out[2], out[3]};
}

// Writes one half of the columns of 64 rows of O; warpgroup 0 their LSE, too. `sums` are those of both warpgroups.
template <class Element, int kHalf>
CUTE_DEVICE void store_tile(const fa3::KernelParams& params, const Job& job,
                            const OnlineSoftmax<2>& softmax, const float (&sums)[2],
                            float (&o)[kLatentDim / 4]) {
  constexpr int kColumns = kLatentDim / 2;
  const LaunchParams& p = params.attention;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int tokens = min(params.packed.tokens, job.qo_len - job.row_begin);
  const std::int64_t q_begin = std::int64_t(job.q_end) - job.qo_len + job.row_begin;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + r * 8 + lane / 4;
    const int token = params.packed.heads.divide(row);
    const int head = job.head + row - token * int(params.packed.heads.divisor);
    const bool exists = token < tokens;
    const float m = softmax.minus_m[r] < OnlineSoftmax<2>::kNoKey ? -softmax.minus_m[r] : -INFINITY;
    if (job.num_splits > 1) {
      if (!exists) continue;
      const std::int64_t at =
          TilePartials{job.partial_row, job.num_splits}.at(p, token, head, job.split);
      if (kHalf == 0 && lane % 4 == 0) *partial_max_sum(p, at) = {m, sums[r]};
      float* out = partial_o(p, at) + kHalf * kColumns + lane % 4 * 2;
      const bool empty = has_no_key(m, sums[r]);
      CUTE_UNROLL
      for (int i = 0; i < kColumns / 8; ++i) {
        *reinterpret_cast<float2*>(out + i * 8) =
            empty ? float2{0.0f, 0.0f} : float2{o[4 * i + 2 * r], o[4 * i + 2 * r + 1]};
      }
      continue;
    }
    float factor = p.v_scale;
    const FinishedRow finished = finish_row(m, sums[r], p.sinks, exists ? head : job.head,
                                            [&](float weight) { factor *= weight; });
    const float scale = finished.scale(factor);
    if (kHalf == 0 && p.lse != nullptr && exists && lane % 4 == 0) {
      p.lse[(q_begin + token) * p.lse_stride_token + head * p.lse_stride_head] =
          finished.lse() * p.lse_scale;
    }
    char* const out = static_cast<char*>(p.o.data) +
                      2 * ((q_begin + token) * p.o.stride_token + head * p.o.stride_head +
                           kHalf * kColumns + lane % 4 * 8);
    CUTE_UNROLL
    for (int i = 0; i < kColumns / 32; ++i) {
      std::uint32_t words[4];
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float* x = &o[16 * i + 4 * j + 2 * r];
        // Masked keys have p = 0, but their V may be infinite: a row without keys is 0 whatever V is.
        words[j] = finished.is_empty ? 0u : Element::pack(x[0] * scale, x[1] * scale);
      }
      const uint4 value = transpose_quad(words);
      if (exists) *reinterpret_cast<uint4*>(out + i * 64) = value;
    }
  }
}

}  // namespace cutlass_kernels::mla
