// Host side of the fa2 backend: which tile, which grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <type_traits>

#include "common/packing.h"
#include "cuda_failure.h"
#include "device.h"
#include "fa2/kernel.h"
#include "registry.h"

namespace cutlass_kernels::fa2 {

// Two waves of blocks on a 132-SM device, two blocks per SM.
constexpr std::int64_t kTwoWaves = 528;

// Longer than TileOrder::kTailBytes: the last section may be as large as two waves, at no cost where a block takes so much
// longer over its keys than fa3's (hd128, 8k causal: 1.17 times torch's speed, with 32 MB 1.14).
constexpr std::int64_t kTailBytes = std::int64_t(1) << 40;

// Shared memory a block may have (CUDA programming guide, technical specifications per compute capability).
constexpr int kLeastSharedBytes = 99 << 10;
inline int max_shared_bytes(int compute_capability) {
  switch (compute_capability) {
    case 80:
    case 87:
      return 163 << 10;
    case 86:
    case 89:
    case 120:
    case 121:
      return kLeastSharedBytes;
    default:
      return compute_capability >= 90 ? 227 << 10 : 0;
  }
}

template <class Tile>
std::int64_t block_count(const AttentionParams& params) {
  return (params.total_q + Tile::kBlockM - 1) / Tile::kBlockM * params.num_qo_heads;
}

template <class Tile>
bool has_shared_memory_for(int compute_capability) {
  return SharedLayout<Tile>::kPagedBytes <= max_shared_bytes(compute_capability);
}

// What launches take for granted: a device without the memory for one tile has it for another that serves the same rows.
template <class Tiles>
constexpr bool serves_every_device() {
  const auto fit = [](auto... bytes) { return ((bytes <= kLeastSharedBytes) && ...); };
  static_assert(
      fit(SharedLayout<typename Tiles::Small>::kPagedBytes,
          SharedLayout<typename Tiles::Packed>::kPagedBytes,
          SharedLayout<typename Tiles::DecodeSmall>::kPagedBytes,
          SharedLayout<typename Tiles::Fp8>::kPagedBytes,
          SharedLayout<typename Tiles::Fp8Wide>::kPagedBytes,
          SharedLayout<typename Tiles::DecodeFp8>::kPagedBytes),
      "fa2: 99 KB, the shared memory of compute capability 8.6, must be enough for these.");
  static_assert(std::max(SharedLayout<typename Tiles::Medium>::kPagedBytes,
                         SharedLayout<typename Tiles::Capped>::kPagedBytes) <=
                    SharedLayout<typename Tiles::Large>::kPagedBytes,
                "fa2: where there is memory for Large, Medium and Capped are launched, too.");
  return true;
}

// Whether the small tile and the others have as many rows. Then a schedule serves both, and launch_rows() chooses.
template <class Tiles>
constexpr bool kEqualRows = Tiles::Small::kBlockM == Tiles::Large::kBlockM;

// Blocks of a tile that run at once on an SM. Beside its own shared memory each takes 1 KB.
template <class Tile>
int blocks_per_sm_on(int compute_capability) {
  const int fit =
      (max_shared_bytes(compute_capability) + 1024) / (SharedLayout<Tile>::kPagedBytes + 1024);
  return std::clamp(fit, 1, Tile::kBlocksPerSm);
}

// The tile of so short queries that it holds all rows of a request and a key head, if they are all as long.
template <class Tile>
TileShape decode_shape(const AttentionParams& params, int compute_capability) {
  const int heads = params.num_qo_heads / params.num_kv_heads;
  TileShape shape{Tile::kBlockM / heads, kDecode, heads,
                  blocks_per_sm_on<Tile>(compute_capability)};
  shape.most_waves = 4;
  shape.least_piece = 64;
  shape.merges = true;
  // Packed tiles of more rows do not: with the search for pieces in it, ptxas orders the main loop anew, and a chunk of 512
  // rows over 16k keys took 9 % longer (hd128). A list takes 4 us.
  shape.splits_without_list = true;
  return shape;
}

// The tile of a problem. A batch is scheduled before its mask is known and is taken to be causal.
template <int HeadDim>
TileShape tile_shape(const AttentionParams& params, int compute_capability) {
  using Tiles = TileTable<HeadDim>;
  using Large = typename Tiles::Large;
  using Packed = typename Tiles::Packed;
  if (decodes(params)) return decode_shape<typename Tiles::Decode>(params, compute_capability);
  const int heads = packed_heads(params, Packed::kBlockM);
  if (packs(params, heads, Large::kBlockM)) {
    return {Packed::kBlockM / heads, kPacked, heads, blocks_per_sm_on<Packed>(compute_capability)};
  }
  if constexpr (kEqualRows<Tiles>) {
    return {Large::kBlockM, kRows};
  } else {
    const bool causal = params.causal || params.chunk_size > 0 || params.qo_indptr != nullptr;
    const int few = causal ? Tiles::kFewBlocksCausal : Tiles::kFewBlocks;
    const bool small = params.total_q / params.batch_size <= Tiles::Small::kBlockM ||
                       block_count<Large>(params) < few ||
                       !has_shared_memory_for<Large>(compute_capability);
    return {small ? Tiles::Small::kBlockM : Large::kBlockM, kRows};
  }
}

// Three blocks per SM pay where tiles are short and there are many of them (hd64, 16k tokens: 15 % at 512
// causal keys, 0 % at 2k, -8 % at 16k).
template <class Tile>
bool many_short_tiles(const AttentionParams& params) {
  const std::int64_t keys = params.total_kv / params.batch_size;
  return (params.causal || params.chunk_size > 0 ? keys / 2 : keys) <= 1024 &&
         block_count<Tile>(params) >= 4 * kTwoWaves;
}

template <class Element, class Kv, class Tile, Logits kLogits, bool kPaged>
Status launch_kernel(const AttentionParams& params, cudaStream_t stream) {
  KernelParams kernel_params{};
  kernel_params.attention = params;
  const AttentionParams& p = kernel_params.attention;
  kernel_params.transform = LogitsTransform::make(params);
  kernel_params.general = GeneralTransform::make(params);
  kernel_params.stats = RowStats::make(params);
  kernel_params.transforms = GeneralTransform::changes(params);
  if (kLogits == Logits::kGeneral) kernel_params.transform.scale = kernel_params.general.scale;
  kernel_params.chunk = FastDivisor(std::uint32_t(p.chunk_size));
  kernel_params.group_size = p.num_qo_heads / p.num_kv_heads;
  kernel_params.rows = RowTiles::make(p);
  const int packed_heads = std::max(p.schedule.packed_heads, 1);
  kernel_params.pack = FastDivisor(std::uint32_t(packed_heads));
  const int tiles = p.schedule.capacity;
  // Packed heads share their keys already: sections would only put entries of the list without a tile between the others.
  const std::int64_t tail_tiles =
      Tile::kDecodes ? std::int64_t(tiles) * (p.num_qo_heads / packed_heads) : kTwoWaves;
  kernel_params.order = TileOrder::make(p, tiles, tail_tiles, kTailBytes);
  if constexpr (kPaged) {
    const PageTable& pages = p.pages;
    kernel_params.page_size = FastDivisor(std::uint32_t(pages.page_size));
    kernel_params.num_pages =
        std::uint32_t(std::clamp<std::int64_t>(pages.num_pages, 0, std::int64_t(1) << 31));
    auto matrix = [](const ConstTensorView& view, const std::int32_t* indices,
                     std::int64_t stride_page) {
      constexpr std::int64_t kBytes = Tile::kKvBytes;
      return PagedMatrix{indices, static_cast<const char*>(view.data), kBytes * stride_page,
                         kBytes * view.stride_token, kBytes * view.stride_head};
    };
    const std::int32_t* v_indices = pages.v_indices != nullptr ? pages.v_indices : pages.indices;
    kernel_params.paged[0] = matrix(p.k, pages.indices, pages.k_stride_page);
    kernel_params.paged[1] = matrix(p.v, v_indices, pages.v_stride_page);
    kernel_params.first_v_page = std::uint32_t(pages.v_offset);
  }

  auto* kernel = &attention_kernel<Element, Kv, Tile, kLogits, kPaged>;
  constexpr int kBytes = kPaged ? SharedLayout<Tile>::kPagedBytes : SharedLayout<Tile>::kBytes;
  Device device;
  if (Status asked = current_device(&device); !asked.ok()) return asked;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(tiles) * unsigned(p.num_qo_heads / packed_heads));
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = Tile::kDecodes && has_dependent_launch(device.compute_capability) ? 1 : 0;
  static DoneOnDevices allowed;  // this kernel, so much shared memory
  const cudaError_t error =
      launch_with_shared_memory(config, kernel, kernel_params, device.index, &allowed);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the fa2 kernel", error);
}

