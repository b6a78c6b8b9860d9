// Tiles of packed heads: short queries, which would leave rows of a tile of one head empty.
//
// Row r of the tile is token r / heads, head r % heads of the pack; rows past tokens * heads are unused. So the keys
// that these heads share are read once. They may be split, too: a thread block then computes one KV split, and
// merge/combine_splits.cu combines the partial results.
#pragma once

#include <cstdint>

#include "common/element_types.h"
#include "common/fp8_operands.h"
#include "common/logits.h"
#include "common/mask.h"
#include "common/numeric.h"
#include "common/ptx/cp_async.h"
#include "common/softmax.h"
#include "fa2/params.h"
#include "fa2/shared_memory.h"
#include "merge/partial_results.h"
#include "plan/launch_params.h"
#include "schedule/find_work.h"

namespace cutlass_kernels::fa2 {

// Rows of a warp as rows of the request.
template <class Tile, bool kPacked = Tile::kPacked>
struct WarpRows {
  int first;

  CUTE_DEVICE WarpRows(int row_begin, int warp_row, const FastDivisor&) : first(row_begin + warp_row) {}
  CUTE_DEVICE int operator()(int row) const { return first + row; }
};

// As tokens, and heads of the pack.
template <class Tile>
struct WarpRows<Tile, true> {
  int row_begin;  // the tile's first token
  int warp_row;   // the warp's first row, in the tile
  const FastDivisor& pack;

  CUTE_DEVICE int operator()(int row) const { return row_begin + int(pack.divide(warp_row + row)); }
  CUTE_DEVICE int pack_head(int row) const { return pack.modulo(warp_row + row); }
};

// Restricts a tile to the KV blocks of one split; none where there are fewer KV blocks than splits.
CUTE_DEVICE void take_split(const WorkItem& work, int block_n, int& key_begin, int& key_end, int& block_begin,
                            int& block_end) {
  const SplitBlocks blocks = blocks_of_split<false>(work, block_end - block_begin);
  block_end = block_begin + blocks.end;
  block_begin += blocks.begin;
  key_begin = max(key_begin, block_begin * block_n);
  key_end = max(min(key_end, block_end * block_n), key_begin);
}

// Loads Q of the tokens [row_begin, row_end); zeros where there is none.
template <class Tile>
CUTE_DEVICE void load_packed_q(const KernelParams& params, std::uint32_t shared, int q_begin, int row_begin,
                               int row_end, int head, int thread) {
  using Layout = SharedLayout<Tile>;
  const LaunchParams& p = params.attention;
  const int chunk = thread % Layout::kChunks;
  constexpr int kRowStep = Tile::kThreads / Layout::kChunks;
  CUTE_UNROLL
  for (int i = 0; i < Tile::kBlockM / kRowStep; ++i) {
    const int row = i * kRowStep + thread / Layout::kChunks;
    const int token = params.pack.divide(row);
    const int of_pack = row - token * int(params.pack.divisor);
    const char* from =
        static_cast<const char*>(p.q.data) + chunk * 16 +
        2 * ((std::int64_t(q_begin) + row_begin + token) * p.q.stride_token + (head + of_pack) * p.q.stride_head);
    cp_async_16(shared + Layout::offset(row, chunk), from, row_begin + token < row_end && chunk * 8 < p.head_dim_qk);
  }
}

// Q for keys of 8 bits: in fp16, and columns in the order that products.h asks for: of 16, two at a time, first those
// that are the first two of four. Through registers, which leaves time for other loads between begin() and finish().
template <class Tile>
struct PackedQ {
  using Layout = SharedLayout<Tile>;
  static constexpr int kGroups = Tile::kHeadDim / 16;
  static constexpr int kRowStep = Tile::kThreads / kGroups;
  static constexpr int kSteps = (Tile::kBlockM + kRowStep - 1) / kRowStep;

  int group;  // of 16 columns
  int first_row;
  bool scales;               // queries are bf16
  uint4 columns[kSteps][2];  // (step, 8 columns each)

  CUTE_DEVICE PackedQ(const KernelParams& params, int thread)
      : group(thread % kGroups), first_row(thread / kGroups), scales(params.attention.q_dtype == DType::kBFloat16) {}

