// The consumer warpgroups of up to 16 heads: with keys as the 64 rows of wgmma, and heads as its columns, a tile of 16
// heads takes the tensor cores a quarter of the time of one of 64.
//
//   S^T (64 keys, 16)  = K (64, 576) Q^T
//   O^T (512, 16)     += V^T (512, 64) P^T (64, 16)
//
// Each warpgroup has every other KV block for itself, all columns of O, and an m of its own: they meet at the end of
// the tile. A column of S^T, a head, is spread over all 128 threads: maxima go through shared memory, as does P^T,
// which is B of the second product.
//
// Products read a block from shared memory twice, which takes 1360 cycles; what the producers write and read there
// takes another 1100. In all a block takes 4000: what is left are the latencies of the producers (gather_staged.h).
#pragma once

#include <cute/config.hpp>

#include "common/element_types.h"
#include "common/ptx/named_barrier.h"
#include "common/ptx/shared_address.h"
#include "common/softmax.h"
#include "fa3/wgmma.h"
#include "latent/fa3/load.h"
#include "latent/fa3/shared_memory.h"
#include "latent/fa3/store.h"
#include "merge/combine_row.h"
#include "merge/partial_results.h"

namespace cutlass_kernels::mla {

CUTE_DEVICE void stmatrix_x4_transposed(std::uint32_t address, const std::uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// 64 x 16 (+)= A B, 16 columns of A: both in shared memory, A K-major or M-major, B K-major.
template <class Element, bool kTransposesA>
CUTE_DEVICE void multiply_64x16(float (&d)[8], std::uint64_t a, std::uint64_t b, int accumulate) {
#define CK_MULTIPLY(TYPE)                                                                              \
  asm volatile(                                                                                        \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"                                                     \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE                                      \
      " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, 0;\n}"                                 \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) \
      : "l"(a), "l"(b), "r"(accumulate), "n"(int(kTransposesA)))
  if constexpr (std::is_same_v<Element, bf16>) {
    CK_MULTIPLY("bf16");
  } else {
    CK_MULTIPLY("f16");
  }
#undef CK_MULTIPLY
}

template <class Element, class Tile, int kHalf>
struct FewHeadsConsumer {
  static constexpr int kHeads = Tile::kQRows;
  static_assert(kHeads == 16);
  static constexpr int kLaneHeads = kHeads / 4;  // of a thread: 8 j + lane % 4 * 2 + {0, 1}
  static constexpr int kPanelsV = kLatentDim / 64;
  static constexpr int kMemoryStride = kLatentDim + 4;  // floats of a row of O in shared memory
  static constexpr float kNoKey = OnlineSoftmax<1>::kNoKey;
  static_assert(kHeads * kMemoryStride * 4 <= kPanelsV * kPanelBytes);

  const fa3::KernelParams& params;
  Shared<Tile>& shared;
  const int lane;
  const int warp;  // of the warpgroup
  const std::uint32_t q_base, k_base, p_base;
  std::uint32_t q_phase = 0;
  int first_block = 0;  // of the tile, among all of the CTA
  int tile_parity = 0;
  float minus_m[kLaneHeads], sum[kLaneHeads], largest[kLaneHeads];
  float o[kPanelsV][kHeads / 2];

  CUTE_DEVICE FewHeadsConsumer(const fa3::KernelParams& params_, Shared<Tile>& shared_)
      : params(params_),
        shared(shared_),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32 % 4),
        q_base(shared_address(shared_.q)),
        k_base(shared_address(shared_.k)),
        p_base(shared_address(shared_.staged.p[kHalf])) {}

  CUTE_DEVICE static int lane_head(int lane, int c) { return c / 2 * 8 + lane % 4 * 2 + c % 2; }
  CUTE_DEVICE std::uint32_t stage_base(int block) const {
    return k_base + stage_of<Tile>(block) * (Tile::kStagePanels * kPanelBytes);
  }
  CUTE_DEVICE void arrive(Barrier& barrier) const {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }
  CUTE_DEVICE void release(int block, PanelGroup group) {
    if (lane == 0) shared.k_empty[stage_of<Tile>(block)][group].arrive();
  }
  CUTE_DEVICE void release(int block) {
    release(block, kLeft);
    release(block, kRight);
  }
  CUTE_DEVICE void sync_warpgroup() const { named_barrier_wait(kBarrierScores + kHalf, 128); }

  CUTE_DEVICE void compute_scores(float (&s)[kHeads / 2], int block) {
    Barrier* const full = shared.k_full[stage_of<Tile>(block)];
    const std::uint32_t phase = phase_of<Tile>(block);
    const std::uint64_t q = fa3::descriptor_k_major(q_base);
    const std::uint64_t k = fa3::descriptor_k_major(stage_base(block));
    constexpr int kScorePanels = Tile::kHeadDimQk / 64;
    CUTE_UNROLL
    for (int n = 0; n < kScorePanels; ++n) {
      const int panel = score_panel<Tile>(kHalf, n);
      const bool waits = begins_group<Tile>(n);
      if (waits) full[panel].wait(phase);
      if (!Tile::kHasPositions && n == kHalfPanels) full[kRopePanel].wait(phase);  // for `listed`
      if (waits) fa3::fence_proxy_async();
      fa3::wgmma_fence();
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        multiply_64x16<Element, false>(s, k + (panel * kPanelBytes + i * 32) / 16,
                                       q + (panel * Tile::kQRows * 128 + i * 32) / 16, n > 0 || i > 0);
      }
    }
    fa3::wgmma_commit();
    fa3::wgmma_wait<0>();
    fa3::pin(s);
    release(block, kRope);
  }

