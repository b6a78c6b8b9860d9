// Which tile of which head a thread block computes, and which keys its rows see.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/mask.h"
#include "fa2/packed_rows.h"
#include "fa2/params.h"
#include "fa2/sharing.h"
#include "mask_extents.h"
#include "schedule/find_work.h"

namespace cutlass_kernels::fa2 {

struct TileWork {
  WorkItem item;
  int head;  // of packed heads the first
  int kv_head;
  int row_begin;  // rows [row_begin, row_end) of the request
  int row_end;
  IntervalMask mask;
  int key_begin;  // keys [key_begin, key_end) of the request: some row sees them, and they are of this KV split
  int key_end;
  int block_begin;  // KV blocks [block_begin, block_end) hold them
  int block_end;
  // Of a bit mask.
  bool hides;      // whether there may be keys that no row sees
  int bits_begin;  // all rows see keys [bits_begin, bits_end)
  int bits_end;
  std::int64_t request_bit;  // the request's first bit

  // After find_work() has found `item`. (Called from here, it makes ptxas order the main loop anew.)
  template <class Tile, bool kGeneral>
  CUTE_DEVICE void begin(const KernelParams& params, TileOrder::Position position) {
    const LaunchParams& p = params.attention;
    head = Tile::kPacked ? position.head * int(params.pack.divisor) : position.head;
    // Not a FastDivisor: ptxas then orders the main loop anew, which is 3 % slower.
    kv_head = int(unsigned(head) / unsigned(params.group_size));
    const int tile_rows = Tile::kPacked ? p.plan.tile_rows : Tile::kBlockM;
    row_begin = item.tile * tile_rows;
    row_end = min(row_begin + tile_rows, item.qo_len);
    mask = IntervalMask::make<kGeneral>(p, params.mask_divisors, item.batch, item.qo_len, item.kv_len);
    key_begin = mask.lo<kGeneral>(row_begin);
    key_end = mask.hi<kGeneral>(row_end - 1);
    hides = p.mask.words != nullptr;
    bits_begin = 0;
    bits_end = 0;
    request_bit = 0;
    if constexpr (kGeneral) {
      if (p.plan.mask_extents != nullptr) {
        take_extent(p, p.plan.mask_extents[position.rank]);
      }
    }
    block_begin = key_begin / Tile::kBlockN;
    block_end = (key_end + Tile::kBlockN - 1) / Tile::kBlockN;
    if constexpr (Tile::kPacked) {
      if (item.num_splits > 1) {
        take_split(item, Tile::kBlockN, key_begin, key_end, block_begin, block_end);
      }
    }
    if constexpr (kGeneral) {
      if (p.mask.indptr != nullptr) request_bit = std::int64_t(p.mask.indptr[item.batch]) * 8;
    }
  }

  // Which keys the rows of the tile see by a bit mask, as another kernel has found out.
  CUTE_DEVICE void take_extent(const LaunchParams& p, const MaskExtent& extent) {
    key_begin = max(key_begin, extent.begin);
    key_end = max(min(key_end, extent.end), key_begin);
    hides = extent.hides != 0;
    if (!mask.hides_keys()) {
      bits_begin = extent.all_begin;
      bits_end = extent.all_end;
    }
  }
};

// ---- A warp's share of a tile: which rows it computes, and which keys or columns of them.

template <class Tile>
struct WarpShare {
  static constexpr int kRows = 16 * Tile::kRowTiles;

  int thread;
  int lane;
  int warp;
  int sharer;             // of warps that share rows: which keys of a step in Q K^T (sharing.h)
  int part;               // which columns in P V
  KeySharing<Tile> keys;  // which steps of a KV block (sharing.h)
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
        last_row(Tile::kPacked ? min(row_at(kRows - 1), tile.row_end - 1) : min(row_at(kRows), tile.row_end) - 1),
        has_rows(first_row <= last_row && keys.has_part()) {}
};

}  // namespace cutlass_kernels::fa2
