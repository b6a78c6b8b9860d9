// S = Q K^T and O += P V of a warp, from keys of which there is one copy in shared memory.
//
// Row r of the keys is kRowBytes long, and the 16-byte chunk c of each 128 bytes lies at position c ^ (r % 8): the eight
// rows that an ldmatrix phase reads lie in eight different bank groups. A row is a multiple of 128 bytes, so an address
// is that of the first chunk, with the chunk's number added to bits 4 to 6 by XOR.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/ldmatrix.h"
#include "common/ptx/mma.h"
#include "mla/mma_config.h"

namespace cutlass_kernels::mla::mma_sync {

constexpr int kStepsK = (kLatentDim + kRopeDim) / 16;  // of S

// Fragment of Q for columns 16 step on, from `rows`, the lane's address in 16 rows of Q.
CUTE_DEVICE void read_q(std::uint32_t (&q)[4], std::uint32_t rows, int step) {
  ldmatrix_x4(q, (rows ^ (step % 4 * 2 << 4)) + step / 4 * 128);
}

// Where the lane's ldmatrix addresses begin in 16 rows: lanes 0-15 at rows 0-15, lanes 16-31 at the same rows eight
// columns on. Of Q the A fragment; of V, transposed, the B fragments of two tiles of O.
template <int kRowBytes>
CUTE_DEVICE std::uint32_t sixteen_rows(std::uint32_t shared, int lane) {
  return shared + lane % 16 * kRowBytes + ((lane / 16 ^ lane % 8) << 4);
}

// In eight keys: lanes 0-7 at keys 0-7, the others at the same keys 8, 16 and 24 columns on. The B fragments of two
// steps of S.
template <class Tile>
CUTE_DEVICE std::uint32_t eight_keys(std::uint32_t shared, int lane) {
  return shared + lane % 8 * Tile::kRowBytes + ((lane / 8 ^ lane % 8) << 4);
}

// Fragments of Q that a warp keeps: (16 columns, fragment).
template <class Tile>
using KeptQ = std::uint32_t[Tile::kQInRegisters ? Tile::kQSteps : 1][4];

// s = Q K^T of the warp's 16 rows and 8 kTilesN keys, which begin at `keys` (eight_keys()). `q_rows`: the rows of Q in
// shared memory (sixteen_rows()), without the columns that are kept in registers. Fragments of K are read kAhead ldmatrix
// before their products, those of Q two steps before.
template <class Element, class Tile>
CUTE_DEVICE void take_scores(float (&s)[Tile::kTilesN][4], std::uint32_t keys,
                             const KeptQ<Tile>& kept, std::uint32_t q_rows) {
  constexpr int kTilesN = Tile::kTilesN;
  constexpr int kChains = Tile::kChains;
  constexpr int kReads = kStepsK / 2 * kTilesN;
  constexpr int kAhead = Tile::kQSteps == 32 ? 2 : 4;
  constexpr int kSlots = kAhead + 1;
  std::uint32_t b[kSlots][4];
  auto read_k = [&](int read) {
    if (read >= kReads) return;
    const int pair = read / kTilesN;  // of steps
    ldmatrix_x4(b[read % kSlots], (keys ^ (pair % 2 * 4 << 4)) + pair / 2 * 128 +
                                      read % kTilesN * 8 * Tile::kRowBytes);
  };
  std::uint32_t q[4][4];  // (step % 4, fragment)
  auto begin_q = [&](int step) {
    if (step >= Tile::kQSteps && step < kStepsK) read_q(q[step % 4], q_rows, step - Tile::kQSteps);
  };
  auto get_q = [&](int step) -> const std::uint32_t (&)[4] {
    if (step < Tile::kQSteps) return kept[step];
    return q[step % 4];
  };
  float sums[kTilesN][kChains][4];
  CUTE_UNROLL
  for (int i = 0; i < kTilesN * kChains * 4; ++i) {
    sums[i / 4 / kChains][i / 4 % kChains][i % 4] = 0.0f;
  }
  CUTE_UNROLL
  for (int read = 0; read < kAhead; ++read) read_k(read);
  begin_q(0);
  begin_q(1);
  CUTE_UNROLL
  for (int pair = 0; pair < kStepsK / 2; ++pair) {
    begin_q(2 * pair + 2);
    begin_q(2 * pair + 3);
    const std::uint32_t (&q0)[4] = get_q(2 * pair);
    const std::uint32_t (&q1)[4] = get_q(2 * pair + 1);
    CUTE_UNROLL
    for (int n = 0; n < kTilesN; ++n) {
      const int read = pair * kTilesN + n;
      read_k(read + kAhead);
      const std::uint32_t (&fragment)[4] = b[read % kSlots];
      mma<Element>(sums[n][2 * pair % kChains], q0, fragment[0], fragment[1]);
      mma<Element>(sums[n][(2 * pair + 1) % kChains], q1, fragment[2], fragment[3]);
    }
  }
  CUTE_UNROLL
  for (int n = 0; n < kTilesN; ++n) {
    CUTE_UNROLL
    for (int e = 0; e < 4; ++e) {
      s[n][e] = sums[n][0][e];
      CUTE_UNROLL
      for (int chain = 1; chain < kChains; ++chain) s[n][e] += sums[n][chain][e];
    }
  }
}

// o += P V of the warp's row tiles and columns. `values`: the first of its columns in the KV block (sixteen_rows()).
// `p`: P of its first row tile, fragments (row tile, 16 keys, lane).
template <class Element, class Tile>
CUTE_DEVICE void add_values(float (&o)[Tile::kOutRowTiles][Tile::kTilesD][4], std::uint32_t values,
                            const uint4* p) {
  constexpr int kRowTiles = Tile::kOutRowTiles;
  constexpr int kSteps = Tile::kBlockN / 16;
  constexpr int kPairs = Tile::kTilesD / 2;  // of tiles of 8 columns
  constexpr int kAhead = 3;
  constexpr int kSlots = kAhead + 1;
  std::uint32_t b[kSlots][4];
  auto read_v = [&](int read) {
    if (read >= kSteps * kPairs) return;
    const int pair = read % kPairs;
    ldmatrix_x4_trans(b[read % kSlots], (values ^ (pair % 4 * 2 << 4)) + pair / 4 * 128 +
                                            read / kPairs * 16 * Tile::kRowBytes);
  };
  CUTE_UNROLL
  for (int read = 0; read < kAhead; ++read) read_v(read);
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    std::uint32_t a[kRowTiles][4];
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      const uint4 fragment = p[(m * kSteps + step) * 32];
      a[m][0] = fragment.x;
      a[m][1] = fragment.y;
      a[m][2] = fragment.z;
      a[m][3] = fragment.w;
    }
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const int read = step * kPairs + pair;
      read_v(read + kAhead);
      const std::uint32_t (&fragment)[4] = b[read % kSlots];
      CUTE_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        mma<Element>(o[m][2 * pair], a[m], fragment[0], fragment[1]);
        mma<Element>(o[m][2 * pair + 1], a[m], fragment[2], fragment[3]);
      }
    }
  }
}

}  // namespace cutlass_kernels::mla::mma_sync
