// The tiles of the table (config.h) that may compute a problem: pure functions of its sizes and of the device's facts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/logits.h"
#include "common/mask.h"
#include "cutlass_kernels/params.h"
#include "device.h"
#include "fa2/config.h"
#include "fa2/shared_memory.h"
#include "plan/packing.h"
#include "plan/tile_shape.h"

namespace cutlass_kernels::fa2 {

// Tiles of two waves, at two thread blocks per SM.
inline std::int64_t two_waves(const Device& device) { return 4 * device.multiprocessors; }

// The least that a device with these kernels has: compute capabilities 8.6, 8.9 and 12.x.
constexpr int kLeastSharedBytes = 99 << 10;

template <class Tile>
std::int64_t tile_count(const AttentionParams& params) {
  return (params.total_q + Tile::kBlockM - 1) / Tile::kBlockM * params.num_qo_heads;
}

template <class Tile>
bool has_shared_memory_for(const Device& device) {
  return SharedLayout<Tile>::kPagedBytes <= device.shared_memory_per_block;
}

// What launches take for granted: a device without the memory for one tile has it for another that serves the same
// rows.
template <class... Tile>
constexpr bool fit_every_device() {
  return ((SharedLayout<Tile>::kPagedBytes <= kLeastSharedBytes) && ...);
}

template <class Tiles>
constexpr bool serves_every_device() {
  static_assert(fit_every_device<typename Tiles::Small, typename Tiles::Packed, typename Tiles::PackedWide,
                                 typename Tiles::DecodeSmall>(),
                "fa2: 99 KB, the shared memory of compute capability 8.6, must be enough for these.");
  static_assert(
      std::max(SharedLayout<typename Tiles::FewKeys>::kPagedBytes,
               SharedLayout<typename Tiles::SoftCap>::kPagedBytes) <= SharedLayout<typename Tiles::Large>::kPagedBytes,
      "fa2: where there is memory for Large, FewKeys and SoftCap are launched, too.");
  return true;
}

// Whether the small tile and the others have as many rows. Then a plan serves both, and launch_rows() chooses.
template <class Tiles>
constexpr bool kEqualRows = Tiles::Small::kBlockM == Tiles::Large::kBlockM;

template <class Tiles>
constexpr bool kHasPackedWide = !std::is_same_v<typename Tiles::Packed, typename Tiles::PackedWide>;

// Head dimensions with tiles whose warps take turns.
template <class Tiles, class = void>
constexpr bool kHasTurns = false;
template <class Tiles>
constexpr bool kHasTurns<Tiles, std::void_t<typename Tiles::Turns>> = true;

// A tile of 256 rows whose warps do not take turns needs less shared memory.
template <class Tiles>
constexpr bool general_turns_fit() {
  return SharedLayout<typename Tiles::TurnsGeneral>::kPagedBytes <= SharedLayout<typename Tiles::Turns>::kPagedBytes &&
         Tiles::TurnsGeneral::kBlockM == Tiles::Turns::kBlockM &&
         Tiles::PackedTurnsGeneral::kBlockM == Tiles::PackedTurns::kBlockM;
}

// GPUs with fa2's tiles for prefill, which are all but Decode, Packed and those of 8-bit keys. Where fa3 is built,
// Hopper does not need them: they took a quarter of the time to compile for compute capability 9.0.
enum class AmpereTiles { kNowhere, kNotOnHopper, kEverywhere };

template <AmpereTiles kAmpere>
bool has_ampere_tiles(const Device& device) {
  return kAmpere == AmpereTiles::kEverywhere ||
         (kAmpere == AmpereTiles::kNotOnHopper && device.compute_capability / 10 != 9);
}

// Thread blocks that run at once on an SM. Beside its own shared memory each takes 1 KB.
template <class Tile>
int blocks_per_sm_on(const Device& device) {
  const int fit = (device.shared_memory_per_block + 1024) / (SharedLayout<Tile>::kPagedBytes + 1024);
  return std::clamp(fit, 1, Tile::kBlocksPerSm);
}

// The tile of so short queries that it holds all rows of a request and a key head, if they are all as long.
template <class Tile>
TileShape decode_shape(const AttentionParams& params, const Device& device) {
  const int heads = params.num_qo_heads / params.num_kv_heads;
  TileShape shape{Tile::kBlockM / heads, kDecode, heads, blocks_per_sm_on<Tile>(device)};
  shape.most_waves = 4;
  shape.least_split_keys = 64;
  shape.combines = true;
  // Packed tiles of more rows do not: with the search for splits in it, ptxas orders the main loop anew, and a chunk of
  // 512 rows over 16k keys took 9 % longer (hd128). A list takes 4 us.
  shape.splits_without_list = true;
  return shape;
}

template <class Tile>
Candidate packed_candidate(const char* name, int kind, const AttentionParams& params, const Device& device) {
  static_assert(Tile::kTime.per_key > 0);
  const int heads = packed_heads(params, Tile::kBlockM);
  TileShape shape{Tile::kBlockM / heads, kind, heads, blocks_per_sm_on<Tile>(device)};
  shape.least_split_keys_of_few = 64;  // 1 x 16 over 1k keys, 32/8 heads: 18.0 -> 14.0 us
  return {name, shape, Tile::kTime};
}

template <class Tile>
Candidate row_candidate(const char* name, const Device& device) {
  static_assert(Tile::kTime.per_key > 0);
  return {name, {Tile::kBlockM, kRows, 0, blocks_per_sm_on<Tile>(device)}, Tile::kTime};
}

template <int HeadDim, AmpereTiles kAmpere>
Candidates candidates(const AttentionParams& params, const Device& device) {
  using Tiles = TileTable<HeadDim>;
  using Packed = typename Tiles::Packed;
  using Large = typename Tiles::Large;
  if (decodes(params)) return {{"decode", decode_shape<typename Tiles::Decode>(params, device), {}}};
  const Candidate packed = packed_candidate<Packed>("packed", kPacked, params, device);
  if (!has_ampere_tiles<kAmpere>(device)) return {packed};
  const Candidate wide = packed_candidate<typename Tiles::PackedWide>("packed_wide", kPackedWide, params, device);
  // Where results must not depend on the batch, one tile for all of its rows.
  if (is_alone(params)) {
    const bool fit = std::int64_t(params.least_rows) * packed.shape.packed_heads <= Packed::kBlockM;
    return {kHasPackedWide<Tiles> && !fit ? wide : packed};
  }
  Candidates all{packed};
  if (kHasPackedWide<Tiles>) all.add(wide);
  if (kEqualRows<Tiles> || has_shared_memory_for<Large>(device)) all.add(row_candidate<Large>("large", device));
  if constexpr (!kEqualRows<Tiles>) all.add(row_candidate<typename Tiles::Small>("small", device));
  if constexpr (kHasTurns<Tiles>) {
    // Those of 256 rows for other logits do not take turns: they are for plans that receive such a mask later.
    const bool plain = !GeneralTransform::needed(params) && !LogitsTransform::needed(params);
    if (plain && has_shared_memory_for<typename Tiles::Turns>(device) && all_keys(params) >= params.total_q) {
      all.add(row_candidate<typename Tiles::Turns>("turns", device));
      all.add(packed_candidate<typename Tiles::PackedTurns>("packed_turns", kPackedTurns, params, device));
    }
  }
  return all;
}

// Three thread blocks per SM pay where tiles are short and there are many of them (hd64, 16k tokens: 15 % at 512
// causal keys, 0 % at 2k, -8 % at 16k).
template <class Tile>
bool many_short_tiles(const AttentionParams& params, const Device& device) {
  const std::int64_t keys = all_keys(params) / params.batch_size;
  return (hides_later_keys(params) ? keys / 2 : keys) <= 1024 && tile_count<Tile>(params) >= 4 * two_waves(device);
}

// Rows of a request, on average, up to which tiles of one row tile to a warp are faster.
constexpr std::int64_t kFp8NarrowRows = 32;

inline bool is_fp8_wide(const AttentionParams& params, int packed_heads) {
  // The two sum in different orders: where results must not depend on the batch, there is one.
  return !is_alone(params) && !GeneralTransform::needed(params) && !LogitsTransform::needed(params) &&
         params.total_q * packed_heads > kFp8NarrowRows * params.batch_size;
}

// Keys and values of 8 bits: packed heads, one at the least, whatever the length of the queries. Both tiles have as
// many rows: a plan serves either.
template <int HeadDim>
TileShape packed_fp8_shape(const AttentionParams& params, const Device& device) {
  using Tile = typename TileTable<HeadDim>::Fp8;
  using Wide = typename TileTable<HeadDim>::Fp8Wide;
  static_assert(Wide::kBlockM == Tile::kBlockM);
  const int heads = packed_heads(params, Tile::kBlockM);
  TileShape shape{Tile::kBlockM / heads, kPacked, heads,
                  is_fp8_wide(params, heads) ? blocks_per_sm_on<Wide>(device) : blocks_per_sm_on<Tile>(device)};
  shape.most_waves = 4;
  shape.needs_list = true;  // there are no registers to find tiles otherwise
  return shape;
}

template <int HeadDim>
Candidates fp8_candidates(const AttentionParams& params, const Device& device) {
  if (decodes(params)) return {{"decode", decode_shape<typename TileTable<HeadDim>::DecodeFp8>(params, device), {}}};
  return {{"packed", packed_fp8_shape<HeadDim>(params, device), {}}};
}

}  // namespace cutlass_kernels::fa2
