// Consumer: O += P V, and what becomes of O.
#pragma once

#include "common/ptx/shared_address.h"
#include "fa3/consumer.h"
#include "fa3/store.h"
#include "fa3/store_packed.h"

namespace cutlass_kernels::fa3 {

// Starts O (+)= P V with the V stage at v_ring.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::issue_output(OutputFragment& o,
                                                                ProbabilityFragment& p,
                                                                bool accumulate) {
  const std::uint32_t v_stage = v_base + v_ring.index * Layout::kVBytes;
  // (BLK_N, C, D_VO / C); of e4m3, transposed, (D_VO, 128, BLK_N / 128)
  const auto v =
      kFp8 ? descriptor_k_major(v_stage) : descriptor_mn_major(v_stage, Layout::kPanelBytesKv);
  wgmma_fence();
  CUTE_UNROLL
  for (int i = 0; i < kN / kStep; ++i) {
    if constexpr (kFp8) {
      const std::uint64_t v_step = v + (i / 4 * Layout::kPanelBytesVt + i % 4 * 32) / 16;
      Wgmma<Operand, kDvo>::template rs<BOrder::kKMajor>(o, &p[4 * i], v_step, i > 0 || accumulate);
    } else {
      Wgmma<Operand, kDvo>::template rs<BOrder::kMnMajor>(o, &p[4 * i], v + i * (16 * 128 / 16),
                                                          i > 0 || accumulate);
    }
  }
  wgmma_commit();
}

// Skips the V stage of a KV block that the warpgroup does not need.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::skip_values() {
  shared.v_full[v_ring.index].wait(v_ring.phase);
  release(shared.v_empty[v_ring.index]);
  v_ring.advance();
}

template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::rescale(OutputFragment& o,
                                                           const RowFactors& factor) {
  CUTE_UNROLL
  for (int i = 0; i < kDvo / 2; ++i) o[i] *= factor[i / 2 % 2];
}

// Stores O of the tile whose job is in `slot`, and releases the job.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::store(OutputFragment& o,
                                                         const OnlineSoftmax<2>& of_tile,
                                                         int slot) {
  if constexpr (Tile::kPacked) {
    store_packed_tile<Element, Tile, kHasStats>(params, shared.jobs[slot], warpgroup, of_tile, o,
                                                shared.o[warpgroup]);
  } else {
    store_tile<Element, Tile, kLogits>(params, shared.jobs[slot], warpgroup, of_tile, o,
                                       shared_address(shared.o[warpgroup]));
  }
  // Every lane, having read the job: racecheck does not follow an order through lane 0.
  shared.job_empty[slot].arrive();
}

}  // namespace cutlass_kernels::fa3
