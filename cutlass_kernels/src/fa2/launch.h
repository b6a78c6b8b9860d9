// Host side of the fa2 backend: which tile, which grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <type_traits>

#include "cuda_failure.h"
#include "device.h"
#include "fa2/choose_tile.h"
#include "fa2/kernel.h"
#include "launch_kernel.h"
#include "plan/packing.h"
#include "registry/registry.h"

namespace cutlass_kernels::fa2 {

// Longer than what fits L2: the last section may be as large as two waves, at no cost where a thread block takes so
// much longer over its keys than fa3's (hd128, 8k causal: 1.17 times torch's speed, with 32 MB 1.14).
constexpr std::int64_t kTailBytes = std::int64_t(1) << 40;

// What a launch needs to know of a kernel.
struct KernelFacts {
  void (*kernel)(KernelParams);
  int threads;
  int shared_bytes;
  int kv_bytes;  // of an element of K and V
  bool decodes;  // starts before the previous kernel ends; its tiles come in no sections
  bool general;  // Logits::kGeneral
};

// Of kernels that find rows by their addresses. Where they serve tensors, too (KvRows::kInEither), a tensor is a cache
// whose pages begin a token apart: the keys of a request are in the one that begins with its first key.
inline void set_pages(int kv_bytes, KernelParams* kernel_params) {
  const LaunchParams& p = kernel_params->attention;
  const PageTable& pages = p.pages;
  if (pages.page_size == 0) {
    const auto tensor = [&](const ConstTensorView& view) {
      const std::int64_t token_bytes = kv_bytes * view.stride_token;
      return PagedMatrix{nullptr, static_cast<const char*>(view.data), token_bytes, token_bytes,
                         kv_bytes * view.stride_head};
    };
    kernel_params->num_pages = std::uint32_t(1) << 31;
    kernel_params->paged[0] = tensor(p.k);
    kernel_params->paged[1] = tensor(p.v);
    return;
  }
  const auto matrix = [&](const ConstTensorView& view, const std::int32_t* indices, std::int64_t stride_page) {
    return PagedMatrix{indices, static_cast<const char*>(view.data), kv_bytes * stride_page,
                       kv_bytes * view.stride_token, kv_bytes * view.stride_head};
  };
  kernel_params->page_size = FastDivisor(std::uint32_t(std::max(pages.page_size, pages.slots_per_page)));
  kernel_params->num_pages = std::uint32_t(std::clamp<std::int64_t>(pages.num_pages, 0, std::int64_t(1) << 31));
  kernel_params->paged[0] = matrix(p.k, pages.indices, pages.k_stride_page);
  const std::int32_t* v_indices = pages.v_indices != nullptr ? pages.v_indices : pages.indices;
  kernel_params->paged[1] = matrix(p.v, v_indices, pages.v_stride_page);
  kernel_params->first_v_page = std::uint32_t(pages.v_offset);
}

// No template: it is compiled once, not once per kernel.
inline Status enqueue_kernel(const KernelFacts& facts, const LaunchParams& params, cudaStream_t stream,
                             DoneOnDevices* allowed) {
  Device device;
  if (Status asked = current_device(&device); !asked.ok()) return asked;
  KernelParams kernel_params{};
  kernel_params.attention = params;
  const LaunchParams& p = kernel_params.attention;
  kernel_params.transform = LogitsTransform::make(params);
  kernel_params.general = GeneralTransform::make(params);
  kernel_params.stats = RowStats::make(params);
  kernel_params.transforms = GeneralTransform::changes(params);
  if (facts.general) kernel_params.transform.scale = kernel_params.general.scale;
  kernel_params.mask_divisors = MaskDivisors(p);
  kernel_params.group_size = p.num_qo_heads / p.num_kv_heads;
  kernel_params.rows = RowTiles::make(p);
  const int packed_heads = std::max(p.plan.packed_heads, 1);
  kernel_params.pack = FastDivisor(std::uint32_t(packed_heads));
  const int tiles = p.plan.tile_indices;
  const int heads = p.num_qo_heads / packed_heads;
  // Packed heads share their keys already: sections would only put entries of the list without a tile between the
  // others.
  const std::int64_t tail_tiles = facts.decodes ? std::int64_t(tiles) * heads : two_waves(device);
  kernel_params.order = TileOrder::make(p, tiles, tail_tiles, device, kTailBytes);
  set_pages(facts.kv_bytes, &kernel_params);

  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(tiles) * unsigned(heads));
  config.blockDim = dim3(unsigned(facts.threads));
  config.dynamicSmemBytes = std::size_t(facts.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = facts.decodes && has_dependent_launch(device.compute_capability) ? 1 : 0;
  const cudaError_t error = launch_with_shared_memory(config, facts.kernel, kernel_params, device.index, allowed);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the fa2 kernel", error);
}

template <class Element, class Kv, class Tile, Logits kLogits, KvRows kKvRows>
Status launch_kernel(const LaunchParams& params, cudaStream_t stream) {
  static DoneOnDevices allowed;  // this kernel, so much shared memory
  const KernelFacts facts{&attention_kernel<Element, Kv, Tile, kLogits, kKvRows>,
                          Tile::kThreads,
                          kKvRows == KvRows::kInTensors ? SharedLayout<Tile>::kBytes : SharedLayout<Tile>::kPagedBytes,
                          Tile::kKvBytes,
                          Tile::kDecodes,
                          kLogits == Logits::kGeneral};
  return enqueue_kernel(facts, params, stream, &allowed);
}

// Kernels of packed heads that are general, and those of 8-bit keys, serve pages and tensors alike. (As one, those of
// one head would take 9 to 26 % longer for soft caps and up to 15 % for bits and ALiBi, head dimension 64 and 256.)
template <class Element, class Tile, Logits kLogits, class Kv = Element>
Status launch_tile(const LaunchParams& params, cudaStream_t stream) {
  if constexpr (Tile::kKvBytes == 1 || (Tile::kPacked && kLogits == Logits::kGeneral)) {
    return launch_kernel<Element, Kv, Tile, kLogits, KvRows::kInEither>(params, stream);
  } else {
    return params.pages.page_size > 0 ? launch_kernel<Element, Kv, Tile, kLogits, KvRows::kInPages>(params, stream)
                                      : launch_kernel<Element, Kv, Tile, kLogits, KvRows::kInTensors>(params, stream);
  }
}

template <int HeadDim>
Status no_such_tile(const LaunchParams& params) {
  const LaunchPlan& plan = params.plan;
  return Status::invalid("The plan is for tiles of " + std::to_string(plan.tile_rows) + " rows (kind " +
                         std::to_string(plan.tile_kind) + ", " + std::to_string(plan.packed_heads) +
                         " packed heads), but fa2 has none such for head dimension " + std::to_string(HeadDim) +
                         " with these heads on this device: make_plan() makes a plan for these parameters.");
}

// The kernels for packed heads. General: the tile for whatever Packed has no registers for.
template <class Element, int HeadDim, class Packed, class Kv = Element, class General = Packed>
Status launch_packed(const LaunchParams& params, cudaStream_t stream) {
  const int heads = packed_heads(params, Packed::kBlockM);
  if (params.plan.packed_heads != heads || params.plan.tile_rows != Packed::kBlockM / heads) {
    return no_such_tile<HeadDim>(params);
  }
  return GeneralTransform::needed(params) || LogitsTransform::needed(params)
             ? launch_tile<Element, General, Logits::kGeneral, Kv>(params, stream)
             : launch_tile<Element, Packed, Logits::kPlain, Kv>(params, stream);
}

// The tiles that Hopper does not need, in a unit of their own (attention_ampere.cu.in): below.
template <class Element, int HeadDim>
Status launch_ampere(const LaunchParams& params, const Device& device, cudaStream_t stream);

template <class Element, int HeadDim, AmpereTiles kAmpere>
Status launch(const LaunchParams& params, cudaStream_t stream) {
  using Tiles = TileTable<HeadDim>;
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  if (params.plan.tile_kind == kDecode && has_shared_memory_for<typename Tiles::Decode>(device)) {
    return launch_packed<Element, HeadDim, typename Tiles::Decode>(params, stream);
  }
  if (params.plan.tile_kind == kPacked) {
    return launch_packed<Element, HeadDim, typename Tiles::Packed>(params, stream);
  }
  if constexpr (kAmpere != AmpereTiles::kNowhere) {
    if (has_ampere_tiles<kAmpere>(device)) {
      return launch_ampere<Element, HeadDim>(params, device, stream);
    }
  }
  return no_such_tile<HeadDim>(params);
}

template <class Kv, int HeadDim>
Status launch_fp8(const LaunchParams& params, cudaStream_t stream) {
  using Tile = typename TileTable<HeadDim>::Fp8;
  using Wide = typename TileTable<HeadDim>::Fp8Wide;
  if (params.plan.tile_kind == kDecode) {
    return launch_packed<Any16Bit, HeadDim, typename TileTable<HeadDim>::DecodeFp8, Kv>(params, stream);
  }
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  const TileShape shape = packed_fp8_shape<HeadDim>(params, device);
  const LaunchPlan& plan = params.plan;
  if (plan.tile_kind != shape.kind || plan.packed_heads != shape.packed_heads || plan.tile_rows != shape.rows) {
    return no_such_tile<HeadDim>(params);
  }
  if (GeneralTransform::needed(params) || LogitsTransform::needed(params)) {
    return launch_tile<Any16Bit, Tile, Logits::kGeneral, Kv>(params, stream);
  }
  return is_fp8_wide(params, shape.packed_heads) ? launch_tile<Any16Bit, Wide, Logits::kPlain, Kv>(params, stream)
                                                 : launch_tile<Any16Bit, Tile, Logits::kPlain, Kv>(params, stream);
}

template <class Element, class Kv, int HeadDim, AmpereTiles kAmpere>
KernelEntry kernel_entry() {
  using Tiles = TileTable<HeadDim>;
  KernelEntry entry;
  entry.uses_mask_extents = true;
  if constexpr (!std::is_same_v<Element, Any16Bit>) {
    static_assert(serves_every_device<Tiles>());
    entry.candidates = &candidates<HeadDim, kAmpere>;
    entry.launch = &launch<Element, HeadDim, kAmpere>;
  } else {
    static_assert(fit_every_device<typename Tiles::Fp8, typename Tiles::Fp8Wide, typename Tiles::DecodeFp8>());
    entry.candidates = &fp8_candidates<HeadDim>;
    entry.launch = &launch_fp8<Kv, HeadDim>;
  }
  return entry;
}

// ---- Host side of the tiles that Hopper does not need, because fa3 computes its prefill (AmpereTiles in
// choose_tile.h).

// Soft caps have kernels of their own for long queries at the head dimensions of Gemma 2 and Grok alone. Elsewhere the
// general ones compute them.
template <int HeadDim>
constexpr bool kHasSoftCap = HeadDim == 128 || HeadDim == 256;

// Small tiles are for few rows: one kernel serves pages and tensors.
template <class Element, class Tile>
Status launch_small(const LaunchParams& params, cudaStream_t stream) {
  constexpr KvRows kRows = KvRows::kInEither;
  return GeneralTransform::needed(params) || LogitsTransform::needed(params)
             ? launch_kernel<Element, Element, Tile, Logits::kGeneral, kRows>(params, stream)
             : launch_kernel<Element, Element, Tile, Logits::kPlain, kRows>(params, stream);
}

template <class Element, int HeadDim>
Status launch_long_rows(const LaunchParams& params, const Device& device, cudaStream_t stream) {
  using Tiles = TileTable<HeadDim>;
  static_assert(Tiles::Large::kBlockM == Tiles::FewKeys::kBlockM && Tiles::Large::kBlockM == Tiles::SoftCap::kBlockM);
  const bool capped = LogitsTransform::needed(params);
  if (GeneralTransform::needed(params) || (capped && !kHasSoftCap<HeadDim>)) {
    return launch_tile<Element, typename Tiles::SoftCap, Logits::kGeneral>(params, stream);
  }
  if constexpr (kHasSoftCap<HeadDim>) {
    if (capped) {
      return launch_tile<Element, typename Tiles::SoftCap, Logits::kTransformed>(params, stream);
    }
  }
  return many_short_tiles<typename Tiles::Large>(params, device)
             ? launch_tile<Element, typename Tiles::FewKeys, Logits::kPlain>(params, stream)
             : launch_tile<Element, typename Tiles::Large, Logits::kPlain>(params, stream);
}

template <class Element, int HeadDim>
Status launch_rows(const LaunchParams& params, const Device& device, cudaStream_t stream) {
  using Tiles = TileTable<HeadDim>;
  const int rows = params.plan.tile_rows;
  if (params.plan.packed_heads != 0 || params.plan.split_tile_capacity != 0) {
    return no_such_tile<HeadDim>(params);
  }
  if constexpr (kHasTurns<Tiles>) {
    static_assert(general_turns_fit<Tiles>());
    if (rows == Tiles::Turns::kBlockM) {
      return GeneralTransform::needed(params) || LogitsTransform::needed(params)
                 ? launch_tile<Element, typename Tiles::TurnsGeneral, Logits::kGeneral>(params, stream)
                 : launch_tile<Element, typename Tiles::Turns, Logits::kPlain>(params, stream);
    }
  }
  const bool is_long =
      rows == Tiles::Large::kBlockM && (!kEqualRows<Tiles> || has_shared_memory_for<typename Tiles::Large>(device));
  if (is_long) return launch_long_rows<Element, HeadDim>(params, device, stream);
  return rows == Tiles::Small::kBlockM ? launch_small<Element, typename Tiles::Small>(params, stream)
                                       : no_such_tile<HeadDim>(params);
}

template <class Element, int HeadDim>
Status launch_ampere(const LaunchParams& params, const Device& device, cudaStream_t stream) {
  using Tiles = TileTable<HeadDim>;
  switch (params.plan.tile_kind) {
    case kPackedWide:
      if constexpr (kHasPackedWide<Tiles>) {
        return launch_packed<Element, HeadDim, typename Tiles::PackedWide>(params, stream);
      }
      break;
    case kPackedTurns:
      if constexpr (kHasTurns<Tiles>) {
        return launch_packed<Element, HeadDim, typename Tiles::PackedTurns, Element,
                             typename Tiles::PackedTurnsGeneral>(params, stream);
      }
      break;
    case kDecode:
      if constexpr (!std::is_same_v<typename Tiles::Decode, typename Tiles::DecodeSmall>) {
        // One schedule serves both.
        static_assert(Tiles::DecodeSmall::kBlockM == Tiles::Decode::kBlockM);
        return launch_packed<Element, HeadDim, typename Tiles::DecodeSmall>(params, stream);
      }
      break;
    case kRows:
      return launch_rows<Element, HeadDim>(params, device, stream);
  }
  return no_such_tile<HeadDim>(params);
}

}  // namespace cutlass_kernels::fa2