template <class Element, class Tile, Logits kLogits, class Kv = Element>
Status launch_tile(const AttentionParams& params, cudaStream_t stream) {
  return params.pages.page_size > 0
             ? launch_kernel<Element, Kv, Tile, kLogits, true>(params, stream)
             : launch_kernel<Element, Kv, Tile, kLogits, false>(params, stream);
}

template <int HeadDim>
Status no_such_tile(const AttentionParams& params) {
  const Schedule& schedule = params.schedule;
  return Status::invalid(
      "The schedule is for tiles of " + std::to_string(schedule.tile_rows) + " rows (kind " +
      std::to_string(schedule.tile_kind) + ", " + std::to_string(schedule.packed_heads) +
      " packed heads), but fa2 has none such for head dimension " + std::to_string(HeadDim) +
      " and these heads: make it with make_schedule() from the same parameters.");
}

// The kernels for packed heads.
template <class Element, int HeadDim, class Packed, class Kv = Element>
Status launch_packed(const AttentionParams& params, cudaStream_t stream) {
  const int heads = packed_heads(params, Packed::kBlockM);
  if (params.schedule.packed_heads != heads ||
      params.schedule.tile_rows != Packed::kBlockM / heads) {
    return no_such_tile<HeadDim>(params);
  }
  return GeneralTransform::needed(params) || LogitsTransform::needed(params)
             ? launch_tile<Element, Packed, Logits::kGeneral, Kv>(params, stream)
             : launch_tile<Element, Packed, Logits::kPlain, Kv>(params, stream);
}

