// Which tile of the table (config.h) serves a problem: pure functions of the problem's sizes and the device's facts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "common/logits.h"
#include "common/mask.h"
#include "cutlass_kernels/params.h"
#include "device.h"
#include "fa2/config.h"
#include "fa2/shared_memory.h"
#include "plan/packing.h"
#include "plan/split.h"
#include "plan/tile_shape.h"
#include "plan/tile_time.h"

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
TileShape shape_of_packed(int heads, int kind, const Device& device) {
  TileShape shape{Tile::kBlockM / heads, kind, heads, blocks_per_sm_on<Tile>(device)};
  shape.least_split_keys_of_few = 64;  // 1 x 16 over 1k keys, 32/8 heads: 18.0 -> 14.0 us
  return shape;
}

// The tile of packed heads for so many rows of a request, on average.
template <class Tiles>
TileShape packed_shape(const AttentionParams& params, std::int64_t rows, const Device& device) {
  using Packed = typename Tiles::Packed;
  using Wide = typename Tiles::PackedWide;
  const int heads = packed_heads(params, Packed::kBlockM);
  if (!kHasPackedWide<Tiles> || rows * heads <= Packed::kBlockM) {
    return shape_of_packed<Packed>(heads, kPacked, device);
  }
  return shape_of_packed<Wide>(packed_heads(params, Wide::kBlockM), kPackedWide, device);
}

template <class Tile>
TileShape shape_of_rows(const Device& device) {
  return {Tile::kBlockM, kRows, 0, blocks_per_sm_on<Tile>(device)};
}

// The fastest tile where either fills the device. A batch is planned before its mask is known and is taken to be
// causal.
template <int HeadDim>
TileShape usual_shape(const AttentionParams& params, const Device& device) {
  using Tiles = TileTable<HeadDim>;
  using Large = typename Tiles::Large;
  const int heads = packed_heads(params, Tiles::Packed::kBlockM);
  // Packed tiles as fast as those of one head serve a whole wave of them.
  const int per_sm = kHasPackedWide<Tiles> ? blocks_per_sm_on<typename Tiles::PackedWide>(device) : 1;
  if (has_short_queries(params, heads) ||
      leaves_device_idle(params, Large::kBlockM, per_sm * device.multiprocessors, 4)) {
    return packed_shape<Tiles>(params, params.total_q / params.batch_size, device);
  }
  bool small = false;
  if constexpr (!kEqualRows<Tiles>) {
    const bool causal = hides_later_keys(params) || is_batch(params);
    const int few_on_132 = causal ? Tiles::kFewTilesCausal : Tiles::kFewTiles;
    const int few = few_on_132 * device.multiprocessors / 132;
    small = params.total_q / params.batch_size <= Tiles::Small::kBlockM || tile_count<Large>(params) < few ||
            !has_shared_memory_for<Large>(device);
  }
  return small ? shape_of_rows<typename Tiles::Small>(device) : shape_of_rows<Large>(device);
}

// From an H100, hd128, of the usual tile's time: 16k keys 0.88, 8k 0.90, 1k 0.96, 512 1.01; causal 16k 0.91, 4k 0.95,
// 2k 1.04.
constexpr TileSpeed kUsualSpeed{128, 1.1, 0, 48};
constexpr TileSpeed kTurnsSpeed{256, 1.0, 60, 160};
// Loads among the products, and the rows' tokens and heads, cost 1 to 6 %; a causal mask hides fewer of their keys.
constexpr TileSpeed kPackedTurnsSpeed{256, 1.02, 60, 160};

// A tile of twice as many rows whose warps take turns, of one head or of packed heads, where it is faster than `usual`.
template <class Tiles>
TileShape with_turns(const AttentionParams& params, const TileShape& usual, const Device& device) {
  using Turns = typename Tiles::Turns;
  using PackedTurns = typename Tiles::PackedTurns;
  const bool wide = usual.kind == kPackedWide || (usual.kind == kRows && usual.rows == Tiles::Large::kBlockM);
  if (!wide || !has_shared_memory_for<Turns>(device) || GeneralTransform::needed(params) ||
      LogitsTransform::needed(params) || all_keys(params) < params.total_q) {
    return usual;
  }
  TileShape best = usual;
  double least = estimated_time(params, usual, kUsualSpeed, device);
  const auto consider = [&](const TileShape& shape, const TileSpeed& speed) {
    const double time = estimated_time(params, shape, speed, device);
    if (time < least) best = shape, least = time;
  };
  consider(shape_of_rows<Turns>(device), kTurnsSpeed);
  consider(shape_of_packed<PackedTurns>(packed_heads(params, PackedTurns::kBlockM), kPackedTurns, device),
           kPackedTurnsSpeed);
  return best;
}

// All tiles but those for decoding and those whose warps take turns, the fastest first.
template <int HeadDim>
std::vector<TileShape> all_shapes(const AttentionParams& params, const Device& device) {
  using Tiles = TileTable<HeadDim>;
  using Packed = typename Tiles::Packed;
  using Wide = typename Tiles::PackedWide;
  std::vector<TileShape> shapes;
  if (can_split(params)) {
    if constexpr (kHasPackedWide<Tiles>) {
      shapes.push_back(shape_of_packed<Wide>(packed_heads(params, Wide::kBlockM), kPackedWide, device));
    }
    shapes.push_back(shape_of_packed<Packed>(packed_heads(params, Packed::kBlockM), kPacked, device));
  }
  if (has_shared_memory_for<typename Tiles::Large>(device)) {
    shapes.push_back(shape_of_rows<typename Tiles::Large>(device));
  }
  if constexpr (!kEqualRows<Tiles>) shapes.push_back(shape_of_rows<typename Tiles::Small>(device));
  return shapes;
}

// The tile of a problem.
template <int HeadDim, AmpereTiles kAmpere>
TileShape tile_shape(const AttentionParams& params, const Device& device) {
  using Tiles = TileTable<HeadDim>;
  if (decodes(params)) return decode_shape<typename Tiles::Decode>(params, device);
  if (!has_ampere_tiles<kAmpere>(device)) {
    using Packed = typename Tiles::Packed;
    return shape_of_packed<Packed>(packed_heads(params, Packed::kBlockM), kPacked, device);
  }
  // Where results must not depend on the batch, one tile for all of its rows.
  if (is_alone(params)) return packed_shape<Tiles>(params, params.least_rows, device);
  TileShape usual = usual_shape<HeadDim>(params, device);
  if constexpr (kHasTurns<Tiles>) usual = with_turns<Tiles>(params, usual, device);
  // Where one tile holds all rows of a request, memory is what takes time, whichever SMs read it.
  const std::int64_t rows = params.total_q / params.batch_size;
  if (usual.packed_heads > 0 && rows <= usual.rows) return usual;
  // Another one only where it leaves more than a third of the SMs idle: then the first that does not, or the least
  // idle.
  constexpr double kMostIdle = 0.35;
  TileShape best = usual;
  double idle = idle_share(params, usual, device);
  if (idle <= kMostIdle) return usual;
  for (const TileShape& other : all_shapes<HeadDim>(params, device)) {
    const double of_other = idle_share(params, other, device);
    if (of_other < idle) best = other, idle = of_other;
    if (idle <= kMostIdle) break;
  }
  return best;
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
TileShape fp8_tile_shape(const AttentionParams& params, const Device& device) {
  return decodes(params) ? decode_shape<typename TileTable<HeadDim>::DecodeFp8>(params, device)
                         : packed_fp8_shape<HeadDim>(params, device);
}

}  // namespace cutlass_kernels::fa2
