// From O in registers to the output, or to partial results.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/element_types.h"
#include "common/numeric.h"
#include "common/ptx/shared_address.h"
#include "common/softmax.h"
#include "fa3/pair.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"
#include "fa3/tensor_map.h"
#include "fa3/tma.h"
#include "merge/partial_results.h"

namespace cutlass_kernels::fa3 {

// ---- Rows of O in e4m3, which kernels of e4m3 tensors write from registers: a quad of lanes holds eight columns in
// every eight, two of each lane, and after an exchange each lane 16 that lie side by side.

// Lane i of a quad brings row i of a 4 x 4 matrix of words and takes column i. By all lanes of a warp.
CUTE_DEVICE void transpose_in_quad(std::uint32_t (&x)[4]) {
  CUTE_UNROLL
  for (int distance = 1; distance <= 2; ++distance) {
    const bool upper = (threadIdx.x & distance) != 0;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) != 0) continue;
      const std::uint32_t sent = upper ? x[i] : x[i + distance];
      const std::uint32_t got = __shfl_xor_sync(0xffffffffu, sent, distance);
      x[i] = upper ? got : x[i];
      x[i + distance] = upper ? x[i + distance] : got;
    }
  }
}

// Writes o * scale, of the thread's row r of its two: beyond 448 they become 448, infinities too; NaN stays NaN. `out`
// is where the row begins, null where nobody wants it. By all lanes of a warp.
template <int kHeadDim>
CUTE_DEVICE void store_e4m3_row(const float (&o)[kHeadDim / 2], float scale, int r, char* out, int head_dim) {
  // Another number to the compiler, which else computes all products ahead, for the outputs of 16 bits, too.
  asm volatile("" : "+f"(scale));
  const int first_column = threadIdx.x % 4 * 16;
  CUTE_UNROLL
  for (int panel = 0; panel < kHeadDim / 64; ++panel) {
    std::uint32_t x[4];  // two columns of 16 i + 2 lane, two of 16 i + 8 + 2 lane
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float* pair = &o[32 * panel + 8 * i + 2 * r];
      x[i] = e4m3::pack(pair[0] * scale, pair[1] * scale, pair[4] * scale, pair[5] * scale);
    }
    transpose_in_quad(x);
    const int column = panel * 64 + first_column;
    if (out != nullptr && column < head_dim) {
      *reinterpret_cast<uint4*>(out + column) = {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410),
                                                 __byte_perm(x[0], x[1], 0x7632), __byte_perm(x[2], x[3], 0x7632)};
    }
  }
}

// ---- The epilogue of a consumer warpgroup: normalise O, stage it in shared memory, write it by TMA, warp by warp. O
// of e4m3 goes straight to global memory.

CUTE_DEVICE void stmatrix_x4(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                             std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Writes 64 rows of O and their LSE. weight_sum: of e4m3, what O is divided by. `staging` is the
// warpgroup's memory for O, of which each warp uses the part of its own 16 rows. On return the last stores may still be
// reading it.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void store_tile(const KernelParams& params, const Job& job, int warpgroup, const OnlineSoftmax<2>& softmax,
                            const float (&weight_sum)[2], float (&o)[Tile::kHeadDimVo / 2], std::uint32_t staging) {
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
    const FinishedRow finished = finish_row(m, weights, p.sinks, head, [&](float weight) { factor *= weight; });
    scale[r] = finished.fast_scale(factor);
    const int row = warp_row + r * 8 + lane / 4;
    if (p.lse != nullptr && writes_rows && row < job.qo_len) {
      const float lse = kFp8 ? finish_row(m, sum, p.sinks, head, [](float) {}).lse() : finished.lse();
      p.lse[(std::int64_t(job.q_end) - job.qo_len + row) * p.lse_stride_token + head * p.lse_stride_head] =
          lse * p.lse_scale;
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
          out = static_cast<char*>(p.o.data) + (std::int64_t(job.q_end) - job.qo_len + row) * p.o.stride_token +
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
                  Output::pack(x[0] * scale[0], x[1] * scale[0]), Output::pack(x[2] * scale[1], x[3] * scale[1]),
                  Output::pack(x[4] * scale[0], x[5] * scale[0]), Output::pack(x[6] * scale[1], x[7] * scale[1]));
    }
    tma_store_fence();
    __syncwarp();
    if (lane == 0) {
      if (warp_row < job.qo_len) {
        CUTE_UNROLL
        for (int panel = 0; panel < Tile::kOPanels; ++panel) {
          tma_store(&params.o_map, warp_base + panel * Layout::kPanelBytesQ, column + (pass + panel) * 64,
                    kMapRows - job.qo_len + warp_row, head, job.q_end, kMapRows);
        }
      }
      tma_store_commit();
    }
  }
}

// ---- The epilogue of a packed tile: its rows lie in the rows of several tokens and heads. Those of a KV split go to
// the partial results instead, as they are, in fp32.

