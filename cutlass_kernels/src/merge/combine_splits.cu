#include "merge/combine_splits.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "common/dependent_launch.h"
#include "common/find_work.h"
#include "cuda_failure.h"
#include "device.h"
#include "merge/combine_row.h"
#include "plan/launch_params.h"

namespace cutlass_kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 4;   // that run at once and share out the rows
constexpr int kFirstTiles = 512;  // that each block looks up beforehand

// A tile whose keys are split; without rows, one that was not computed, or whose keys are not split.
struct SplitsOfTile {
  int q_begin;  // first row, in the tensor
  int rows;
  int partial_row;
  int num_splits;
  int batch;
};

// As in find_work(): a request outside the tensors is not computed.
__device__ bool is_inside(const LaunchParams& p, int q_begin, int q_end,
                          const KeysOfRequest& keys) {
  return min(q_begin, keys.begin) >= 0 && q_begin <= q_end && q_end <= p.total_q &&
         keys.length >= 0 &&
         (p.pages.page_size > 0 || std::int64_t(keys.begin) + keys.length <= p.total_kv);
}

// Of a request of a batch without a list, which has these rows and splits.
__device__ SplitsOfTile tile_of_request(const LaunchParams& p, RowsOfRequest rows,
                                        const RequestSplits& splits, int tile) {
  const LaunchPlan& plan = p.plan;
  rows.length = min(rows.length, p.max_qo_len);
  const int first_row = tile * plan.tile_rows;
  const bool is_split = splits.count > 1 &&
                        is_inside(p, rows.begin, rows.begin + rows.length, splits.keys) &&
                        first_row < rows.length;
  if (!is_split) return {};
  return {rows.begin + first_row, min(plan.tile_rows, rows.length - first_row),
          (tile * plan.num_splits + splits.first) * rows_of_split(p), splits.count, splits.batch};
}

// Tiles of a batch without a list: those of the longest request, each for all requests.
__device__ SplitsOfTile tile_of_batch(const LaunchParams& p, const SplitTable& batch_splits,
                                      int index) {
  const int tile = index / p.batch_size;
  const int batch = index - tile * p.batch_size;
  return tile_of_request(p, rows_of_request(p, batch), batch_splits.of(p, batch), tile);
}

__device__ SplitsOfTile tile_at(const LaunchParams& p, const SplitTable& batch_splits, int index) {
  const LaunchPlan& plan = p.plan;
  if (plan.tile_list != nullptr) {
    const SplitTile tile = static_cast<const SplitTile*>(plan.split_tiles)[index];
    if (!is_inside(p, tile.q_begin, tile.q_end, {tile.kv_begin, tile.kv_len})) return {};
    return {tile.q_begin, tile.rows, tile.partial_row, tile.num_splits, tile.batch};
  }
  if (plan.source != TileSource::kSingleRequest) return tile_of_batch(p, batch_splits, index);
  const int first = index * plan.tile_rows;
  return {first, min(plan.tile_rows, int(p.total_q) - first), first * plan.num_splits,
          plan.num_splits, 0};
}

__device__ int split_tile_count(const LaunchParams& p) {
  if (p.plan.tile_list == nullptr) return p.plan.split_tile_capacity;
  return (static_cast<const TileListHeader*>(p.plan.tile_list) - 1)->num_split_tiles;
}