  // Hides keys that are no slots.
  CUTE_DEVICE void hide_missing(float (&s)[kHeads / 2], int block) const {
    static_assert(Tile::kListedWords == 16);
    const std::uint32_t* const words = shared.listed[stage_of<Tile>(block)] + warp * 4 + lane / 16;  // of four rows
    const std::uint32_t listed[2] = {words[0] >> lane / 4 % 4, words[2] >> lane / 4 % 4};
    CUTE_UNROLL
    for (int i = 0; i < kHeads / 2; ++i) mask_unless_bit(s[i], listed[i % 4 / 2], 0);
  }

  // S of an own block becomes P^T. factor: of what has been summed up before.
  CUTE_DEVICE void take_exponentials(float (&s)[kHeads / 2], float (&factor)[kLaneHeads]) {
    float (&maxima)[64] = shared.largest[0][kHalf];  // (warp, head)
    float most[kLaneHeads];
    CUTE_UNROLL
    for (int c = 0; c < kLaneHeads; ++c) {
      const int i = c / 2 * 4 + c % 2;
      most[c] = fmaxf(s[i], s[i + 2]);
      CUTE_UNROLL
      for (int distance = 4; distance < 32; distance *= 2) {
        most[c] = fmaxf(most[c], __shfl_xor_sync(0xffffffffu, most[c], distance));
      }
      if (lane < 4) maxima[warp * kHeads + lane_head(lane, c)] = most[c];
    }
    sync_warpgroup();  // all warps are done with the P before, too
    CUTE_UNROLL
    for (int c = 0; c < kLaneHeads; ++c) {
      CUTE_UNROLL
      for (int w = 0; w < 4; ++w) most[c] = fmaxf(most[c], maxima[w * kHeads + lane_head(lane, c)]);
      largest[c] = fmaxf(largest[c], most[c]);
      const float scale = params.transform.scale;
      const bool raised = fmaf(most[c], scale, minus_m[c]) > OnlineSoftmax<1>::kHeadroom;
      const float raised_m = raised ? -most[c] * scale : minus_m[c];
      factor[c] = exp2_approx(raised_m - minus_m[c]);  // 0 at the first key
      minus_m[c] = raised_m;
      sum[c] *= factor[c];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float& x = s[c / 2 * 4 + r * 2 + c % 2];
        x = exp2_approx(fmaf(x, scale, minus_m[c]));
        sum[c] += x;
      }
    }
    const std::uint32_t p[4] = {Element::pack(s[0], s[1]), Element::pack(s[2], s[3]), Element::pack(s[4], s[5]),
                                Element::pack(s[6], s[7])};
    const int head = lane / 16 * 8 + lane % 8;
    const int chunk = warp * 2 + lane / 8 % 2;
    stmatrix_x4_transposed(p_base + head * 128 + ((chunk ^ lane % 8) << 4), p);
    fa3::fence_proxy_async();
    sync_warpgroup();
  }

  // Starts O^T (+)= V^T P^T for the columns of a group.
  CUTE_DEVICE void issue_output(PanelGroup group, int block, bool accumulate) {
    const std::uint32_t base = stage_base(block);
    const std::uint64_t p = fa3::descriptor_k_major(p_base);
    fa3::wgmma_fence();
    CUTE_UNROLL
    for (int n = 0; n < kHalfPanels; ++n) {
      const int panel = (group == kRight ? kHalfPanels : 0) + n;
      const std::uint64_t v = fa3::descriptor_mn_major(base + panel * kPanelBytes, kPanelBytes);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        multiply_64x16<Element, true>(o[panel], v + i * (16 * 128 / 16), p + i * (32 / 16), i > 0 || accumulate);
      }
    }
    fa3::wgmma_commit();
  }

  CUTE_DEVICE void run() {
    for (fa3::JobReader<Shared<Tile>> jobs(shared); jobs.next(); jobs.release()) {
      compute_tile(jobs.job());
      tile_parity ^= 1;
    }
  }

  CUTE_DEVICE void compute_tile(const Job& job) {
    const int kv_blocks = job.kv_blocks;
    const int own_count = (kv_blocks + 1 - kHalf) / 2;
    CUTE_UNROLL
    for (int c = 0; c < kLaneHeads; ++c) {
      minus_m[c] = kNoKey;
      sum[c] = 0.0f;
      largest[c] = -INFINITY;
    }
    // Through which O goes: the memory of the last block of warpgroup 1, or of the only one.
    const int kept_block = first_block + (kv_blocks == 1 ? 0 : (kv_blocks - 2) / 2 * 2 + 1);
    shared.q_full.wait(q_phase);
    q_phase ^= 1;
    if (own_count == 0) arrive(shared.q_empty);
    CUTE_NO_UNROLL
    for (int i = 0; i < own_count; ++i) {
      constexpr PanelGroup kFirst = kHalf == 0 ? kLeft : kRight, kSecond = kHalf == 0 ? kRight : kLeft;
      const int block = first_block + 2 * i + kHalf;
      float s[kHeads / 2], factor[kLaneHeads];
      compute_scores(s, block);
      if (i + 1 == own_count) arrive(shared.q_empty);
      if (params.transform.changes_logits()) params.transform.apply<true>(s, kHeads / 2);
      hide_missing(s, block);
      take_exponentials(s, factor);
      const bool changes = factor[0] != 1.0f || factor[1] != 1.0f || factor[2] != 1.0f || factor[3] != 1.0f;
      if (i > 0 && __any_sync(0xffffffffu, changes)) {
        CUTE_UNROLL
        for (int panel = 0; panel < kPanelsV; ++panel) {
          CUTE_UNROLL
          for (int n = 0; n < kHeads / 2; ++n) o[panel][n] *= factor[n / 4 * 2 + n % 2];
        }
      }
      issue_output(kFirst, block, i > 0);
      issue_output(kSecond, block, i > 0);
      fa3::wgmma_wait<1>();
      if (block != kept_block) release(block, kFirst);
      fa3::wgmma_wait<0>();
      CUTE_UNROLL
      for (int panel = 0; panel < kPanelsV; ++panel) fa3::pin(o[panel]);
      if (block != kept_block) release(block, kSecond);
    }
    finish_tile(job, own_count, reinterpret_cast<float*>(shared.k[stage_of<Tile>(kept_block)]));
    first_block += kv_blocks;
    if constexpr (kHalf == 0) {
      sync_warpgroup();
      release(kept_block);
    }
  }

  // Where element n of a panel of O lies in `memory`, (head, column).
  CUTE_DEVICE int place(int panel, int n) const {
    const int head = lane_head(lane, n / 4 * 2 + n % 2);
    return head * kMemoryStride + panel * 64 + warp * 16 + n % 4 / 2 * 8 + lane / 4;
  }

  CUTE_DEVICE void finish_tile(const Job& job, int own_count, float* memory) {
    float (&sums)[2][64] = shared.sums[tile_parity];  // (warpgroup, (warp, head))
    RowState(&of_other)[64] = shared.states[tile_parity];
    CUTE_UNROLL
    for (int c = 0; c < kLaneHeads; ++c) {
      float all = sum[c];
      CUTE_UNROLL
      for (int distance = 4; distance < 32; distance *= 2) all += __shfl_xor_sync(0xffffffffu, all, distance);
      if (lane >= 4) continue;
      const int head = lane_head(lane, c);
      sums[kHalf][warp * kHeads + head] = all;
      if (kHalf == 1 && warp == 0) of_other[head] = {minus_m[c], largest[c]};
    }
    if (kHalf == 1 && own_count > 0) {
      sync_warpgroup();  // other warps may still read V there
      CUTE_UNROLL
      for (int panel = 0; panel < kPanelsV; ++panel) {
        CUTE_UNROLL
        for (int n = 0; n < kHeads / 2; ++n) memory[place(panel, n)] = o[panel][n];
      }
    }
    named_barrier_wait(kBarrierTileEnd, 256);
    if constexpr (kHalf == 0) join(job, sums, of_other, memory);
  }

  // By warpgroup 0: the results of both become those of the tile.
  CUTE_DEVICE void join(const Job& job, const float (&sums)[2][64], const RowState (&of_other)[64], float* memory) {
    const LaunchParams& p = params.attention;
    const int heads = int(params.packed.heads.divisor);
    const std::int64_t token = std::int64_t(job.q_end) - job.qo_len + job.row_begin;
    const bool is_partial = job.num_splits > 1;
    const bool has_other = job.kv_blocks > 1;
    const TilePartials partials{job.partial_row, job.num_splits};
    float own_factor[kLaneHeads], other_factor[kLaneHeads];
    bool is_empty[kLaneHeads];
    CUTE_UNROLL
    for (int c = 0; c < kLaneHeads; ++c) {
      const int head = lane_head(lane, c);
      const RowState other = of_other[head];
      float all[2] = {0.0f, 0.0f};
      CUTE_UNROLL
      for (int w = 0; w < 4; ++w) {
        all[0] += sums[0][w * kHeads + head];
        all[1] += sums[1][w * kHeads + head];
      }
      float joined = fminf(minus_m[c], other.minus_m);
      const float most = fmaxf(largest[c], other.factor);
      if (p.max_logits != nullptr && most > -INFINITY) joined = -most * params.transform.scale;
      own_factor[c] = exp2_approx(joined - minus_m[c]);
      other_factor[c] = has_other ? exp2_approx(joined - other.minus_m) : 0.0f;
      const float total = all[0] * own_factor[c] + all[1] * other_factor[c];
      const float m = joined < kNoKey ? -joined : -INFINITY;
      const bool exists = head < heads;
      const bool writes = exists && warp == 0 && lane < 4;
      if (is_partial) {
        is_empty[c] = has_no_key(m, total);
        if (writes) *partial_max_sum(p, partials.at(p, 0, job.head + head, job.split)) = {m, total};
      } else {
        float factor = p.v_scale;
        const FinishedRow finished = finish_row<true>(m, total, p.sinks, job.head + (exists ? head : 0),
                                                      [&](float weight) { factor *= weight; });
        is_empty[c] = finished.is_empty;
        const float scale = finished.is_empty ? 0.0f : finished.fast_scale(factor);
        own_factor[c] *= scale;
        other_factor[c] *= scale;
        if (writes) write_row_stats(p, finished, m, total, token, job.head + head);
      }
    }
    CUTE_UNROLL
    for (int panel = 0; panel < kPanelsV; ++panel) {
      CUTE_UNROLL
      for (int n = 0; n < kHeads / 2; ++n) {
        const int c = n / 4 * 2 + n % 2;
        float x = o[panel][n] * own_factor[c];
        if (has_other) x = fmaf(memory[place(panel, n)], other_factor[c], x);
        memory[place(panel, n)] = is_empty[c] ? 0.0f : x;
      }
    }
    sync_warpgroup();
    CUTE_NO_UNROLL
    for (int head = warp; head < heads; head += 4) {
      const float* const row = memory + head * kMemoryStride + lane * 4;
      if (is_partial) {
        float* const out = partial_o(p, partials.at(p, 0, job.head + head, job.split)) + lane * 4;
        CUTE_UNROLL
        for (int n = 0; n < kLatentDim; n += 128) {
          *reinterpret_cast<float4*>(out + n) = *reinterpret_cast<const float4*>(row + n);
        }
      } else {
        char* const out = static_cast<char*>(p.o.data) +
                          2 * (token * p.o.stride_token + (job.head + head) * p.o.stride_head + lane * 4);
        CUTE_UNROLL
        for (int n = 0; n < kLatentDim; n += 128) {
          const float4 x = *reinterpret_cast<const float4*>(row + n);
          *reinterpret_cast<uint2*>(out + 2 * n) = {Element::pack(x.x, x.y), Element::pack(x.z, x.w)};
        }
      }
    }
  }
};

}  // namespace cutlass_kernels::mla
