// The epilogue of a consumer warpgroup: normalise O, stage it in shared memory, write it by TMA, warp by warp. O of
// e4m3 goes straight to global memory.
#pragma once

#include <cute/config.hpp>

#include "common/finish_row.h"
#include "common/softmax.h"
#include "fa3/pair.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"
#include "fa3/store_e4m3.h"
#include "fa3/tensor_map.h"
#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

CUTE_DEVICE void stmatrix_x4(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                             std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Writes 64 rows of O and their LSE. weight_sum: of e4m3, what O is divided by. `staging` is the
// warpgroup's memory for O, of which each warp uses the part of its own 16 rows. On return the last stores may still be
// reading it.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void store_tile(const KernelParams& params, const Job& job, int warpgroup,
                            const OnlineSoftmax<2>& softmax, const float (&weight_sum)[2],
                            float (&o)[Tile::kHeadDimVo / 2], std::uint32_t staging) {
  using Layout = Shared<Tile>;
  using Output = typename Element::Output;
  constexpr bool kFp8 = Element::kBytes == 1;
  const LaunchParams& p = params.attention;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int warp_row = job.row_begin + warpgroup * kWarpgroupRows + warp * 16;  // in the request
  const int head = job.head;
  const int column = first_column<Tile>(Tile::kHeadDimVo);
  const bool writes_rows = lane % 4 == 0 && writes_row_results<Tile>();

  float scale[2];  // (row)
  bool no_key[2];  // (row)
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float m, sum;
    softmax.finish(r, m, sum);
    if constexpr (kLogits == Logits::kGeneral && Element::kBytes == 2) {
      const int row = warp_row + r * 8 + lane / 4;
      if (p.stats != nullptr && writes_rows && row < job.qo_len) {
        params.stats.store(p, std::int64_t(job.q_end) - job.qo_len + row, head, m, sum);
      }
    }
    const float weights = kFp8 ? weight_sum[r] : sum;
    no_key[r] = has_no_key(m, weights);
    float factor = p.v_scale;
    if constexpr (kLogits == Logits::kGeneral || Element::kBytes == 1) {
      factor *= scale_of(p.output_scale, job.batch, head);
    }
    const FinishedRow finished =
        finish_row(m, weights, p.sinks, head, [&](float weight) { factor *= weight; });
    scale[r] = finished.fast_scale(factor);
    const int row = warp_row + r * 8 + lane / 4;
    if (p.lse != nullptr && writes_rows && row < job.qo_len) {
      const float lse =
          kFp8 ? finish_row(m, sum, p.sinks, head, [](float) {}).lse() : finished.lse();
      p.lse[(std::int64_t(job.q_end) - job.qo_len + row) * p.lse_stride_token +
            head * p.lse_stride_head] = lse * p.lse_scale;
    }
  }
  // Masked keys have p = 0, but their V may be infinite: a row without keys is 0 whatever V is.
  if (__any_sync(0xffffffffu, no_key[0] || no_key[1])) {
    CUTE_UNROLL
    for (int i = 0; i < Tile::kHeadDimVo / 2; ++i) {
      if (no_key[i / 2 % 2]) o[i] = 0.0f;
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (no_key[r]) scale[r] = 0.0f;
    }
  }

  if constexpr (Element::kBytes == 1) {
    if (p.o_dtype == DType::kFloat8E4M3) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = warp_row + r * 8 + lane / 4;
        char* out = nullptr;
        if (row < job.qo_len) {
          out = static_cast<char*>(p.o.data) +
                (std::int64_t(job.q_end) - job.qo_len + row) * p.o.stride_token +
                head * p.o.stride_head;
        }
        store_e4m3_row<Tile::kHeadDimVo>(o, scale[r], r, out, p.head_dim_vo);
      }
      return;
    }
  }

  const std::uint32_t warp_base = staging + warp * 16 * 128;
  const int stage_row = lane % 16;
  const std::uint32_t row_base = warp_base + stage_row * 128;
  CUTE_UNROLL
  for (int pass = 0; pass < Layout::kPanelsO; pass += Tile::kOPanels) {
    if (lane == 0) tma_store_wait();  // the previous pass, or tile, has been read
    __syncwarp();
    CUTE_UNROLL
    for (int i = 0; i < Tile::kOPanels * 4; ++i) {         // 16 columns
      if ((pass * 4 + i) * 16 >= Tile::kHeadDimVo) break;  // TMA writes none of those beyond
      const float* x = &o[8 * (pass * 4 + i)];
      const int chunk = i % 4 * 2 + lane / 16;
      stmatrix_x4(row_base + i / 4 * Layout::kPanelBytesQ + ((chunk ^ (stage_row & 7)) << 4),
                  Output::pack(x[0] * scale[0], x[1] * scale[0]),
                  Output::pack(x[2] * scale[1], x[3] * scale[1]),
                  Output::pack(x[4] * scale[0], x[5] * scale[0]),
                  Output::pack(x[6] * scale[1], x[7] * scale[1]));
    }
    tma_store_fence();
    __syncwarp();
    if (lane == 0) {
      if (warp_row < job.qo_len) {
        CUTE_UNROLL
        for (int panel = 0; panel < Tile::kOPanels; ++panel) {
          tma_store(&params.o_map, warp_base + panel * Layout::kPanelBytesQ,
                    column + (pass + panel) * 64, kMapRows - job.qo_len + warp_row, head, job.q_end,
                    kMapRows);
        }
      }
      tma_store_commit();
    }
  }
}

}  // namespace cutlass_kernels::fa3
