// The products of mma_products.h for keys of 8 bits: from bytes in shared memory to the B fragments of mma.sync.
//
// ldmatrix moves 16-bit elements; here each is two bytes, and fa2/fp8.h says what a lane then has. Of 16 bytes per row:
//   S   four columns that follow one another, of one key. Of each 16 columns a lane takes the same four of Q.
//   O   an even and an odd column of two keys: B fragments of two tiles. A tile of O has every other column of 16.
// Rows of keys are an odd number of 16-byte chunks apart, so there is no swizzle, and addresses are sums.
#pragma once

#include <cute/config.hpp>

#include <cstdint>
#include <type_traits>

#include "common/fp8_operands.h"
#include "common/ptx/ldmatrix.h"
#include "common/ptx/mma.h"
#include "latent/fa2/config.h"
#include "latent/fa2/products.h"

namespace cutlass_kernels::mla::mma_sync {

// s = Q K^T, as take_scores(). An ldmatrix reads 32 columns of 16 keys, for two products of each of two tiles.
template <class Kv, class Tile>
CUTE_DEVICE void take_scores_fp8(float (&s)[Tile::kPartTiles][4], std::uint32_t keys,
                                 const KeptQ<Tile>& kept) {
  constexpr int kTiles = Tile::kPartTiles;
  constexpr int kPairs = kTiles / 2;
  constexpr int kChains = Tile::kChains;
  constexpr int kReads = Tile::kPanels * kPairs;
  constexpr int kAhead = 3;
  constexpr int kSlots = kAhead + 1;
  static_assert(Tile::kQPanels == Tile::kPanels);
  std::uint32_t words[kSlots][4];  // (keys 0-7, columns 0-15), (0-7, 16-31), (8-15, 0-15), ...
  auto read_k = [&](int read) {
    if (read >= kReads) return;
    ldmatrix_x4(words[read % kSlots], keys + read / kPairs * Tile::kKeyPanelBytes +
                                          read % kPairs * 16 * Tile::kKeyRowBytes);
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
      const std::uint32_t word = words[read % kSlots][i % 2 * 2 + step];
      mma<fp16>(sums[tile][step % kChains], kept[panel][step], converted<Kv, 0, 1>(word),
                converted<Kv, 2, 3>(word));
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
  static constexpr int kSlots = kAhead + 1;

  std::uint32_t values;
  std::uint32_t words[kSlots][4];  // (keys 0-7, columns 0-15), (8-15, 0-15), (0-7, 16-31), ...

  CUTE_DEVICE explicit ValueProductsFp8(std::uint32_t values_) : values(values_) {
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) read(i);
  }

  CUTE_DEVICE void read(int i) {
    if (i >= kAllReads) return;
    ldmatrix_x4_trans(words[i % kSlots],
                      values + i % kReads * 32 + i / kReads * 16 * Tile::kKeyRowBytes);
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
          const std::uint32_t low = words[i % kSlots][2 * half];
          const std::uint32_t high = words[i % kSlots][2 * half + 1];
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
      const std::uint32_t at = rows + (row + r * 8) * Tile::kRowBytes + panel * 128 +
                               ((chunk ^ row) << 4) + lane % 2 * 8;
      std::uint32_t (&fragment)[4] = fragments[panel][step];
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                   : "=r"(fragment[r]), "=r"(fragment[r + 2])
                   : "r"(at)
                   : "memory");
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
    const auto pair = [&](int i) -> std::uint32_t& {
      return fragments[i / 4][i / 2 % 2][i % 2 * 2 + r];
    };
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
