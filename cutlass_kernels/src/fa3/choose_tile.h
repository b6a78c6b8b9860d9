// Which tile of the table (config.h) serves a problem: pure functions of the problem's sizes and the device's facts.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/element_bytes.h"
#include "common/logits.h"
#include "common/mask.h"
#include "common/packing.h"
#include "cutlass_kernels/params.h"
#include "device.h"
#include "fa3/config.h"
#include "plan/tile_shape.h"

namespace cutlass_kernels::fa3 {

template <class Tile>
std::int64_t tile_count(const AttentionParams& params) {
  return (params.total_q + Tile::kBlockM - 1) / Tile::kBlockM * params.num_qo_heads;
}

// Keys of a request within its window or chunk, on average. Where only the device knows the KV length, the query
// length.
inline std::int64_t keys_in_mask(const AttentionParams& params) {
  const std::int64_t total = params.total_kv > 0 ? params.total_kv : params.total_q;
  return most_keys_of_row(params, total / params.batch_size);
}

// Whether keys and values of 8 bits become 16-bit ones on the way.
inline bool converts(const AttentionParams& params) {
  return size_of(params.kv_dtype) < size_of(params.q_dtype);
}

// Whether rows of K and V are gathered. The swizzle has a period of eight rows: a box of fewer rows, which no page
// splits, would not start at one.
inline bool gathers(const AttentionParams& params) {
  return params.pages.page_size % 8 != 0 || converts(params);
}

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

template <int HeadDimQk, int HeadDimVo>
TileShape tile_shape(const AttentionParams& params, const Device& device) {
  using Tiles = TileTable<HeadDimQk, HeadDimVo>;
  const int heads = packed_heads(params, kWarpgroupRows);
  const int at_once = device.multiprocessors / Tiles::Large::kCtasPerTile;
  if (packs(params, heads, Tiles::Large::kBlockM, at_once)) {
    return packed_tile_shape<typename Tiles::Packed>(params, heads);
  }
  const bool general = GeneralTransform::needed(params);
  const bool small =
      device.compute_capability == 0 ||  // an unknown device: the smallest
      (!is_alone(params) &&
       (params.total_q / params.batch_size <= Tiles::Small::kBlockM ||
        (hides_keys(params) && keys_in_mask(params) <= Tiles::kSmallUpToKeys) ||
        tile_count<typename Tiles::Large>(params) < Tiles::few_tiles(device.multiprocessors)));
  if (gathers(params)) {
    return {general ? Tiles::GatherGeneral::kBlockM
            : small ? Tiles::GatherSmall::kBlockM
                    : Tiles::Gather::kBlockM,
            kGather};
  }
  if (general) return {Tiles::General::kBlockM, kGeneral};
  return {small ? Tiles::Small::kBlockM : Tiles::Large::kBlockM, kRows};
}

template <int HeadDim>
TileShape fp8_tile_shape(const AttentionParams& params, const Device& device) {
  using Tiles = Fp8TileTable<HeadDim>;
  const int heads = packed_heads(params, kWarpgroupRows);
  if (packs(params, heads, Tiles::Large::kBlockM, device.multiprocessors)) {
    return packed_tile_shape<typename Tiles::Packed>(params, heads);
  }
  return {Tiles::Large::kBlockM, kRows};
}

template <int HeadDim>
TileShape converted_tile_shape(const AttentionParams& params, const Device&) {
  return packed_tile_shape<typename ConvertedTileTable<HeadDim>::Packed>(
      params, packed_heads(params, kWarpgroupRows));
}

// Whether FewKeys takes the place of Large, whose rows are as many: whether a mask leaves few keys to a row, on
// average.
inline bool few_keys(const AttentionParams& params) {
  // hd128, 16k tokens: 3 % faster at 512 keys, with and without a mask; 3 % slower at 8k.
  constexpr std::int64_t kFewKeys = 1024;
  const std::int64_t keys = keys_in_mask(params);
  const std::int64_t hidden =
      params.causal ? std::min(keys, params.total_q / params.batch_size) / 2 : 0;
  return keys - hidden <= kFewKeys;
}

}  // namespace cutlass_kernels::fa3
