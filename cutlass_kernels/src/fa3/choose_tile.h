// Which tile of the table (config.h) serves a problem: pure functions of the problem's sizes and the device's facts.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/element_bytes.h"
#include "common/logits.h"
#include "common/mask.h"
#include "cutlass_kernels/params.h"
#include "device.h"
#include "fa3/config.h"
#include "plan/packing.h"
#include "plan/tile_shape.h"
#include "plan/tile_time.h"

namespace cutlass_kernels::fa3 {

template <class Tile>
std::int64_t tile_count(const AttentionParams& params) {
  return (params.total_q + Tile::kBlockM - 1) / Tile::kBlockM * params.num_qo_heads;
}

// Keys of a request within its window or chunk, on average. Where only the device knows the KV length, the query
// length.
inline std::int64_t keys_in_mask(const AttentionParams& params) {
  const std::int64_t total = params.total_kv > 0 ? all_keys(params) : params.total_q;
  return most_keys_of_row(params, total / params.batch_size);
}

// Whether keys and values of 8 bits become 16-bit ones on the way.
inline bool converts(const AttentionParams& params) { return size_of(params.kv_dtype) < size_of(params.q_dtype); }

// Whether rows of K and V are gathered. The swizzle has a period of eight rows: a box of fewer rows, which no page
// splits, would not start at one.
inline bool gathers(const AttentionParams& params) { return params.pages.page_size % 8 != 0 || converts(params); }

template <class Tile>
int packed_tile_rows(const AttentionParams& params) {
  return Tile::kConsumers * (kWarpgroupRows / packed_heads(params, kWarpgroupRows));
}

template <class Packed>
TileShape packed_tile_shape(const AttentionParams& params, int heads) {
  TileShape shape{packed_tile_rows<Packed>(params), kPacked, heads, Packed::kCtasPerSm};
  shape.splits_without_list = true;
  shape.blocks_per_tile = Packed::kCtasPerTile;
  return shape;
}

template <class Tile>
TileShape row_tile_shape(int kind) {
  TileShape shape{Tile::kBlockM, kind, 0, Tile::kCtasPerSm};
  shape.blocks_per_tile = Tile::kCtasPerTile;
  return shape;
}

// From an H100 at hd128: the start and the end of a thread block take 1.5 us, of a packed one 5, a key of a tile of 128
// rows 10.25 ns, a row of a partial result 0.35 ns. In 198 cells (8 to 64 heads, 24 to 512 rows over 1k to 8k keys) the
// tile that is taken by this needs at most 10 % more time than the fastest, more than 3 % in three.
template <class Tile>
constexpr TileSpeed tile_speed() {
  TileSpeed speed{Tile::kBlockM, Tile::kTimePerLogit, Tile::kPacked ? 500 : 150, 64};
  // Keys of more columns take longer, starts and ends do not.
  if (Tile::kHeadDimQk > 128) speed.start = speed.start * 128 / Tile::kHeadDimQk;
  if (Tile::kPacked) speed.per_partial_row = 4.4;
  if (Tile::kCtasPerSm > 1) {
    speed.start /= Tile::kCtasPerSm;  // behind those of the others
    speed.alone = 0.7;
  }
  return speed;
}

// The tile of one head, or that of packed heads where it is faster although queries are not short: it splits keys.
template <class Tile, class Packed>
TileShape row_or_packed_shape(const AttentionParams& params, int kind, const TileShape& packed, const Device& device) {
  const TileShape shape = row_tile_shape<Tile>(kind);
  const double time = estimated_time(params, shape, tile_speed<Tile>(), device);
  return estimated_time(params, packed, tile_speed<Packed>(), device) < time ? packed : shape;
}

// Whether either may be the faster one: tiles of one head leave SMs idle, or short queries need several packed tiles.
// (Where one holds all rows of a request, memory is what takes time.)
template <class Large>
bool compares_packed(const AttentionParams& params, const TileShape& packed, const Device& device) {
  if (is_alone(params) || !can_split(params) || device.multiprocessors == 0) return false;
  const std::int64_t rows = params.total_q / params.batch_size;
  if (packed.packed_heads > 1 && rows <= kPackedUpToRows) return rows > packed.rows;
  return leaves_device_idle(params, Large::kBlockM, device.multiprocessors / Large::kCtasPerTile, 2);
}

// Whether so few or so short queries, or so few keys, are left to them that the small tile of one head is faster.
template <class Tiles>
bool needs_small(const AttentionParams& params, const Device& device) {
  if (device.compute_capability == 0) return true;  // an unknown device: the smallest
  return !is_alone(params) && (params.total_q / params.batch_size <= Tiles::Small::kBlockM ||
                               (hides_keys(params) && keys_in_mask(params) <= Tiles::kSmallUpToKeys) ||
                               tile_count<typename Tiles::Large>(params) < Tiles::few_tiles(device.multiprocessors));
}

template <int HeadDimQk, int HeadDimVo>
TileShape tile_shape(const AttentionParams& params, const Device& device) {
  using Tiles = TileTable<HeadDimQk, HeadDimVo>;
  using Large = typename Tiles::Large;
  using Packed = typename Tiles::Packed;
  const int heads = packed_heads(params, kWarpgroupRows);
  const TileShape packed = packed_tile_shape<Packed>(params, heads);
  const bool compares = compares_packed<Large>(params, packed, device);
  if (has_short_queries(params, heads) && !compares) return packed;
  const bool general = GeneralTransform::needed(params);
  if (gathers(params) && general) return packed;
  const auto choose = [&](auto tile, int kind) {
    using Tile = decltype(tile);
    return compares ? row_or_packed_shape<Tile, Packed>(params, kind, packed, device) : row_tile_shape<Tile>(kind);
  };
  const bool small = needs_small<Tiles>(params, device);
  if (gathers(params)) {
    if (small) return choose(typename Tiles::GatherSmall{}, kGather);
    return choose(typename Tiles::Gather{}, kGather);
  }
  if (general) return choose(typename Tiles::General{}, kGeneral);
  if (small) return choose(typename Tiles::Small{}, kRows);
  return choose(Large{}, kRows);
}

template <int HeadDim>
TileShape fp8_tile_shape(const AttentionParams& params, const Device& device) {
  using Large = typename Fp8TileTable<HeadDim>::Large;
  using Packed = typename Fp8TileTable<HeadDim>::Packed;
  const int heads = packed_heads(params, kWarpgroupRows);
  const TileShape packed = packed_tile_shape<Packed>(params, heads);
  if (compares_packed<Large>(params, packed, device)) {
    return row_or_packed_shape<Large, Packed>(params, kRows, packed, device);
  }
  return has_short_queries(params, heads) ? packed : row_tile_shape<Large>(kRows);
}

template <int HeadDim>
TileShape converted_tile_shape(const AttentionParams& params, const Device&) {
  return packed_tile_shape<typename ConvertedTileTable<HeadDim>::Packed>(params, packed_heads(params, kWarpgroupRows));
}

// Whether FewKeys takes the place of Large, whose rows are as many: whether a mask leaves few keys to a row, on
// average.
inline bool few_keys(const AttentionParams& params) {
  // hd128, 16k tokens: 3 % faster at 512 keys, with and without a mask; 3 % slower at 8k.
  constexpr std::int64_t kFewKeys = 1024;
  const std::int64_t keys = keys_in_mask(params);
  const std::int64_t hidden = params.causal ? std::min(keys, params.total_q / params.batch_size) / 2 : 0;
  return keys - hidden <= kFewKeys;
}

}  // namespace cutlass_kernels::fa3