template <class Element, int HeadDim>
Status launch_decode(const AttentionParams& params, cudaStream_t stream) {
  using Tile = typename TileTable<HeadDim>::Decode;
  using Small = typename TileTable<HeadDim>::DecodeSmall;
  static_assert(Small::kBlockM == Tile::kBlockM);  // one schedule serves both
  if constexpr (!std::is_same_v<Tile, Small>) {
    Device device;
    if (Status status = current_device(&device); !status.ok()) return status;
    if (!has_shared_memory_for<Tile>(device.compute_capability)) {
      return launch_packed<Element, HeadDim, Small>(params, stream);
    }
  }
  return launch_packed<Element, HeadDim, Tile>(params, stream);
}

// The kernel for one head's rows.
template <class Element, int HeadDim, Logits kLogits>
Status launch_rows(const AttentionParams& params, cudaStream_t stream) {
  using Tiles = TileTable<HeadDim>;
  static_assert(Tiles::Large::kBlockM == Tiles::Medium::kBlockM &&
                Tiles::Large::kBlockM == Tiles::Capped::kBlockM);
  const int rows = params.schedule.tile_rows;
  if (params.schedule.packed_heads != 0 || params.schedule.split_capacity != 0 ||
      (rows != Tiles::Small::kBlockM && rows != Tiles::Large::kBlockM)) {
    return no_such_tile<HeadDim>(params);
  }
  bool small = rows == Tiles::Small::kBlockM;
  if constexpr (kEqualRows<Tiles>) {
    Device device;
    if (Status status = current_device(&device); !status.ok()) return status;
    small = !has_shared_memory_for<typename Tiles::Large>(device.compute_capability);
  }
  if (small) return launch_tile<Element, typename Tiles::Small, kLogits>(params, stream);
  if constexpr (kLogits != Logits::kPlain) {
    return launch_tile<Element, typename Tiles::Capped, kLogits>(params, stream);
  } else if (many_short_tiles<typename Tiles::Large>(params)) {
    return launch_tile<Element, typename Tiles::Medium, kLogits>(params, stream);
  } else {
    return launch_tile<Element, typename Tiles::Large, kLogits>(params, stream);
  }
}

