// The layout of shared memory.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace cutlass_kernels::fa2 {

// Q, then the stages of K, then those of V, then what warps that share rows exchange. Rows are head_dim elements
// long, in 16-byte chunks of 8 elements (K and V of 8 bits: of 16). Row r holds chunk c at position c ^ (r % 8), so
// that the eight rows an ldmatrix phase reads lie in eight different bank groups (CuTe's Swizzle<3, 3, log2(head_dim
// / 8)> on element offsets).
//
//   Q  (kBlockM, head_dim)           K, V  (kStages, kBlockN, head_dim)
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
  static constexpr int kRowFactors = kP;                              // of 8-bit keys: floats [row] (packed_rows.h)
  static constexpr int kBytes = Tile::kSharers > 1 ? kRowValues + Tile::kBlockM * Tile::kSharers * 4
                                                   : kP + (Tile::kKvBytes == 1 ? Tile::kBlockM * 4 : 0);
  // Of a paged cache: the addresses of a KV block's rows of K and of V. 1 KB, or half of it at head dimension 128
  // with 32 keys per KV block, is what two thread blocks of 80 KB each leave of the 164 KB of an A100.
  static constexpr int kTable = kBytes;
  static constexpr int kPagedBytes = kTable + 2 * Tile::kBlockN * 8;

  CUTE_HOST_DEVICE static constexpr int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
  }

  // The same of K and V. Two rows of 64 bytes lie beside each other: there the pairs of rows take turns.
  CUTE_HOST_DEVICE static constexpr int kv_swizzle(int row) { return kKvChunks < 8 ? row >> 1 & 3 : row & 7; }
  CUTE_HOST_DEVICE static constexpr int kv_offset(int row, int chunk) {
    return row * kKvRowBytes + ((chunk ^ kv_swizzle(row)) << 4);
  }

  // Bytes from a row's start to chunk `swizzle` ^ `chunk`, swizzle < 8. At head dim 256 it is spelled out that chunks
  // eight apart differ by an immediate: of the plain XOR, ptxas kept 32 addresses in registers. At 128 the plain one
  // is as fast (benchmarks/results/log/2026-11-21.md).
  CUTE_HOST_DEVICE static constexpr int chunk_offset(int swizzle, int chunk) {
    return Tile::kHeadDim > 128 ? ((swizzle ^ (chunk & 7)) << 4) + (chunk >> 3 << 7) : (swizzle ^ chunk) << 4;
  }
  // Where that chunk begins. In turns, instructions of one warp delay the products of another: one XOR per address is
  // part of what made a prototype 432 TFLOP/s fast, and not 391 (benchmarks/results/log/2026-11-25.md).
  CUTE_HOST_DEVICE static constexpr std::uint32_t chunk_at(std::uint32_t row, int swizzle, int chunk) {
    return Tile::kTakesTurns ? ((row + (swizzle << 4)) ^ ((chunk & 7) << 4)) + (chunk >> 3 << 7)
                             : row + chunk_offset(swizzle, chunk);
  }
  CUTE_HOST_DEVICE static constexpr int kv_chunk_offset(int swizzle, int chunk) {
    return kKvChunks > 8 ? ((swizzle ^ (chunk & 7)) << 4) + (chunk >> 3 << 7) : (swizzle ^ chunk) << 4;
  }
};

}  // namespace cutlass_kernels::fa2
