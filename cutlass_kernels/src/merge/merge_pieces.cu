#include "merge/merge_pieces.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "common/dependent_launch.h"
#include "cuda_failure.h"
#include "device.h"
#include "merge/merge_row.h"
#include "schedule.h"

namespace cutlass_kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kBlocksPerSm = 8;  // that run at once and share out the rows

__device__ SplitTile split_tile_at(const AttentionParams& p, int index) {
  const Schedule& schedule = p.schedule;
  if (schedule.work_list != nullptr) {
    return static_cast<const SplitTile*>(schedule.split_list)[index];
  }
  const int first = index * schedule.tile_rows;
  return {first,
          min(schedule.tile_rows, int(p.total_q) - first),
          first * schedule.pieces,
          schedule.pieces,
          int(p.total_q),
          0,
          int(p.total_kv),
          0};
}

__device__ int split_tile_count(const AttentionParams& p) {
  if (p.schedule.work_list == nullptr) return p.schedule.split_capacity;
  return (static_cast<const ScheduleHeader*>(p.schedule.work_list) - 1)->split_tiles;
}

// A warp merges a row of a head at a time.
template <class Element, int kPanels>
__global__ void __launch_bounds__(32 * kWarps)
    merge_pieces_kernel(__grid_constant__ const AttentionParams p) {
  await_previous_kernel();
  const int heads = p.num_qo_heads;
  const int rows_of_tile = p.schedule.tile_rows * heads;  // at most
  const std::int64_t count = std::int64_t(split_tile_count(p)) * rows_of_tile;
  for (std::int64_t item = blockIdx.x * kWarps + threadIdx.x / 32; item < count;
       item += gridDim.x * kWarps) {
    const int index_of_tile = int(item / rows_of_tile);
    const int in_tile = int(item - std::int64_t(index_of_tile) * rows_of_tile);
    const int row = in_tile / heads;
    const int head = in_tile - row * heads;
    const SplitTile tile = split_tile_at(p, index_of_tile);
    // As in find_work(): a request outside the tensors was not computed.
    const bool inside =
        min(tile.q_begin, tile.kv_begin) >= 0 && tile.q_end <= p.total_q &&
        (p.pages.page_size > 0 || std::int64_t(tile.kv_begin) + tile.kv_len <= p.total_kv);
    if (row >= tile.rows || !inside) continue;
    merge_row<Element, kPanels, 16>(p, {tile.q_begin, tile.rows, tile.partial_row, tile.pieces},
                                    row, head);
  }
}

}  // namespace

Status launch_merge_pieces(const AttentionParams& params, cudaStream_t stream) {
  const bool is_fp16 = params.o_dtype == DType::kFloat16;
  auto* kernel = params.head_dim_vo <= 128
                     ? (is_fp16 ? &merge_pieces_kernel<fp16, 1> : &merge_pieces_kernel<bf16, 1>)
                     : (is_fp16 ? &merge_pieces_kernel<fp16, 2> : &merge_pieces_kernel<bf16, 2>);
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  const std::int64_t most_rows = std::int64_t(params.schedule.split_capacity) *
                                 params.schedule.tile_rows * params.num_qo_heads;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(std::min<std::int64_t>(
      (most_rows + kWarps - 1) / kWarps, std::int64_t(device.multiprocessors) * kBlocksPerSm)));
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
                              : cuda_failure("Launching the merge kernel", error);
}

}  // namespace cutlass_kernels
