// Keys and values of 8 bits below 16-bit queries: from bytes in shared memory to the B fragments of mma.sync.
//
// ldmatrix moves 16-bit elements; here each is two bytes. Of 16 bytes per row
//   K, not transposed: lane t gets d = 4 (t % 4) + {0, 1, 2, 3} of key t / 4. The first two are rows 2 (t % 4) + {0, 1} of
//      B, the others rows 8 further on, if the rows of B, and the columns of Q with them, are numbered so: Q is stored
//      in that order (packed_q.h).
//   V, transposed: lane t gets d = 2 (t / 4) + {0, 1} of keys 2 (t % 4) and 2 (t % 4) + 1. Even and odd d are B fragments of
//      two tiles: a tile of O has every other column of 16, and a lane, of both, four columns that follow one another.
// So no lane needs what another has; conversion is all there is to do.
#pragma once

#include <cute/config.hpp>

#include <cstdint>
#include <type_traits>

#include "common/ldmatrix.h"
#include "common/numeric.h"
#include "fa2/shared.h"

namespace cutlass_kernels::fa2 {

// Sign, exponent and mantissa stand at 16 bits as at 8, in other places: `kShift` is how far magnitudes, one byte each, are
// moved to the left. The exponent then lacks the difference of the biases, which `kFactor` (as a 16-bit number) makes up
// for: exactly, for subnormal numbers too. Infinities and NaN (e4m3: the largest magnitude) become finite numbers, except
// where an instruction converts.
struct e4m3 {
  template <class Element>
  struct As {
    static constexpr bool kIsHalf = std::is_same_v<Element, fp16>;
    static constexpr int kShift = kIsHalf ? 7 : 4;
    static constexpr std::uint32_t kFactor = kIsHalf ? 0x5c00 : 0x7b80;  // 2^8, 2^120
  };
};

struct e5m2 {
  template <class Element>
  struct As {
    static constexpr bool kIsHalf = std::is_same_v<Element, fp16>;
    static constexpr int kShift = kIsHalf ? 8 : 5;
    static constexpr std::uint32_t kFactor = kIsHalf ? 0x3c00 : 0x7780;  // 1, 2^112
  };
};

// Bytes kFirst (to the low half) and kSecond of `word` as two 16-bit numbers.
template <class Element, class Format, int kFirst, int kSecond>
CUTE_DEVICE std::uint32_t converted(std::uint32_t word) {
  using As = typename Format::template As<Element>;
  if constexpr (As::kShift == 8) {  // e5m2 is the upper half of fp16
    return __byte_perm(word, 0, 0x0404 | kFirst << 4 | kSecond << 12);
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    if constexpr (As::kIsHalf) {
      const std::uint32_t pair = kSecond == kFirst + 1 && kFirst % 2 == 0
                                     ? word >> 8 * kFirst
                                     : __byte_perm(word, 0, kFirst | kSecond << 4);
      std::uint32_t numbers;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(numbers) : "h"(std::uint16_t(pair)));
      return numbers;
    }
#endif
    // Each byte below eight copies of its sign; moved; the copies taken out, but for the highest.
    std::uint32_t spread;
    asm("prmt.b32 %0, %1, 0, %2;"
        : "=r"(spread)
        : "r"(word), "n"(kFirst | (8 | kFirst) << 4 | kSecond << 8 | (8 | kSecond) << 12));
    constexpr std::uint32_t kMask = 0x8000 | 0x7f << As::kShift;
    const std::uint32_t placed = (spread << As::kShift) & (kMask << 16 | kMask);
    constexpr std::uint32_t kFactors = As::kFactor << 16 | As::kFactor;
    std::uint32_t numbers;
    if constexpr (As::kIsHalf) {
      asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(numbers) : "r"(placed), "r"(kFactors));
    } else {  // adding -0 keeps the sign of a zero
      asm("fma.rn.bf16x2 %0, %1, %2, %3;"
          : "=r"(numbers)
          : "r"(placed), "r"(kFactors), "r"(0x80008000u));
    }
    return numbers;
  }
}

// s += Q K^T: 16 rows of Q at `q_rows` and a step of keys at `keys`, where ldmatrix addresses of a lane begin. Fragments of
// K are read kAhead steps, of 16 keys and 32 columns, before their products.
template <class Element, class Format, class Tile, int kTilesN>
CUTE_DEVICE void add_scores(float (&s)[kTilesN][4], std::uint32_t q_rows, int swizzle_q,
                            std::uint32_t keys, int swizzle_k) {
  using Layout = SharedLayout<Tile>;
  using Mma = typename Element::Mma;
  constexpr int kColumns = Tile::kHeadDim / 32;
  constexpr int kPairs = kTilesN / 2;
  constexpr int kSlots = Tile::kAhead + 1;
  std::uint32_t words[kSlots][4];  // (keys 0-7, d 0-15), (0-7, 16-31), (8-15, 0-15), (8-15, 16-31)
  std::uint32_t a[4][4];
  auto read_q = [&](int kd) {
    ldmatrix_x4(a[kd % 4], q_rows + Layout::chunk_offset(swizzle_q, 2 * kd));
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
        mma<Mma>(s[2 * pair + n], a[(2 * column + half) % 4],
                 converted<Element, Format, 0, 1>(word), converted<Element, Format, 2, 3>(word));
      }
    }
  }
}

// o += P V: make_p(k, i) gives register i of the fragment of P for keys 16 k on. Of 16 columns d, tile 2 (d / 16) of `o` has
// the even ones, the next one the odd ones.
template <class Element, class Format, class Tile, int kSteps, class MakeP>
CUTE_DEVICE void add_values(float (&o)[Tile::kHeadDim / 8][4], std::uint32_t values, int swizzle_v,
                            MakeP&& make_p) {
  using Layout = SharedLayout<Tile>;
  using Mma = typename Element::Mma;
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
    std::uint32_t p[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) p[i] = make_p(k, i);
    CUTE_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      const int step = k * kColumns + column;
      read_v(step + Tile::kAhead);
      const std::uint32_t (&word)[4] = words[step % kSlots];
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int tile = 4 * column + 2 * half;
        mma<Mma>(o[tile], p, converted<Element, Format, 0, 2>(word[2 * half]),
                 converted<Element, Format, 0, 2>(word[2 * half + 1]));
        mma<Mma>(o[tile + 1], p, converted<Element, Format, 1, 3>(word[2 * half]),
                 converted<Element, Format, 1, 3>(word[2 * half + 1]));
      }
    }
  }
}

}  // namespace cutlass_kernels::fa2
