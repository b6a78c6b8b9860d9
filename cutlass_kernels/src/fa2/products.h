// The products of a warp: S = Q K^T and O += P V, of 8-bit keys and values, too.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/element_types.h"
#include "common/fp8_operands.h"
#include "common/ptx/ldmatrix.h"
#include "common/ptx/mma.h"
#include "fa2/params.h"
#include "fa2/shared_memory.h"
#include "fa2/sharing.h"

namespace cutlass_kernels::fa2 {

// ---- S = Q K^T of 16-bit elements: a warp's rows and one step of keys. Keys of 8 bits come last.

// s += Q K^T: the warp's rows of Q at `q_rows`, the keys at `keys`, where the ldmatrix addresses of a lane begin.
// Fragments of K are read kAhead steps, of 16 keys and 16 columns, before their products.
// near_end() is called when an eighth of the products is left.
template <class Element, class Tile, int kTilesN, class NearEnd>
CUTE_DEVICE void add_scores(float (&s)[Tile::kRowTiles][kTilesN][4], std::uint32_t q_rows, int swizzle_q,
                            std::uint32_t keys, int swizzle_k, NearEnd&& near_end) {
  using Layout = SharedLayout<Tile>;
  constexpr int kStepsK = Tile::kColumns / 16;
  constexpr int kStepsN = kTilesN / 2;  // a step is one pair of key tiles
  constexpr int kBuffers = Tile::kAhead + 1;
  std::uint32_t a[2][Tile::kRowTiles][4];  // Q: (buffer, row tile, fragment)
  std::uint32_t b[kBuffers][4];            // K: (buffer, two fragments of one key tile each)
  auto read_q = [&](int kd) {
    CUTE_UNROLL
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      ldmatrix_x4(a[kd % 2][m], Layout::chunk_at(q_rows, swizzle_q, 2 * kd) + m * 16 * Layout::kRowBytes);
    }
  };
  auto read_k = [&](int step) {
    if (step < kStepsK * kStepsN) {
      ldmatrix_x4(b[step % kBuffers],
                  Layout::chunk_at(keys, swizzle_k, 2 * (step / kStepsN)) + step % kStepsN * 16 * Layout::kRowBytes);
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
        mma<Element>(s[m][2 * pair], a[kd % 2][m], b[step % kBuffers][0], b[step % kBuffers][1]);
        mma<Element>(s[m][2 * pair + 1], a[kd % 2][m], b[step % kBuffers][2], b[step % kBuffers][3]);
      }
    }
  }
}

// ---- O += P V of 16-bit elements: a warp's rows and one step of keys. Values of 8 bits come last.

// o += P V. make_p(k, i) gives register i % 4 of the fragment of P for row tile i / 4 and keys 16 k on. P of the next
// 16 keys is computed between the products of these, and fragments of V are read kAhead steps, of 16 keys and 16
// columns, before their products. Of warps that share rows each has P of some of the keys: its own products come first,
// then those with P of the others.
template <class Element, class Tile, int kTilesN, int kTilesD, class MakeP>
CUTE_DEVICE void add_values(float (&o)[Tile::kRowTiles][kTilesD][4], std::uint32_t values, int swizzle_v, int sharer,
                            const RowSharing<Tile>& other, const KernelParams& params, MakeP&& make_p) {
  using Layout = SharedLayout<Tile>;
  constexpr int kSharers = Tile::kSharers;
  constexpr int kOwnSteps = kTilesN / 2;  // of 16 keys and this warp's P; the other's follow
  constexpr int kStepsK = kOwnSteps * kSharers;
  constexpr int kStepsD = kTilesD / 2;
  constexpr int kBuffers = Tile::kAhead + 1;
  std::uint32_t b[kBuffers][4];  // V: (buffer, two fragments of one d tile each)
  auto read_v = [&](int step) {
    if (step < kStepsK * kStepsD) {
      const int k = step / kStepsD;
      const int of_sharer = sharer ^ k / kOwnSteps;
      const int key = (of_sharer * kOwnSteps + k % kOwnSteps) * 16;
      ldmatrix_x4_trans(b[step % kBuffers],
                        Layout::chunk_at(values, swizzle_v, step % kStepsD * 2) + key * Layout::kRowBytes);
    }
  };
  CUTE_UNROLL
  for (int step = 0; step < Tile::kAhead; ++step) read_v(step);

  constexpr int kPacks = Tile::kRowTiles * 4;
  std::uint32_t a[2][Tile::kRowTiles][4];  // P: (buffer, row tile, fragment)
  CUTE_UNROLL
  for (int pack = 0; pack < kPacks; ++pack) a[0][pack / 4][pack % 4] = make_p(0, pack);
  if constexpr (kSharers > 1) other.write_p(0, a[0]);
  if constexpr (kSharers > 1 && kOwnSteps == 1) other.p_is_written();
  CUTE_UNROLL
  for (int k = 0; k < kStepsK; ++k) {
    if constexpr (kSharers > 1) {
      if (k == kOwnSteps) {
        other.await_p();
        other.read_p(1, 0, a[k % 2]);
      }
      if (k >= kOwnSteps && k + 1 < kStepsK) {
        other.read_p((k + 1) / kOwnSteps, (k + 1) % kOwnSteps, a[(k + 1) % 2]);
      }
    }
    CUTE_UNROLL
    for (int pair = 0; pair < kStepsD; ++pair) {
      const int step = k * kStepsD + pair;
      // Never taken. Left alone, the compiler computes all of P before the first product; it does not move instructions
      // across a possible exit, so exponentials and products alternate (4 % at hd64). In turns, P is complete.
      if constexpr (!Tile::kTakesTurns) {
        if (k < kOwnSteps && pair % 2 == 0 && params.order.tiles < 0) asm volatile("exit;");
      }
      read_v(step + Tile::kAhead);
      CUTE_UNROLL
      for (int m = 0; m < Tile::kRowTiles; ++m) {
        mma<Element>(o[m][2 * pair], a[k % 2][m], b[step % kBuffers][0], b[step % kBuffers][1]);
        mma<Element>(o[m][2 * pair + 1], a[k % 2][m], b[step % kBuffers][2], b[step % kBuffers][3]);
      }
      if (k + 1 < kOwnSteps) {
        CUTE_UNROLL
        for (int pack = pair * kPacks / kStepsD; pack < (pair + 1) * kPacks / kStepsD; ++pack) {
          a[(k + 1) % 2][pack / 4][pack % 4] = make_p(k + 1, pack);
        }
      }
    }
    if constexpr (kSharers > 1) {
      if (k + 1 < kOwnSteps) other.write_p(k + 1, a[(k + 1) % 2]);
      if (k + 2 == kOwnSteps) other.p_is_written();
    }
  }
}