  CUTE_DEVICE void begin(const KernelParams& params, int q_begin, int row_begin, int row_end, int head) {
    const LaunchParams& p = params.attention;
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      const int row = i * kRowStep + first_row;
      const int token = params.pack.divide(row);
      const int of_pack = row - token * int(params.pack.divisor);
      const char* from =
          static_cast<const char*>(p.q.data) + group * 32 +
          2 * ((std::int64_t(q_begin) + row_begin + token) * p.q.stride_token + (head + of_pack) * p.q.stride_head);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        columns[i][half] = uint4{};
        if (has_row(row) && row_begin + token < row_end && group * 16 + half * 8 < p.head_dim_qk) {
          columns[i][half] = __ldg(reinterpret_cast<const uint4*>(from) + half);
        }
      }
    }
  }

  // All of a warp have one, or none.
  CUTE_DEVICE static bool has_row(int row) { return Tile::kBlockM % kRowStep == 0 || row < Tile::kBlockM; }

  CUTE_DEVICE void finish(char* shared_memory) const {
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      const int row = i * kRowStep + first_row;
      if (!has_row(row)) continue;
      const uint4& low = columns[i][0];
      const uint4& high = columns[i][1];
      std::uint32_t pairs[8] = {low.x, low.z, high.x, high.z, low.y, low.w, high.y, high.w};
      float factor = 1.0f;
      if (scales) {
        std::uint32_t largest = 0;
        CUTE_UNROLL
        for (int j = 0; j < 16; ++j) {
          const std::uint32_t magnitude = pairs[j / 2] >> j % 2 * 16 & 0x7fff;
          largest = max(largest, magnitude < 0x7f80 ? magnitude : 0u);
        }
        CUTE_UNROLL
        for (int lanes = 1; lanes < kGroups; lanes *= 2) {  // those of a row
          largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        }
        factor = row_factor(largest);
        const float scale = __uint_as_float(0x7f000000u - __float_as_uint(factor));  // 1 / factor
        CUTE_UNROLL
        for (int j = 0; j < 8; ++j) pairs[j] = scaled_to_fp16(pairs[j], scale);
      }
      if (group == 0) reinterpret_cast<float*>(shared_memory + Layout::kRowFactors)[row] = factor;
      char* shared_q = shared_memory + Layout::kQ;
      *reinterpret_cast<uint4*>(shared_q + Layout::offset(row, 2 * group)) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      *reinterpret_cast<uint4*>(shared_q + Layout::offset(row, 2 * group + 1)) =
          make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    }
  }

  // Factors of the scores of row tile r / 2, for the lane's rows r % 2. After a barrier.
  CUTE_DEVICE static void read_factors(const char* shared_memory, int warp_row, float (&factors)[2 * Tile::kRowTiles]) {
    const float* rows = reinterpret_cast<const float*>(shared_memory + Layout::kRowFactors) + warp_row;
    CUTE_UNROLL
    for (int r = 0; r < 2 * Tile::kRowTiles; ++r) factors[r] = rows[r * 8 + threadIdx.x % 32 / 4];
  }
};

