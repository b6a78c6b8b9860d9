// Shared memory of the fa2 kernel and the loads into it.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include <cstdint>

#include "common/ldmatrix.h"

namespace cutlass_kernels::fa2 {

// Q, then the stages of K, then those of V, then what warps that share rows exchange. Rows are head_dim elements
// long, in 16-byte chunks of 8 elements; row r holds chunk c at position c ^ (r % 8), so that the eight rows an
// ldmatrix phase reads lie in eight different bank groups (CuTe's Swizzle<3, 3, log2(head_dim / 8)> on element
// offsets).
template <class Tile>
struct SharedLayout {
  static constexpr int kRowBytes = Tile::kHeadDim * 2;
  static constexpr int kChunks = Tile::kHeadDim / 8;
  static constexpr int kStageBytes = Tile::kBlockN * kRowBytes;
  static constexpr int kQ = 0;
  static constexpr int kK = Tile::kBlockM * kRowBytes;
  static constexpr int kV = kK + Tile::kStages * kStageBytes;
  // fragments [warp][step][row tile][lane]
  static constexpr int kP = kV + Tile::kStages * kStageBytes;
  static constexpr int kPWarpBytes = Tile::kRowTiles * 16 * Tile::kStepN / Tile::kSharers * 2;
  static constexpr int kRowValues = kP + Tile::kWarps * kPWarpBytes;  // floats [row][sharer]
  static constexpr int kBytes =
      Tile::kSharers > 1 ? kRowValues + Tile::kBlockM * Tile::kSharers * 4 : kP;
  // Of a paged cache: the addresses of a block's rows of K and of V. 1 KB, at head dim 128 with 32 keys to a block half
  // of it, is what two blocks of 80 KB each leave of the 164 KB of an A100.
  static constexpr int kTable = kBytes;
  static constexpr int kPagedBytes = kTable + 2 * Tile::kBlockN * 8;

  CUTE_HOST_DEVICE static constexpr int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
  }

  // Bytes from a row's start to chunk `swizzle` ^ `chunk`, swizzle < 8. At head dim 256 it is spelled out that chunks
  // eight apart differ by an immediate: of the plain XOR, ptxas kept 32 addresses in registers. At 128 the plain one
  // is as fast (RESULTS.md).
  CUTE_HOST_DEVICE static constexpr int chunk_offset(int swizzle, int chunk) {
    return Tile::kHeadDim > 128 ? ((swizzle ^ (chunk & 7)) << 4) + (chunk >> 3 << 7)
                                : (swizzle ^ chunk) << 4;
  }
};

// Copies kRows rows of a [rows, head_dim] global tensor into shared memory, 16 bytes per thread and step.
// Rows outside [begin, begin + extent) and columns past the tensor's own head dimension become zero: garbage
// in keys that nobody sees never reaches a product. Steps are issued one by one, so that the main loop can
// spread them over the softmax: in a burst before the products they hold up the ldmatrix behind them.
template <class Tile, int kRows>
struct RowLoader {
  using Layout = SharedLayout<Tile>;
  static constexpr int kRowStep = Tile::kThreads / Layout::kChunks;
  static constexpr int kSteps = kRows / kRowStep;
  static constexpr int kPatterns =
      kRowStep < 8 ? 8 / kRowStep : 1;  // the swizzle repeats after 8 rows
  static_assert(kRows % kRowStep == 0);

  const char* from;  // this thread's 16 bytes of the next row to copy
  std::int64_t step_bytes;
  std::uint32_t relative;  // that row, counted from `begin`; wraps around to large values before it
  std::uint32_t extent;
  bool in_columns;
  std::uint32_t to[kPatterns];

  // `base`: the tensor's first row for this head; rows [first, first + kRows) go to `shared`.
  CUTE_DEVICE RowLoader(std::uint32_t shared, const char* base, std::int64_t stride_token,
                        int head_dim, int first, int begin, int extent_, int thread) {
    const int thread_row = thread / Layout::kChunks;
    const int chunk = thread % Layout::kChunks;
    from = base + std::int64_t(first + thread_row) * (stride_token * 2) + chunk * 16;
    step_bytes = stride_token * (2 * kRowStep);
    relative = first + thread_row - begin;
    extent = extent_;
    in_columns = chunk * 8 < head_dim;
    CUTE_UNROLL
    for (int i = 0; i < kPatterns; ++i) {
      to[i] = shared + Layout::offset(thread_row + i * kRowStep, chunk);
    }
  }

  // Step i of kSteps, in order. cp.async reads nothing where it is not valid.
  CUTE_DEVICE void issue(int i) {
    const bool valid = relative + i * kRowStep < extent && in_columns;
    cp_async_16(to[i % kPatterns] + (i - i % kPatterns) * kRowStep * Layout::kRowBytes, from,
                valid);
    from += step_bytes;
  }

  CUTE_DEVICE void issue_all() {
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) issue(i);
  }
};

}  // namespace cutlass_kernels::fa2
