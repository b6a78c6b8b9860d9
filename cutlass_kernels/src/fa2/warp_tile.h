// What a warp computes of a tile, one step of keys after the other: S = Q K^T, softmax, O += P V.
#pragma once

#include <cute/config.hpp>

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "common/element_types.h"
#include "common/logits.h"
#include "common/softmax.h"
#include "fa2/load.h"
#include "fa2/params.h"
#include "fa2/products.h"
#include "fa2/sharing.h"
#include "fa2/softmax.h"

namespace cutlass_kernels::fa2 {

// Scalars are held by value; arrays are references to the kernel's (kernel.h says why).
template <class Element, class Kv, class Tile, Logits kLogits>
struct WarpTile {
  static constexpr bool kGeneral = kLogits == Logits::kGeneral;
  static constexpr bool kFp8 = Tile::kKvBytes == 1;
  static constexpr int kRowTiles = Tile::kRowTiles;
  static constexpr int kTilesN = Fragments<Tile>::kTilesN;
  static constexpr int kTilesD = Fragments<Tile>::kTilesD;
  static constexpr int kRows = Fragments<Tile>::kRows;
  using S = typename Fragments<Tile>::S;
  using O = typename Fragments<Tile>::O;
  using Rows = typename Fragments<Tile>::Rows;
  using P = std::uint32_t[kTilesN / 2][kRowTiles * 4];     // (16 keys, registers of a fragment)
  using Factor = std::conditional_t<kFp8, fp16, Element>;  // of products
  // Rows of bf16 held in fp16 have factors: part of the scale, or of logits that are transformed (packed_rows.h).
  using Softmax = OnlineSoftmax<kRows, kFp8 && !kGeneral>;
  using Transform =
      std::conditional_t<kGeneral, GeneralLogits<Tile>, IntervalLogits<Tile, kLogits == Logits::kTransformed>>;

  const KernelParams& params;
  OperandAddresses<Tile> at;
  Transform logits;
  Softmax& softmax;
  O& o;
  RowSharing<Tile> neighbour;  // the warp that shares its rows, if one does
  int sharer;
  float headroom;  // of the softmax

  // S = Q K^T, of keys `offset` bytes behind the first ones in shared memory.
  // near_end(): see add_scores().
  template <class NearEnd>
  CUTE_DEVICE void compute_scores(S& s, int offset, NearEnd&& near_end) const {
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      CUTE_UNROLL
      for (int n = 0; n < kTilesN; ++n) {
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) s[m][n][e] = 0.0f;
      }
    }
    if constexpr (kFp8) {
      add_scores_fp8<Kv, Tile>(s, at.q, at.swizzle_q, at.k + offset, at.swizzle_k);
    } else {
      add_scores<Factor, Tile>(s, at.q, at.swizzle_q, at.k + offset, at.swizzle_k, near_end);
    }
  }

  // Raises the softmax's references where the rows' maxima are too far above them.
  CUTE_DEVICE void raise(const Rows& row_max) {
    softmax.raise(row_max, [&](int r, float factor) { rescale_row<Tile>(o, r, factor); }, headroom);
  }

  // Makes the factors of the rows of Q (packed_rows.h) a part of the scale. Kept finite and normal: 0 or inf times a
  // hidden key's -inf or a product of 0 would be NaN.
  template <class Q>
  CUTE_DEVICE void scale_rows(const Q& q, const char* shared_memory, int warp_row) {
    Rows factors;
    q.read_factors(shared_memory, warp_row, factors);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      softmax.scale[r] = fminf(fmaxf(params.transform.scale * factors[r], FLT_MIN), FLT_MAX);
    }
  }

  // O += P V, of values `offset` bytes behind the first ones in shared memory.
  CUTE_DEVICE void accumulate(S& s, int offset) {
    auto p = [&](int k, int pack) { return make_p<Tile, Factor>(softmax, s, k, pack); };
    if constexpr (kFp8) {
      add_values_fp8<Kv, Tile, kTilesN / 2>(o, at.v + offset, at.swizzle_v, p);
    } else {
      add_values<Factor, Tile, kTilesN>(o, at.v + offset, at.swizzle_v, sharer, neighbour, params, p);
    }
  }

  // P of a step: the keys from first_key on. For loops that complete it before its products; hidden keys are computed,
  // too.
  CUTE_DEVICE void compute_p(S& s, int first_key, P& p) {
    float thread_max[kRows];
    NoLoads none;
    logits.apply(s, first_key);
    take_max<Tile>(s, thread_max, none, false);
    if (__any_sync(0xffffffffu, softmax.exceeds(thread_max, headroom))) {
      softmax.reduce_max(thread_max);
      raise(thread_max);
    }
    CUTE_UNROLL
    for (int k = 0; k < kTilesN / 2; ++k) {
      CUTE_UNROLL
      for (int i = 0; i < kRowTiles * 4; ++i) p[k][i] = make_p<Tile, Factor>(softmax, s, k, i);
    }
  }

  // O += P V, of such a P. Loads are issued among the products of all but the last 16 keys.
  template <class Loads>
  CUTE_DEVICE void accumulate_p(const P& p, int offset, Loads& next) {
    constexpr int kRegisters = kRowTiles * 4;
    const auto p_of = [&](int k, int i) {  // called among the products of k - 1
      if (k > 0) next.issue((k - 1) * kRegisters + i, (kTilesN / 2 - 1) * kRegisters);
      return p[k][i];
    };
    add_values<Factor, Tile, kTilesN>(o, at.v + offset, at.swizzle_v, sharer, neighbour, params, p_of);
  }

  // A step: the keys from first_key on, which lie at `offset`. next_key: those of the warp's next step. If `loads`,
  // the loads of the next KV block are issued along the way. If `scales`, row r of S is multiplied by `factors[r]`.
  template <class Loads>
  CUTE_DEVICE void step(int first_key, int next_key, int offset, Loads& next, bool loads, [[maybe_unused]] bool scales,
                        [[maybe_unused]] const Rows& factors) {
    if constexpr (kGeneral) logits.find(first_key);
    if (!logits.skips(first_key)) {
      float s[kRowTiles][kTilesN][4];  // (row tile, key tile, fragment)
      float thread_max[kRows];         // (row)
      compute_scores(s, offset, [] {});
      if constexpr (kFp8 && kGeneral) {
        if (scales) multiply_rows<Tile>(s, factors);
      }
      logits.apply(s, first_key);
      take_max<Tile>(s, thread_max, next, loads);
      if constexpr (kGeneral) logits.fetch(next_key);
      if (__any_sync(0xffffffffu, softmax.exceeds(thread_max, headroom))) {
        softmax.reduce_max(thread_max);
        raise(thread_max);
      }
      accumulate(s, offset);
    } else {
      __syncwarp();  // keeps this a branch: predicated, the loads would cost every other step 50 instructions
      if (loads) next.issue(0, 1);
      if constexpr (kGeneral) logits.fetch(next_key);
    }
  }
};

}  // namespace cutlass_kernels::fa2
