// The consumer warpgroups: S = Q K^T, softmax, O += P V.
#pragma once

#include "common/softmax.h"
#include "fa3/params.h"
#include "fa3/shared.h"
#include "fa3/store.h"
#include "fa3/wgmma.h"

namespace cutlass_kernels::fa3 {

// One stream of (tile, block of keys) without a seam: while the last P V of a tile runs, the first S of the next one is
// computed and its exponentials taken.
//
//  tensor   | S(j+1) = Q K(j+1)^T | O += P(j) V(j)     | S(j+2) ...
//  others   |                     | mask, max, exp of S(j+1) | P(j+1) = pack(S(j+1)), rescale or store O
template <class Element, class Tile, bool kTransform>
struct Consumer {
  using Layout = Shared<Tile>;
  static constexpr int kN = Tile::kBlockN;
  static constexpr int kDqk = Tile::kHeadDimQk;
  static constexpr int kDvo = Tile::kHeadDimVo;

  const KernelParams& params;
  Layout& shared;
  const int warpgroup;
  const int lane;

  // Tile.
  Ring<kJobSlots> jobs;
  int q_buffer;
  std::uint32_t q_phase = 0;
  int block;        // of keys, of the S being computed
  int block_begin;  // last one of the tile
  int row;          // of the thread's first row, in its request
  int all_begin;    // keys that every row of the warpgroup sees
  int all_end;
  int qo_len;
  int kv_len;

  Ring<Tile::kStages> k_ring;
  Ring<Tile::kStages> v_ring;
  OnlineSoftmax<2> softmax;

  CUTE_DEVICE Consumer(const KernelParams& params_, Layout& shared_, int warpgroup_)
      : params(params_),
        shared(shared_),
        warpgroup(warpgroup_),
        lane(threadIdx.x % 32),
        q_buffer(warpgroup_),
        softmax(params_.transform.scale) {}

  CUTE_DEVICE void release(typename Layout::Barrier& empty) const {
    if (lane == 0) empty.arrive();
  }

  CUTE_DEVICE void wait_turn() const {
    if constexpr (Tile::kPingPong && Tile::kConsumers > 1) {
      asm volatile("bar.sync %0, 256;" ::"r"(int(kBarrierTurn) + warpgroup) : "memory");
    }
  }
  CUTE_DEVICE void end_turn() const {
    if constexpr (Tile::kPingPong && Tile::kConsumers > 1) {
      const int next = warpgroup + 1 == Tile::kConsumers ? 0 : warpgroup + 1;
      asm volatile("bar.arrive %0, 256;" ::"r"(int(kBarrierTurn) + next) : "memory");
    }
  }

  // Waits for the description and the Q of the tile at `jobs` and q_buffer. False if there is none.
  CUTE_DEVICE bool begin_tile() {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job job = shared.jobs[jobs.index];
    if (job.valid == 0) return false;
    shared.q_full[q_buffer].wait(q_phase);
    const int first_row = job.row_begin + warpgroup * kWarpgroupRows;
    const IntervalMask mask = make_mask(params, job.qo_len, job.kv_len);
    block = job.block_end - 1;
    block_begin = job.block_begin;
    row = first_row + threadIdx.x / 32 % 4 * 16 + lane / 4;
    all_begin = mask.lo(first_row + kWarpgroupRows - 1);
    all_end = mask.hi(first_row);
    qo_len = job.qo_len;
    kv_len = job.kv_len;
    return true;
  }
  CUTE_DEVICE void advance_q() {
    q_buffer += Tile::kConsumers;
    while (q_buffer >= Tile::kQBuffers) {
      q_buffer -= Tile::kQBuffers;
      q_phase ^= 1;
    }
  }

  CUTE_DEVICE void issue_scores(float (&s)[kN / 2]) {
    const std::uint64_t q = descriptor_k_major(cute::cast_smem_ptr_to_uint(shared.q[q_buffer]));
    const std::uint64_t k = descriptor_k_major(cute::cast_smem_ptr_to_uint(shared.k[k_ring.index]));
    wgmma_fence();
    CUTE_UNROLL
    for (int i = 0; i < kDqk / 16; ++i) {
      Wgmma<Element, kN>::ss(s, q + i / 4 * (Layout::kPanelBytesQ / 16) + i % 4 * 2,
                             k + i / 4 * (Layout::kPanelBytesKv / 16) + i % 4 * 2, i > 0);
    }
    wgmma_commit();
  }

  CUTE_DEVICE void issue_output(float (&o)[kDvo / 2], std::uint32_t (&p)[kN / 4], bool accumulate) {
    const std::uint64_t v = descriptor_mn_major(cute::cast_smem_ptr_to_uint(shared.v[v_ring.index]),
                                                Layout::kPanelBytesKv);
    wgmma_fence();
    CUTE_UNROLL
    for (int i = 0; i < kN / 16; ++i) {
      Wgmma<Element, kDvo>::rs(o, &p[4 * i], v + i * (16 * 128 / 16), i > 0 || accumulate);
    }
    wgmma_commit();
  }

