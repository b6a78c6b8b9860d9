#include "merge/merge_pieces.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "common/dependent_launch.h"
#include "common/logits.h"
#include "common/numeric.h"
#include "cuda_failure.h"
#include "device.h"
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

// A warp merges a row of a head at a time, a lane four columns of 128. kPanels: of 128 columns.
template <class Element, int kPanels>
__global__ void __launch_bounds__(32 * kWarps)
    merge_pieces_kernel(__grid_constant__ const AttentionParams p) {
  await_previous_kernel();
  const int lane = threadIdx.x % 32;
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
    const std::int64_t token = tile.q_begin + row;
    // As in find_work(): a request outside the tensors was not computed.
    const bool inside =
        min(tile.q_begin, tile.kv_begin) >= 0 && tile.q_end <= p.total_q &&
        (p.pages.page_size > 0 || std::int64_t(tile.kv_begin) + tile.kv_len <= p.total_kv);
    if (row >= tile.rows || !inside) continue;
    // Piece i of this row and head.
    auto index = [&](int i) {
      return (std::int64_t(tile.partial_row) + std::int64_t(i) * tile.rows + row) * heads + head;
    };
    auto lse_of = [&](int i) {
      return i < tile.pieces ? p.schedule.partial_lse[index(i)] : -INFINITY;
    };
    float top = -INFINITY;
    bool is_nan = false;
    for (int i = lane; i < tile.pieces; i += 32) {
      const float lse = lse_of(i);
      top = fmaxf(top, lse);
      is_nan |= lse != lse;
    }
    for (int step = 16; step > 0; step /= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    }
    is_nan = __any_sync(0xffffffffu, is_nan);
    const bool any_key = is_nan || top > -INFINITY;
    const float sink = p.sinks == nullptr ? -INFINITY : p.sinks[head] * kLog2e;
    top = is_nan ? NAN : fmaxf(top, sink);
    float sum = 0.0f;
    float o[kPanels][4] = {};  // (column / 128, column % 4)
    // Pieces whose loads are in flight together: one at a time, a row would take a microsecond per piece.
    constexpr int kAhead = 16 / kPanels;
    for (int first = 0; first < tile.pieces && any_key; first += 32) {
      const float own_weight = exp2_approx(lse_of(first + lane) - top);
      sum += own_weight;
      const int end = min(32, tile.pieces - first);
      // O of a piece without keys is 0.
      for (int begin = 0; begin < end; begin += kAhead) {
        float4 x[kAhead][kPanels];
        CUTE_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          const float* from = p.schedule.partial_o + index(first + begin + i) * p.head_dim_vo;
          CUTE_UNROLL
          for (int c = 0; c < kPanels; ++c) {
            const int column = c * 128 + lane * 4;
            x[i][c] = {};
            if (begin + i < end && column < p.head_dim_vo) {
              x[i][c] = *reinterpret_cast<const float4*>(from + column);
            }
          }
        }
        CUTE_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          const float weight = __shfl_sync(0xffffffffu, own_weight, begin + i);
          CUTE_UNROLL
          for (int c = 0; c < kPanels; ++c) {
            o[c][0] = fmaf(weight, x[i][c].x, o[c][0]);
            o[c][1] = fmaf(weight, x[i][c].y, o[c][1]);
            o[c][2] = fmaf(weight, x[i][c].z, o[c][2]);
            o[c][3] = fmaf(weight, x[i][c].w, o[c][3]);
          }
        }
      }
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (sink > -INFINITY) sum += exp2_approx(sink - top);
    const float scale = any_key ? p.v_scale * scale_of(p.output_scale, head) / sum : 0.0f;
    char* out =
        static_cast<char*>(p.o.data) + 2 * (token * p.o.stride_token + head * p.o.stride_head);
    CUTE_UNROLL
    for (int c = 0; c < kPanels; ++c) {
      const int column = c * 128 + lane * 4;
      if (column < p.head_dim_vo) {
        *reinterpret_cast<uint2*>(out + 2 * column) = {
            Element::pack(o[c][0] * scale, o[c][1] * scale),
            Element::pack(o[c][2] * scale, o[c][3] * scale)};
      }
    }
    if (p.lse != nullptr && lane == 0) {
      p.lse[token * p.lse_stride_token + head * p.lse_stride_head] =
          sum == 0.0f ? -INFINITY : top + log2f(sum);
    }
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
