// Host side of the fa3 backend: which tile, which tensor maps, which grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <string>

#include "cuda_failure.h"
#include "device.h"
#include "fa3/kernel.h"
#include "fa3/tensor_map.h"
#include "registry.h"

namespace cutlass_kernels::fa3 {

template <class Tile>
std::int64_t tile_count(const AttentionParams& params) {
  return (params.total_q + Tile::kBlockM - 1) / Tile::kBlockM * params.num_qo_heads;
}

// Keys that a mask leaves to a request, on average. Where only the device knows how many there are, as many as queries.
inline std::int64_t keys_in_mask(const AttentionParams& params) {
  const std::int64_t total = params.total_kv > 0 ? params.total_kv : params.total_q;
  std::int64_t keys = total / params.batch_size;
  if (params.window_left >= 0) keys = std::min<std::int64_t>(keys, params.window_left + 1);
  if (params.chunk_size > 0) keys = std::min<std::int64_t>(keys, params.chunk_size);
  return keys;
}

// Query rows of the tiles of a problem.
template <int HeadDimQk, int HeadDimVo>
int tile_rows(const AttentionParams& params, int compute_capability) {
  using Tiles = TileTable<HeadDimQk, HeadDimVo>;
  const bool masked = params.causal || params.window_left >= 0 || params.chunk_size > 0;
  const bool small = compute_capability == 0 ||  // an unknown device: the smallest
                     params.total_q / params.batch_size <= Tiles::Small::kBlockM ||
                     (masked && keys_in_mask(params) <= Tiles::kSmallUpToKeys) ||
                     tile_count<typename Tiles::Large>(params) < Tiles::kFewTiles;
  return small ? Tiles::Small::kBlockM : Tiles::Large::kBlockM;
}

// Which of the two tiles of the same rows: whether a mask leaves few keys to a row, on average.
inline bool few_keys(const AttentionParams& params) {
  const std::int64_t keys = keys_in_mask(params);
  const std::int64_t hidden =
      params.causal ? std::min(keys, params.total_q / params.batch_size) / 2 : 0;
  return keys - hidden <=
         1024;  // hd128, 16k tokens: 3 % faster at 512 keys, with and without a mask; -3 % at 8k
}

inline Status make_maps(const AttentionParams& p, int block_n, KernelParams* kernel_params) {
  // Without keys there may be no K and V, but there must be a map, all of which is out of bounds.
  const bool keys = p.total_kv > 0;
  const void* k = keys ? p.k.data : p.q.data;
  const void* v = keys ? p.v.data : p.q.data;
  const int kv_heads = keys ? p.num_kv_heads : 1;
  const struct {
    const char* name;
    RowsOfTensor rows;
    DType dtype;
    int box_rows;
    CUtensorMap* map;
  } wanted[] = {
      {"q",
       {p.q.data, p.q.stride_token, p.q.stride_head, p.total_q, p.num_qo_heads, p.head_dim_qk},
       p.q_dtype,
       kWarpgroupRows,
       &kernel_params->q_map},
      {"k",
       {k, p.k.stride_token, p.k.stride_head, p.total_kv, kv_heads, p.head_dim_qk},
       p.kv_dtype,
       block_n,
       &kernel_params->k_map},
      {"v",
       {v, p.v.stride_token, p.v.stride_head, p.total_kv, kv_heads, p.head_dim_vo},
       p.kv_dtype,
       block_n,
       &kernel_params->v_map},
      {"o",
       {p.o.data, p.o.stride_token, p.o.stride_head, p.total_q, p.num_qo_heads, p.head_dim_vo},
       p.o_dtype,
       16,  // the rows of a warp
       &kernel_params->o_map}};
  for (const auto& one : wanted) {
    Status made = make_tensor_map(one.name, one.rows, one.dtype, one.box_rows, one.map);
    if (!made.ok()) return made;
  }
  return Status::success();
}

template <class Element, class Tile, bool kTransform>
Status launch_tile(const AttentionParams& params, cudaStream_t stream) {
  KernelParams kernel_params;
  kernel_params.attention = params;
  const AttentionParams& p = kernel_params.attention;
  Device device;
  if (Status asked = current_device(&device); !asked.ok()) return asked;
  const int blocks = device.multiprocessors * Tile::kBlocksPerSm;

  const int tiles = p.schedule.work_list != nullptr
                        ? p.schedule.capacity
                        : int((p.total_q + Tile::kBlockM - 1) / Tile::kBlockM);
  // Dealt out beforehand, tiles even out only where they come in one order of lengths, without sections.
  const bool dealt = p.schedule.next_tile == nullptr;
  kernel_params.order = dealt ? TileOrder::make(p, tiles, std::int64_t(tiles) * p.num_qo_heads,
                                                std::numeric_limits<std::int64_t>::max())
                              : TileOrder::make(p, tiles, 2 * blocks);
  kernel_params.transform = LogitsTransform::make(params);
  kernel_params.chunk = FastDivisor(std::uint32_t(p.chunk_size));
  kernel_params.group_size = p.num_qo_heads / p.num_kv_heads;

  if (Status made = make_maps(p, Tile::kBlockN, &kernel_params); !made.ok()) return made;

  auto* kernel = &attention_kernel<Element, Tile, kTransform>;
  constexpr int kBytes = sizeof(Shared<Tile>);
  static_assert(kBytes * Tile::kBlocksPerSm <= (227 << 10) - 1024 * (Tile::kBlocksPerSm - 1));
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(unsigned(std::min<std::int64_t>(blocks, std::int64_t(tiles) * p.num_qo_heads)));
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  static DoneOnDevices allowed;  // this kernel, so much shared memory
  cudaError_t error = cudaErrorInvalidValue;
  if (allowed.contains(device.index)) error = cudaLaunchKernelEx(&config, kernel, kernel_params);
  if (error == cudaErrorInvalidValue) {  // not allowed yet, or forgotten in a cudaDeviceReset()
    cudaGetLastError();
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error == cudaSuccess) {
      allowed.add(device.index);
      error = cudaLaunchKernelEx(&config, kernel, kernel_params);
    }
  }
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the fa3 kernel", error);
}

