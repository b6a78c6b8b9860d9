// Consumer: the loop over tiles and their KV blocks, of e4m3.
//
// wgmma adds e4m3 products to a sum of 14 bits and truncates. A long sum of one sign shrinks: by 1 % over 1k keys, by
// half over 128k (benchmarks/results/e4m3.md). So P V of a KV block is a product of its own, and O its sum over KV
// blocks in fp32.
// Beside O there are registers for S, or for P and that product, not for all: a warpgroup computes one after the other.
// What keeps the tensor cores busy in the meantime are the products of the other warpgroups. Where they take turns
// (kPingPong), a turn is one's P V.
//
// O is divided by the sums of the rounded P, which the tensor cores add up too: the bias of rounding, of -0.0007, cancels.
// That of truncated sums, down to -0.0003, stays. Sums of P that is not rounded are for an LSE, and for partial results.
#pragma once

#include "fa3/consumer.h"
#include "fa3/exponentials.h"
#include "fa3/logits.h"
#include "fa3/scores.h"
#include "fa3/values.h"

namespace cutlass_kernels::fa3 {

// S of the KV block at block_begin, once its K is there, and its logits. Returns whether any were masked.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::compute_logits(ScoreFragment& s) {
  shared.k_full[k_ring.index].wait(k_ring.phase);
  issue_scores(s);
  wgmma_wait<0>();
  pin(s);
  transform(s);
  const bool masked = needs_mask();
  if (unlikely(masked)) apply_mask(s);
  return masked;
}

// Raises m of each row to row_max, where that is higher, and what was added up so far.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::raise_sums(RowFactors& row_max,
                                                              OutputFragment& o) {
  RowFactors factor;
  if (!raise_to(row_max, factor)) return;
  rescale(o, factor);
  weight_sum[0] *= factor[0];
  weight_sum[1] *= factor[1];
}

// P of the KV block at block_begin, and the sums of its rows. `first`: of its tile. Returns whether P is relative to an m
// that the block may exceed.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::compute_probabilities(
    ScoreFragment& s, ProbabilityFragment& p, OutputFragment& o, RowFactors& sum, bool first) {
  const bool masked = compute_logits(s);
  const bool lazy = kLazyMax && !(masked && !kIsGeneral) && !first;
  if (!lazy) {
    __syncwarp();      // keeps this a branch
    float row_max[2];  // (row)
    find_maximum(s, row_max);
    raise_sums(row_max, o);
  }
  if (needs_sums()) {
    take_exponentials(s, p, sum);
  } else {
    take_exponentials<false>(s, p, sum);
  }
  return lazy;
}

// Makes sure that P fits e4m3, which it may not if it is `lazy`, and O += P V.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::add_output(ScoreFragment& s,
                                                              ProbabilityFragment& p,
                                                              OutputFragment& o, RowFactors& sum,
                                                              bool lazy, bool first) {
  Product<0> product;
  if constexpr (Tile::kChecksLate) begin_output(product, p);
  const bool row_fits[2] = {fits(p, 0), fits(p, 1)};
  // S was not kept, its registers became P's: it is computed again, which takes all warps of the warpgroup.
  if (lazy && unlikely(!all_agree(row_fits[0] && row_fits[1]))) {
    __syncwarp();  // keeps this a branch
    if constexpr (Tile::kChecksLate) {
      wgmma_wait<0>();
      pin(product);
      pin(p);
    }
    compute_logits(s);
    float row_max[2];  // (row)
    find_maximum(s, row_max);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (row_fits[r]) row_max[r] = -INFINITY;  // else its m would depend on other rows
    }
    raise_sums(row_max, o);
    take_exponentials(s, p, sum);
    if constexpr (Tile::kChecksLate) issue_part<0>(product, p);
  }
  end_scores(first);
  if (needs_sums()) {
    softmax.partial_sum[0] += sum[0];
    softmax.partial_sum[1] += sum[1];
  }
  if constexpr (!Tile::kChecksLate) begin_output(product, p);
  add_part<0>(o, product, p);
  pin(p);  // was read until here: its registers must not have been given to anything else
  release(shared.v_empty[v_ring.index]);
  v_ring.advance();
}

// As compute_tiles().
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::compute_fp8_tiles() {
  OutputFragment o;  // (2, D_VO / 4)
  bool found = true;
  if (Tile::kPingPong && warpgroup == Tile::kConsumers - 1) end_turn();  // warpgroup 0 begins
  while (found && (!Tile::kPacked || has_rows)) {
    softmax = OnlineSoftmax<2>(softmax_scale());
    CUTE_UNROLL
    for (float& x : o) x = 0.0f;
    weight_sum[0] = weight_sum[1] = 0.0f;
    if (kSkips && skips_block) {
      skip_keys();
      skip_values();
    }
    // ptxas would spill 90 bytes of hd256 with the condition in front, and 300 with s in compute_probabilities().
    for (bool first = true;; first = false) {
      ScoreFragment s;        // (2, BLK_N / 4)
      ProbabilityFragment p;  // (2, BLK_N / 4)
      RowFactors sum;
      const bool lazy = compute_probabilities(s, p, o, sum, first);
      add_output(s, p, o, sum, lazy, first);
      const bool last = block_begin == key_begin;
      block_begin -= kN;
      if (last) break;
    }
    store(o, softmax, jobs.index);
    advance_q();
    jobs.advance();
    found = begin_tile();
  }
  return found;
}

}  // namespace cutlass_kernels::fa3
