// Host side of the fa3 backend: the kernel of a tile, its parameters, its grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "cuda_failure.h"
#include "device.h"
#include "fa3/choose_tile.h"
#include "fa3/kernel.h"
#include "fa3/make_tensor_maps.h"
#include "launch_kernel.h"
#include "registry/registry.h"

namespace cutlass_kernels::fa3 {

// What a launch needs to know of a kernel.
struct KernelFacts {
  void (*kernel)(KernelParams);
  int threads;
  int shared_bytes;
  int block_n;
  int ctas_per_sm;
  int ctas_per_tile;
  int head_tiles;  // of packed heads, that are computed together
  bool general;    // Logits::kGeneral
  Status (*make_maps)(const LaunchParams&, int, KernelParams*) = &fa3::make_maps;
  int packed_rows = kWarpgroupRows;
};

// No template: it is compiled once, not once per kernel.
inline Status enqueue_kernel(const KernelFacts& facts, const LaunchParams& params, cudaStream_t stream,
                             DoneOnDevices* allowed) {
  KernelParams kernel_params;
  kernel_params.attention = params;
  const LaunchParams& p = kernel_params.attention;
  Device device;
  if (Status asked = current_device(&device); !asked.ok()) return asked;
  // CTAs, or pairs of them, that run at once.
  const int ctas = device.multiprocessors * facts.ctas_per_sm / facts.ctas_per_tile;

  const int tiles = p.plan.tile_indices;
  const int packed_heads = std::max(p.plan.packed_heads, 1);
  kernel_params.heads = p.num_qo_heads / packed_heads / facts.head_tiles;
  kernel_params.packed.heads = FastDivisor(std::uint32_t(packed_heads));
  kernel_params.packed.tokens = facts.packed_rows / packed_heads;
  kernel_params.packed.last_token = (facts.packed_rows - 1) / packed_heads;
  LaunchParams of_order = p;
  of_order.plan.packed_heads = packed_heads * facts.head_tiles;
  // Without a counter, each CTA has fixed tile indices. They even out only in one order of lengths, without sections.
  const bool fixed = p.plan.tile_counter == nullptr;
  kernel_params.order = fixed ? TileOrder::make(of_order, tiles, std::int64_t(tiles) * kernel_params.heads, device,
                                                std::numeric_limits<std::int64_t>::max())
                              : TileOrder::make(of_order, tiles, 2 * ctas, device, TileOrder::tail_bytes_in_l2(device));
  kernel_params.transform = LogitsTransform::make(params);
  kernel_params.general = GeneralTransform::make(params);
  kernel_params.stats = RowStats::make(params);
  kernel_params.changes_logits = GeneralTransform::changes(params);
  if (facts.general) kernel_params.transform.scale = kernel_params.general.scale;
  kernel_params.mask_divisors = MaskDivisors(p);
  kernel_params.group_size = FastDivisor(std::uint32_t(p.num_qo_heads / p.num_kv_heads));
  kernel_params.rows = RowTiles::make(p);
  kernel_params.splits_of_row = FastDivisor(std::uint32_t(std::max(p.plan.equal_splits, 1)));

  if (Status made = facts.make_maps(p, facts.block_n, &kernel_params); !made.ok()) return made;

  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(unsigned(std::min<std::int64_t>(ctas, std::int64_t(tiles) * kernel_params.heads) * facts.ctas_per_tile));
  config.blockDim = dim3(unsigned(facts.threads));
  config.dynamicSmemBytes = std::size_t(facts.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(facts.ctas_per_tile), 1, 1};
  config.attrs = attributes;
  config.numAttrs = facts.ctas_per_tile > 1 ? 2 : 1;
  const cudaError_t error = launch_with_shared_memory(config, facts.kernel, kernel_params, device.index, allowed);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the fa3 kernel", error);
}

template <class Element, class Tile, Logits kLogits>
Status launch_tile(const LaunchParams& params, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<Tile>);
  static_assert(kBytes * Tile::kCtasPerSm <= (227 << 10) - 1024 * (Tile::kCtasPerSm - 1),
                "fa3: the shared memory of an SM is 227 KB for one CTA, and 1 KB less for each "
                "further one.");
  static DoneOnDevices allowed;  // this kernel to use kBytes
  const KernelFacts facts{&attention_kernel<Element, Tile, kLogits>,
                          Tile::kThreads,
                          kBytes,
                          Tile::kBlockN,
                          Tile::kCtasPerSm,
                          Tile::kCtasPerTile,
                          1,
                          kLogits == Logits::kGeneral};
  return enqueue_kernel(facts, params, stream, &allowed);
}

inline Status no_such_tile(const LaunchParams& params) {
  return Status::invalid("The plan is for tiles of " + std::to_string(params.plan.tile_rows) + " rows (kind " +
                         std::to_string(params.plan.tile_kind) +
                         "), but fa3 has none such for these head dimensions, this mask and these "
                         "pages: make_plan() makes a plan for these parameters.");
}

template <class Element, class Tile>
Status launch_capped(const LaunchParams& params, cudaStream_t stream) {
  return LogitsTransform::needed(params) ? launch_tile<Element, Tile, Logits::kTransformed>(params, stream)
                                         : launch_tile<Element, Tile, Logits::kPlain>(params, stream);
}

