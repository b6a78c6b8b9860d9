// The tiles of the table (config.h) that may compute a problem: pure functions of its sizes and of the device's facts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/element_bytes.h"
#include "common/logits.h"
#include "common/mask.h"
#include "cutlass_kernels/params.h"
#include "device.h"
#include "fa3/config.h"
#include "plan/packing.h"
#include "plan/tile_shape.h"

namespace cutlass_kernels::fa3 {

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

template <class Packed>
Candidate packed_candidate(const AttentionParams& params) {
  return {"packed", packed_tile_shape<Packed>(params, packed_heads(params, kWarpgroupRows)), Packed::kTime};
}

template <class Tile>
Candidate row_candidate(const char* name, int kind) {
  TileShape shape{Tile::kBlockM, kind, 0, Tile::kCtasPerSm};
  shape.blocks_per_tile = Tile::kCtasPerTile;
  return {name, shape, Tile::kTime};
}

// Tiles of packed heads, or of one head: `large`, and `small` if it is another one. Where results must not depend on
// the batch, there is one for all rows, or for all of their part.
template <class Packed, class Large, class Small = Large>
Candidates packed_or_rows(const AttentionParams& params, const char* large, int kind, const char* small = "") {
  const Candidate packed = packed_candidate<Packed>(params), rows = row_candidate<Large>(large, kind);
  if (is_alone(params)) return {params.least_rows <= kPackedUpToRows ? packed : rows};
  if constexpr (std::is_same_v<Large, Small>) {
    return {packed, rows};
  } else {
    return {packed, rows, row_candidate<Small>(small, kind)};
  }
}

template <int HeadDimQk, int HeadDimVo>
Candidates candidates(const AttentionParams& params, const Device&) {
  using Tiles = TileTable<HeadDimQk, HeadDimVo>;
  using Packed = typename Tiles::Packed;
  const bool general = GeneralTransform::needed(params);
  if (gathers(params)) {
    using PackedGather = typename Tiles::PackedGather;
    if (general) return {packed_candidate<PackedGather>(params)};
    return packed_or_rows<PackedGather, typename Tiles::Gather, typename Tiles::GatherSmall>(params, "gather", kGather,
                                                                                             "gather_small");
  }
  if (general) return packed_or_rows<Packed, typename Tiles::General>(params, "general", kGeneral);
  return packed_or_rows<Packed, typename Tiles::Large, typename Tiles::Small>(params, "large", kRows, "small");
}

template <int HeadDim>
Candidates fp8_candidates(const AttentionParams& params, const Device&) {
  using Tiles = Fp8TileTable<HeadDim>;
  return packed_or_rows<typename Tiles::Packed, typename Tiles::Large>(params, "large", kRows);
}

template <int HeadDim>
Candidates converted_candidates(const AttentionParams& params, const Device&) {
  return {packed_candidate<typename ConvertedTileTable<HeadDim>::Packed>(params)};
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