// A row of a head is combined by a warp, or (kShared) by all warps of a thread block, each some of the splits: one row
// of one request may have as many splits as the device runs thread blocks. kPanels: of 128 columns.
template <class Element, int kPanels, bool kShared>
__global__ void __launch_bounds__(32 * kWarps)
    combine_splits_kernel(__grid_constant__ const LaunchParams p) {
  constexpr int kLoads = 16;
  __shared__ float4 others_o[kShared ? kWarps - 1 : 1][kPanels][32];
  __shared__ float2 others_sum[kWarps];  // with its maximum
  // While the attention kernel runs: it does not write any of this, and has not started before whatever did had ended.
  __shared__ SplitsOfTile first_tiles[kFirstTiles];
  __shared__ SplitTable batch_splits;
  const int tiles = split_tile_count(p);
  if (splits_batch(p) && p.batch_size <= 32 && tiles <= kFirstTiles) {
    // A lane of one warp has each request: its lengths are loaded once.
    if (threadIdx.x < 32) {
      const int batch = int(threadIdx.x);
      RowsOfRequest rows{};
      if (batch < p.batch_size) rows = rows_of_request(p, batch);
      const BatchSplits splits(p);
      for (int i = batch; batch < p.batch_size && i < tiles; i += p.batch_size) {
        first_tiles[i] = tile_of_request(p, rows, splits.own(), i / p.batch_size);
      }
    }
  } else {
    if (splits_batch(p)) {
      if (threadIdx.x < 32) batch_splits.fill(p);
      __syncthreads();
    }
    for (int i = threadIdx.x; i < min(tiles, kFirstTiles); i += 32 * kWarps) {
      first_tiles[i] = tile_at(p, batch_splits, i);
    }
  }
  __syncthreads();
  await_previous_kernel();
  const int heads = p.num_qo_heads;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  constexpr int kRowsOfBlock = kShared ? 1 : kWarps;
  const int rows_of_tile = p.plan.tile_rows * heads;  // at most
  const std::int64_t count = std::int64_t(tiles) * rows_of_tile;
  for (std::int64_t item = std::int64_t(blockIdx.x) * kRowsOfBlock + (kShared ? 0 : warp);
       item < count; item += std::int64_t(gridDim.x) * kRowsOfBlock) {
    const int index_of_tile = count >> 32 == 0 ? int(std::uint32_t(item) / unsigned(rows_of_tile))
                                               : int(item / rows_of_tile);
    const int in_tile = int(item - std::int64_t(index_of_tile) * rows_of_tile);
    const int row = in_tile / heads;
    const int head = in_tile - row * heads;
    const SplitsOfTile tile = index_of_tile < kFirstTiles ? first_tiles[index_of_tile]
                                                          : tile_at(p, batch_splits, index_of_tile);
    if (row >= tile.rows) continue;
    const SplitRows splits{tile.q_begin, tile.rows, tile.partial_row, tile.num_splits};
    if constexpr (kShared) {
      CombinedRow<kPanels> combined =
          combine_splits<kPanels, kLoads>(p, splits, row, head, tile.num_splits * warp / kWarps,
                                          tile.num_splits * (warp + 1) / kWarps);
      if (lane == 0) others_sum[warp] = {combined.m, combined.sum};
      if (warp > 0) {
        CUTE_UNROLL
        for (int c = 0; c < kPanels; ++c) {
          others_o[warp - 1][c][lane] = {combined.o[c][0], combined.o[c][1], combined.o[c][2],
                                         combined.o[c][3]};
        }
      }
      __syncthreads();
      if (warp == 0) {
        for (int w = 1; w < kWarps; ++w) {
          const auto [m, sum] = others_sum[w];
          const float top = fmaxf(m, combined.m);
          // 1 where none has a key: -inf is at no distance from itself.
          const float weight = combined.m == top ? 1.0f : exp2_approx(combined.m - top);
          const float their_weight = m == top ? 1.0f : exp2_approx(m - top);
          combined.m = top;
          combined.sum = combined.sum * weight + sum * their_weight;
          CUTE_UNROLL
          for (int c = 0; c < kPanels; ++c) {
            const float4 x = others_o[w - 1][c][lane];
            combined.o[c][0] = combined.o[c][0] * weight + x.x * their_weight;
            combined.o[c][1] = combined.o[c][1] * weight + x.y * their_weight;
            combined.o[c][2] = combined.o[c][2] * weight + x.z * their_weight;
            combined.o[c][3] = combined.o[c][3] * weight + x.w * their_weight;
          }
        }
        store_row<Element>(p, combined, tile.batch, tile.q_begin + row, head);
      }
      __syncthreads();
    } else {
      store_row<Element>(p,
                         combine_splits<kPanels, kLoads>(p, splits, row, head, 0, tile.num_splits),
                         tile.batch, tile.q_begin + row, head);
    }
  }
}

using Kernel = void (*)(LaunchParams);

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
  const std::int64_t most_rows =
      std::int64_t(params.plan.split_tile_capacity) * params.plan.tile_rows * params.num_qo_heads;
  const std::int64_t most_blocks = std::int64_t(device.multiprocessors) * kBlocksPerSm;
  // The two add up splits in different orders. With a fixed split size, results must not depend on the batch: only one
  // is used.
  const bool shared = params.fixed_split_size == 0 && most_rows <= most_blocks;
  static_assert(kMostCombinedColumns <= 4 * 128,
                "Columns beyond those of four panels of 128 would never be combined.");
  const Kernel kernel = params.head_dim_vo <= 128   ? kernel_for<1>(params.o_dtype, shared)
                        : params.head_dim_vo <= 256 ? kernel_for<2>(params.o_dtype, shared)
                                                    : kernel_for<4>(params.o_dtype, shared);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(
      shared ? most_rows : std::min<std::int64_t>((most_rows + kWarps - 1) / kWarps, most_blocks)));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  // Blocks start while the last of the attention kernel's run, and wait for their results: 2 us less between the two.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = has_dependent_launch(device.compute_capability) ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  return error == cudaSuccess ? Status::success()
                              : cuda_failure("Launching the kernel that combines splits", error);
}

}  // namespace cutlass_kernels
