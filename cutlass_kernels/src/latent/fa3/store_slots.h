// The epilogue of a tile of keys by slots, whose rows are heads of one token.
#pragma once

#include "common/ptx/shared_address.h"
#include "common/softmax.h"
#include "fa3/store.h"
#include "fa3/tma.h"
#include "latent/fa3/load.h"
#include "latent/fa3/shared_memory.h"
#include "latent/fa3/store.h"
#include "merge/combine_row.h"

namespace cutlass_kernels::mla {

// Writes one half of the columns of 64 rows of O, through `memory`, the stage of the tile's last block, so that Q of
// the next tile arrives meanwhile; warpgroup 1 their LSE and their maxima, too, having time until warpgroup 0 has
// issued the next S. `sums` are those of both warpgroups; O is to be multiplied by `factors`, and they have been.
//
// done() says that nobody reads `memory` any more. Warpgroup 0 does not wait for that here and returns true: its warps'
// first lanes have stores to wait for.
//
// (With lines of the panels copied by lanes, and O multiplied by `factors` first, 64 heads over 512 keys took 723 us
// instead of 670. Straight from registers, transposed in quads, 662 instead of 651: the memory is free earlier, but a
// warp is done as late.)
template <class Element, int kHalf, class Done>
CUTE_DEVICE bool store_slots_tile(const fa3::KernelParams& params, const Job& job, const OnlineSoftmax<2>& softmax,
                                  const float (&sums)[2], const float (&factors)[2], float (&o)[kLatentDim / 4],
                                  char* memory, Done&& done) {
  constexpr int kPanelRows = 16 * 128;  // bytes of a warp's rows of a panel
  const LaunchParams& p = params.attention;
  const int warp = threadIdx.x / 32 % 4;
  const int first_row = warp * 16;
  const int lane = threadIdx.x % 32;
  float m[2];
  row_maxima(softmax, m);
  if (job.num_splits > 1) {
    done();
    CUTE_UNROLL
    for (int i = 0; i < kLatentDim / 4; ++i) o[i] *= factors[i / 2 % 2];
    store_partial_rows<kHalf>(params, job, m, sums, o);
    return false;
  }
  FinishedRow finished[2];
  OutputRow to[2];
  float scales[2];
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    to[r] = output_row(params, job, first_row + r * 8 + lane / 4);
    float factor = p.v_scale * factors[r];
    finished[r] = finish_row<true>(m[r], sums[r], p.sinks, to[r].exists ? to[r].head : job.head,
                                   [&](float weight) { factor *= weight; });
    scales[r] = finished[r].is_empty ? 0.0f : finished[r].fast_scale(factor);
  }
  // Masked keys have p = 0, but their V may be infinite: a row without keys is 0 whatever V is.
  if (__any_sync(0xffffffffu, finished[0].is_empty || finished[1].is_empty)) {
    CUTE_UNROLL
    for (int i = 0; i < kLatentDim / 4; ++i) {
      if (finished[i / 2 % 2].is_empty) o[i] = 0.0f;
    }
  }
  const std::uint32_t panels = shared_address(memory) + (kHalf * 4 + warp) * (kHalfPanels * kPanelRows);
  const std::uint32_t to_row = panels + lane % 16 * 128;
  CUTE_UNROLL
  for (int step = 0; step < kLatentDim / 32; ++step) {  // of 16 columns
    std::uint32_t words[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float* x = &o[8 * step + 2 * i];
      words[i] = Element::pack(x[0] * scales[i % 2], x[1] * scales[i % 2]);
    }
    const int chunk = step % 4 * 2 + lane / 16;
    fa3::stmatrix_x4(to_row + step / 4 * kPanelRows + ((chunk ^ (lane & 7)) << 4), words[0], words[1], words[2],
                     words[3]);
  }
  fa3::tma_store_fence();
  __syncwarp();
  if (lane == 0) {
    if (first_row < int(params.packed.heads.divisor)) {
      fa3::tma_store(&output_map(params), panels, 0, first_row, kHalf * kHalfPanels,
                     int(params.packed.heads.divide(job.head)), job.q_end - job.qo_len + job.row_begin);
    }
    fa3::tma_store_commit();
  }
  if constexpr (kHalf == 0) return true;
  if (lane == 0) fa3::tma_store_wait();
  done();
  if (lane % 4 != 0) return false;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    if (to[r].exists) write_row_stats(p, finished[r], m[r], sums[r], to[r].token, to[r].head);
  }
  return false;
}

}  // namespace cutlass_kernels::mla
