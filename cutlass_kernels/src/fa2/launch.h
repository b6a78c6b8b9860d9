// Host side of the fa2 backend: which tile, which grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda_failure.h"
#include "device.h"
#include "fa2/kernel.h"
#include "registry.h"

namespace cutlass_kernels::fa2 {

// Two waves of blocks on a 132-SM device, two blocks per SM.
constexpr std::int64_t kTwoWaves = 528;

// K and V of the heads being worked on should stay in L2 (50 MB on Hopper, 40 on A100, each half of it
// caching for its own SMs) beside the queries and outputs that stream through.
constexpr std::int64_t kSectionBytes = 8 << 20;

// Sections of heads keep K and V in L2. The last one takes two waves of blocks or more, so that its long
// tiles, which come first, and its short ones even out: a last section of one head costs 12 % at 4k causal.
inline void divide_into_sections(KernelParams& params) {
  const AttentionParams& p = params.attention;
  const std::int64_t head_bytes = 2 * p.total_kv * (p.head_dim_qk + p.head_dim_vo);
  const std::int64_t fit = kSectionBytes / std::max<std::int64_t>(head_bytes, 1);
  const int heads = int(std::clamp<std::int64_t>(fit, 1, p.num_kv_heads));
  const std::int64_t head_blocks = std::int64_t(params.tiles) * params.group_size;
  const std::int64_t for_tail = (kTwoWaves + head_blocks - 1) / head_blocks;
  const int tail = int(std::clamp<std::int64_t>(for_tail, heads, p.num_kv_heads));
  const int early_sections = (p.num_kv_heads - tail) / heads;
  params.sections = early_sections + 1;
  params.section_heads = heads * params.group_size;
  params.last_heads = p.num_qo_heads - early_sections * params.section_heads;
}

// Shared memory a block may have (CUDA programming guide, technical specifications per compute capability).
inline int max_shared_bytes(int compute_capability) {
  switch (compute_capability) {
    case 80:
    case 87:
      return 163 << 10;
    case 86:
    case 89:
    case 120:
    case 121:
      return 99 << 10;
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
  return SharedLayout<Tile>::kBytes <= max_shared_bytes(compute_capability);
}

// Whether the small tile and the others have as many rows. Then a schedule serves both, and launch_variant() chooses.
template <class Tiles>
constexpr bool kEqualRows = Tiles::Small::kBlockM == Tiles::Large::kBlockM;

// A batch is scheduled before its mask is known and is taken to be causal.
template <int HeadDim>
int tile_rows(const AttentionParams& params, int compute_capability) {
  using Tiles = TileTable<HeadDim>;
  using Large = typename Tiles::Large;
  if constexpr (kEqualRows<Tiles>) {
    return Large::kBlockM;
  } else {
    const bool causal = params.causal || params.chunk_size > 0 || params.qo_indptr != nullptr;
    const int few = causal ? Tiles::kFewBlocksCausal : Tiles::kFewBlocks;
    const bool small = params.total_q / params.batch_size <= Tiles::Small::kBlockM ||
                       block_count<Large>(params) < few ||
                       !has_shared_memory_for<Large>(compute_capability);
    return small ? Tiles::Small::kBlockM : Large::kBlockM;
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

template <class Element, class Tile, bool kTransform, bool kPaged>
Status launch_paged_or_not(const AttentionParams& params, cudaStream_t stream) {
  KernelParams kernel_params;
  kernel_params.attention = params;
  const AttentionParams& p = kernel_params.attention;
  kernel_params.transform = LogitsTransform::make(params);
  kernel_params.chunk = FastDivisor(std::uint32_t(p.chunk_size));
  kernel_params.group_size = p.num_qo_heads / p.num_kv_heads;
  kernel_params.tiles = p.schedule.work_list != nullptr
                            ? p.schedule.capacity
                            : int((p.total_q + Tile::kBlockM - 1) / Tile::kBlockM);
  divide_into_sections(kernel_params);
  if constexpr (kPaged) {
    kernel_params.page_size = FastDivisor(std::uint32_t(p.pages.page_size));
    if (p.pages.v_indices == nullptr) kernel_params.attention.pages.v_indices = p.pages.indices;
  }

  auto* kernel = &attention_kernel<Element, Tile, kTransform, kPaged>;
  constexpr int kBytes =
      kPaged ? SharedLayout<Tile>::kPagedBytes : SharedLayout<Tile>::kBytes;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess) {
    // Unlike cudaGetLastError(), its result speaks of this launch only.
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(kernel_params.tiles) * unsigned(p.num_qo_heads));
    config.blockDim = dim3(Tile::kThreads);
    config.dynamicSmemBytes = kBytes;
    config.stream = stream;
    error = cudaLaunchKernelEx(&config, kernel, kernel_params);
  }
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the fa2 kernel", error);
}

template <class Element, class Tile, bool kTransform>
Status launch_tile(const AttentionParams& params, cudaStream_t stream) {
  return params.pages.page_size > 0
             ? launch_paged_or_not<Element, Tile, kTransform, true>(params, stream)
             : launch_paged_or_not<Element, Tile, kTransform, false>(params, stream);
}

template <class Element, int HeadDim, bool kTransform>
Status launch_variant(const AttentionParams& params, cudaStream_t stream) {
  using Tiles = TileTable<HeadDim>;
  static_assert(Tiles::Large::kBlockM == Tiles::Medium::kBlockM &&
                Tiles::Large::kBlockM == Tiles::Capped::kBlockM);
  const int rows = params.schedule.tile_rows;
  if (rows != Tiles::Small::kBlockM && rows != Tiles::Large::kBlockM) {
    const std::string larger =
        kEqualRows<Tiles> ? "" : " and " + std::to_string(Tiles::Large::kBlockM);
    return Status::invalid("The schedule is for tiles of " + std::to_string(rows) +
                           " rows, but head dimension " + std::to_string(HeadDim) +
                           " has tiles of " + std::to_string(Tiles::Small::kBlockM) + larger +
                           ": make it with make_schedule().");
  }
  bool small = rows == Tiles::Small::kBlockM;
  if constexpr (kEqualRows<Tiles>) {
    Device device;
    if (Status status = current_device(&device); !status.ok()) return status;
    small = !has_shared_memory_for<typename Tiles::Large>(device.compute_capability);
  }
  if (small) return launch_tile<Element, typename Tiles::Small, kTransform>(params, stream);
  if constexpr (kTransform) {
    return launch_tile<Element, typename Tiles::Capped, true>(params, stream);
  } else if (many_short_tiles<typename Tiles::Large>(params)) {
    return launch_tile<Element, typename Tiles::Medium, false>(params, stream);
  } else {
    return launch_tile<Element, typename Tiles::Large, false>(params, stream);
  }
}

template <class Element, int HeadDim>
Status launch(const AttentionParams& params, cudaStream_t stream) {
  return LogitsTransform::needed(params) ? launch_variant<Element, HeadDim, true>(params, stream)
                                         : launch_variant<Element, HeadDim, false>(params, stream);
}

}  // namespace cutlass_kernels::fa2
