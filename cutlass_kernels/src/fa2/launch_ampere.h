// Host side of the tiles that Hopper does not need, because fa3 computes its prefill (AmpereTiles in choose_tile.h).
#pragma once

#include "fa2/launch.h"

namespace cutlass_kernels::fa2 {

// Soft caps have kernels of their own for long queries at the head dimensions of Gemma 2 and Grok alone. Elsewhere the
// general ones compute them.
template <int HeadDim>
constexpr bool kHasCapped = HeadDim == 128 || HeadDim == 256;

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
  static_assert(Tiles::Large::kBlockM == Tiles::Medium::kBlockM &&
                Tiles::Large::kBlockM == Tiles::Capped::kBlockM);
  const bool capped = LogitsTransform::needed(params);
  if (GeneralTransform::needed(params) || (capped && !kHasCapped<HeadDim>)) {
    return launch_tile<Element, typename Tiles::Capped, Logits::kGeneral>(params, stream);
  }
  if constexpr (kHasCapped<HeadDim>) {
    if (capped) {
      return launch_tile<Element, typename Tiles::Capped, Logits::kTransformed>(params, stream);
    }
  }
  return many_short_tiles<typename Tiles::Large>(params, device)
             ? launch_tile<Element, typename Tiles::Medium, Logits::kPlain>(params, stream)
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
                 ? launch_tile<Element, typename Tiles::TurnsGeneral, Logits::kGeneral>(params,
                                                                                        stream)
                 : launch_tile<Element, typename Tiles::Turns, Logits::kPlain>(params, stream);
    }
  }
  const bool is_long = rows == Tiles::Large::kBlockM &&
                       (!kEqualRows<Tiles> || has_shared_memory_for<typename Tiles::Large>(device));
  if (is_long) return launch_long_rows<Element, HeadDim>(params, device, stream);
  return rows == Tiles::Small::kBlockM
             ? launch_small<Element, typename Tiles::Small>(params, stream)
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