  CUTE_DEVICE void apply_mask(float (&s)[kN / 2]) const {
    const IntervalMask mask = make_mask(params, qo_len, kv_len);
    const int key0 = block * kN + lane % 4 * 2;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      // Seen if lo <= key < hi: one unsigned comparison of the distance from lo.
      const int lo = mask.lo(row + r * 8);
      const std::uint32_t from_lo = key0 - lo;
      const std::uint32_t extent = max(mask.hi(row + r * 8) - lo, 0);
      CUTE_UNROLL
      for (int i = 0; i < kN / 8; ++i) {
        mask_unless_below(s[4 * i + 2 * r], from_lo + i * 8, extent);
        mask_unless_below(s[4 * i + 2 * r + 1], from_lo + i * 8 + 1, extent);
      }
    }
  }

  // S becomes the exponentials of softmax. Returns whether O must be multiplied by `factor` first.
  CUTE_DEVICE bool take_exponentials(float (&s)[kN / 2], float (&factor)[2]) {
    if constexpr (kTransform) params.transform.apply(s, kN / 2);
    if (block * kN < all_begin || (block + 1) * kN > all_end) apply_mask(s);
    float row_max[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      // Four chains, since each step of one waits for the step before.
      float chain[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) chain[i] = s[i / 2 * 4 + 2 * r + i % 2];
      CUTE_UNROLL
      for (int i = 4; i < kN / 4; ++i) {
        chain[i % 4] = fmaxf(chain[i % 4], s[i / 2 * 4 + 2 * r + i % 2]);
      }
      row_max[r] = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
    }
    bool raised = false;
    if (__any_sync(0xffffffffu, softmax.exceeds(row_max))) {
      OnlineSoftmax<2>::reduce_max(row_max);
      softmax.raise(row_max, [&](int r, float f) { factor[r] = f; });
      raised = true;
    }
    CUTE_UNROLL
    for (int i = 0; i < kN / 2; ++i) {
      const int r = i / 2 % 2;
      s[i] = softmax.exponential(r, s[i]);
      softmax.partial_sum[r] += s[i];
    }
    return raised;
  }

  CUTE_DEVICE void pack(const float (&s)[kN / 2], std::uint32_t (&p)[kN / 4]) const {
    CUTE_UNROLL
    for (int i = 0; i < kN / 4; ++i) p[i] = Element::pack(s[2 * i], s[2 * i + 1]);
  }

  CUTE_DEVICE void store(float (&o)[kDvo / 2], const OnlineSoftmax<2>& of_tile, int slot) {
    store_tile<Element, Tile>(params, shared.jobs[slot], warpgroup, of_tile, o,
                              cute::cast_smem_ptr_to_uint(shared.o[warpgroup]));
    release(shared.job_empty[slot]);
  }
  // S of a block is computed: its K may go and, after a tile's last one, its Q.
  CUTE_DEVICE void end_scores() {
    release(shared.k_empty[k_ring.index]);
    k_ring.advance();
    if (block == block_begin) release(shared.q_empty[q_buffer]);
  }

  CUTE_DEVICE void run() {
    if (!begin_tile()) return;
    float s[kN / 2];
    float o[kDvo / 2];
    std::uint32_t p[kN / 4];
    float factor[2];

    shared.k_full[k_ring.index].wait(k_ring.phase);
    issue_scores(s);
    wgmma_wait<0>();
    pin(s);
    end_scores();
    take_exponentials(s, factor);
    pack(s, p);
    if (Tile::kPingPong && warpgroup == Tile::kConsumers - 1) end_turn();  // the first one begins

    bool accumulate = false;
    int slot = jobs.index;  // of the tile that P belongs to
    while (true) {
      const bool last = block == block_begin;  // of the tile that P belongs to
      OnlineSoftmax<2> of_tile = softmax;
      if (last) {
        advance_q();
        jobs.advance();
        if (!begin_tile()) break;
        softmax = OnlineSoftmax<2>(params.transform.scale);
      } else {
        --block;
      }
      shared.k_full[k_ring.index].wait(k_ring.phase);
      wait_turn();
      issue_scores(s);
      shared.v_full[v_ring.index].wait(v_ring.phase);
      issue_output(o, p, accumulate);
      end_turn();
      wgmma_wait<1>();
      pin(s);
      end_scores();
      const bool raised = take_exponentials(s, factor);
      wgmma_wait<0>();
      pin(o);
      release(shared.v_empty[v_ring.index]);
      v_ring.advance();
      accumulate = true;
      if (last) {
        store(o, of_tile, slot);
        slot = jobs.index;
        accumulate = false;
      } else if (raised) {
        CUTE_UNROLL
        for (int i = 0; i < kDvo / 2; ++i) o[i] *= factor[i / 2 % 2];
      }
      pack(s, p);
    }
    shared.v_full[v_ring.index].wait(v_ring.phase);
    issue_output(o, p, accumulate);
    wgmma_wait<0>();
    pin(o);
    store(o, softmax, slot);
    if (lane == 0) cute::tma_store_wait<0>();  // shared memory lives until its readers are done
  }
};

}  // namespace cutlass_kernels::fa3
