#include "mask_extents.h"

#include <cuda_runtime.h>

#include "common/bit_mask.h"
#include "common/mask.h"
#include "common/work.h"
#include "cuda_failure.h"

namespace cutlass_kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kWords = 32 * kWarps;  // of 32 keys, looked at together

// A block per tile. Of each chunk of keys: which of them some row sees, warps taking rows in turn; then a thread per word.
__global__ void __launch_bounds__(32 * kWarps)
    mask_extents_kernel(__grid_constant__ const AttentionParams p, MaskExtent* extents) {
  __shared__ std::uint32_t seen[kWords];
  __shared__ int begin, end, count;
  if (threadIdx.x == 0) {
    begin = 0x7fffffff;
    end = count = 0;
  }
  __syncthreads();
  TileOrder order{};
  order.tiles = p.schedule.capacity;
  WorkItem work;
  if (find_work(p, order, blockIdx.x, work)) {
    const int first_row = work.tile * p.schedule.tile_rows;
    const int end_row = min(first_row + p.schedule.tile_rows, work.qo_len);
    const IntervalMask window{work.kv_len, work.kv_len - work.qo_len, false, p.window_left, 0, {}};
    const std::int64_t first_bit =
        p.mask.indptr == nullptr ? 0 : std::int64_t(p.mask.indptr[work.batch]) * 8;
    for (int chunk = 0; chunk < work.kv_len; chunk += 32 * kWords) {
      seen[threadIdx.x] = 0;
      __syncthreads();
      for (int row = first_row + threadIdx.x / 32; row < end_row; row += kWarps) {
        const std::int64_t bit = first_bit + std::int64_t(row) * work.kv_len;
        for (int word = threadIdx.x % 32; word < kWords; word += 32) {
          const int key = chunk + 32 * word;
          if (key >= work.kv_len) break;
          const std::uint32_t bits =
              bits_at(p.mask, bit + key) & bits_between(window.lo(row) - key, window.hi(row) - key);
          if (bits != 0) atomicOr(&seen[word], bits);
        }
      }
      __syncthreads();
      const std::uint32_t bits = seen[threadIdx.x];
      const int key = chunk + 32 * int(threadIdx.x);
      if (bits != 0) {
        atomicMin(&begin, key + __ffs(bits) - 1);
        atomicMax(&end, key + 32 - __clz(bits));
        atomicAdd(&count, __popc(bits));
      }
      __syncthreads();
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    extents[blockIdx.x] = end == 0 ? MaskExtent{} : MaskExtent{begin, end, count < end - begin, 0};
  }
}

}  // namespace

Status launch_mask_extents(const AttentionParams& params, MaskExtent* extents,
                           cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.schedule.capacity);
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, mask_extents_kernel, params, extents);
  return error == cudaSuccess ? Status::success()
                              : cuda_failure("Launching the mask kernel", error);
}

}  // namespace cutlass_kernels
