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

// Starts the products of P with kPart of the columns of V, of e4m3, at v_ring. The last part has the sums of P too, by V's
// rows of ones.
template <class Element, class Tile, Logits kLogits>
template <int kPart>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::issue_part(Product<kPart>& product,
                                                              ProbabilityFragment& p) {
  constexpr int kColumns = kDvo / Tile::kOutputParts;
  // (D_VO + 8, 128, BLK_N / 128)
  const auto v = descriptor_k_major(v_base + v_ring.index * Layout::kVBytes);
  wgmma_fence();
  CUTE_UNROLL
  for (int i = 0; i < kN / kStep; ++i) {
    const int offset = kPart * kColumns * 128 + i / 4 * Layout::kPanelBytesVt + i % 4 * 32;
    Wgmma<Operand, int(sizeof(product) / 2)>::template rs<BOrder::kKMajor>(product, &p[4 * i],
                                                                           v + offset / 16, i > 0);
  }
  wgmma_commit();
}

// Once V of the KV block is there, and it is the warpgroup's turn.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::begin_output(Product<0>& product,
                                                                ProbabilityFragment& p) {
  shared.v_full[v_ring.index].wait(v_ring.phase);
  wait_turn();
  issue_part<0>(product, p);
}

// Adds them to O (main_loop_fp8.h), and the parts behind them. The last one ends the turn.
template <class Element, class Tile, Logits kLogits>
template <int kPart>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::add_part(OutputFragment& o,
                                                            Product<kPart>& product,
                                                            ProbabilityFragment& p) {
  constexpr bool kLast = kPart + 1 == Tile::kOutputParts;
  constexpr int kColumns = kDvo / Tile::kOutputParts;
  if constexpr (kLast) end_turn();
  wgmma_wait<0>();
  pin(product);
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 2; ++i) o[kPart * (kColumns / 2) + i] += product[i];
  if constexpr (!kLast) {
    Product<kPart + 1> next;
    issue_part<kPart + 1>(next, p);
    add_part<kPart + 1>(o, next, p);
  } else {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) weight_sum[r] += product[kColumns / 2 + 2 * r];
  }
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
    if constexpr (kFp8) {
      // From here on, sums are those of P that are not rounded: of partial results, too.
      RowFactors factor;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float m, sum;
        of_tile.finish(r, m, sum);
        factor[r] = weight_sum[r] > 0.0f ? __fdividef(sum, weight_sum[r]) : 1.0f;
      }
      rescale(o, factor);
    }
    store_packed_tile<Element, Tile, kHasStats>(params, shared.jobs[slot], warpgroup, of_tile, o,
                                                shared.o[warpgroup]);
  } else {
    store_tile<Element, Tile, kLogits>(params, shared.jobs[slot], warpgroup, of_tile, weight_sum, o,
                                       shared_address(shared.o[warpgroup]));
  }
  // Every lane, having read the job: racecheck does not follow an order through lane 0.
  shared.job_empty[slot].arrive();
}

}  // namespace cutlass_kernels::fa3
