// Which request each new token belongs to, and where it stands there: a thread per token, which searches the offsets.
#include <cuda_runtime.h>

#include <limits>
#include <string>

#include "cuda_failure.h"
#include "cutlass_kernels/append.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) places_kernel(const __grid_constant__ BatchIndicesPositionsParams p) {
  const std::int64_t token = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (token >= p.num_tokens) return;
  // How many requests end at the token or before: the index of its own, whatever empty ones stand before that. Offsets
  // were never checked, but no search leaves them.
  int low = 0, high = p.batch_size;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (__ldg(p.append_indptr + middle + 1) <= token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const bool is_inside = low < p.batch_size && __ldg(p.append_indptr) <= token;
  p.batch_indices[token] = is_inside ? low : -1;
  p.positions[token] = is_inside ? __ldg(p.seq_lens + low) - __ldg(p.append_indptr + low + 1) + int(token) : -1;
}

}  // namespace

Status get_batch_indices_positions(const BatchIndicesPositionsParams& params, cudaStream_t stream) {
  constexpr std::int64_t kMostTokens = std::numeric_limits<std::int32_t>::max();
  if (params.batch_size < 0) {
    return Status::invalid("batch_size=" + std::to_string(params.batch_size) + " must not be negative.");
  }
  if (params.num_tokens < 0 || params.num_tokens > kMostTokens) {
    return Status::invalid("num_tokens=" + std::to_string(params.num_tokens) + " must lie between 0 and " +
                           std::to_string(kMostTokens) + ": split the batch.");
  }
  if (params.num_tokens == 0) return Status::success();
  if (params.batch_indices == nullptr || params.positions == nullptr ||
      (params.batch_size > 0 && (params.append_indptr == nullptr || params.seq_lens == nullptr))) {
    return Status::invalid(
        "append_indptr, seq_lens, batch_indices and positions are needed, but one of them is "
        "null.");
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((params.num_tokens + kThreads - 1) / kThreads));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, places_kernel, params);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the kernel of positions", error);
}

}  // namespace cutlass_kernels
