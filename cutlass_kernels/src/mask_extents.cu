#include "mask_extents.h"

#include <cuda_runtime.h>

#include "common/bit_mask.h"
#include "common/work.h"
#include "cuda_failure.h"

namespace cutlass_kernels {
namespace {

constexpr int kWarps = 8;

// A block per tile, a warp per row at a time, a lane per 32 keys.
__global__ void __launch_bounds__(32 * kWarps)
    mask_extents_kernel(__grid_constant__ const AttentionParams p, MaskExtent* extents) {
  __shared__ int begin, end;
  if (threadIdx.x == 0) {
    begin = 0x7fffffff;
    end = 0;
  }
  __syncthreads();
  TileOrder order{};
  order.tiles = p.schedule.capacity;
  WorkItem work;
  if (find_work(p, order, blockIdx.x, work)) {
    const int first_row = work.tile * p.schedule.tile_rows;
    const int end_row = min(first_row + p.schedule.tile_rows, work.qo_len);
    const std::int64_t first_bit =
        p.mask.indptr == nullptr ? 0 : std::int64_t(p.mask.indptr[work.batch]) * 8;
    int own_begin = 0x7fffffff, own_end = 0;
    for (int row = first_row + threadIdx.x / 32; row < end_row; row += kWarps) {
      const std::int64_t bit = first_bit + std::int64_t(row) * work.kv_len;
      for (int key = threadIdx.x % 32 * 32; key < work.kv_len; key += 32 * 32) {
        std::uint32_t bits = bits_at(p.mask, bit + key);
        if (work.kv_len - key < 32) bits &= (1u << (work.kv_len - key)) - 1;
        if (bits != 0) {
          own_begin = min(own_begin, key + __ffs(bits) - 1);
          own_end = max(own_end, key + 32 - __clz(bits));
        }
      }
    }
    own_begin = __reduce_min_sync(0xffffffffu, own_begin);
    own_end = __reduce_max_sync(0xffffffffu, own_end);
    if (threadIdx.x % 32 == 0) {
      atomicMin(&begin, own_begin);
      atomicMax(&end, own_end);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) extents[blockIdx.x] = end == 0 ? MaskExtent{0, 0} : MaskExtent{begin, end};
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