// Normalises and writes the warp's 16 rows, through its rows of Q in shared memory, 16 bytes per lane; or writes those
// of a KV split as they are, in fp32: all else is left to the merge.
template <class Element, class Tile, bool kGeneral>
CUTE_DEVICE void store_packed(const KernelParams& params, const WorkItem& work, char* shared_memory,
                              const WarpRows<Tile>& row_at, int row_end, int head, int sharer,
                              const float (&o)[1][Tile::kColumns / 8 / Tile::kSharers][4], const float (&row_m)[2],
                              const float (&row_sum)[2]) {
  using Layout = SharedLayout<Tile>;
  constexpr int kTilesD = Tile::kColumns / 8 / Tile::kSharers;
  const int first_d = Tile::kSharers > 1 ? sharer * kTilesD : 0;
  const bool is_first = Tile::kSharers == 1 || sharer == 0;  // which writes what rows have once
  const LaunchParams& p = params.attention;
  const int lane = threadIdx.x % 32;
  const bool partial = work.num_splits > 1;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = r * 8 + lane / 4;
    const int token = row_at(row);
    const int of_head = head + row_at.pack_head(row);
    if constexpr (kGeneral && Tile::kKvBytes == 2) {
      if (p.stats != nullptr && is_first && lane % 4 == 0 && token < row_end) {
        params.stats.store(p, std::int64_t(work.q_begin) + token, of_head, row_m[r], row_sum[r]);
      }
    }
    float factor = 1.0f;
    const FinishedRow finished =
        finish_row(row_m[r], row_sum[r], partial ? nullptr : p.sinks, of_head, [&](float weight) { factor *= weight; });
    if (!partial) {
      factor *= p.v_scale;
      if constexpr (kGeneral) factor *= scale_of(p.output_scale, work.batch, of_head);
    }
    const float scale = finished.scale(factor);
    const float lse = finished.lse() * p.lse_scale;
    if (partial) {
      if (token >= row_end) continue;
      const std::int64_t at =
          TilePartials{work.partial_row, work.num_splits}.at(p, token - row_at.row_begin, of_head, work.split);
      if constexpr (Tile::kKvBytes == 1) {  // four columns of 16 are this lane's
        float* out = partial_o(p, at) + lane % 4 * 4;
        CUTE_UNROLL
        for (int d = 0; d < kTilesD; d += 2) {
          if (d * 8 + lane % 4 * 4 < p.head_dim_vo) {
            *reinterpret_cast<float4*>(out + d * 8) = {o[0][d][r * 2], o[0][d + 1][r * 2], o[0][d][r * 2 + 1],
                                                       o[0][d + 1][r * 2 + 1]};
          }
        }
      } else {
        float* out = partial_o(p, at) + first_d * 8 + lane % 4 * 2;
        CUTE_UNROLL
        for (int d = 0; d < kTilesD; ++d) {
          if ((first_d + d) * 8 < p.head_dim_vo) {
            *reinterpret_cast<float2*>(out + d * 8) = {o[0][d][r * 2], o[0][d][r * 2 + 1]};
          }
        }
      }
      if (is_first && lane % 4 == 0) *partial_max_sum(p, at) = {row_m[r], row_sum[r]};
    } else {
      char* shared_q = shared_memory + Layout::kQ;
      if constexpr (Tile::kKvBytes == 1) {
        CUTE_UNROLL
        for (int d = 0; d < kTilesD; d += 2) {
          *reinterpret_cast<uint2*>(shared_q + Layout::offset(row_at.warp_row + row, d + lane % 4 / 2) +
                                    lane % 2 * 8) = {
              pack_pair<Element>(p.o_dtype, o[0][d][r * 2] * scale, o[0][d + 1][r * 2] * scale),
              pack_pair<Element>(p.o_dtype, o[0][d][r * 2 + 1] * scale, o[0][d + 1][r * 2 + 1] * scale)};
        }
      } else {
        CUTE_UNROLL
        for (int d = 0; d < kTilesD; ++d) {
          *reinterpret_cast<std::uint32_t*>(shared_q + Layout::offset(row_at.warp_row + row, first_d + d) +
                                            lane % 4 * 4) =
              pack_pair<Element>(p.o_dtype, o[0][d][r * 2] * scale, o[0][d][r * 2 + 1] * scale);
        }
      }
      if (p.lse != nullptr && is_first && lane % 4 == 0 && token < row_end) {
        p.lse[(std::int64_t(work.q_begin) + token) * p.lse_stride_token + of_head * p.lse_stride_head] = lse;
      }
    }
  }
  if (partial) return;
  __syncwarp();
  constexpr int kOwnChunks = Layout::kChunks / Tile::kSharers;
  constexpr int kRowsPerStep = 32 / kOwnChunks;
  const int chunk = first_d + lane % kOwnChunks;
  CUTE_UNROLL
  for (int i = 0; i < 16 / kRowsPerStep; ++i) {
    const int row = i * kRowsPerStep + lane / kOwnChunks;
    const int token = row_at(row);
    if (token < row_end && chunk * 8 < p.head_dim_vo) {
      const std::int64_t at = (std::int64_t(work.q_begin) + token) * p.o.stride_token +
                              (head + row_at.pack_head(row)) * p.o.stride_head + chunk * 8;
      *reinterpret_cast<uint4*>(static_cast<char*>(p.o.data) + 2 * at) =
          *reinterpret_cast<const uint4*>(shared_memory + Layout::kQ + Layout::offset(row_at.warp_row + row, chunk));
    }
  }
}

}  // namespace cutlass_kernels::fa2
