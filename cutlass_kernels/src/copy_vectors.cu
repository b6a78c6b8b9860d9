#include "copy_vectors.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda_failure.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 128;  // of a vector

// A row of blocks copies a vector. They are of some hundred elements, page numbers of some thousand: launching is all
// it costs.
__global__ void __launch_bounds__(kThreads) copy_vectors_kernel(const __grid_constant__ VectorCopies copies) {
  const VectorCopy& vector = copies.vectors[blockIdx.y];
  const std::int64_t step = std::int64_t(gridDim.x) * kThreads;
  for (std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x; i < vector.count; i += step) {
    vector.to[i] = vector.from[i];
  }
}

}  // namespace

Status upload(const VectorCopies& vectors, cudaStream_t stream) {
  for (int i = 0; i < vectors.count; ++i) {
    const VectorCopy& vector = vectors.vectors[i];
    const cudaError_t error = cudaMemcpyAsync(vector.to, vector.from, std::size_t(vector.count) * sizeof(std::int32_t),
                                              cudaMemcpyHostToDevice, stream);
    if (error != cudaSuccess) return cuda_failure("Copying index tensors", error);
  }
  return Status::success();
}

Status copy_vectors(const VectorCopies& copies, cudaStream_t stream) {
  std::int64_t longest = 0;
  for (int i = 0; i < copies.count; ++i) longest = std::max(longest, copies.vectors[i].count);
  if (longest == 0) return Status::success();
  const std::int64_t blocks = std::min<std::int64_t>((longest + kThreads - 1) / kThreads, kMostBlocks);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks), unsigned(copies.count));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, copy_vectors_kernel, copies);
  return error == cudaSuccess ? Status::success()
                              : cuda_failure("Launching the kernel that copies index tensors", error);
}

}  // namespace cutlass_kernels
