// The layouts that kernels compute by hand are those that CuTe's layout algebra gives. Compiled, not run: the kernels
// include no more of CuTe than its macros, because its layouts and atoms take five seconds of every unit.
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/swizzle_layout.hpp>
#include <cute/tensor.hpp>

#include "fa2/config.h"
#include "fa2/shared_memory.h"

namespace ck = cutlass_kernels;
using cute::_1, cute::Int, cute::Layout, cute::Shape, cute::Stride;

// ---- Shared memory of fa2: chunk c of row r lies at chunk c ^ (r % 8). ----

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

template <int kHeadDim>
constexpr bool fa2_swizzles_as_cute() {
  using Tile = typename ck::fa2::TileTable<kHeadDim>::Large;
  constexpr auto kRows = cute::composition(cute::Swizzle<3, 3, log2_of(kHeadDim / 8)>{}, Int<0>{},
                                           Layout<Shape<Int<64>, Int<kHeadDim>>, Stride<Int<kHeadDim>, _1>>{});
  for (int row = 0; row < 64; ++row) {
    for (int chunk = 0; chunk < kHeadDim / 8; ++chunk) {
      if (ck::fa2::SharedLayout<Tile>::offset(row, chunk) != 2 * kRows(row, 8 * chunk)) return false;
    }
  }
  return true;
}
static_assert(fa2_swizzles_as_cute<64>() && fa2_swizzles_as_cute<128>() && fa2_swizzles_as_cute<256>() &&
              fa2_swizzles_as_cute<512>());

// ---- Panels of fa3: rows of 128 bytes, as TMA and wgmma swizzle them. ----

constexpr bool fa3_swizzles_as_wgmma() {
  constexpr auto kSwizzle = cute::GMMA::Layout_K_SW128_Atom<cute::bfloat16_t>{}.layout_a();
  for (int row = 0; row < 8; ++row) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      if (row * 128 + ((chunk ^ row) << 4) != kSwizzle(row * 128 + chunk * 16)) return false;
    }
  }
  return true;
}
static_assert(fa3_swizzles_as_wgmma());

// ---- Accumulators: which element of the product value v of thread t is. ----

// fa2/softmax.h: of 16 x 8, (t / 4, 2 (t % 4) + {0, 1}) and the same eight rows below.
constexpr bool fa2_accumulates_as_cute() {
  using Traits = cute::MMA_Traits<cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  for (int t = 0; t < 32; ++t) {
    for (int v = 0; v < 4; ++v) {
      const int row = t / 4 + v / 2 * 8, column = 2 * (t % 4) + v % 2;
      if (typename Traits::CLayout{}(t, v) != row + 16 * column) return false;
    }
  }
  return true;
}
static_assert(fa2_accumulates_as_cute());

// fa3/wgmma.h: of 64 x N, d[4 j + {0, 1}] = (r, 8 j + 2 (t % 4) + {0, 1}), d[4 j + {2, 3}] the same of row r + 8.
template <int kN>
constexpr bool fa3_accumulates_as_cute() {
  for (int t = 0; t < 128; ++t) {
    for (int v = 0; v < kN / 2; ++v) {
      const int row = 16 * (t / 32) + t % 32 / 4 + v / 2 % 2 * 8;
      const int column = v / 4 * 8 + 2 * (t % 4) + v % 2;
      if (cute::GMMA::CLayout_64xN<kN>{}(t, v) != row + 64 * column) return false;
    }
  }
  return true;
}
static_assert(fa3_accumulates_as_cute<64>());
