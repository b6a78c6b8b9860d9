// S = Q K^T and O += P V of a warp, from keys of which there is one copy in shared memory. Keys of 8 bits come
// last.
//
// Row r of the keys is kKeyRowBytes long, and the 16-byte chunk c of each 128 bytes lies at position c ^ (r % 8): the
// eight rows that an ldmatrix phase reads lie in eight different bank groups. A row is a multiple of 128 bytes, so an
// address is that of the first chunk, with the chunk's index added to bits 4 to 6 by XOR.
#pragma once

#include <cute/config.hpp>

#include <cstdint>
#include <type_traits>

#include "common/fp8_operands.h"
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
// before their products, those of Q a panel before. next(panel) is called along the way. The last panel, of the
// position, is zero unless has_positions: a predicate skips its products, 6 % of the tensor cores' work.
template <class Element, class Tile, class Next>
CUTE_DEVICE void take_scores(float (&s)[Tile::kPartTiles][4], std::uint32_t keys, const KeptQ<Tile>& kept,
                             std::uint32_t q_rows, bool has_positions, Next&& next) {
  constexpr int kTiles = Tile::kPartTiles;
  constexpr int kPairs = kTiles / 2;
  constexpr int kChains = Tile::kChains;
  constexpr int kReads = Tile::kPanels * 2 * kPairs;
  constexpr int kAhead = kTiles == 4 ? 3 : 5;
  constexpr int kBuffers = kAhead + 1;
  std::uint32_t b[kBuffers][4];
  auto read_k = [&](int read) {
    if (read >= kReads) return;
    const int step = read / kPairs;  // of 16 columns
    ldmatrix_x4(b[read % kBuffers],
                (step % 2 == 0 ? keys : keys ^ 32) + step / 2 * 128 + read % kPairs * 16 * Tile::kKeyRowBytes);
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
    if (step / 2 == Tile::kPanels - 1 && !has_positions) continue;
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const int read = step * kPairs + pair;
      read_k(read + kAhead);
      const std::uint32_t (&fragments)[4] = b[read % kBuffers];
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
CUTE_DEVICE void add_halves(float (&s)[Tile::kTilesN][4], const float (&part)[Tile::kPartTiles][4], int half,
                            int barrier, float4* own_sums, const float4* other_sums) {
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
  static constexpr int kBuffers = kAhead + 1;

  std::uint32_t values;
  std::uint32_t b[kBuffers][4];

  CUTE_DEVICE explicit ValueProducts(std::uint32_t values_) : values(values_) {
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) read(i);
  }

  CUTE_DEVICE void read(int i) {
    if (i >= kSteps * kPairs) return;
    const int pair = i % kPairs;
    ldmatrix_x4_trans(b[i % kBuffers],
                      (values ^ (pair % 4 * 2 << 4)) + pair / 4 * 128 + i / kPairs * 16 * Tile::kKeyRowBytes);
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
        const std::uint32_t (&fragments)[4] = b[i % kBuffers];
        CUTE_UNROLL
        for (int m = 0; m < kRowTiles; ++m) {
          mma<Element>(o[m][2 * pair], a[m], fragments[0], fragments[1]);
          mma<Element>(o[m][2 * pair + 1], a[m], fragments[2], fragments[3]);
        }
      }
    }
  }
};

// ---- The same for keys of 8 bits: from bytes in shared memory to the B fragments of mma.sync.
//
// ldmatrix moves 16-bit elements; here each is two bytes, and fa2/products.h says what a lane then has. Of 16 bytes per
// row:
//   S   four columns that follow one another, of one key. Of each 16 columns a lane takes the same four of Q.
//   O   an even and an odd column of two keys: B fragments of two tiles. A tile of O has every other column of 16.
// Rows of keys are an odd number of 16-byte chunks apart, so there is no swizzle, and addresses are sums.

