#include "copy_vectors.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>

#include "cuda_failure.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 128;  // of a vector

// A row of blocks copies a vector. They are of some hundred elements, page numbers of some thousand: launching is all
// it costs.
__global__ void __launch_bounds__(kThreads)
    copy_vectors_kernel(const __grid_constant__ VectorCopies copies) {
  const VectorCopy& vector = copies.vectors[blockIdx.y];
  const std::int64_t step = std::int64_t(gridDim.x) * kThreads;
  for (std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x; i < vector.count;
       i += step) {
    vector.to[i] = vector.from[i];
  }
}

/// Kernels take 4 KB of parameters.
template <int kCount>
struct Words {
  std::int32_t* to;
  int count;
  std::int32_t words[kCount];
};

template <int kCount>
__global__ void __launch_bounds__(kThreads)
    store_kernel(const __grid_constant__ Words<kCount> given) {
  for (int i = int(threadIdx.x); i < given.count; i += kThreads) given.to[i] = given.words[i];
}

template <int kCount>
cudaError_t store(const std::int32_t* from, std::int64_t count, std::int32_t* to,
                  cudaStream_t stream) {
  Words<kCount> given;
  given.to = to;
  given.count = int(count);
  std::memcpy(given.words, from, std::size_t(count) * sizeof(std::int32_t));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, store_kernel<kCount>, given);
}

}  // namespace

Status upload(const std::int32_t* from, std::int64_t count, std::int32_t* to, cudaStream_t stream) {
  constexpr int kFew = 120, kMany = 1000;
  cudaError_t error = cudaSuccess;
  if (count <= kFew) {
    error = store<kFew>(from, count, to, stream);
  } else if (count <= kMany) {
    error = store<kMany>(from, count, to, stream);
  } else {
    error = cudaMemcpyAsync(to, from, std::size_t(count) * sizeof(std::int32_t),
                            cudaMemcpyHostToDevice, stream);
  }
  return error == cudaSuccess ? Status::success() : cuda_failure("Copying index tensors", error);
}

Status copy_vectors(const VectorCopies& copies, cudaStream_t stream) {
  std::int64_t longest = 0;
  for (int i = 0; i < copies.count; ++i) longest = std::max(longest, copies.vectors[i].count);
  if (longest == 0) return Status::success();
  const std::int64_t blocks =
      std::min<std::int64_t>((longest + kThreads - 1) / kThreads, kMostBlocks);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks), unsigned(copies.count));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, copy_vectors_kernel, copies);
  return error == cudaSuccess
             ? Status::success()
             : cuda_failure("Launching the kernel that copies index tensors", error);
}

}  // namespace cutlass_kernels
