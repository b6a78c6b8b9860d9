// The two consumer warpgroups: S = Q K^T, softmax and O += P V for the 64 rows of every tile of the CTA.
//
// O has 512 columns, and a warpgroup registers for 256: each has one half, and takes S and the softmax of every other
// KV block. Two blocks, a (of warpgroup 0) and b (of warpgroup 1), at a time:
//
//   tensor cores | Sa           | Sb           | Oleft += Pa Va, Oright += Pa Va | Oleft += Pb Vb, Oright += Pb Vb
//   warpgroup 0  |              | softmax of a |                                 |
//   warpgroup 1  |              |    takes Pa  | softmax of b                    |
//
// Stage a is free before Pb Vb begins, and needed after it; stage b is needed after the next Sa: a load has at least a
// thousand cycles. So warpgroup 1 waits with Sb until Sa has been issued. (With both at once, and each warpgroup's own
// block first in O, a pair of blocks took 6200 cycles instead of 5600.)
//
// Warpgroup 1 takes m and P of a between the parts of Sb, so that Pa Va follows Sb at once, and stage a is free earlier
// (behind all of Sb, 4096 rows of 128 heads over 2048 slots took 3683 us instead of 3581). Not behind the second part:
// O may have to be rescaled, and ptxas waits for all products in flight before other accumulators change.
//
// P goes to the other warpgroup through the panel of the positions, which nobody reads once S is computed. Warp i of
// either has the same rows: they wait for one another, not for all eight.
#pragma once

#include "common/mask.h"
#include "common/ptx/ldmatrix.h"
#include "common/ptx/named_barrier.h"
#include "common/ptx/shared_address.h"
#include "common/softmax.h"
#include "fa3/pair.h"
#include "fa3/store.h"
#include "fa3/wgmma.h"
#include "latent/fa3/load.h"
#include "latent/fa3/shared_memory.h"
#include "latent/fa3/store.h"
#include "latent/fa3/store_slots.h"

namespace cutlass_kernels::mla {

// kHalf: of the columns of O, and which blocks are its own.
template <class Element, class Tile, int kHalf>
struct Consumer {
  static constexpr int kN = Tile::kBlockN;
  using Softmax = OnlineSoftmax<2>;

  const fa3::KernelParams& params;
  Shared<Tile>& shared;
  const int lane;
  const int warp;  // of the warpgroup
  const std::uint32_t q_base, k_base;
  std::uint32_t q_phase = 0;
  std::uint32_t state_phase = 0;  // of m_full
  std::uint32_t p_phase = 0;      // of the other warpgroup's p_full
  int first_block = 0;            // of the tile, among all of the CTA
  int tile_parity = 0;
  bool staged = false;  // O of the last tile may still be read from the last stage by TMA

  CUTE_DEVICE Consumer(const fa3::KernelParams& params_, Shared<Tile>& shared_)
      : params(params_),
        shared(shared_),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32 % 4),
        q_base(shared_address(shared_.q)),
        k_base(shared_address(shared_.k)) {}

  CUTE_DEVICE int row_of(int r) const { return warp * 16 + r * 8 + lane / 4; }
  CUTE_DEVICE void arrive(Barrier& barrier) const {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }
  CUTE_DEVICE std::uint32_t stage_base(int block) const {
    return k_base + stage_of<Tile>(block) * (kPanels * kPanelBytes);
  }

