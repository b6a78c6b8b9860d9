// What a thread holds of a warp's matrices, and where it finds their operands in shared memory.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "fa2/shared_memory.h"

namespace cutlass_kernels::fa2 {

// Accumulators of m16n8 mma.sync tiles: of each 16 x 8 tile thread t of a warp holds elements (t / 4, 2 (t % 4) + {0,
// 1}) and the same eight rows below.
template <class Tile>
struct Fragments {
  static constexpr int kRowTiles = Tile::kRowTiles;
  // Tiles of S along the keys of a step, and of O along the head dimension.
  static constexpr int kTilesN = Tile::kStepN / 8 / Tile::kSharers;
  static constexpr int kTilesD = Tile::kColumns / 8 / Tile::kSharers / Tile::kColumnParts;
  static constexpr int kRows = 2 * kRowTiles;  // rows of which a thread holds elements

  using S = float[kRowTiles][kTilesN][4];  // (row tile, key tile, fragment)
  using O = float[kRowTiles][kTilesD][4];  // (row tile, d tile, fragment)
  using Rows = float[kRows];
};

// Where the ldmatrix addresses of a lane begin, in the first stage. Lanes 0-15 point at rows 0-15 of a 16 x 16 tile,
// lanes 16-31 at the same rows eight columns on. For K, four 8 x 8 matrices in the order (keys 0-7, d 0-7), (0-7,
// 8-15), (8-15, 0-7), (8-15, 8-15) are the B fragments of two n8 tiles. For V, transposed, lanes are as for Q.
template <class Tile>
struct OperandAddresses {
  using Layout = SharedLayout<Tile>;

  std::uint32_t q, k, v;
  int swizzle_q, swizzle_k, swizzle_v;

  // part: of the columns of O.
  CUTE_DEVICE OperandAddresses(std::uint32_t shared, int lane, int warp_row, int sharer, int part) {
    const int lane_row = lane % 16;
    const int lane_chunk = lane / 16;
    const int k_row = (lane % 8) + (lane / 16) * 8;
    const int k_chunk = (lane / 8) % 2;
    swizzle_q = lane_chunk ^ (lane_row & 7);
    swizzle_k = k_chunk ^ Layout::kv_swizzle(k_row);
    swizzle_v = lane_chunk ^ Layout::kv_swizzle(lane_row);
    q = shared + Layout::kQ + (warp_row + lane_row) * Layout::kRowBytes;
    k = shared + Layout::kK + (sharer * Fragments<Tile>::kTilesN * 8 + k_row) * Layout::kKvRowBytes;
    v = shared + Layout::kV + lane_row * Layout::kKvRowBytes + part * Fragments<Tile>::kTilesD * 16;
  }
};

}  // namespace cutlass_kernels::fa2
