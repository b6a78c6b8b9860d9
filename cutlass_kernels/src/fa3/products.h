// The products of a consumer warpgroup: S = Q K^T, of a pair of CTAs the other one's part of it, and O += P V.
#pragma once

#include <cute/config.hpp>

#include "common/ptx/ldmatrix.h"
#include "common/ptx/shared_address.h"
#include "fa3/consumer.h"
#include "fa3/pair.h"
#include "fa3/store.h"
#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

// ---- Consumer: the beginning of a tile, and S = Q K^T of its KV blocks.

// Waits for the job and the Q of the tile at `jobs` and q_buffer. Returns false if there is no further tile.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::begin_tile() {
  shared.job_full[jobs.index].wait(jobs.phase);
  const Job job = shared.jobs[jobs.index];
  if (job.valid == 0) return false;
  shared.q_full[q_buffer].wait(q_phase);
  if constexpr (Tile::kQInRegisters) {
    CUTE_UNROLL
    for (int i = 0; i < kDqk / kStep; ++i) {
      read_q(reinterpret_cast<std::uint32_t (&)[4]>(q_fragments[4 * i]), i);
    }
  }
  const IntervalMask mask = make_mask<kIsGeneral>(params, job.batch, job.qo_len, job.kv_len);
  key_begin = job.key_begin;
  block_begin = key_begin + (job.kv_blocks - 1) * kN;
  int first_row, last_row;
  if constexpr (Tile::kPacked) {
    first_row = job.row_begin + warpgroup * params.packed.tokens;
    last_row = first_row + params.packed.last_token;
    row = first_row;
    has_rows = first_row < min(job.qo_len, job.row_begin + params.attention.plan.tile_rows);
  } else {
    first_row = job.row_begin + warpgroup * kWarpgroupRows;
    last_row = first_row + kWarpgroupRows - 1;
    row = first_row + warpgroup_row(0);
  }
  unmasked_begin = mask.template lo<kIsGeneral>(last_row);
  unmasked_end = mask.template hi<kIsGeneral>(first_row);
  if constexpr (kIsGeneral) {
    unmasked_begin = max(unmasked_begin, job.unmasked_begin);
    unmasked_end = min(unmasked_end, job.unmasked_end);
  }
  skips_block = kSkips && block_begin > key_begin && block_begin >= mask.template hi<kIsGeneral>(last_row);
  qo_len = job.qo_len;
  kv_len = job.kv_len;
  if constexpr (kFoldsScale) {
    const LaunchParams& p = params.attention;
    head_transform = LogitsTransform::make(p.sm_scale * logits_scale_of(p, job.batch, job.head), p.logits_soft_cap);
  }
  if constexpr (kSkipsNegligible) {
    // At most 1: with few keys, the factor must not hide what would be a new maximum.
    log2_threshold = fminf(__log2f(__fdividef(params.attention.skip_softmax_factor, float(job.kv_len))), 0.0f);
  }
  return true;
}

// Log2 units per unit of S, of the tile that has begun.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE float Consumer<Element, Tile, kLogits>::softmax_scale() const {
  return kFoldsScale ? head_transform.scale : params.transform.scale;
}

// Reads the A fragment of kStep columns of the warp's 16 rows.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::read_q(std::uint32_t (&a)[4], int step) const {
  const int q_row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const int chunk = step % 4 * 2 + lane / 16;  // of 16 bytes
  ldmatrix_x4(a, q_base + q_buffer * Layout::kQBytes + step / 4 * Layout::kPanelBytesQ + q_row * 128 +
                     ((chunk ^ (q_row & 7)) << 4));
}

template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::advance_q() {
  q_buffer += Tile::kConsumers;
  while (q_buffer >= Tile::kQBuffers) {
    q_buffer -= Tile::kQBuffers;
    q_phase ^= 1;
  }
}

// Starts S = Q K^T with the K stage at k_ring. Q is read from shared memory, or from registers (kQInRegisters).
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::issue_scores(ScoreFragment& s) {
  // Q (64, C, D_QK / C), K (BLK_N, C, D_QK / C)
  const auto q = descriptor_k_major(q_base + q_buffer * Layout::kQBytes);
  const auto k = descriptor_k_major(k_base + k_ring.index * Layout::kKBytes);
  wgmma_fence();
  CUTE_UNROLL
  for (int i = 0; i < kDqk / kStep; ++i) {
    const std::uint64_t k_step = k + (i / 4 * Layout::kPanelBytesKv + i % 4 * 32) / 16;
    if constexpr (Tile::kQInRegisters) {
      Wgmma<Operand, kN>::template rs<BOrder::kKMajor>(s, &q_fragments[4 * i], k_step, i > 0);
    } else {
      Wgmma<Operand, kN>::ss(s, q + (i / 4 * Layout::kPanelBytesQ + i % 4 * 32) / 16, k_step, i > 0);
    }
  }
  wgmma_commit();
}

// S of a KV block is computed: releases its K stage. Releases Q, too, after the tile's last KV block or, if Q was
// copied to registers, after the first: the copy is complete only once a product has used it (an arrival does not wait
// for the loads before it, and the next Q overwrote what some lanes had yet to read).
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::end_scores(bool first) {
  release(shared.k_empty[k_ring.index]);
  k_ring.advance();
  if (Tile::kQInRegisters ? first : block_begin == key_begin) release(shared.q_empty[q_buffer]);
}

