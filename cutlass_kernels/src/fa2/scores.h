// S = Q K^T of 16-bit elements: a warp's rows and one step of keys. For keys of 8 bits see fp8.h.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/ldmatrix.h"
#include "common/ptx/mma.h"
#include "fa2/shared_memory.h"

namespace cutlass_kernels::fa2 {

// s += Q K^T: the warp's rows of Q at `q_rows`, the keys at `keys`, where the ldmatrix addresses of a lane begin.
// Fragments of K are read kAhead steps, of 16 keys and 16 columns, before their products.
// near_end() is called when an eighth of the products is left.
template <class Element, class Tile, int kTilesN, class NearEnd>
CUTE_DEVICE void add_scores(float (&s)[Tile::kRowTiles][kTilesN][4], std::uint32_t q_rows,
                            int swizzle_q, std::uint32_t keys, int swizzle_k, NearEnd&& near_end) {
  using Layout = SharedLayout<Tile>;
  constexpr int kStepsK = Tile::kColumns / 16;
  constexpr int kStepsN = kTilesN / 2;  // a step is one pair of key tiles
  constexpr int kSlots = Tile::kAhead + 1;
  std::uint32_t a[2][Tile::kRowTiles][4];  // Q: (slot, row tile, fragment)
  std::uint32_t b[kSlots][4];              // K: (slot, two fragments of one key tile each)
  auto read_q = [&](int kd) {
    CUTE_UNROLL
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      ldmatrix_x4(a[kd % 2][m],
                  Layout::chunk_at(q_rows, swizzle_q, 2 * kd) + m * 16 * Layout::kRowBytes);
    }
  };
  auto read_k = [&](int step) {
    if (step < kStepsK * kStepsN) {
      ldmatrix_x4(b[step % kSlots], Layout::chunk_at(keys, swizzle_k, 2 * (step / kStepsN)) +
                                        step % kStepsN * 16 * Layout::kRowBytes);
    }
  };
  read_q(0);
  CUTE_UNROLL
  for (int step = 0; step < Tile::kAhead; ++step) read_k(step);
  CUTE_UNROLL
  for (int kd = 0; kd < kStepsK; ++kd) {
    if (kd + 1 < kStepsK) read_q(kd + 1);
    if (kd == kStepsK * 7 / 8) near_end();
    CUTE_UNROLL
    for (int pair = 0; pair < kStepsN; ++pair) {
      const int step = kd * kStepsN + pair;
      read_k(step + Tile::kAhead);
      CUTE_UNROLL
      for (int m = 0; m < Tile::kRowTiles; ++m) {
        mma<Element>(s[m][2 * pair], a[kd % 2][m], b[step % kSlots][0], b[step % kSlots][1]);
        mma<Element>(s[m][2 * pair + 1], a[kd % 2][m], b[step % kSlots][2], b[step % kSlots][3]);
      }
    }
  }
}

}  // namespace cutlass_kernels::fa2