// s = Q K^T, as take_scores(). An ldmatrix reads 32 columns of 16 keys, for two products of each of two tiles.
template <class Kv, class Tile>
CUTE_DEVICE void take_scores_fp8(float (&s)[Tile::kPartTiles][4], std::uint32_t keys, const KeptQ<Tile>& kept) {
  constexpr int kTiles = Tile::kPartTiles;
  constexpr int kPairs = kTiles / 2;
  constexpr int kChains = Tile::kChains;
  constexpr int kReads = Tile::kPanels * kPairs;
  constexpr int kAhead = 3;
  constexpr int kBuffers = kAhead + 1;
  static_assert(Tile::kQPanels == Tile::kPanels);
  std::uint32_t words[kBuffers][4];  // (keys 0-7, columns 0-15), (0-7, 16-31), (8-15, 0-15), ...
  auto read_k = [&](int read) {
    if (read >= kReads) return;
    ldmatrix_x4(words[read % kBuffers],
                keys + read / kPairs * Tile::kKeyPanelBytes + read % kPairs * 16 * Tile::kKeyRowBytes);
  };
  float sums[kTiles][kChains][4];
  CUTE_UNROLL
  for (int i = 0; i < kTiles * kChains * 4; ++i) {
    sums[i / 4 / kChains][i / 4 % kChains][i % 4] = 0.0f;
  }
  CUTE_UNROLL
  for (int read = 0; read < kAhead; ++read) read_k(read);
  CUTE_UNROLL
  for (int read = 0; read < kReads; ++read) {
    read_k(read + kAhead);
    const int panel = read / kPairs;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int step = i / 2;
      const int tile = read % kPairs * 2 + i % 2;
      const std::uint32_t word = words[read % kBuffers][i % 2 * 2 + step];
      mma<fp16>(sums[tile][step % kChains], kept[panel][step], converted<Kv, 0, 1>(word), converted<Kv, 2, 3>(word));
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) {
    s[i / 4][i % 4] = sums[i / 4][0][i % 4];
    if constexpr (kChains == 2) s[i / 4][i % 4] += sums[i / 4][1][i % 4];
  }
}

// volatile: otherwise ptxas reads all of P first, and spills.
CUTE_DEVICE void read_p(std::uint32_t (&a)[4], std::uint32_t from) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(from)
               : "memory");
}

// o += P V, as ValueProducts. An ldmatrix reads 32 columns of 16 keys, for a product of each of four tiles.
template <class Kv, class Tile>
struct ValueProductsFp8 {
  static constexpr int kRowTiles = Tile::kOutRowTiles;
  static constexpr int kSteps = Tile::kBlockN / 16;
  static constexpr int kReads = Tile::kTilesD / 4;  // of 16 keys
  static constexpr int kAllReads = kSteps * kReads;
  static_assert(Tile::kTilesD % 4 == 0);
  static constexpr int kAhead = 3;
  static constexpr int kBuffers = kAhead + 1;

  std::uint32_t values;
  std::uint32_t words[kBuffers][4];  // (keys 0-7, columns 0-15), (8-15, 0-15), (0-7, 16-31), ...

  CUTE_DEVICE explicit ValueProductsFp8(std::uint32_t values_) : values(values_) {
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) read(i);
  }

  CUTE_DEVICE void read(int i) {
    if (i >= kAllReads) return;
    ldmatrix_x4_trans(words[i % kBuffers], values + i % kReads * 32 + i / kReads * 16 * Tile::kKeyRowBytes);
  }

  // `p`: P of the first row tile, fragments (row tile, 16 keys, lane). next(read) is called after each read of V.
  template <class Next>
  CUTE_DEVICE void add_to(float (&o)[kRowTiles][Tile::kTilesD][4], std::uint32_t p, Next&& next) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t a[kRowTiles][4];
      CUTE_UNROLL
      for (int m = 0; m < kRowTiles; ++m) read_p(a[m], p + (m * kSteps + step) * 512);
      CUTE_UNROLL
      for (int column = 0; column < kReads; ++column) {
        const int i = step * kReads + column;
        read(i + kAhead);
        next(i);
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t low = words[i % kBuffers][2 * half];
          const std::uint32_t high = words[i % kBuffers][2 * half + 1];
          const int tile = 4 * column + 2 * half;
          std::uint32_t even[2], odd[2];
          convert_alternately<Kv>(low, even[0], odd[0]);
          convert_alternately<Kv>(high, even[1], odd[1]);
          CUTE_UNROLL
          for (int m = 0; m < kRowTiles; ++m) {
            mma<fp16>(o[m][tile], a[m], even[0], even[1]);
            mma<fp16>(o[m][tile + 1], a[m], odd[0], odd[1]);
          }
        }
      }
    }
  }
};

