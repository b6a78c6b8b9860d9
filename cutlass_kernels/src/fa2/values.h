// O += P V of 16-bit elements: a warp's rows and one step of keys. For values of 8 bits see fp8.h.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/ldmatrix.h"
#include "common/ptx/mma.h"
#include "fa2/params.h"
#include "fa2/row_sharing.h"
#include "fa2/shared_memory.h"

namespace cutlass_kernels::fa2 {

// o += P V. make_p(k, i) gives register i % 4 of the fragment of P for row tile i / 4 and keys 16 k on. P of the next
// 16 keys is computed between the products of these, and fragments of V are read kAhead steps, of 16 keys and 16
// columns, before their products. Of warps that share rows each has P of some of the keys: its own products come first,
// then those with P of the others.
template <class Element, class Tile, int kTilesN, int kTilesD, class MakeP>
CUTE_DEVICE void add_values(float (&o)[Tile::kRowTiles][kTilesD][4], std::uint32_t values,
                            int swizzle_v, int sharer, const RowSharing<Tile>& other,
                            const KernelParams& params, MakeP&& make_p) {
  using Layout = SharedLayout<Tile>;
  constexpr int kSharers = Tile::kSharers;
  constexpr int kOwnSteps = kTilesN / 2;  // of 16 keys and this warp's P; the other's follow
  constexpr int kStepsK = kOwnSteps * kSharers;
  constexpr int kStepsD = kTilesD / 2;
  constexpr int kSlots = Tile::kAhead + 1;
  std::uint32_t b[kSlots][4];  // V: (slot, two fragments of one d tile each)
  auto read_v = [&](int step) {
    if (step < kStepsK * kStepsD) {
      const int k = step / kStepsD;
      const int of_sharer = sharer ^ k / kOwnSteps;
      const int key = (of_sharer * kOwnSteps + k % kOwnSteps) * 16;
      ldmatrix_x4_trans(b[step % kSlots], Layout::chunk_at(values, swizzle_v, step % kStepsD * 2) +
                                              key * Layout::kRowBytes);
    }
  };
  CUTE_UNROLL
  for (int step = 0; step < Tile::kAhead; ++step) read_v(step);

  constexpr int kPacks = Tile::kRowTiles * 4;
  std::uint32_t a[2][Tile::kRowTiles][4];  // P: (slot, row tile, fragment)
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
        mma<Element>(o[m][2 * pair], a[k % 2][m], b[step % kSlots][0], b[step % kSlots][1]);
        mma<Element>(o[m][2 * pair + 1], a[k % 2][m], b[step % kSlots][2], b[step % kSlots][3]);
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

}  // namespace cutlass_kernels::fa2
