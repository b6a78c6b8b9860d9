// Keys and values of 8 bits below 16-bit queries: from bytes in shared memory to the B fragments of mma.sync.
//
// ldmatrix moves 16-bit elements; here each is two bytes. Of 16 bytes per row
//   K, not transposed: lane t gets d = 4 (t % 4) + {0, 1, 2, 3} of key t / 4. The first two are rows
//      2 (t % 4) + {0, 1} of B, the others rows 8 further on, if the rows of B, and the columns of Q with them, are
//      numbered so: Q is stored in that order (packed_rows.h).
//   V, transposed: lane t gets d = 2 (t / 4) + {0, 1} of keys 2 (t % 4) and 2 (t % 4) + 1. Even and odd d are B
//      fragments of two tiles: a tile of O has every other column of 16, and a lane, of both, four columns that follow
//      one another.
// So no lane needs what another has; conversion is all there is to do.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/element_types.h"
#include "common/fp8_operands.h"
#include "common/ptx/ldmatrix.h"
#include "common/ptx/mma.h"
#include "fa2/shared_memory.h"

namespace cutlass_kernels::fa2 {

// s += Q K^T: a warp's rows of Q at `q_rows` and a step of keys at `keys`, where ldmatrix addresses of a lane begin.
// Fragments of K are read kAhead steps, of 16 keys and 32 columns, before their products.
template <class Format, class Tile, int kTilesN>
CUTE_DEVICE void add_scores_fp8(float (&s)[Tile::kRowTiles][kTilesN][4], std::uint32_t q_rows,
                                int swizzle_q, std::uint32_t keys, int swizzle_k) {
  using Layout = SharedLayout<Tile>;
  constexpr int kColumns = Tile::kHeadDim / 32;
  constexpr int kPairs = kTilesN / 2;
  constexpr int kSlots = Tile::kAhead + 1;
  std::uint32_t words[kSlots][4];  // (keys 0-7, d 0-15), (0-7, 16-31), (8-15, 0-15), (8-15, 16-31)
  std::uint32_t a[4][Tile::kRowTiles][4];  // Q: (kd % 4, row tile, fragment)
  auto read_q = [&](int kd) {
    CUTE_UNROLL
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      ldmatrix_x4(a[kd % 4][m],
                  q_rows + m * 16 * Layout::kRowBytes + Layout::chunk_offset(swizzle_q, 2 * kd));
    }
  };
  auto read_k = [&](int step) {
    if (step < kColumns * kPairs) {
      ldmatrix_x4(words[step % kSlots], keys + step % kPairs * 16 * Layout::kKvRowBytes +
                                            Layout::kv_chunk_offset(swizzle_k, step / kPairs * 2));
    }
  };
  CUTE_UNROLL
  for (int step = 0; step < Tile::kAhead; ++step) read_k(step);
  read_q(0);
  read_q(1);
  CUTE_UNROLL
  for (int column = 0; column < kColumns; ++column) {
    if (column + 1 < kColumns) {
      read_q(2 * column + 2);
      read_q(2 * column + 3);
    }
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const int step = column * kPairs + pair;
      read_k(step + Tile::kAhead);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int n = i % 2;
        const int half = i / 2;
        const std::uint32_t word = words[step % kSlots][2 * n + half];
        const std::uint32_t b0 = converted<Format, 0, 1>(word);
        const std::uint32_t b1 = converted<Format, 2, 3>(word);
        CUTE_UNROLL
        for (int m = 0; m < Tile::kRowTiles; ++m) {
          mma<fp16>(s[m][2 * pair + n], a[(2 * column + half) % 4][m], b0, b1);
        }
      }
    }
  }
}

// o += P V: make_p(k, i) gives register i % 4 of the fragment of P for row tile i / 4 and keys 16 k on. Of 16 columns
// d, tile 2 (d / 16) of `o` has the even ones, the next one the odd ones.
template <class Format, class Tile, int kSteps, class MakeP>
CUTE_DEVICE void add_values_fp8(float (&o)[Tile::kRowTiles][Tile::kHeadDim / 8][4],
                                std::uint32_t values, int swizzle_v, MakeP&& make_p) {
  using Layout = SharedLayout<Tile>;
  constexpr int kColumns = Tile::kHeadDim / 32;
  constexpr int kSlots = Tile::kAhead + 1;
  std::uint32_t words[kSlots][4];  // (keys 0-7, d 0-15), (8-15, 0-15), (0-7, 16-31), (8-15, 16-31)
  auto read_v = [&](int step) {
    if (step < kColumns * kSteps) {
      ldmatrix_x4_trans(words[step % kSlots],
                        values + step / kColumns * 16 * Layout::kKvRowBytes +
                            Layout::kv_chunk_offset(swizzle_v, step % kColumns * 2));
    }
  };
  CUTE_UNROLL
  for (int step = 0; step < Tile::kAhead; ++step) read_v(step);
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    std::uint32_t p[Tile::kRowTiles][4];  // P: (row tile, fragment)
    CUTE_UNROLL
    for (int i = 0; i < Tile::kRowTiles * 4; ++i) p[i / 4][i % 4] = make_p(k, i);
    CUTE_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      const int step = k * kColumns + column;
      read_v(step + Tile::kAhead);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t low = words[step % kSlots][2 * half];
        const std::uint32_t high = words[step % kSlots][2 * half + 1];
        const int tile = 4 * column + 2 * half;
        std::uint32_t even[2], odd[2];
        convert_alternately<Format>(low, even[0], odd[0]);
        convert_alternately<Format>(high, even[1], odd[1]);
        CUTE_UNROLL
        for (int m = 0; m < Tile::kRowTiles; ++m) {
          mma<fp16>(o[m][tile], p[m], even[0], even[1]);
          mma<fp16>(o[m][tile + 1], p[m], odd[0], odd[1]);
        }
      }
    }
  }
}

}  // namespace cutlass_kernels::fa2
