// Consumer: the beginning of a tile, and S = Q K^T of its KV blocks.
#pragma once

#include "common/ptx/ldmatrix.h"
#include "fa3/consumer.h"

namespace cutlass_kernels::fa3 {

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
  skips_block =
      kSkips && block_begin > key_begin && block_begin >= mask.template hi<kIsGeneral>(last_row);
  qo_len = job.qo_len;
  kv_len = job.kv_len;
  if constexpr (kFoldsScale) {
    const LaunchParams& p = params.attention;
    head_transform = LogitsTransform::make(p.sm_scale * logits_scale_of(p, job.batch, job.head),
                                           p.logits_soft_cap);
  }
  if constexpr (kSkipsNegligible) {
    // At most 1: with few keys, the factor must not hide what would be a new maximum.
    log2_threshold =
        fminf(__log2f(__fdividef(params.attention.skip_softmax_factor, float(job.kv_len))), 0.0f);
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
  ldmatrix_x4(a, q_base + q_buffer * Layout::kQBytes + step / 4 * Layout::kPanelBytesQ +
                     q_row * 128 + ((chunk ^ (q_row & 7)) << 4));
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
      Wgmma<Operand, kN>::ss(s, q + (i / 4 * Layout::kPanelBytesQ + i % 4 * 32) / 16, k_step,
                             i > 0);
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

}  // namespace cutlass_kernels::fa3
