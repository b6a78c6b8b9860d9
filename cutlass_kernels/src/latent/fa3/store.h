// The epilogue of a tile: its rows lie in the rows of several tokens and heads. Those of a KV split go to the partial
// results instead, as they are, in fp32.
#pragma once

#include "common/ptx/shared_address.h"
#include "common/softmax.h"
#include "fa3/store.h"
#include "latent/fa3/shared_memory.h"
#include "merge/combine_row.h"
#include "merge/partial_results.h"

namespace cutlass_kernels::mla {

// A row of the tile in the output.
struct OutputRow {
  std::int64_t token;  // in the tensor
  int head;
  bool exists;
};

CUTE_DEVICE OutputRow output_row(const fa3::KernelParams& params, const Job& job, int row) {
  const int token = params.packed.heads.divide(row);
  return {std::int64_t(job.q_end) - job.qo_len + job.row_begin + token,
          job.head + row - token * int(params.packed.heads.divisor),
          token < min(params.packed.tokens, job.qo_len - job.row_begin)};
}

template <int kHalf>
CUTE_DEVICE void store_partial_rows(const fa3::KernelParams& params, const Job& job, const float (&m)[2],
                                    const float (&sums)[2], const float (&o)[kLatentDim / 4]) {
  constexpr int kColumns = kLatentDim / 2;
  const LaunchParams& p = params.attention;
  const int lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = threadIdx.x / 32 % 4 * 16 + r * 8 + lane / 4;
    const OutputRow to = output_row(params, job, row);
    if (!to.exists) continue;
    const std::int64_t at =
        TilePartials{job.partial_row, job.num_splits}.at(p, int(params.packed.heads.divide(row)), to.head, job.split);
    if (kHalf == 0 && lane % 4 == 0) *partial_max_sum(p, at) = {m[r], sums[r]};
    float* out = partial_o(p, at) + kHalf * kColumns + lane % 4 * 2;
    const bool empty = has_no_key(m[r], sums[r]);
    CUTE_UNROLL
    for (int i = 0; i < kColumns / 8; ++i) {
      *reinterpret_cast<float2*>(out + i * 8) =
          empty ? float2{0.0f, 0.0f} : float2{o[4 * i + 2 * r], o[4 * i + 2 * r + 1]};
    }
  }
}

// Of each row, in log2 units: -inf if it saw no key.
CUTE_DEVICE void row_maxima(const OnlineSoftmax<2>& softmax, float (&m)[2]) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    m[r] = softmax.minus_m[r] < OnlineSoftmax<2>::kNoKey ? -softmax.minus_m[r] : -INFINITY;
  }
}

// Writes one half of the columns of 64 rows of O; warpgroup 0 their LSE, too. `sums` are those of both warpgroups. O
// passes through the panels of Q that have the same columns: 16 lanes that write a row each take L1 eight cycles per
// store, and what rearranges their columns by shuffles is 900 instructions that are never in the instruction cache (in
// all 5 to 7 us per tile, 128 heads over 4k keys, of 125).
template <class Element, class Tile, int kHalf>
CUTE_DEVICE void store_tile(const fa3::KernelParams& params, const Job& job, Shared<Tile>& shared,
                            const OnlineSoftmax<2>& softmax, const float (&sums)[2], const float (&o)[kLatentDim / 4]) {
  const LaunchParams& p = params.attention;
  const int first_row = threadIdx.x / 32 % 4 * 16;  // of the warp
  const int lane = threadIdx.x % 32;
  float m[2];
  row_maxima(softmax, m);
  if (job.num_splits > 1) {
    store_partial_rows<kHalf>(params, job, m, sums, o);
    return;
  }
  float scales[2];
  bool is_empty[2];
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const OutputRow to = output_row(params, job, first_row + r * 8 + lane / 4);
    float factor = p.v_scale;
    const FinishedRow finished =
        finish_row(m[r], sums[r], p.sinks, to.exists ? to.head : job.head, [&](float weight) { factor *= weight; });
    scales[r] = finished.scale(factor);
    is_empty[r] = finished.is_empty || !to.exists;  // rows of Q that are never loaded stay zeros
    if (kHalf == 0 && to.exists && lane % 4 == 0) {
      write_row_stats<false>(p, finished, m[r], sums[r], to.token, to.head);
    }
  }
  char* const panels = shared.q + kHalf * kHalfPanels * kPanelBytes;  // (64, 64, panels / 2)
  CUTE_UNROLL
  for (int step = 0; step < kLatentDim / 32; ++step) {  // of 16 columns
    std::uint32_t words[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = i % 2;
      const float* x = &o[8 * step + 2 * i];
      // Masked keys have p = 0, but their V may be infinite: a row without keys is 0 whatever V is.
      words[i] = is_empty[r] ? 0u : Element::pack(x[0] * scales[r], x[1] * scales[r]);
    }
    const int row = first_row + lane % 16;
    const int chunk = step % 4 * 2 + lane / 16;
    char* const at = panels + step / 4 * kPanelBytes + row * 128 + ((chunk ^ (row & 7)) << 4);
    fa3::stmatrix_x4(shared_address(at), words[0], words[1], words[2], words[3]);
  }
  __syncwarp();
#pragma unroll 4
  for (int row = first_row; row < first_row + 16; ++row) {
    const OutputRow to = output_row(params, job, row);
    const uint4 columns =
        *reinterpret_cast<const uint4*>(panels + lane / 8 * kPanelBytes + row * 128 + ((lane % 8 ^ (row & 7)) << 4));
    char* const out = static_cast<char*>(p.o.data) + 2 * (to.token * p.o.stride_token + to.head * p.o.stride_head +
                                                          kHalf * (kLatentDim / 2) + lane * 8);
    if (to.exists) *reinterpret_cast<uint4*>(out) = columns;
  }
  fa3::fence_proxy_async();  // TMA writes the next Q there
}

}  // namespace cutlass_kernels::mla