  // Starts a part of S = Q K^T, panel by panel as they arrive. First the columns of this warpgroup's half of V, which
  // were free first, then the others.
  template <bool kFirst>
  CUTE_DEVICE void issue_scores(float (&s)[kN / 2], int block) {
    Barrier* const full = shared.k_full[stage_of<Tile>(block)];
    const std::uint32_t phase = phase_of<Tile>(block);
    const std::uint64_t q = fa3::descriptor_k_major(q_base);
    const std::uint64_t k = fa3::descriptor_k_major(stage_base(block));
    constexpr int kScorePanels = Tile::kHeadDimQk / 64;
    CUTE_UNROLL
    for (int n = kFirst ? 0 : kHalfPanels; n < (kFirst ? kHalfPanels : kScorePanels); ++n) {
      const int panel = score_panel<Tile>(kHalf, n);
      // Of keys by slots, the first panel of a group stands for all.
      const bool waits = !Tile::kBySlots || begins_group<Tile>(n);
      if (waits) full[panel].wait(phase);
      if (Tile::kBySlots && !Tile::kHasPositions && n == kHalfPanels) full[kRopePanel].wait(phase);  // for `listed`
      if (Tile::kQuantized && waits) fa3::fence_proxy_async();  // producers do not: gather_quantized.h
      fa3::wgmma_fence();
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int offset = (panel * kPanelBytes + i * 32) / 16;
        fa3::Wgmma<Element, kN>::ss(s, q + offset, k + offset, n > 0 || i > 0);
      }
    }
    fa3::wgmma_commit();
  }

  // Starts O (+)= P V with this warpgroup's half of V.
  CUTE_DEVICE void issue_output(float (&o)[kLatentDim / 4], const std::uint32_t (&p)[kN / 4], int block,
                                bool accumulate) {
    const std::uint64_t v =
        fa3::descriptor_mn_major(stage_base(block) + kHalf * kHalfPanels * kPanelBytes, kPanelBytes);
    fa3::wgmma_fence();
    CUTE_UNROLL
    for (int i = 0; i < kN / 16; ++i) {
      fa3::Wgmma<Element, kLatentDim / 2>::template rs<fa3::BOrder::kMnMajor>(o, &p[4 * i], v + i * (16 * 128 / 16),
                                                                              i > 0 || accumulate);
    }
    fa3::wgmma_commit();
  }

  CUTE_DEVICE void mask_scores(float (&s)[kN / 2], const Job& job, int first_key) const {
    const IntervalMask mask = fa3::make_mask<true>(params, job.batch, job.qo_len, job.kv_len);
    const int key0 = first_key + lane % 4 * 2;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int token = job.row_begin + int(params.packed.heads.divide(row_of(r)));
      const int lo = mask.lo<true>(token);
      const std::uint32_t from_lo = key0 - lo;
      const std::uint32_t extent = max(mask.hi<true>(token) - lo, 0);
      CUTE_UNROLL
      for (int i = 0; i < kN / 8; ++i) {
        mask_unless_below(s[4 * i + 2 * r], from_lo + i * 8, extent);
        mask_unless_below(s[4 * i + 2 * r + 1], from_lo + i * 8 + 1, extent);
      }
    }
  }

  // Hides keys that are no slots. All rows see the others.
  CUTE_DEVICE void hide_missing(float (&s)[kN / 2], int block) const {
    constexpr int kWords = Tile::kListedWords, kBits = kN / kWords;
    std::uint32_t listed[kWords], all = 0xffffffffu;
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      listed[i] = shared.listed[stage_of<Tile>(block)][i];
      all &= listed[i];
    }
    if (all == 0xffffffffu >> (32 - kBits)) return;
    __syncwarp();  // keeps this a branch
    CUTE_UNROLL
    for (int i = 0; i < kN / 2; ++i) {
      const int column = i / 4 * 8 + i % 2;  // and lane % 4 * 2
      mask_unless_bit(s[i], listed[column / kBits] >> lane % 4 * 2, column % kBits);
    }
  }

  // Address of the 16 bytes that the lane reads or writes of the warp's rows of P and 16 keys.
  CUTE_DEVICE std::uint32_t p_address(int block, int step) const {
    const int row = warp * 16 + lane % 16;
    const int chunk = step * 2 + lane / 16;
    return stage_base(block) + kRopePanel * kPanelBytes + row * 128 + ((chunk ^ (row & 7)) << 4);
  }

  CUTE_DEVICE void publish_state(const Softmax& softmax, const float (&factor)[2]) {
    if (lane % 4 == 0) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        shared.states[kHalf][row_of(r)] = {softmax.minus_m[r], factor[r]};
      }
    }
    if (kHalf == 0) arrive(shared.m_full[warp]);
  }

  // Takes over the m of the other warpgroup's block, and what it multiplies earlier weights by.
  CUTE_DEVICE void take_state(Softmax& softmax, float (&factor)[2]) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const RowState state = shared.states[1 - kHalf][row_of(r)];
      softmax.minus_m[r] = state.minus_m;
      softmax.partial_sum[r] *= state.factor;
      factor[r] = state.factor;
    }
  }

  CUTE_DEVICE static bool changes(const float (&factor)[2]) {
    return __any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f);
  }
  CUTE_DEVICE static void rescale(float (&o)[kLatentDim / 4], const float (&factor)[2]) {
    CUTE_UNROLL
    for (int i = 0; i < kLatentDim / 4; ++i) o[i] *= factor[i / 2 % 2];
  }

  // S of an own block becomes P, here and in the panel of the positions. The m that it begins with is that of the block
  // before.
  CUTE_DEVICE void take_exponentials(float (&s)[kN / 2], std::uint32_t (&p)[kN / 4], Softmax& softmax,
                                     float (&factor)[2], float (&largest)[2], int block) {
    float row_max[2] = {s[0], s[2]};
    CUTE_UNROLL
    for (int i = 0; i < kN / 2; ++i) row_max[i / 2 % 2] = fmaxf(row_max[i / 2 % 2], s[i]);
    Softmax::reduce_max(row_max);
    if constexpr (Tile::kBySlots) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], row_max[r]);
    }
    softmax.raise(row_max, [&](int r, float by) { factor[r] = by; });
    publish_state(softmax, factor);
    CUTE_UNROLL
    for (int step = 0; step < kN / 16; ++step) {
      CUTE_UNROLL
      for (int i = 4 * step; i < 4 * step + 4; ++i) {
        const int r = i % 2;
        const float x = exp2_unordered(fmaf(s[2 * i], softmax.scale, softmax.minus_m[r]));
        const float y = exp2_unordered(fmaf(s[2 * i + 1], softmax.scale, softmax.minus_m[r]));
        softmax.partial_sum[r] += x + y;
        p[i] = Element::pack(x, y);
      }
      fa3::stmatrix_x4(p_address(block, step), p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]);
    }
    arrive(shared.p_full[kHalf][warp]);
  }

  CUTE_DEVICE void wait_for_other() {
    shared.p_full[1 - kHalf][warp].wait(p_phase);
    p_phase ^= 1;
  }
  CUTE_DEVICE void read_other(std::uint32_t (&p)[kN / 4], int block) const {
    CUTE_UNROLL
    for (int step = 0; step < kN / 16; ++step) {
      ldmatrix_x4(reinterpret_cast<std::uint32_t (&)[4]>(p[4 * step]), p_address(block, step));
    }
  }

  // Of warpgroup 1: P of the block before its own, O rescaled for it.
  CUTE_DEVICE void take_other(Softmax& softmax, float (&factor)[2], float (&o)[kLatentDim / 4],
                              std::uint32_t (&other)[kN / 4], int block, bool accumulate) {
    shared.m_full[warp].wait(state_phase);
    state_phase ^= 1;
    take_state(softmax, factor);
    if (accumulate && changes(factor)) rescale(o, factor);
    wait_for_other();
    read_other(other, block);
    release_p(block);
  }

  CUTE_DEVICE void release_q() { arrive(shared.q_empty); }
  // To the producers of both CTAs of a pair.
  CUTE_DEVICE void release(int block, PanelGroup group) {
    if (lane != 0) return;
    Barrier& empty = shared.k_empty[stage_of<Tile>(block)][group];
    empty.arrive();
    if constexpr (Tile::kCtasPerTile == 2) Barrier::arrive_in_peer(fa3::address_in_peer(empty.address()));
  }
  // O += P V of the block is done.
  CUTE_DEVICE void release_values(int block) { release(block, kHalf == 0 ? kLeft : kRight); }
  // Of quantized caches, nobody waits for it.
  CUTE_DEVICE void release_p(int block) {
    if constexpr (!Tile::kQuantized) release(block, kRope);
  }

  // Of warpgroup 0: the last block of the tile before, through whose memory O went.
  CUTE_DEVICE void release_staging() {
    if (!Tile::kBySlots || !staged) return;
    if (lane == 0) fa3::tma_store_wait();
    release_values(first_block - 1);
    staged = false;
  }

  CUTE_DEVICE void run() {
    for (fa3::JobReader<Shared<Tile>> jobs(shared); jobs.next(); jobs.release()) {
      compute_tile(jobs.job());
      tile_parity ^= 1;
    }
    release_staging();
  }

  CUTE_DEVICE void compute_tile(const Job& job) {
    const int kv_blocks = job.kv_blocks;
    const int key_begin = job.key_begin;
    const IntervalMask mask = fa3::make_mask<true>(params, job.batch, job.qo_len, job.kv_len);
    const int unmasked_begin = mask.lo<true>(job.row_begin + params.packed.last_token);
    const int unmasked_end = mask.hi<true>(job.row_begin);

    float s[kN / 2];            // S (2, BLK_N / 4)
    float o[kLatentDim / 4];    // O (2, D_VO / 8): this half
    std::uint32_t own[kN / 4];  // P (2, BLK_N / 4), packed
    std::uint32_t other[kN / 4];
    float factor[2];
    float largest[2] = {-INFINITY, -INFINITY};  // s of own blocks
    Softmax softmax(params.transform.scale);
    bool accumulate = false;
    const int own_count = (kv_blocks + 1 - kHalf) / 2;
    const int other_count = (kv_blocks + kHalf) / 2;

    shared.q_full.wait(q_phase);
    q_phase ^= 1;
    if (Tile::kBySlots && own_count == 0) release_q();
    CUTE_NO_UNROLL
    for (int i = 0; i < own_count; ++i) {
      const int own_block = first_block + 2 * i + kHalf;
      const int other_block = first_block + 2 * i + 1 - kHalf;
      const bool has_other = i < other_count;
      if constexpr (kHalf == 1) named_barrier_wait(kBarrierTurn, 256);
      issue_scores<true>(s, own_block);
      if (kHalf == 0 && i > 0) {
        fa3::wgmma_wait<1>();
        fa3::pin(o);
        fa3::pin(other);
        release_values(other_block - 2);
      }
      if constexpr (kHalf == 1) {
        fa3::wgmma_wait<0>();
        fa3::pin(s);
        take_other(softmax, factor, o, other, other_block, accumulate);
      }
      issue_scores<false>(s, own_block);
      if (kHalf == 0 && has_other) named_barrier_arrive(kBarrierTurn, 256);
      if (kHalf == 0 && i == 0) release_staging();
      if constexpr (kHalf == 1) issue_output(o, other, other_block, accumulate);
      fa3::wgmma_wait<kHalf>();
      fa3::pin(s);
      if (Tile::kBySlots && i + 1 == own_count) release_q();
      named_barrier_wait(kBarrierScores + kHalf, 128);
      const int first_key = key_begin + (kv_blocks - 1 - 2 * i - kHalf) * kN;
      // Before the mask: a cap would make -inf finite, a negative scale infinite.
      if (params.transform.changes_logits()) params.transform.apply<true>(s, kN / 2);
      if constexpr (Tile::kBySlots) {
        hide_missing(s, own_block);
      } else if (first_key < unmasked_begin || first_key + kN > unmasked_end) {
        __syncwarp();  // keeps this a branch
        mask_scores(s, job, first_key);
      }
      take_exponentials(s, own, softmax, factor, largest, own_block);
      if constexpr (kHalf == 0) {
        if (accumulate && changes(factor)) rescale(o, factor);
        issue_output(o, own, own_block, accumulate);
        fa3::wgmma_wait<0>();
        fa3::pin(o);
        fa3::pin(own);
        if (!Tile::kBySlots || has_other) release_values(own_block);
        if (has_other) {
          wait_for_other();
          read_other(other, other_block);
          take_state(softmax, factor);
          if (changes(factor)) rescale(o, factor);
          issue_output(o, other, other_block, true);
          release_p(other_block);
        }
      } else {
        fa3::wgmma_wait<0>();
        fa3::pin(o);
        fa3::pin(other);
        release_values(other_block);
        if (changes(factor)) rescale(o, factor);
        issue_output(o, own, own_block, true);
        fa3::wgmma_wait<0>();
        fa3::pin(o);
        fa3::pin(own);
        if (!Tile::kBySlots || 2 * i + 2 < kv_blocks) release_values(own_block);
      }
      accumulate = true;
    }
    // Drain: warpgroup 0 waits for its last P V; warpgroup 1 takes the last block of an odd count. Of keys by slots,
    // store_tile() gives the memory of the last block back.
    const int last_other = first_block + kv_blocks - 1;
    if constexpr (kHalf == 0) {
      fa3::wgmma_wait<0>();
      fa3::pin(o);
      fa3::pin(other);
      if (!Tile::kBySlots && own_count == other_count) release_values(last_other);
    } else if (own_count < other_count) {
      take_other(softmax, factor, o, other, last_other, accumulate);
      issue_output(o, other, last_other, accumulate);
      fa3::wgmma_wait<0>();
      fa3::pin(o);
      fa3::pin(other);
      if (!Tile::kBySlots) release_values(last_other);
    }
    first_block += kv_blocks;

    // Denominators: the sums of both warpgroups.
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float m, sum;
      softmax.finish(r, m, sum);
      if (lane % 4 == 0) shared.sums[tile_parity][kHalf][row_of(r)] = sum;
      if (Tile::kBySlots && lane % 4 == 0) shared.largest[tile_parity][kHalf][row_of(r)] = largest[r];
    }
    named_barrier_wait(kBarrierTileEnd, 256);
    float sum[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      sum[r] = shared.sums[tile_parity][0][row_of(r)] + shared.sums[tile_parity][1][row_of(r)];
    }
    if constexpr (Tile::kBySlots) {
      factor[0] = factor[1] = 1.0f;
      if (params.attention.max_logits != nullptr) raise_to_largest(softmax, sum, factor);
      char* const memory = shared.k[stage_of<Tile>(last_other)];
      staged = store_slots_tile<Element, kHalf>(params, job, softmax, sum, factor, o, memory, [&] {
        __syncwarp();
        release_values(last_other);
      });
    } else {
      store_tile<Element, Tile, kHalf>(params, job, shared, softmax, sum, o);
      release_q();
    }
  }

  // Makes m the largest logit of each row, which it may be below; factor: what O and the sums are to be multiplied by.
  CUTE_DEVICE void raise_to_largest(Softmax& softmax, float (&sum)[2], float (&factor)[2]) const {
    float row_max[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const auto of = [&](int half) { return shared.largest[tile_parity][half][row_of(r)]; };
      row_max[r] = fmaxf(of(0), of(1));
    }
    const auto keep_factor = [&](int r, float by) { factor[r] = by; };
    softmax.raise(row_max, keep_factor, 0.0f);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] *= factor[r];
  }
};

}  // namespace cutlass_kernels::mla