// Skips a KV block, of which the warpgroup sees no key. It takes its turn all the same, as others wait for it. Only one
// KV block of a tile is skipped, and of 16 bits none of the first tile, so that V stages are not held for long.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::skip_keys() {
  shared.k_full[k_ring.index].wait(k_ring.phase);
  wait_turn();
  end_turn();
  release(shared.k_empty[k_ring.index]);
  k_ring.advance();
  block_begin -= kN;
}

// ---- Consumer: partial sums of S go to the other CTA of a pair, and come from there (pair.h).
//
// The receive buffer is the memory through which O leaves. It is returned to the sender just before the next S is
// issued: the partial sums in it have been added, and O of a finished tile has left; and the sender learns of it while
// S is computed.

template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::return_receive_buffer() const {
  if constexpr (Layout::kPair) {
    if (lane == 0) tma_store_wait();  // TMA has read O
    __syncwarp();
    if (lane == 0) {
      Barrier::arrive_in_peer(address_in_peer(shared.s_empty[warpgroup].address()));
    }
  }
}

// Completes S by the sums over the other CTA's columns.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::add_peer_scores(ScoreFragment& s) {
  if constexpr (Layout::kPair) {
    // A warp's memory for O: 16 rows of each panel. Four of a thread's values, of all lanes, are 512 bytes.
    const std::uint32_t buffer = shared_address(shared.o[warpgroup]) + threadIdx.x / 32 % 4 * (16 * 128) + lane * 16;
    constexpr int kPerPanel = 16 * 128 / 512;
    const auto offset = [](int i) { return i / kPerPanel * Layout::kPanelBytesQ + i % kPerPanel * 512; };
    const std::uint32_t to = address_in_peer(buffer);
    const std::uint32_t full = address_in_peer(shared.s_full[warpgroup].address());
    shared.s_empty[warpgroup].wait(exchange_phase);
    CUTE_UNROLL
    for (int i = 0; i < kN / 8; ++i) {
      send(to + offset(i), full, s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    }
    if (threadIdx.x % 128 == 0) shared.s_full[warpgroup].arrive_and_expect(Layout::kOBytes);
    shared.s_full[warpgroup].wait(exchange_phase);
    exchange_phase ^= 1;
    CUTE_UNROLL
    for (int i = 0; i < kN / 8; ++i) {
      float x[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                   : "r"(buffer + offset(i))
                   : "memory");
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) s[4 * i + j] += x[j];
    }
  }
}

// ---- Consumer: O += P V, and what becomes of O.

// Starts O (+)= P V with the V stage at v_ring, of 16 bits.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::issue_output(OutputFragment& o, ProbabilityFragment& p,
                                                                bool accumulate) {
  // (BLK_N, C, D_VO / C)
  const auto v = descriptor_mn_major(v_base + v_ring.index * Layout::kVBytes, Layout::kPanelBytesKv);
  wgmma_fence();
  CUTE_UNROLL
  for (int i = 0; i < kN / kStep; ++i) {
    Wgmma<Operand, kDvo>::template rs<BOrder::kMnMajor>(o, &p[4 * i], v + i * (16 * 128 / 16), i > 0 || accumulate);
  }
  wgmma_commit();
}

// Starts the products of P with kPart of the columns of V, of e4m3, at v_ring. The last part has the sums of P too, by
// V's rows of ones.
template <class Element, class Tile, Logits kLogits>
template <int kPart>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::issue_part(Product<kPart>& product, ProbabilityFragment& p) {
  constexpr int kColumns = kDvo / Tile::kOutputParts;
  // (D_VO + 8, 128, BLK_N / 128)
  const auto v = descriptor_k_major(v_base + v_ring.index * Layout::kVBytes);
  wgmma_fence();
  CUTE_UNROLL
  for (int i = 0; i < kN / kStep; ++i) {
    const int offset = kPart * kColumns * 128 + i / 4 * Layout::kPanelBytesVt + i % 4 * 32;
    Wgmma<Operand, int(sizeof(product) / 2)>::template rs<BOrder::kKMajor>(product, &p[4 * i], v + offset / 16, i > 0);
  }
  wgmma_commit();
}

// Once V of the KV block is there, and it is the warpgroup's turn.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::begin_output(Product<0>& product, ProbabilityFragment& p) {
  shared.v_full[v_ring.index].wait(v_ring.phase);
  wait_turn();
  issue_part<0>(product, p);
}

// Adds them to O (main_loop.h), and the parts behind them. The last one ends the turn.
template <class Element, class Tile, Logits kLogits>
template <int kPart>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::add_part(OutputFragment& o, Product<kPart>& product,
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
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::rescale(OutputFragment& o, const RowFactors& factor) {
  CUTE_UNROLL
  for (int i = 0; i < kDvo / 2; ++i) o[i] *= factor[i / 2 % 2];
}

// Stores O of the tile whose job is in `job_buffer`, and releases the job.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::store(OutputFragment& o, const OnlineSoftmax<2>& of_tile,
                                                         int job_buffer) {
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
    store_packed_tile<Element, Tile, kHasStats>(params, shared.jobs[job_buffer], warpgroup, of_tile, o,
                                                shared.o[warpgroup]);
  } else {
    store_tile<Element, Tile, kLogits>(params, shared.jobs[job_buffer], warpgroup, of_tile, weight_sum, o,
                                       shared_address(shared.o[warpgroup]));
  }
  // Every lane, having read the job: racecheck does not follow an order through lane 0.
  shared.job_empty[job_buffer].arrive();
}

}  // namespace cutlass_kernels::fa3
