// Host side of the fa3 backend: which tile, which tensor maps, which grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda_failure.h"
#include "fa3/kernel.h"
#include "fa3/tensor_map.h"
#include "registry.h"

namespace cutlass_kernels::fa3 {

inline Status multiprocessors(int* count) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  }
  return error == cudaSuccess ? Status::success()
                              : cuda_failure("Asking for the GPU's multiprocessors", error);
}

template <class Element, class Tile, bool kTransform>
Status launch_tile(const AttentionParams& params, cudaStream_t stream) {
  KernelParams kernel_params;
  kernel_params.attention = params;
  const AttentionParams& p = kernel_params.attention;
  int blocks = 0;
  if (Status status = multiprocessors(&blocks); !status.ok()) return status;
  blocks *= Tile::kBlocksPerSm;

  const int tiles = p.schedule.work_list != nullptr
                        ? p.schedule.capacity
                        : int((p.total_q + Tile::kBlockM - 1) / Tile::kBlockM);
  // Dealt out beforehand, tiles even out only where they come in one order of lengths, without sections.
  const bool dealt = p.schedule.next_tile == nullptr;
  kernel_params.order =
      TileOrder::make(p, tiles, dealt ? std::int64_t(tiles) * p.num_qo_heads : 2 * blocks);
  kernel_params.transform = LogitsTransform::make(params);
  kernel_params.chunk = FastDivisor(std::uint32_t(p.chunk_size));
  kernel_params.group_size = p.num_qo_heads / p.num_kv_heads;

  // Without keys there may be no K and V, but there must be a map, all of which is out of bounds.
  const void* k = p.total_kv > 0 ? p.k.data : p.q.data;
  const void* v = p.total_kv > 0 ? p.v.data : p.q.data;
  Status status = make_tensor_map(
      "q", {p.q.data, p.q.stride_token, p.q.stride_head, p.total_q, p.num_qo_heads, p.head_dim_qk},
      p.q_dtype, kWarpgroupRows, &kernel_params.q_map);
  if (status.ok()) {
    status = make_tensor_map(
        "k", {k, p.k.stride_token, p.k.stride_head, p.total_kv, p.num_kv_heads, p.head_dim_qk},
        p.kv_dtype, Tile::kBlockN, &kernel_params.k_map);
  }
  if (status.ok()) {
    status = make_tensor_map(
        "v", {v, p.v.stride_token, p.v.stride_head, p.total_kv, p.num_kv_heads, p.head_dim_vo},
        p.kv_dtype, Tile::kBlockN, &kernel_params.v_map);
  }
  if (status.ok()) {
    status = make_tensor_map(
        "o",
        {p.o.data, p.o.stride_token, p.o.stride_head, p.total_q, p.num_qo_heads, p.head_dim_vo},
        p.o_dtype, 16, &kernel_params.o_map);
  }
  if (!status.ok()) return status;

  auto* kernel = &attention_kernel<Element, Tile, kTransform>;
  constexpr int kBytes = sizeof(Shared<Tile>);
  static_assert(kBytes * Tile::kBlocksPerSm <= (227 << 10) - 1024 * (Tile::kBlocksPerSm - 1));
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim =
        dim3(unsigned(std::min<std::int64_t>(blocks, std::int64_t(tiles) * p.num_qo_heads)));
    config.blockDim = dim3(Tile::kThreads);
    config.dynamicSmemBytes = kBytes;
    config.stream = stream;
    error = cudaLaunchKernelEx(&config, kernel, kernel_params);
  }
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the fa3 kernel", error);
}

}  // namespace cutlass_kernels::fa3
