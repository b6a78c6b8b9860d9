// S = Q K^T and O += P V of a warp, from keys of which there is one copy in shared memory. For keys of 8 bits see
// mma_products_fp8.h.
//
// Row r of the keys is kKeyRowBytes long, and the 16-byte chunk c of each 128 bytes lies at position c ^ (r % 8): the
// eight rows that an ldmatrix phase reads lie in eight different bank groups. A row is a multiple of 128 bytes, so an
// address is that of the first chunk, with the chunk's index added to bits 4 to 6 by XOR.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/ldmatrix.h"
#include "common/ptx/mma.h"
#include "common/ptx/named_barrier.h"
#include "latent/fa2/config.h"

namespace cutlass_kernels::mla::mma_sync {

// What a warp keeps of Q: its half of each panel (panel, 16 columns, fragment).
template <class Tile>
using KeptQ = std::uint32_t[Tile::kQPanels][2][4];

// Makes the compiler keep a number in a register. Left alone, it computes addresses anew in each KV block, a chain of
// ten instructions in front of the first ldmatrix.
CUTE_DEVICE std::uint32_t held(std::uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Where the lane's ldmatrix addresses begin in 16 rows: lanes 0-15 at rows 0-15, lanes 16-31 at the same rows eight
// columns on. Of Q the A fragment; of V, transposed, the B fragments of two tiles of O.
template <int kRowBytes>
CUTE_DEVICE std::uint32_t sixteen_rows(std::uint32_t shared, int lane) {
  return shared + lane % 16 * kRowBytes + ((lane / 16 ^ lane % 8) << 4);
}

// In 16 keys: lanes 0-7 at keys 0-7, 8-15 at the same keys eight columns on, the others at keys 8-15. The B fragments
// of two tiles of S.
template <class Tile>
CUTE_DEVICE std::uint32_t sixteen_keys(std::uint32_t shared, int lane) {
  const int key = lane % 8 + lane / 16 * 8;
  return shared + key * Tile::kKeyRowBytes + ((lane / 8 % 2 ^ lane % 8) << 4);
}

// Its half of a panel of Q, from 16 rows (sixteen_rows()) that begin with its half of the first panel.
CUTE_DEVICE void read_q(std::uint32_t (&q)[2][4], std::uint32_t rows, int panel) {
  ldmatrix_x4(q[0], rows + panel * 128);
  ldmatrix_x4(q[1], (rows ^ 32) + panel * 128);
}

// s = Q K^T of the warp's 16 rows, 8 kPartTiles keys and half of the columns, which begin at `keys` (sixteen_keys()).
// `q_rows`: the rows of Q (sixteen_rows()) without the panels that are kept. Fragments of K are read kAhead ldmatrix
// before their products, those of Q a panel before. next(panel) is called along the way.
template <class Element, class Tile, class Next>
CUTE_DEVICE void take_scores(float (&s)[Tile::kPartTiles][4], std::uint32_t keys,
                             const KeptQ<Tile>& kept, std::uint32_t q_rows, Next&& next) {
  constexpr int kTiles = Tile::kPartTiles;
  constexpr int kPairs = kTiles / 2;
  constexpr int kChains = Tile::kChains;
  constexpr int kReads = Tile::kPanels * 2 * kPairs;
  constexpr int kAhead = kTiles == 4 ? 3 : 5;
  constexpr int kSlots = kAhead + 1;
  std::uint32_t b[kSlots][4];
  auto read_k = [&](int read) {
    if (read >= kReads) return;
    const int step = read / kPairs;  // of 16 columns
    ldmatrix_x4(b[read % kSlots], (step % 2 == 0 ? keys : keys ^ 32) + step / 2 * 128 +
                                      read % kPairs * 16 * Tile::kKeyRowBytes);
  };
  std::uint32_t q[2][2][4];  // (panel % 2, 16 columns, fragment)
  auto begin_q = [&](int panel) {
    if (panel >= Tile::kQPanels && panel < Tile::kPanels) {
      read_q(q[panel % 2], q_rows, panel - Tile::kQPanels);
    }
  };
  auto get_q = [&](int step) -> const std::uint32_t (&)[4] {
    if (step / 2 < Tile::kQPanels) return kept[step / 2][step % 2];
    return q[step / 2 % 2][step % 2];
  };
  float sums[kTiles][kChains][4];
  CUTE_UNROLL
  for (int i = 0; i < kTiles * kChains * 4; ++i) {
    sums[i / 4 / kChains][i / 4 % kChains][i % 4] = 0.0f;
  }
  CUTE_UNROLL
  for (int read = 0; read < kAhead; ++read) read_k(read);
  begin_q(0);
  CUTE_UNROLL
  for (int step = 0; step < 2 * Tile::kPanels; ++step) {
    if (step % 2 == 0) {
      begin_q(step / 2 + 1);
      next(step / 2);
    }
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const int read = step * kPairs + pair;
      read_k(read + kAhead);
      const std::uint32_t (&fragments)[4] = b[read % kSlots];
      mma<Element>(sums[2 * pair][step % kChains], get_q(step), fragments[0], fragments[1]);
      mma<Element>(sums[2 * pair + 1][step % kChains], get_q(step), fragments[2], fragments[3]);
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) {
    s[i / 4][i % 4] = sums[i / 4][0][i % 4];
    if constexpr (kChains == 2) s[i / 4][i % 4] += sums[i / 4][1][i % 4];
  }
}

// Adds the partner's partial sums, of the other half of the columns, to this warp's keys. `sums` (8 keys, lane): what
// the two exchange.
template <class Tile>
CUTE_DEVICE void add_halves(float (&s)[Tile::kTilesN][4], const float (&part)[Tile::kPartTiles][4],
                            int half, int barrier, float4* own_sums, const float4* other_sums) {
  constexpr int kTilesN = Tile::kTilesN;
  CUTE_UNROLL
  for (int n = 0; n < kTilesN; ++n) {
    float sent[4];
    CUTE_UNROLL
    for (int e = 0; e < 4; ++e) {
      sent[e] = half == 0 ? part[kTilesN + n][e] : part[n][e];
      s[n][e] = half == 0 ? part[n][e] : part[kTilesN + n][e];
    }
    own_sums[n * 32] = {sent[0], sent[1], sent[2], sent[3]};
  }
  named_barrier_wait(barrier, 64);
  CUTE_UNROLL
  for (int n = 0; n < kTilesN; ++n) {
    const float4 got = other_sums[n * 32];
    s[n][0] += got.x;
    s[n][1] += got.y;
    s[n][2] += got.z;
    s[n][3] += got.w;
  }
}

// o += P V of the warp's row tiles and columns. `values`: the first of its columns in the KV block (sixteen_rows()).
// Fragments of V are read kAhead ldmatrix before their products, the first of them by the constructor: while the warp
// waits for P of the others.
template <class Element, class Tile>
struct ValueProducts {
  static constexpr int kRowTiles = Tile::kOutRowTiles;
  static constexpr int kSteps = Tile::kBlockN / 16;
  static constexpr int kPairs = Tile::kTilesD / 2;  // of tiles of 8 columns
  static constexpr int kAhead = Tile::kTilesD == 16 ? 3 : 5;
  static constexpr int kSlots = kAhead + 1;

  std::uint32_t values;
  std::uint32_t b[kSlots][4];

  CUTE_DEVICE explicit ValueProducts(std::uint32_t values_) : values(values_) {
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) read(i);
  }

  CUTE_DEVICE void read(int i) {
    if (i >= kSteps * kPairs) return;
    const int pair = i % kPairs;
    ldmatrix_x4_trans(b[i % kSlots], (values ^ (pair % 4 * 2 << 4)) + pair / 4 * 128 +
                                         i / kPairs * 16 * Tile::kKeyRowBytes);
  }

  // `p`: P of the first row tile, fragments (row tile, 16 keys, lane).
  CUTE_DEVICE void add_to(float (&o)[kRowTiles][Tile::kTilesD][4], const uint4* p) {
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
        const int i = step * kPairs + pair;
        read(i + kAhead);
        const std::uint32_t (&fragments)[4] = b[i % kSlots];
        CUTE_UNROLL
        for (int m = 0; m < kRowTiles; ++m) {
          mma<Element>(o[m][2 * pair], a[m], fragments[0], fragments[1]);
          mma<Element>(o[m][2 * pair + 1], a[m], fragments[2], fragments[3]);
        }
      }
    }
  }
};

}  // namespace cutlass_kernels::mla::mma_sync
