// Shared memory of the fa2 kernel and the loads into it.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include <cstdint>

#include "common/ldmatrix.h"

namespace cutlass_kernels::fa2 {

// Q, then the stages of K, then those of V, then what warps that share rows exchange. Rows are head_dim elements
// long, in 16-byte chunks of 8 elements (K and V of 8 bits: of 16); row r holds chunk c at position c ^ (r % 8), so that the eight rows an
// ldmatrix phase reads lie in eight different bank groups (CuTe's Swizzle<3, 3, log2(head_dim / 8)> on element
// offsets).
template <class Tile>
struct SharedLayout {
  static constexpr int kRowBytes = Tile::kHeadDim * 2;
  static constexpr int kChunks = Tile::kHeadDim / 8;
  static constexpr int kKvRowBytes = Tile::kHeadDim * Tile::kKvBytes;
  static constexpr int kKvChunks = kKvRowBytes / 16;
  static constexpr int kStageBytes = Tile::kBlockN * kKvRowBytes;
  static constexpr int kQ = 0;
  static constexpr int kK = Tile::kBlockM * kRowBytes;
  static constexpr int kV = kK + Tile::kStages * kStageBytes;
  // fragments [warp][step][row tile][lane]
  static constexpr int kP = kV + Tile::kStages * kStageBytes;
  static constexpr int kPWarpBytes = Tile::kRowTiles * 16 * Tile::kStepN / Tile::kSharers * 2;
  static constexpr int kRowValues = kP + Tile::kWarps * kPWarpBytes;  // floats [row][sharer]
  static constexpr int kRowFactors = kP;  // of 8-bit keys: floats [row] (packed_rows.h)
  static constexpr int kBytes = Tile::kSharers > 1
                                    ? kRowValues + Tile::kBlockM * Tile::kSharers * 4
                                    : kP + (Tile::kKvBytes == 1 ? Tile::kBlockM * 4 : 0);
  // Of a paged cache: the addresses of a block's rows of K and of V. 1 KB, at head dim 128 with 32 keys to a block half
  // of it, is what two blocks of 80 KB each leave of the 164 KB of an A100.
  static constexpr int kTable = kBytes;
  static constexpr int kPagedBytes = kTable + 2 * Tile::kBlockN * 8;

  CUTE_HOST_DEVICE static constexpr int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
  }

  // The same of K and V. Two rows of 64 bytes lie beside each other: there the pairs of rows take turns.
  CUTE_HOST_DEVICE static constexpr int kv_swizzle(int row) {
    return kKvChunks < 8 ? row >> 1 & 3 : row & 7;
  }
  CUTE_HOST_DEVICE static constexpr int kv_offset(int row, int chunk) {
    return row * kKvRowBytes + ((chunk ^ kv_swizzle(row)) << 4);
  }

  // Bytes from a row's start to chunk `swizzle` ^ `chunk`, swizzle < 8. At head dim 256 it is spelled out that chunks
  // eight apart differ by an immediate: of the plain XOR, ptxas kept 32 addresses in registers. At 128 the plain one
  // is as fast (RESULTS.md).
  CUTE_HOST_DEVICE static constexpr int chunk_offset(int swizzle, int chunk) {
    return Tile::kHeadDim > 128 ? ((swizzle ^ (chunk & 7)) << 4) + (chunk >> 3 << 7)
                                : (swizzle ^ chunk) << 4;
  }
  CUTE_HOST_DEVICE static constexpr int kv_chunk_offset(int swizzle, int chunk) {
    return kKvChunks > 8 ? ((swizzle ^ (chunk & 7)) << 4) + (chunk >> 3 << 7)
                         : (swizzle ^ chunk) << 4;
  }
};

// Whether the 16 bytes of a chunk are inside the tensor's own head dimension, a multiple of 8 elements: all or nothing.
template <int kElementBytes>
struct ColumnBytes {
  bool inside;

