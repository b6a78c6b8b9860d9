// A warp's share of a tile: which rows it computes, and which keys or columns of them.
#pragma once

#include <cute/config.hpp>

#include "fa2/key_sharing.h"
#include "fa2/packed_rows.h"
#include "fa2/params.h"
#include "fa2/tile_work.h"

namespace cutlass_kernels::fa2 {

template <class Tile>
struct WarpShare {
  static constexpr int kRows = 16 * Tile::kRowTiles;

  int thread;
  int lane;
  int warp;
  int sharer;             // of warps that share rows: which keys of a step in Q K^T (row_sharing.h)
  int part;               // which columns in P V
  KeySharing<Tile> keys;  // which steps of a KV block (key_sharing.h)
  int warp_row;           // the warp's first row in the tile, where it has kRows of them
  WarpRows<Tile> row_at;  // the same as rows of the request
  int first_row;          // those that exist
  int last_row;
  bool has_rows;  // if not, the warp only helps with loads

  CUTE_DEVICE WarpShare(const KernelParams& params, const TileWork& tile, int thread_)
      : thread(thread_),
        lane(thread_ % 32),
        warp(thread_ / 32),
        sharer(warp % Tile::kSharers),
        part(Tile::kColumnParts > 1 ? warp / (Tile::kWarps / Tile::kColumnParts) : sharer),
        keys((tile.row_end - tile.row_begin) * int(params.pack.divisor), warp),
        // Of groups that take turns, the two warps of a scheduler have rows beside each other.
        warp_row((Tile::kTakesTurns ? warp % 4 * 2 + warp / 4 : keys.row_group) * kRows),
        row_at{tile.row_begin, warp_row, params.pack},
        first_row(row_at(0)),
        last_row(Tile::kPacked ? min(row_at(kRows - 1), tile.row_end - 1)
                               : min(row_at(kRows), tile.row_end) - 1),
        has_rows(first_row <= last_row && keys.has_part()) {}
};

}  // namespace cutlass_kernels::fa2