template <class Element, int HeadDimQk, int HeadDimVo, bool kTransform>
Status launch_variant(const AttentionParams& params, cudaStream_t stream) {
  using Tiles = TileTable<HeadDimQk, HeadDimVo>;
  using Large = typename Tiles::Large;
  using FewKeys = typename Tiles::FewKeys;
  using Small = typename Tiles::Small;
  static_assert(Large::kBlockM == FewKeys::kBlockM && Small::kBlockM <= Large::kBlockM);
  if (params.schedule.tile_rows == Large::kBlockM) {
    return few_keys(params) ? launch_tile<Element, FewKeys, kTransform>(params, stream)
                            : launch_tile<Element, Large, kTransform>(params, stream);
  }
  if (params.schedule.tile_rows == Small::kBlockM) {
    return launch_tile<Element, Small, kTransform>(params, stream);
  }
  return Status::invalid(
      "The schedule is for tiles of " + std::to_string(params.schedule.tile_rows) +
      " rows, but fa3 has tiles of " + std::to_string(Small::kBlockM) + " and " +
      std::to_string(Large::kBlockM) + " for head dimensions up to " + std::to_string(HeadDimQk) +
      "/" + std::to_string(HeadDimVo) + ": make it with make_schedule().");
}

template <class Element, int HeadDimQk, int HeadDimVo>
Status launch(const AttentionParams& params, cudaStream_t stream) {
  return LogitsTransform::needed(params)
             ? launch_variant<Element, HeadDimQk, HeadDimVo, true>(params, stream)
             : launch_variant<Element, HeadDimQk, HeadDimVo, false>(params, stream);
}

}  // namespace cutlass_kernels::fa3