// Writes 64 rows of O and their LSE. `staging` is as in store_tile().
template <class Element, class Tile, bool kHasStats>
CUTE_DEVICE void store_packed_tile(const KernelParams& params, const Job& job, int warpgroup,
                                   const OnlineSoftmax<2>& softmax, float (&o)[Tile::kHeadDimVo / 2], char* staging) {
  using Layout = Shared<Tile>;
  using Output = typename Element::Output;
  const LaunchParams& p = params.attention;
  const PackedRows& packed = params.packed;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const bool partial = job.num_splits > 1;
  const int first_token = warpgroup * packed.tokens;  // of the warpgroup, in the tile
  const int tokens = min(packed.tokens, job.qo_len - job.row_begin - first_token);
  const int own_column = first_column<Tile>(Tile::kHeadDimVo);
  const bool writes_rows = lane % 4 == 0 && writes_row_results<Tile>();

  // A row of the warpgroup, as token (in the tile) and head; token -1 if the row is unused.
  struct Place {
    int token;
    int head;
  };
  auto place_of = [&](int row) -> Place {
    const int token = packed.heads.divide(row);
    return {token < tokens ? first_token + token : -1, job.head + row - token * int(packed.heads.divisor)};
  };
  auto partial_at = [&](const Place& place) {
    return TilePartials{job.partial_row, job.num_splits}.at(p, place.token, place.head, job.split);
  };
  const std::int64_t q_begin = std::int64_t(job.q_end) - job.qo_len + job.row_begin;

  float scale[2] = {};  // (row)
  bool no_key[2];       // (row)
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float m, sum;
    softmax.finish(r, m, sum);
    no_key[r] = has_no_key(m, sum);
    const Place place = place_of(warp * 16 + r * 8 + lane / 4);
    if constexpr (kHasStats) {
      if (p.stats != nullptr && place.token >= 0 && writes_rows) {
        params.stats.store(p, q_begin + place.token, place.head, m, sum);
      }
    }
    if (partial) {
      if (place.token >= 0 && writes_rows) {
        *partial_max_sum(p, partial_at(place)) = {m, sum};
      }
      continue;
    }
    float factor = p.v_scale * scale_of(p.output_scale, job.batch, place.head);
    const FinishedRow finished = finish_row(m, sum, p.sinks, place.head, [&](float weight) { factor *= weight; });
    scale[r] = finished.fast_scale(factor);
    if (p.lse != nullptr && place.token >= 0 && writes_rows) {
      p.lse[(q_begin + place.token) * p.lse_stride_token + place.head * p.lse_stride_head] =
          finished.lse() * p.lse_scale;
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
  if (partial) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const Place place = place_of(warp * 16 + r * 8 + lane / 4);
      if (place.token < 0) continue;
      float* out = partial_o(p, partial_at(place)) + own_column + lane % 4 * 2;
      CUTE_UNROLL
      for (int i = 0; i < Tile::kHeadDimVo / 8; ++i) {
        if (own_column + i * 8 < p.head_dim_vo) {
          *reinterpret_cast<float2*>(out + i * 8) = {o[4 * i + 2 * r], o[4 * i + 2 * r + 1]};
        }
      }
    }
    return;
  }

  if constexpr (Element::kBytes == 1) {
    if (p.o_dtype == DType::kFloat8E4M3) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const Place place = place_of(warp * 16 + r * 8 + lane / 4);
        char* out = nullptr;
        if (place.token >= 0) {
          out =
              static_cast<char*>(p.o.data) + (q_begin + place.token) * p.o.stride_token + place.head * p.o.stride_head;
        }
        store_e4m3_row<Tile::kHeadDimVo>(o, scale[r], r, out, p.head_dim_vo);
      }
      return;
    }
  }

  const auto pack = [&](float low, float high, float factor) {
    return pack_pair<Output>(p.o_dtype, low * factor, high * factor);
  };
  char* warp_staging = staging + warp * 16 * 128;
  const int stage_row = lane % 16;
  const std::uint32_t row_base = shared_address(warp_staging) + stage_row * 128;
  CUTE_UNROLL
  for (int panel = 0; panel < Layout::kPanelsO; ++panel) {
    __syncwarp();  // the previous panel has been read
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {                           // 16 columns
      if ((panel * 4 + i) * 16 >= Tile::kHeadDimVo) break;  // never read
      const float* x = &o[8 * (panel * 4 + i)];
      const int chunk = i * 2 + lane / 16;
      stmatrix_x4(row_base + ((chunk ^ (stage_row & 7)) << 4), pack(x[0], x[1], scale[0]), pack(x[2], x[3], scale[1]),
                  pack(x[4], x[5], scale[0]), pack(x[6], x[7], scale[1]));
    }
    __syncwarp();
    CUTE_NO_UNROLL                     // registers are few: S of the next tile is in flight
        for (int i = 0; i < 4; ++i) {  // eight lanes write 128 bytes of a row
      const int row = i * 4 + lane / 8;
      const int chunk = lane % 8;
      const Place place = place_of(warp * 16 + row);
      const int column = own_column + panel * 64 + chunk * 8;
      if (place.token >= 0 && column < p.head_dim_vo) {
        const uint4 value = *reinterpret_cast<const uint4*>(warp_staging + row * 128 + ((chunk ^ (row & 7)) << 4));
        *reinterpret_cast<uint4*>(static_cast<char*>(p.o.data) + 2 * ((q_begin + place.token) * p.o.stride_token +
                                                                      place.head * p.o.stride_head + column)) = value;
      }
    }
  }
}

}  // namespace cutlass_kernels::fa3
