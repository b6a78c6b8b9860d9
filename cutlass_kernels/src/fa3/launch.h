// Host side of the fa3 backend: which tile, which tensor maps, which grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <numeric>
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
  if (params.window_left >= 0) keys = std::min(keys, std::int64_t(params.window_left) + 1);
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

inline Status make_maps_of_rows(const AttentionParams& p, int block_n,
                                KernelParams* kernel_params) {
  // Without keys there may be no K and V, but there must be a map, all of which is out of bounds.
  const bool keys = p.total_kv > 0;
  const void* k = keys ? p.k.data : p.q.data;
  const void* v = keys ? p.v.data : p.q.data;
  const int kv_heads = keys ? p.num_kv_heads : 1;
  const RowsOfTensor k_rows{k,          p.k.stride_token, p.k.stride_head,
                            p.total_kv, kv_heads,         p.head_dim_qk};
  const RowsOfTensor v_rows{v,          p.v.stride_token, p.v.stride_head,
                            p.total_kv, kv_heads,         p.head_dim_vo};
  Status made = make_tensor_map("k", k_rows, p.kv_dtype, block_n, &kernel_params->k_map);
  return made.ok() ? make_tensor_map("v", v_rows, p.kv_dtype, block_n, &kernel_params->v_map)
                   : made;
}

inline Status make_maps_of_pages(const AttentionParams& p, int block_n,
                                 KernelParams* kernel_params) {
  const PageTable& table = p.pages;
  const PagesOfTensor k{p.k.data,        p.k.stride_token, p.k.stride_head, table.k_stride_page,
                        table.page_size, p.num_kv_heads,   table.num_pages, p.head_dim_qk};
  const PagesOfTensor v{p.v.data,        p.v.stride_token, p.v.stride_head, table.v_stride_page,
                        table.page_size, p.num_kv_heads,   table.num_pages, p.head_dim_vo};
  kernel_params->page_size = FastDivisor(std::uint32_t(table.page_size));
  kernel_params->num_pages = std::uint32_t(std::min<std::int64_t>(table.num_pages, 1LL << 31));
  // A swizzle pattern is eight rows: boxes of fewer would not start at one.
  const int box_rows = std::gcd(table.page_size, block_n);
  if (box_rows < 8 || !fits_tensor_map(k) || !fits_tensor_map(v)) return Status::success();
  kernel_params->box_rows = box_rows;
  Status made = make_tensor_map("k", k, p.kv_dtype, box_rows, &kernel_params->k_map);
  return made.ok() ? make_tensor_map("v", v, p.kv_dtype, box_rows, &kernel_params->v_map) : made;
}

inline Status make_maps(const AttentionParams& p, int block_n, KernelParams* kernel_params) {
  kernel_params->box_rows = 0;
  Status made = p.pages.page_size > 0 ? make_maps_of_pages(p, block_n, kernel_params)
                                      : make_maps_of_rows(p, block_n, kernel_params);
  if (!made.ok()) return made;
  const RowsOfTensor q{p.q.data,  p.q.stride_token, p.q.stride_head,
                       p.total_q, p.num_qo_heads,   p.head_dim_qk};
  const RowsOfTensor o{p.o.data,  p.o.stride_token, p.o.stride_head,
                       p.total_q, p.num_qo_heads,   p.head_dim_vo};
  made = make_tensor_map("q", q, p.q_dtype, kWarpgroupRows, &kernel_params->q_map);
  return made.ok()
             ? make_tensor_map("o", o, p.o_dtype, 16 /* rows of a warp */, &kernel_params->o_map)
             : made;
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
  const bool known = allowed.contains(device.index);
  if (known) error = cudaLaunchKernelEx(&config, kernel, kernel_params);
  if (error == cudaErrorInvalidValue) {  // not allowed yet, or forgotten in a cudaDeviceReset()
    if (known) cudaGetLastError();
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
      " rows, but fa3 has tiles of " + std::to_string(Large::kBlockM) +
      (Small::kBlockM == Large::kBlockM ? "" : " and " + std::to_string(Small::kBlockM)) +
      " for head dimensions up to " + std::to_string(HeadDimQk) + "/" + std::to_string(HeadDimVo) +
      ": make it with make_schedule(), for this backend and these strides.");
}

template <class Element, int HeadDimQk, int HeadDimVo>
Status launch(const AttentionParams& params, cudaStream_t stream) {
  return LogitsTransform::needed(params)
             ? launch_variant<Element, HeadDimQk, HeadDimVo, true>(params, stream)
             : launch_variant<Element, HeadDimQk, HeadDimVo, false>(params, stream);
}

}  // namespace cutlass_kernels::fa3