  ColumnBytes() = default;
  CUTE_DEVICE ColumnBytes(int chunk, int head_dim) : inside(chunk * 8 < head_dim) {}
  template <bool kOnce>
  CUTE_DEVICE void copy(std::uint32_t to, const char* from, bool valid) const {
    if constexpr (kOnce) {
      cp_async_16_once(to, from, valid && inside);
    } else {
      cp_async_16(to, from, valid && inside);
    }
  }
};

// Head dimensions of 8-bit keys are multiples of 16: all or nothing, of which the instruction takes less to tell than bytes.
template <>
struct ColumnBytes<1> {
  bool inside;

  ColumnBytes() = default;
  CUTE_DEVICE ColumnBytes(int chunk, int head_dim) : inside(chunk * 16 < head_dim) {}
  template <bool kOnce>
  CUTE_DEVICE void copy(std::uint32_t to, const char* from, bool valid) const {
    if constexpr (kOnce) {
      cp_async_16_once_unless(to, from, !valid || !inside);
    } else {
      cp_async_16_unless(to, from, !valid || !inside);
    }
  }
};

// Copies kRows rows of a [rows, head_dim] global tensor into shared memory, 16 bytes per thread and step.
// Rows outside [begin, begin + extent) and columns past the tensor's own head dimension become zero: garbage
// in keys that nobody sees never reaches a product. Steps are issued one by one, so that the main loop can
// spread them over the softmax: in a burst before the products they hold up the ldmatrix behind them.
//
// kOnce: no other block reads them.
template <class Tile, int kRows, int kElementBytes = 2, bool kOnce = false>
struct RowLoader {
  using Layout = SharedLayout<Tile>;
  static constexpr int kChunks = Tile::kHeadDim * kElementBytes / 16;
  static constexpr int kRowBytes = Tile::kHeadDim * kElementBytes;
  static constexpr int kRowStep = Tile::kThreads / kChunks;
  static constexpr int kSteps = kRows / kRowStep;
  static constexpr int kPatterns =
      kRowStep < 8 ? 8 / kRowStep : 1;  // the swizzle repeats after 8 rows
  static_assert(kRows % kRowStep == 0 && Tile::kThreads % kChunks == 0,
                "All threads copy 16 bytes of a row at each step, and steps end with the rows.");

  const char* from;  // this thread's 16 bytes of the next row to copy
  std::int64_t step_bytes;
  std::uint32_t relative;  // that row, counted from `begin`; wraps around to large values before it
  std::uint32_t extent;
  ColumnBytes<kElementBytes> columns;
  std::uint32_t to[kPatterns];

  // `base`: the tensor's first row for this head; rows [first, first + kRows) go to `shared`.
  CUTE_DEVICE RowLoader(std::uint32_t shared, const char* base, std::int64_t stride_token,
                        int head_dim, int first, int begin, int extent_, int thread) {
    const int thread_row = thread / kChunks;
    const int chunk = thread % kChunks;
    from = base + std::int64_t(first + thread_row) * (stride_token * kElementBytes) + chunk * 16;
    step_bytes = stride_token * (kElementBytes * kRowStep);
    relative = first + thread_row - begin;
    extent = extent_;
    columns = ColumnBytes<kElementBytes>(chunk, head_dim);
    CUTE_UNROLL
    for (int i = 0; i < kPatterns; ++i) {
      const int row = thread_row + i * kRowStep;
      to[i] = shared +
              (kElementBytes == 1 ? Layout::kv_offset(row, chunk) : Layout::offset(row, chunk));
    }
  }

  // Step i of kSteps, in order. cp.async reads nothing where it is not valid.
  CUTE_DEVICE void issue(int i) {
    columns.template copy<kOnce>(to[i % kPatterns] + (i - i % kPatterns) * kRowStep * kRowBytes,
                                 from, relative + i * kRowStep < extent);
    from += step_bytes;
  }

  CUTE_DEVICE void issue_all() {
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) issue(i);
  }
};

}  // namespace cutlass_kernels::fa2
