// What a consumer warpgroup does with the KV blocks of a tile, in order.
#pragma once

#include "fa3/consumer.h"
#include "fa3/products.h"
#include "fa3/softmax.h"
#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

// ---- Consumer: the loop over tiles and their KV blocks, of e4m3.
//
// wgmma adds e4m3 products to a sum of 14 bits and truncates. A long sum of one sign shrinks: by 1 % over 1k keys, by
// half over 128k (benchmarks/results/e4m3.md). So P V of a KV block is a product of its own, and O its sum over KV
// blocks in fp32.
// Beside O there are registers for S, or for P and that product, not for all: a warpgroup computes one after the other.
// What keeps the tensor cores busy in the meantime are the products of the other warpgroups. Where they take turns
// (kPingPong), a turn is one's P V.
//
// O is divided by the sums of the rounded P, which the tensor cores add up too: the bias of rounding, of -0.0007,
// cancels. That of truncated sums, down to -0.0003, stays. Sums of P that is not rounded are for an LSE, and for
// partial results.

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
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::raise_sums(RowFactors& row_max, OutputFragment& o) {
  RowFactors factor;
  if (!raise_to(row_max, factor)) return;
  rescale(o, factor);
  weight_sum[0] *= factor[0];
  weight_sum[1] *= factor[1];
}

