// The softmax of a step: maxima of S, and P = 2^(scale S - m) in the fragments that O += P V takes.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/softmax.h"
#include "fa2/fragments.h"

namespace cutlass_kernels::fa2 {

// Multiplies the rows of S.
template <class Tile>
CUTE_DEVICE void multiply_rows(typename Fragments<Tile>::S& s,
                               const typename Fragments<Tile>::Rows& factors) {
  constexpr int kTilesN = Fragments<Tile>::kTilesN;
  __syncwarp();  // keeps this a branch
  CUTE_UNROLL
  for (int i = 0; i < Tile::kRowTiles * kTilesN * 4; ++i) {
    s[i / 4 / kTilesN][i / 4 % kTilesN][i % 4] *= factors[i / 4 / kTilesN * 2 + i % 4 / 2];
  }
}

// Each thread's maximum of its part of the rows. If `load`, it issues the loads of the next KV block along the way:
// in a burst before the products, they would hold up the ldmatrix behind them.
template <class Tile, class Loads>
CUTE_DEVICE void take_max(const typename Fragments<Tile>::S& s,
                          typename Fragments<Tile>::Rows& thread_max, Loads& next, bool load) {
  constexpr int kRows = Fragments<Tile>::kRows;
  constexpr int kTilesN = Fragments<Tile>::kTilesN;
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    float value = s[r / 2][0][r % 2 * 2];
    CUTE_UNROLL
    for (int n = 0; n < kTilesN; ++n) {
      value = fmaxf(value, fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
      if (load) next.issue(r * kTilesN + n, kRows * kTilesN);
    }
    thread_max[r] = value;
  }
}

// Multiplies row r of O.
template <class Tile>
CUTE_DEVICE void rescale_row(typename Fragments<Tile>::O& o, int r, float factor) {
  CUTE_UNROLL
  for (int d = 0; d < Fragments<Tile>::kTilesD; ++d) {
    o[r / 2][d][r % 2 * 2] *= factor;
    o[r / 2][d][r % 2 * 2 + 1] *= factor;
  }
}

// Two packed elements of P: tile pair k, row tile pack / 4, fragment register pack % 4, which is (tile 2k, row 0),
// (2k, row 8), (2k + 1, row 0), (2k + 1, row 8).
template <class Tile, class Factor>
CUTE_DEVICE std::uint32_t make_p(OnlineSoftmax<Fragments<Tile>::kRows>& softmax,
                                 const typename Fragments<Tile>::S& s, int k, int pack) {
  const int m = pack / 4;
  const int i = pack % 4;
  const int r = m * 2 + i % 2;
  const float* pair = &s[m][2 * k + i / 2][(i % 2) * 2];
  const float p0 = softmax.exponential(r, pair[0]);
  const float p1 = softmax.exponential(r, pair[1]);
  softmax.partial_sum[r] += p0;
  softmax.partial_sum[r] += p1;
  return Factor::pack(p0, p1);
}

}  // namespace cutlass_kernels::fa2