// Tiles of one head, and keys that come by TMA.
template <class Element, class Tiles>
Status launch_rows(const LaunchParams& params, cudaStream_t stream) {
  using Large = typename Tiles::Large;
  using FewKeys = typename Tiles::FewKeys;
  using Small = typename Tiles::Small;
  static_assert(Large::kBlockM == FewKeys::kBlockM && Small::kBlockM <= Large::kBlockM);
  const int rows = params.plan.tile_rows;
  if constexpr (!Tiles::kHasSoftCap) {
    static_assert(std::is_same_v<Large, Small> && std::is_same_v<Large, typename Tiles::General>);
    if (rows != Large::kBlockM) return no_such_tile(params);
    return LogitsTransform::needed(params) ? launch_tile<Element, Large, Logits::kGeneral>(params, stream)
                                           : launch_tile<Element, Large, Logits::kPlain>(params, stream);
  } else {
    if (rows == Small::kBlockM && rows != Large::kBlockM) {
      return launch_capped<Element, Small>(params, stream);
    }
    if (rows != Large::kBlockM) return no_such_tile(params);
    if (LogitsTransform::needed(params)) {
      return launch_tile<Element, Large, Logits::kTransformed>(params, stream);
    }
    if constexpr (Tiles::kSkips) {
      if (params.skip_softmax_factor > 0.0f) {
        return launch_tile<Element, Large, Logits::kSkipping>(params, stream);
      }
    }
    return few_keys(params) && !is_alone(params) ? launch_tile<Element, FewKeys, Logits::kPlain>(params, stream)
                                                 : launch_tile<Element, Large, Logits::kPlain>(params, stream);
  }
}

template <class Element, class Packed>
Status launch_packed(const LaunchParams& params, cudaStream_t stream) {
  return GeneralTransform::needed(params) || LogitsTransform::needed(params)
             ? launch_tile<Element, Packed, Logits::kGeneral>(params, stream)
             : launch_tile<Element, Packed, Logits::kPlain>(params, stream);
}

// Tiles of one head, and a page size that is no multiple of 8.
template <class Element, class Tiles>
Status launch_gather(const LaunchParams& params, cudaStream_t stream) {
  using Gather = typename Tiles::Gather;
  using Small = typename Tiles::GatherSmall;
  const int rows = params.plan.tile_rows;
  if (rows == Gather::kBlockM) return launch_capped<Element, Gather>(params, stream);
  return rows == Small::kBlockM ? launch_capped<Element, Small>(params, stream) : no_such_tile(params);
}

template <class Packed>
bool is_packed_schedule(const LaunchParams& params) {
  return params.plan.tile_kind == kPacked && params.plan.packed_heads == packed_heads(params, kWarpgroupRows) &&
         params.plan.tile_rows == packed_tile_rows<Packed>(params);
}

template <class Element, int HeadDimQk, int HeadDimVo>
Status launch(const LaunchParams& params, cudaStream_t stream) {
  using Tiles = TileTable<HeadDimQk, HeadDimVo>;
  const bool general = GeneralTransform::needed(params);
  switch (params.plan.tile_kind) {
    case kPacked:
      if (!is_packed_schedule<typename Tiles::Packed>(params)) return no_such_tile(params);
      return gathers(params) ? launch_packed<Element, typename Tiles::PackedGather>(params, stream)
                             : launch_packed<Element, typename Tiles::Packed>(params, stream);
    case kGather:
      if (general || !gathers(params)) return no_such_tile(params);
      return launch_gather<Element, Tiles>(params, stream);
    case kGeneral:
      if (gathers(params) || params.plan.tile_rows != Tiles::General::kBlockM) {
        return no_such_tile(params);
      }
      return launch_tile<Element, typename Tiles::General, Logits::kGeneral>(params, stream);
    case kRows:
      if (general || gathers(params)) return no_such_tile(params);
      return launch_rows<Element, Tiles>(params, stream);
  }
  return no_such_tile(params);
}

// ---- Host side of the kernels of e4m3 tensors.

// Factors that only the device knows are folded into the softmax's scale where a tile is of one head.
template <class Element, class Large>
Status launch_fp8_rows(const LaunchParams& params, cudaStream_t stream) {
  return LogitsTransform::needed(params) || has_logits_scale(params)
             ? launch_tile<Element, Large, Logits::kTransformed>(params, stream)
             : launch_tile<Element, Large, Logits::kPlain>(params, stream);
}

// Kernels of rows are compiled for each output of 16 bits: one kernel for both takes 4 % longer over prompts of 512
// tokens. All write e4m3, too.
template <int HeadDim>
Status launch_fp8(const LaunchParams& params, cudaStream_t stream) {
  using Tiles = Fp8TileTable<HeadDim>;
  using Large = typename Tiles::Large;
  if (is_packed_schedule<typename Tiles::Packed>(params)) {
    return launch_packed<Fp8To<Any16Bit>, typename Tiles::Packed>(params, stream);
  }
  if (params.plan.tile_kind != kRows || params.plan.tile_rows != Large::kBlockM) return no_such_tile(params);
  return params.o_dtype == DType::kFloat16 ? launch_fp8_rows<Fp8To<fp16>, Large>(params, stream)
                                           : launch_fp8_rows<Fp8To<bf16>, Large>(params, stream);
}

// ---- Host side of the kernels of e4m3 keys and values below 16-bit queries.

template <class Element, int HeadDim>
Status launch_converted(const LaunchParams& params, cudaStream_t stream) {
  using Tile = typename ConvertedTileTable<HeadDim>::Packed;
  return is_packed_schedule<Tile>(params) ? launch_packed<Element, Tile>(params, stream) : no_such_tile(params);
}

}  // namespace cutlass_kernels::fa3