// P of the KV block at block_begin, and the sums of its rows. `first`: of its tile. Returns whether P is relative to an
// m that the block may exceed.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::compute_probabilities(ScoreFragment& s, ProbabilityFragment& p,
                                                                         OutputFragment& o, RowFactors& sum,
                                                                         bool first) {
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
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::add_output(ScoreFragment& s, ProbabilityFragment& p,
                                                              OutputFragment& o, RowFactors& sum, bool lazy,
                                                              bool first) {
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

// ---- Consumer: the loop over tiles and their KV blocks, of 16 bits.
//
// All tiles of a CTA form one stream of KV blocks without a gap: while the last P V of a tile runs, the first S of
// the next tile is computed and its exponentials are taken. In a tile, KV blocks run from the last to the first.
//
//   tensor cores | S(j-1) = Q K(j-1)^T | O += P(j) V(j)          | S(j-2) = Q K(j-2)^T ...
//   other units  |                     | mask, maximum of S(j-1) | P(j-1) = 2^(S(j-1) - m), packed; rescale or store O

template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::run() {
  bool found = begin_tile();
  const auto compute = [&] {
    if constexpr (kFp8) {
      return compute_fp8_tiles();
    } else {
      return compute_tiles();
    }
  };
  if constexpr (Tile::kPacked) {
    while (true) {
      while (found && !has_rows) {
        drain_tile();
        found = begin_tile();
      }
      if (!found) return;
      found = compute();
    }
  } else if (found) {
    compute();
    if (lane == 0) tma_store_wait();  // TMA reads shared memory until its stores are done
  }
}

// Drains the K and V stages of a tile in which this warpgroup has no rows.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::drain_tile() {
  release(shared.q_empty[q_buffer]);
  for (; block_begin >= key_begin; block_begin -= kN) {
    shared.k_full[k_ring.index].wait(k_ring.phase);
    release(shared.k_empty[k_ring.index]);
    k_ring.advance();
    skip_values();
  }
  shared.job_empty[jobs.index].arrive();
  advance_q();
  jobs.advance();
}

// Computes the tile that has begun and those after it. Stops before a tile without rows for this warpgroup, which has
// then begun, and returns true; returns false after the last tile.
//
// What begins the first tile and what ends the last one are copies of steps of the loop. With one copy of each, kernels
// compile in two thirds of the time and take 5 % longer: conditions around products cost that.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::compute_tiles() {
  ScoreFragment s;        // (2, BLK_N / 4)
  OutputFragment o;       // (2, D_VO / 4)
  ProbabilityFragment p;  // (2, BLK_N / 4)
  RowFactors factor;      // of O, when m is raised
  RowFactors sum;
  bool found = false;
  softmax = OnlineSoftmax<2>(softmax_scale());

  // S and P of the first KV block.
  shared.k_full[k_ring.index].wait(k_ring.phase);
  return_receive_buffer();
  issue_scores(s);
  read_bits(0);
  wgmma_wait<0>();
  pin(s);
  end_scores(true);
  add_peer_scores(s);
  transform(s);
  if (needs_mask()) apply_mask(s);
  read_bits(kN);
  raise_maximum(s, factor);
  take_exponentials(s, p, softmax.partial_sum);
  if (Tile::kPingPong && warpgroup == Tile::kConsumers - 1) end_turn();  // warpgroup 0 begins

  bool accumulate = false;      // else P V replaces O: the tile's first KV block
  int job_buffer = jobs.index;  // job of the tile that P belongs to
  // There is no P: the KV block that it would belong to has negligible weight. Never a tile's first.
  bool negligible = false;
  while (true) {
    const bool last = block_begin == key_begin;  // P belongs to the last KV block of its tile
    OnlineSoftmax<2> of_tile = softmax;          // of that tile
    if (unlikely(last)) {
      advance_q();
      jobs.advance();
      found = begin_tile();
      if (!found || (Tile::kPacked && !has_rows)) break;
      softmax = OnlineSoftmax<2>(softmax_scale());
      if (kSkips && skips_block) skip_keys();
    } else {
      block_begin -= kN;
    }

    // The products: S of the next KV block, and P V of this one.
    shared.k_full[k_ring.index].wait(k_ring.phase);
    return_receive_buffer();
    wait_turn();
    issue_scores(s);
    if (kSkipsNegligible && negligible) {
      end_turn();
      wgmma_wait<0>();                                 // for S, which here is the last product issued
      shared.v_full[v_ring.index].wait(v_ring.phase);  // only to be released
    } else {
      shared.v_full[v_ring.index].wait(v_ring.phase);
      issue_output(o, p, accumulate);
      end_turn();
    }

    // While P V runs: logits of the next KV block, and its m.
    if (unlikely(last)) read_bits(0);
    wgmma_wait<1>();
    pin(s);
    if constexpr (Layout::kPair) end_scores(last);
    add_peer_scores(s);
    transform(s);
    const bool masked = needs_mask();
    if (unlikely(masked)) apply_mask(s);
    read_bits(kN);
    if constexpr (!Layout::kPair) end_scores(last);
    // Not lazy in the first KV block of a tile. Later, a row that has seen no key so far gets an infinite sum from its
    // first one, and the block is done again with its maximum: right under any mask, but only custom masks, which may
    // mask every block, gain from it.
    const bool lazy = kLazyMax && !(masked && kLogits != Logits::kGeneral) && !last && !is_exact();
    bool raised = false;
    if constexpr (kSkipsNegligible) {
      float row_max[2];  // (row)
      find_maximum(s, row_max);
      negligible = !last && are_negligible(row_max);
      if (!negligible) raised = raise_to(row_max, factor);
    } else if (!lazy) {
      __syncwarp();  // keeps this a branch
      raised = raise_maximum(s, factor);
    }

    // P V is done: its V stage may be refilled, and O stored or rescaled.
    wgmma_wait<0>();
    pin(o);
    pin(p);  // was read until here: its registers must not have been given to anything else
    release(shared.v_empty[v_ring.index]);
    v_ring.advance();
    accumulate = true;
    if (unlikely(last)) {
      if (kSkips && skips_block) skip_values();
      store(o, of_tile, job_buffer);
      job_buffer = jobs.index;
      accumulate = false;
    } else if (unlikely(raised)) {
      rescale(o, factor);
    }

    // P of the next KV block.
    if (!(kSkipsNegligible && negligible)) {
      take_exponentials(s, p, sum);
      if constexpr (kLazyMax) {
        if (lazy && unlikely(!__all_sync(0xffffffffu, fits(sum, 0) && fits(sum, 1)))) {
          __syncwarp();      // keeps this a branch
          float row_max[2];  // (row)
          find_maximum(s, row_max);
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {
            if (fits(sum, r)) row_max[r] = -INFINITY;  // else its m would depend on other rows
          }
          if (raise_to(row_max, factor)) rescale(o, factor);
          take_exponentials(s, p, sum);
        }
      }
      softmax.partial_sum[0] += sum[0];
      softmax.partial_sum[1] += sum[1];
    }
  }

  // P V of the last KV block.
  shared.v_full[v_ring.index].wait(v_ring.phase);
  if (!(kSkipsNegligible && negligible)) issue_output(o, p, accumulate);
  wgmma_wait<0>();
  pin(o);
  if constexpr (Tile::kPacked) {
    release(shared.v_empty[v_ring.index]);
    v_ring.advance();
  }
  store(o, softmax, job_buffer);
  return found;
}

}  // namespace cutlass_kernels::fa3
