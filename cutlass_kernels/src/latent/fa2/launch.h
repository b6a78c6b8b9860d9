// Host side of latent attention by mma.sync: which tile serves a problem, its launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "device.h"
#include "fa2/launch.h"
#include "latent/dims.h"
#include "latent/fa2/kernel.h"
#include "plan/packing.h"

namespace cutlass_kernels::mla::mma_sync {

using fa2::AmpereTiles;

template <class Tile>
bool fits(const Device& device) {
  return Tile::kBytes <= device.shared_memory_per_block;
}

template <class Tile>
Candidates only(const char* name, const AttentionParams& params, TileKind kind) {
  const int heads = packed_heads(params, Tile::kBlockM);
  TileShape shape{Tile::kBlockM / heads, kind, heads, 1};
  const bool decode = decodes(params);
  shape.most_waves = decode ? 4 : 2;
  shape.least_split_keys = kind == kMany ? 128 : 64;
  shape.combines = decode;
  shape.combined_splits = 8;
  // Where requests have splits of their own, those of a list have tiles of any number.
  shape.splits_without_list = decode || !params.batch_invariant;
  return {{name, shape, {}}};
}

inline Candidates candidates(const AttentionParams& params, const Device& device) {
  const bool by_slots = params.pages.slots_per_page > 0;
  if (decodes(params) && fits<Few>(device) && !by_slots) return only<Few>("few", params, kFew);
  const bool some = decodes(params) || by_slots ||
                    (!is_alone(params) && params.total_q * params.num_qo_heads <= Some::kBlockM * params.batch_size);
  return some || !fits<Many>(device) ? only<Some>("some", params, kSome) : only<Many>("many", params, kMany);
}

template <class Element, class Kv, class Tile>
constexpr auto kernel_of() {
  if constexpr (std::is_same_v<Element, Kv>) {
    return &attention_kernel<Element, Tile>;
  } else {
    return &fp8_attention_kernel<Element, Kv, Tile>;
  }
}

template <class Element, class Kv, class Tile>
Status launch_tile(const LaunchParams& params, cudaStream_t stream) {
  if (params.plan.packed_heads != packed_heads(params, Tile::kBlockM) ||
      params.plan.tile_rows != Tile::kBlockM / params.plan.packed_heads) {
    return fa2::no_such_tile<kLatentDim + kRopeDim>(params);
  }
  static DoneOnDevices allowed;  // this kernel, so much shared memory
  const fa2::KernelFacts facts{
      kernel_of<Element, Kv, Tile>(), Tile::kThreads, Tile::kBytes, Tile::kKeyBytes, true, false};
  return fa2::enqueue_kernel(facts, params, stream, &allowed);
}

inline Candidates fp8_candidates(const AttentionParams& params, const Device& device) {
  const bool few = decodes(params) && fits<FewFp8Small>(device) && params.pages.slots_per_page == 0;
  return few ? only<FewFp8Small>("few", params, kFew) : only<SomeFp8>("some", params, kSome);
}

// The tiles for devices that lack the shared memory of the others, and those that need that of Hopper, in units of their
// own (attention_ampere.cu.in, attention_large.cu.in): below.
template <class Element, class Kv>
Status launch_small(const LaunchParams& params, cudaStream_t stream);
template <class Element, class Kv>
Status launch_large(const LaunchParams& params, cudaStream_t stream);

template <class Element, class Kv, class Tile, AmpereTiles kAmpere>
Status launch_that_fits(const LaunchParams& params, const Device& device, cudaStream_t stream) {
  if constexpr (kAmpere != AmpereTiles::kNowhere) {
    if (!fits<Tile>(device)) return launch_small<Element, Kv>(params, stream);
  }
  return launch_tile<Element, Kv, Tile>(params, stream);
}

template <class Element, class Kv, AmpereTiles kAmpere>
Status launch_slots(const LaunchParams& params, const Device& device, cudaStream_t stream) {
  if (params.plan.tile_kind != kSome) return fa2::no_such_tile<kLatentDim + kRopeDim>(params);
  if constexpr (std::is_same_v<Element, Kv>) {
    return launch_that_fits<Element, Kv, BySlots<Some>, kAmpere>(params, device, stream);
  } else {
    static_assert(SomeFp8Small::kBlockM == SomeFp8::kBlockM);
    return launch_tile<Element, Kv, BySlots<SomeFp8Small>>(params, stream);
  }
}

template <class Element, class Kv, AmpereTiles kAmpere>
Status launch_kind(const LaunchParams& params, const Device& device, cudaStream_t stream) {
  constexpr bool kFp8 = !std::is_same_v<Element, Kv>;
  const bool large = params.plan.tile_kind == kFew || (kFp8 && params.plan.tile_kind == kSome);
  if (large && (kAmpere == AmpereTiles::kNowhere || fits<Few>(device))) {
    return launch_large<Element, Kv>(params, stream);
  }
  if constexpr (kAmpere != AmpereTiles::kNowhere) {
    if (large) return launch_small<Element, Kv>(params, stream);
  }
  if constexpr (!kFp8) {
    if (params.plan.tile_kind == kSome) return launch_that_fits<Element, Kv, Some, kAmpere>(params, device, stream);
    if (params.plan.tile_kind == kMany) return launch_tile<Element, Kv, Many>(params, stream);
  }
  return fa2::no_such_tile<kLatentDim + kRopeDim>(params);
}

template <class Element, class Kv, AmpereTiles kAmpere>
Status launch(const LaunchParams& params, cudaStream_t stream) {
  // The plan may have been made for other tensors: values of their own would not be read.
  if (std::string fault = common_refusal(params); !fault.empty()) {
    return Status::invalid(std::move(fault));
  }
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  return params.pages.slots_per_page > 0 ? launch_slots<Element, Kv, kAmpere>(params, device, stream)
                                         : launch_kind<Element, Kv, kAmpere>(params, device, stream);
}

template <class Element, class Kv, AmpereTiles kAmpere>
KernelEntry kernel_entry() {
  KernelEntry entry;
  entry.candidates = std::is_same_v<Element, Kv> ? &candidates : &fp8_candidates;
  entry.refusal = &common_refusal;
  entry.reads_rope = true;
  entry.reads_slots = true;
  entry.launch = &launch<Element, Kv, kAmpere>;
  return entry;
}

// ---- Host side of latent attention by mma.sync on devices with the shared memory of Hopper, of tiles that need it.

template <class Element, class Kv>
Status launch_large(const LaunchParams& params, cudaStream_t stream) {
  static_assert(FewFp8::kBytes <= Few::kBytes && SomeFp8::kBytes <= Few::kBytes);  // what fits<Few>() says of all
  if constexpr (std::is_same_v<Element, Kv>) {
    return launch_tile<Element, Kv, Few>(params, stream);
  } else {
    return params.plan.tile_kind == kFew ? launch_tile<Element, Kv, FewFp8>(params, stream)
                                         : launch_tile<Element, Kv, SomeFp8>(params, stream);
  }
}

// ---- Host side of latent attention by mma.sync on devices with less shared memory than Hopper has.

template <class Element, class Kv>
Status launch_small(const LaunchParams& params, cudaStream_t stream) {
  // A plan serves both.
  static_assert(FewFp8::kBlockM == FewFp8Small::kBlockM);
  static_assert(SomeFp8::kBlockM == SomeFp8Small::kBlockM && Some::kBlockM == SomeSmall::kBlockM);
  if constexpr (std::is_same_v<Element, Kv>) {
    if (params.plan.tile_kind != kSome) return fa2::no_such_tile<kLatentDim + kRopeDim>(params);
    return params.pages.slots_per_page > 0 ? launch_tile<Element, Kv, BySlots<SomeSmall>>(params, stream)
                                           : launch_tile<Element, Kv, SomeSmall>(params, stream);
  } else {
    return params.plan.tile_kind == kFew ? launch_tile<Element, Kv, FewFp8Small>(params, stream)
                                         : launch_tile<Element, Kv, SomeFp8Small>(params, stream);
  }
}

}  // namespace cutlass_kernels::mla::mma_sync
