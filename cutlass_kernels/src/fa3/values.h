// Consumer: O += P V, and what becomes of O.
#pragma once

#include "common/ptx/shared_address.h"
#include "fa3/consumer.h"
#include "fa3/store.h"
#include "fa3/store_packed.h"

namespace cutlass_kernels::fa3 {

// Starts O (+)= P V with the V stage at v_ring, of 16 bits.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::issue_output(OutputFragment& o,
                                                                ProbabilityFragment& p,
                                                                bool accumulate) {
  // (BLK_N, C, D_VO / C)
  const auto v =
      descriptor_mn_major(v_base + v_ring.index * Layout::kVBytes, Layout::kPanelBytesKv);
  wgmma_fence();
  CUTE_UNROLL
  for (int i = 0; i < kN / kStep; ++i) {
    Wgmma<Operand, kDvo>::template rs<BOrder::kMnMajor>(o, &p[4 * i], v + i * (16 * 128 / 16),
                                                        i > 0 || accumulate);
  }
  wgmma_commit();
}

// O += P V with the V stage at v_ring, of e4m3: a part of the columns at a time, whose products are added up alone and
// then to O (main_loop_fp8.h). Ends the turn with the last products.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::add_output(OutputFragment& o,
                                                              ProbabilityFragment& p) {
  constexpr int kColumns = kDvo / Tile::kOutputParts;
  shared.v_full[v_ring.index].wait(v_ring.phase);
  wait_turn();
  // (D_VO, 128, BLK_N / 128)
  const auto v = descriptor_k_major(v_base + v_ring.index * Layout::kVBytes);
  CUTE_UNROLL
  for (int part = 0; part < Tile::kOutputParts; ++part) {
    float sum[kColumns / 2];  // (2, columns / 4)
    wgmma_fence();
    CUTE_UNROLL
    for (int i = 0; i < kN / kStep; ++i) {
      const int offset = part * kColumns * 128 + i / 4 * Layout::kPanelBytesVt + i % 4 * 32;
      Wgmma<Operand, kColumns>::template rs<BOrder::kKMajor>(sum, &p[4 * i], v + offset / 16,
                                                             i > 0);
    }
    wgmma_commit();
    if (part + 1 == Tile::kOutputParts) end_turn();
    wgmma_wait<0>();
    pin(sum);
    CUTE_UNROLL
    for (int i = 0; i < kColumns / 2; ++i) o[part * (kColumns / 2) + i] += sum[i];
  }
  pin(p);  // was read until here: its registers must not have been given to anything else
  release(shared.v_empty[v_ring.index]);
  v_ring.advance();
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