template <class Element, int HeadDim>
Status launch(const AttentionParams& params, cudaStream_t stream) {
  switch (params.schedule.tile_kind) {
    case kPacked:
      return launch_packed<Element, HeadDim, typename TileTable<HeadDim>::Packed>(params, stream);
    case kDecode:
      return launch_decode<Element, HeadDim>(params, stream);
    case kRows:
      if (GeneralTransform::needed(params)) {
        return launch_rows<Element, HeadDim, Logits::kGeneral>(params, stream);
      }
      return LogitsTransform::needed(params)
                 ? launch_rows<Element, HeadDim, Logits::kTransformed>(params, stream)
                 : launch_rows<Element, HeadDim, Logits::kPlain>(params, stream);
  }
  return no_such_tile<HeadDim>(params);
}

// Rows of a request, on average, up to which tiles of one row tile to a warp are faster.
constexpr std::int64_t kFp8NarrowRows = 32;

inline bool is_fp8_wide(const AttentionParams& params, int packed_heads) {
  // The two sum in different orders: where results must not depend on the batch, there is one.
  const bool invariant = params.disable_split_kv || params.fixed_split_size > 0;
  return !invariant && !GeneralTransform::needed(params) && !LogitsTransform::needed(params) &&
         params.total_q * packed_heads > kFp8NarrowRows * params.batch_size;
}

// Keys and values of 8 bits: packed heads, one at the least, whatever the length of the queries. Both tiles have as many
// rows: a schedule serves either.
template <int HeadDim>
TileShape packed_fp8_shape(const AttentionParams& params, int compute_capability) {
  using Tile = typename TileTable<HeadDim>::Fp8;
  using Wide = typename TileTable<HeadDim>::Fp8Wide;
  static_assert(Wide::kBlockM == Tile::kBlockM);
  const int heads = packed_heads(params, Tile::kBlockM);
  TileShape shape{Tile::kBlockM / heads, kPacked, heads,
                  is_fp8_wide(params, heads) ? blocks_per_sm_on<Wide>(compute_capability)
                                             : blocks_per_sm_on<Tile>(compute_capability)};
  shape.most_waves = 4;
  return shape;
}

template <int HeadDim>
TileShape fp8_tile_shape(const AttentionParams& params, int compute_capability) {
  return decodes(params)
             ? decode_shape<typename TileTable<HeadDim>::DecodeFp8>(params, compute_capability)
             : packed_fp8_shape<HeadDim>(params, compute_capability);
}

template <class Element, class Kv, int HeadDim>
Status launch_fp8(const AttentionParams& params, cudaStream_t stream) {
  using Tile = typename TileTable<HeadDim>::Fp8;
  using Wide = typename TileTable<HeadDim>::Fp8Wide;
  if (params.schedule.tile_kind == kDecode) {
    return launch_packed<Element, HeadDim, typename TileTable<HeadDim>::DecodeFp8, Kv>(params,
                                                                                       stream);
  }
  const TileShape shape = packed_fp8_shape<HeadDim>(params, 0);
  const Schedule& schedule = params.schedule;
  if (schedule.tile_kind != shape.kind || schedule.packed_heads != shape.packed_heads ||
      schedule.tile_rows != shape.rows) {
    return no_such_tile<HeadDim>(params);
  }
  if (GeneralTransform::needed(params) || LogitsTransform::needed(params)) {
    return launch_tile<Element, Tile, Logits::kGeneral, Kv>(params, stream);
  }
  return is_fp8_wide(params, shape.packed_heads)
             ? launch_tile<Element, Wide, Logits::kPlain, Kv>(params, stream)
             : launch_tile<Element, Tile, Logits::kPlain, Kv>(params, stream);
}

template <class Element, class Kv, int HeadDim>
KernelEntry kernel_entry() {
  static_assert(serves_every_device<TileTable<HeadDim>>());
  KernelEntry entry;
  entry.uses_extents = true;
  if constexpr (std::is_same_v<Element, Kv>) {
    entry.tile = &tile_shape<HeadDim>;
    entry.launch = &launch<Element, HeadDim>;
  } else {
    entry.tile = &fp8_tile_shape<HeadDim>;
    entry.launch = &launch_fp8<Element, Kv, HeadDim>;
  }
  return entry;
}

}  // namespace cutlass_kernels::fa2
