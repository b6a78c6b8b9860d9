#include "merge/combine_splits.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "common/dependent_launch.h"
#include "common/fast_divisor.h"
#include "cuda_failure.h"
#include "device.h"
#include "merge/combine_row.h"
#include "plan/launch_params.h"
#include "schedule/split_tiles.h"

namespace cutlass_kernels {
namespace {

// Beside the transfer of the partial results, the kernel waits for its instructions and parameters, and for the
// description of a tile. So there is little of each.
struct CombineParams : LaunchParams {
  FastDivisor heads;
  FastDivisor blocks_per_tile;
  int sharing_log2;  // 1 << this many warps share a row
};

constexpr int kWarps = 8;
// Thread blocks that run at once, by the registers that so many panels of 128 columns take.
template <int kPanels>
constexpr int kBlocksPerSm = kPanels == 1 ? 3 : 2;
// Splits whose loads are in flight together. Of 512 columns two: registers.
template <int kPanels>
constexpr int kAhead = kPanels <= 2 ? 8 : 2;

// What the warps that share a row have found. kPanels: of 128 columns.
template <int kPanels>
struct SharedRows {
  float4 o[kWarps][kPanels][32];
  float2 max_sum[kWarps];

  CUTE_DEVICE void write(int warp, const CombinedRow<kPanels>& row) {
    max_sum[warp] = {row.m, row.sum};
    CUTE_UNROLL
    for (int c = 0; c < kPanels; ++c) {
      o[warp][c][threadIdx.x % 32] = {row.o[c][0], row.o[c][1], row.o[c][2], row.o[c][3]};
    }
  }
  CUTE_DEVICE void add(int warp, CombinedRow<kPanels>& row) const {
    float4 theirs[kPanels];
    CUTE_UNROLL
    for (int c = 0; c < kPanels; ++c) theirs[c] = o[warp][c][threadIdx.x % 32];
    const float weight = exp2_approx(max_sum[warp].x - row.raise(fmaxf(row.m, max_sum[warp].x)));
    row.add(weight, max_sum[warp].y, theirs);
  }
};

// kShared: 1 << p.sharing_log2 warps share a row; else a warp combines it by itself.
template <class Element, int kPanels, bool kShared>
__global__ void __launch_bounds__(32 * kWarps, kBlocksPerSm<kPanels>)
    combine_splits_kernel(__grid_constant__ const CombineParams p) {
  const int index = int(p.blocks_per_tile.divide(blockIdx.x));
  const int block = int(blockIdx.x) - index * int(p.blocks_per_tile.divisor);
  const int warp = threadIdx.x / 32;
  const int sharing_log2 = kShared ? p.sharing_log2 : 0;
  const int part = warp & ((1 << sharing_log2) - 1);
  const int rows_of_block = kWarps >> sharing_log2;
  if (is_described_by_kernel(p.plan)) await_previous_kernel();
  const SplitTile tile = tile_at(p, index);
  await_previous_kernel();
  if (tile.num_splits <= 1) return;
  const TilePartials partials{tile.partial_row, tile.num_splits};
  const int rows = tile.rows * p.num_qo_heads;
  CUTE_NO_UNROLL
  for (int first = block * rows_of_block; first < rows;
       first += int(p.blocks_per_tile.divisor) * rows_of_block) {
    const int i = first + (warp >> sharing_log2);
    if (!kShared && i >= rows) break;
    const int row = int(p.heads.divide(i));
    const int head = i - row * int(p.heads.divisor);
    CombinedRow<kPanels> combined;
    if (i < rows) {
      combined =
          combine_splits<kPanels, kAhead<kPanels>>(p, partials, row, head, part, 1 << sharing_log2);
    }
    if constexpr (kShared) {
      __shared__ SharedRows<kPanels> shared;
      if (part > 0) shared.write(warp, combined);
      __syncthreads();
      if (part == 0) {
        CUTE_NO_UNROLL
        for (int other = 1; other < 1 << sharing_log2; ++other) shared.add(warp + other, combined);
      }
      __syncthreads();
      if (part > 0 || i >= rows) continue;
    }
    store_row<Element>(p, combined, tile.batch, tile.q_begin + row, head);
  }
}

using Kernel = void (*)(CombineParams);

template <class Element, int kPanels>
Kernel kernel_for(bool shared) {
  return shared ? &combine_splits_kernel<Element, kPanels, true>
                : &combine_splits_kernel<Element, kPanels, false>;
}

template <int kPanels>
Kernel kernel_for(DType dtype, bool shared) {
  switch (dtype) {
    case DType::kFloat16:
      return kernel_for<fp16, kPanels>(shared);
    case DType::kFloat8E4M3:
      return kernel_for<e4m3, kPanels>(shared);
    default:
      return kernel_for<bf16, kPanels>(shared);
  }
}

}  // namespace

Status launch_combine_splits(const LaunchParams& params, cudaStream_t stream) {
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  const LaunchPlan& plan = params.plan;
  const std::int64_t tiles = plan.split_tile_capacity;
  // Of a request whose splits are its own, all tiles are described as one.
  std::int64_t rows =
      std::min<std::int64_t>(std::max(plan.tile_rows, plan.own_splits.most_rows), params.total_q);
  // A list may be written anew, with longer requests, for a captured call.
  if (plan.source != TileSource::kList && plan.source != TileSource::kSingleRequest) {
    rows = std::min<std::int64_t>(rows, params.max_qo_len);
  }
  rows *= params.num_qo_heads;  // of a tile, of one head each
  // A warp for as many splits as it loads at once, while there are no more than two thread blocks per SM: with more,
  // warps that share rows only wait for each other (16 rows of 32 heads in 16 splits: 14.0 -> 10.5 us in all). The order
  // of additions depends on their number. Where results must not depend on the batch, it does not, either: with a fixed
  // split size a row has one warp.
  const int ahead = params.head_dim_vo <= 256 ? kAhead<1> : kAhead<4>;
  const std::int64_t most_warps =
      params.batch_invariant ? tiles * rows * kWarps : 2 * kWarps * device.multiprocessors;
  int sharing_log2 = 0;
  while (params.fixed_split_size == 0 && 1 << sharing_log2 < kWarps &&
         ahead << sharing_log2 < plan.likely_splits &&
         (tiles * rows) << (sharing_log2 + 1) <= most_warps) {
    ++sharing_log2;
  }
  // About as many as run at once: the lengths on the device may leave nothing to combine, and each further wave of thread
  // blocks takes a microsecond to find that out (128 heads, 128 requests: 1152 -> 384 thread blocks, 0.6 to 8 us less).
  // In a batch, tiles may have far fewer rows than there is room for, too.
  const std::int64_t blocks = std::int64_t(device.multiprocessors) *
                              (params.head_dim_vo <= 128 ? kBlocksPerSm<1> : kBlocksPerSm<4>);
  const std::int64_t blocks_per_tile =
      std::min(((rows << sharing_log2) + kWarps - 1) / kWarps, (blocks + tiles - 1) / tiles);
  static_assert(kMostCombinedColumns <= 4 * 128,
                "Columns beyond those of four panels of 128 would never be combined.");
  const bool shared = sharing_log2 > 0;
  const Kernel kernel = params.head_dim_vo <= 128   ? kernel_for<1>(params.o_dtype, shared)
                        : params.head_dim_vo <= 256 ? kernel_for<2>(params.o_dtype, shared)
                                                    : kernel_for<4>(params.o_dtype, shared);
  CombineParams combine_params;
  static_cast<LaunchParams&>(combine_params) = params;
  combine_params.sharing_log2 = sharing_log2;
  combine_params.heads = FastDivisor(std::uint32_t(params.num_qo_heads));
  combine_params.blocks_per_tile = FastDivisor(std::uint32_t(blocks_per_tile));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(tiles * blocks_per_tile));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  // Blocks start while the last of the attention kernel's run, and wait for their results: 2 us less between the two.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = has_dependent_launch(device.compute_capability) ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, combine_params);
  return error == cudaSuccess ? Status::success()
                              : cuda_failure("Launching the kernel that combines splits", error);
}

}  // namespace cutlass_kernels