// A lane's first ldmatrix address: in 16 keys and its half of the columns, for S; in its columns, for O.
template <class Tile>
CUTE_DEVICE std::uint32_t sixteen_fp8_keys(std::uint32_t shared, int lane, int half) {
  const int key = lane % 8 + lane / 16 * 8;
  return shared + key * Tile::kKeyRowBytes + lane / 8 % 2 * 16 + half * 32;
}
template <class Tile>
CUTE_DEVICE std::uint32_t fp8_values(std::uint32_t shared, int lane, int column) {
  return shared + lane % 16 * Tile::kKeyRowBytes + lane / 16 * 16 + column;
}

// Q of a warp as fp16 A fragments, whose columns are permuted as those of the keys are. Rows of bf16 that do not fit
// into fp16 are scaled, and their scores scaled back: each half of the columns has its own factor.
template <class Element, class Tile>
struct Fp16Q {
  static constexpr bool kScalesRows = std::is_same_v<Element, bf16>;

  KeptQ<Tile> fragments;
  float factors[2];  // of the scores of rows lane / 4 and 8 further on

  // From 16 rows in shared memory.
  CUTE_DEVICE Fp16Q(std::uint32_t rows, int half, int lane) {
    const int row = lane / 4;
    CUTE_UNROLL
    for (int i = 0; i < Tile::kPanels * 4; ++i) {
      const int panel = i / 4, step = i / 2 % 2, r = i % 2;
      const int chunk = half * 4 + step * 2 + lane % 4 / 2;
      const std::uint32_t at =
          rows + (row + r * 8) * Tile::kRowBytes + panel * 128 + ((chunk ^ row) << 4) + lane % 2 * 8;
      std::uint32_t (&fragment)[4] = fragments[panel][step];
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(fragment[r]), "=r"(fragment[r + 2]) : "r"(at) : "memory");
    }
    if constexpr (kScalesRows) {
      scale_row(0);
      scale_row(1);
    }
  }

  template <int kTiles>
  CUTE_DEVICE void scale_back(float (&s)[kTiles][4]) const {
    if constexpr (kScalesRows) {
      CUTE_UNROLL
      for (int e = 0; e < kTiles * 4; ++e) s[e / 4][e % 4] *= factors[e / 2 % 2];
    }
  }

 private:
  // Row r of the lane's: elements r and r + 2 of the fragments. Beside an infinite number the others do not count.
  CUTE_DEVICE void scale_row(int r) {
    constexpr int kPairs = Tile::kPanels * 4;
    const auto pair = [&](int i) -> std::uint32_t& { return fragments[i / 4][i / 2 % 2][i % 2 * 2 + r]; };
    std::uint32_t magnitudes = 0;  // the largest of two columns
    CUTE_UNROLL
    for (int i = 0; i < kPairs; ++i) magnitudes = __vmaxu2(magnitudes, pair(i) & 0x7fff7fffu);
    std::uint32_t largest = max(magnitudes & 0xffff, magnitudes >> 16);
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    factors[r] = row_factor(largest);
    const float scale = __uint_as_float(0x7f000000u - __float_as_uint(factors[r]));  // 1 / factor
    CUTE_UNROLL
    for (int i = 0; i < kPairs; ++i) pair(i) = scaled_to_fp16(pair(i), scale);
  }
};

}  // namespace cutlass_kernels::mla::mma_sync
