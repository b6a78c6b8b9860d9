// Warps that share rows: two give head dimension 256 two row tiles, four 512.
//
// A warp has registers for the output of 16 rows of 256 columns, and with 16 rows every fragment of K and V read from
// shared memory feeds one product. Here a pair of warps has 32 rows: of S each computes 32 of a KV block's 64 keys,
// of O 128 of the 256 columns, so that a fragment feeds two products. Each has P of half the keys and needs all of
// it: the halves are handed over as fragments, through shared memory. At head dimension 512 four warps have a quarter
// each, 16 keys of S and 128 columns of O; where the device has shared memory for few rows only, two warps have halves
// of 16 rows.
//
//            +------------------------------- KV block j --------------------------------+
//  tensor    | S = Q K(j)^T, own 32 keys |               | O += P V(j), own 128 columns  |
//            |                           |               | own 32 keys | the other's 32  |
//  softmax   |                           | mask, max     | P, 16 keys ahead of products  |
//  loads     | V(j)                                      | K(j - 1)                      |
//            A                                           B             P
//
//  A  __syncthreads: K(j) has landed; all warps are done with V(j + 1)
//  B  __syncthreads_or: V(j) has landed; all warps are done with K(j); whether some row's maximum must be raised
//  P  the pair's own barriers: the other's P is in shared memory
//
// Per 128 rows and 64 keys shared memory is busy for 4352 clocks: Q 1024 (both warps of a pair read all of it), K and
// V 1024 each, P 256, loads from global memory 1024. Warps with 16 rows each, 128 per thread block, take 5120: Q 512,
// K and V 2048 each, loads 512. One stage leaves room for two thread blocks per SM (104.5 KB each), which cover each
// other's waits, starts and ends. FlashAttention-2's tile (two thread blocks, too, 16 rows per warp) is a fifth
// slower (benchmarks/results/prefill-fa2.md).
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/named_barrier.h"
#include "fa2/shared_memory.h"

namespace cutlass_kernels::fa2 {

// Hardware barriers. __syncthreads() is barrier 0: all warps arrive and wait.
enum Barrier {
  // Of two warps that share rows, + warp: that warp arrives when its P is written, the other waits. Of four, + their
  // rows: each arrives when its P is written, and waits.
  kPBarrier = 1,
};

// What a warp exchanges with those that share its rows, its neighbours. P is written anew after A and B of the next
// block, when the others have read it; row values after A or B of a later one, or, after the last block, by a warp that
// has waited for the others' P, which these announce after reading them.
template <class Tile>
struct RowSharing {
  using Layout = SharedLayout<Tile>;
  static constexpr int kRowTiles = Tile::kRowTiles;
  static constexpr int kRows = 2 * kRowTiles;  // rows of which a thread holds elements
  static constexpr int kSharers = Tile::kSharers;

  int warp;
  int lane;
  uint4* own_p;          // fragments [step][row tile][lane]
  const uint4* other_p;  // of warp ^ 1
  float* row_values;     // [row][sharer]

  CUTE_DEVICE RowSharing(char* shared_memory, int warp_, int lane_) : warp(warp_), lane(lane_) {
    char* p = shared_memory + Layout::kP;
    own_p = reinterpret_cast<uint4*>(p + warp * Layout::kPWarpBytes);
    other_p = reinterpret_cast<uint4*>(p + (warp ^ 1) * Layout::kPWarpBytes);
    row_values = reinterpret_cast<float*>(shared_memory + Layout::kRowValues);
  }

  // P of 16 keys, step `step` of the warp's own.
  CUTE_DEVICE void write_p(int step, const std::uint32_t (&p)[kRowTiles][4]) const {
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      own_p[(step * kRowTiles + m) * 32 + lane] = make_uint4(p[m][0], p[m][1], p[m][2], p[m][3]);
    }
  }
  CUTE_DEVICE void p_is_written() const {
    if constexpr (kSharers == 2) named_barrier_arrive(kPBarrier + warp, 64);
  }

  CUTE_DEVICE void await_p() const {
    if constexpr (kSharers == 2) {
      named_barrier_wait(kPBarrier + (warp ^ 1), 64);
    } else {
      named_barrier_wait(kPBarrier + warp / kSharers, 32 * kSharers);
    }
  }
  // Of warp ^ other, one of those that share its rows.
  CUTE_DEVICE void read_p(int other, int step, std::uint32_t (&p)[kRowTiles][4]) const {
    constexpr int kOfWarp = Layout::kPWarpBytes / 16;
    const uint4* fragments =
        other == 1 ? other_p : other_p + ((warp ^ other) - (warp ^ 1)) * kOfWarp;
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      const uint4 fragment = fragments[(step * kRowTiles + m) * 32 + lane];
      p[m][0] = fragment.x;
      p[m][1] = fragment.y;
      p[m][2] = fragment.z;
      p[m][3] = fragment.w;
    }
  }

  // One number per row, which all threads of a quad know. Between writing and reading lies a barrier.
  CUTE_DEVICE float& row_value(int r, int of_warp) const {
    const int row = warp / kSharers * (kRowTiles * 16) + r / 2 * 16 + r % 2 * 8 + lane / 4;
    return row_values[row * kSharers + of_warp % kSharers];
  }
  CUTE_DEVICE void write_rows(const float (&values)[kRows]) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (lane % 4 == 0) row_value(r, warp) = values[r];
    }
  }
  CUTE_DEVICE float read_row(int r, int other) const { return row_value(r, warp ^ other); }
};

}  // namespace cutlass_kernels::fa2