// ---- Keys and values of 8 bits below 16-bit queries: from bytes in shared memory to the B fragments of mma.sync.
//
// ldmatrix moves 16-bit elements; here each is two bytes. Of 16 bytes per row
//   K, not transposed: lane t gets d = 4 (t % 4) + {0, 1, 2, 3} of key t / 4. The first two are rows
//      2 (t % 4) + {0, 1} of B, the others rows 8 further on, if the rows of B, and the columns of Q with them, are
//      numbered so: Q is stored in that order (packed_rows.h).
//   V, transposed: lane t gets d = 2 (t / 4) + {0, 1} of keys 2 (t % 4) and 2 (t % 4) + 1. Even and odd d are B
//      fragments of two tiles: a tile of O has every other column of 16, and a lane, of both, four columns that follow
//      one another.
// So no lane needs what another has; conversion is all there is to do.

// s += Q K^T: a warp's rows of Q at `q_rows` and a step of keys at `keys`, where ldmatrix addresses of a lane begin.
// Fragments of K are read kAhead steps, of 16 keys and 32 columns, before their products.
template <class Format, class Tile, int kTilesN>
CUTE_DEVICE void add_scores_fp8(float (&s)[Tile::kRowTiles][kTilesN][4], std::uint32_t q_rows, int swizzle_q,
                                std::uint32_t keys, int swizzle_k) {
  using Layout = SharedLayout<Tile>;
  constexpr int kColumns = Tile::kHeadDim / 32;
  constexpr int kPairs = kTilesN / 2;
  constexpr int kBuffers = Tile::kAhead + 1;
  std::uint32_t words[kBuffers][4];        // (keys 0-7, d 0-15), (0-7, 16-31), (8-15, 0-15), (8-15, 16-31)
  std::uint32_t a[4][Tile::kRowTiles][4];  // Q: (kd % 4, row tile, fragment)
  auto read_q = [&](int kd) {
    CUTE_UNROLL
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      ldmatrix_x4(a[kd % 4][m], q_rows + m * 16 * Layout::kRowBytes + Layout::chunk_offset(swizzle_q, 2 * kd));
    }
  };
  auto read_k = [&](int step) {
    if (step < kColumns * kPairs) {
      ldmatrix_x4(words[step % kBuffers], keys + step % kPairs * 16 * Layout::kKvRowBytes +
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
        const std::uint32_t word = words[step % kBuffers][2 * n + half];
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
CUTE_DEVICE void add_values_fp8(float (&o)[Tile::kRowTiles][Tile::kHeadDim / 8][4], std::uint32_t values, int swizzle_v,
                                MakeP&& make_p) {
  using Layout = SharedLayout<Tile>;
  constexpr int kColumns = Tile::kHeadDim / 32;
  constexpr int kBuffers = Tile::kAhead + 1;
  std::uint32_t words[kBuffers][4];  // (keys 0-7, d 0-15), (8-15, 0-15), (0-7, 16-31), (8-15, 16-31)
  auto read_v = [&](int step) {
    if (step < kColumns * kSteps) {
      ldmatrix_x4_trans(words[step % kBuffers], values + step / kColumns * 16 * Layout::kKvRowBytes +
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
        const std::uint32_t low = words[step % kBuffers][2 * half];
        const std::uint32_t high = words[step % kBuffers][2 * half + 1];
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
