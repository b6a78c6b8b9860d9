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
  FastDivisor blocks_per_tile;  // without a list
};

constexpr int kWarps = CombineUnits::kWarps;
// Thread blocks that run at once, by the registers. Three of 80 registers, for 128 columns, spilled two: 0.3 us more.
constexpr int kBlocksPerSm = 2;
template <int kPanels>
constexpr int kAhead = combined_ahead(128 * kPanels);

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

// A unit of a tile, by all threads.
template <int kPanels>
CUTE_DEVICE void combine_unit(const CombineParams& p, const SplitTile& tile, int unit) {
  __shared__ SharedRows<kPanels> shared;
  const int warp = threadIdx.x / 32;
  const int sharing_log2 = CombineUnits{p.plan.splits_of_warp}.warps_log2(tile.num_splits);
  const int sharers = 1 << sharing_log2, part = warp & (sharers - 1);
  const int i = unit * (kWarps >> sharing_log2) + (warp >> sharing_log2);
  const int row = int(p.heads.divide(i));
  const int head = i - row * int(p.heads.divisor);
  CombinedRow<kPanels> combined;
  await_previous_kernel();  // late: what is above takes 0.2 us; once it has ended, this takes no time
  if (row < tile.rows) {
    const TilePartials partials{tile.partial_row, tile.num_splits};
    combined = combine_splits<kPanels, kAhead<kPanels>>(p, partials, row, head, part, sharers);
  }
  if (sharers > 1) {
    if (part > 0) shared.write(warp, combined);
    __syncthreads();
    if (part == 0) {
      CUTE_NO_UNROLL
      for (int other = 1; other < sharers; ++other) shared.add(warp + other, combined);
    }
    __syncthreads();
  }
  if (part == 0 && row < tile.rows) {
    store_row<AnyOutput, kPanels == 4>(p, combined, tile.batch, tile.q_begin + row, head);
  }
}

// The last tile of a list whose first unit is not behind this one, by all threads: of the tiles, 256 at equal distances
// are looked at together, and then those from the last such tile on.
CUTE_DEVICE int tile_of_unit(const LaunchPlan& plan, int tiles, int unit) {
  int first = 0;
  for (int count = tiles; count > 1;) {
    const int step = (count + 32 * kWarps - 1) / (32 * kWarps);
    const int tile = first + int(threadIdx.x) * step;
    const bool reached = int(threadIdx.x) * step < count && __ldcg(&plan.split_tiles[tile].first_unit) <= unit;
    first += max(__syncthreads_count(reached) - 1, 0) * step;
    count = step > 1 ? min(step, tiles - first) : 1;
  }
  return first;
}

// With a list, thread blocks take as many units as each other, which follow one another; the list was there before the
// previous kernel. Without one, each has a tile, and its share of the units. In one kernel, the two would have a tenth
// more instructions to wait for: 0.1 to 0.2 us of attention() of one request over 4k keys, 11.4.
template <int kPanels, bool kList>
__global__ void __launch_bounds__(32 * kWarps, kBlocksPerSm)
    combine_splits_kernel(__grid_constant__ const CombineParams p) {
  const CombineUnits units{p.plan.splits_of_warp};
  const auto units_of = [&](const SplitTile& tile) {
    return tile.num_splits > 1 ? units.of_rows(tile.rows * p.num_qo_heads, tile.num_splits) : 0;
  };
  if constexpr (kList) {
    const int tiles = __ldcg(&p.plan.list_header->num_split_tiles);
    const unsigned all = unsigned(__ldcg(&p.plan.list_header->num_units)), each = all / gridDim.x;
    const unsigned longer = all - each * gridDim.x;  // the first blocks, by one
    int unit = int(each * blockIdx.x + min(longer, blockIdx.x));
    const int end = unit + int(each + (blockIdx.x < longer ? 1 : 0));
    CUTE_NO_UNROLL
    for (int index = unit < end ? tile_of_unit(p.plan, tiles, unit) : tiles; index < tiles && unit < end; ++index) {
      const SplitTile tile = tile_at(p, index);
      unit = max(unit, tile.first_unit);
      const int last = min(end, tile.first_unit + units_of(tile));
      CUTE_NO_UNROLL
      for (; unit < last; ++unit) combine_unit<kPanels>(p, tile, unit - tile.first_unit);
    }
  } else {
    if (is_described_by_kernel(p.plan)) await_previous_kernel();
    const int index = int(p.blocks_per_tile.divide(blockIdx.x)), blocks = int(p.blocks_per_tile.divisor);
    const SplitTile tile = tile_at(p, index);
    const int count = units_of(tile);
    CUTE_NO_UNROLL
    for (int unit = int(blockIdx.x) - index * blocks; unit < count; unit += blocks) {
      combine_unit<kPanels>(p, tile, unit);
    }
  }
  await_previous_kernel();  // what comes after this kernel comes after that one, too
}

template <int kPanels>
auto kernel_for(const LaunchPlan& plan) {
  return plan.tile_list == nullptr ? &combine_splits_kernel<kPanels, false> : &combine_splits_kernel<kPanels, true>;
}

}  // namespace

Status launch_combine_splits(const LaunchParams& params, cudaStream_t stream) {
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  const LaunchPlan& plan = params.plan;
  const std::int64_t tiles = plan.split_tile_capacity;
  // Of a request whose splits are its own, all tiles are described as one.
  std::int64_t rows = std::min<std::int64_t>(std::max(plan.tile_rows, plan.own_splits.most_rows), params.total_q);
  // A list may be written anew, with longer requests, for a captured call.
  if (plan.source != TileSource::kList && plan.source != TileSource::kSingleRequest) {
    rows = std::min<std::int64_t>(rows, params.max_qo_len);
  }
  // About as many as run at once: the lengths on the device may leave nothing to combine, and each further wave of
  // thread blocks takes a microsecond to find that out (128 heads, 128 requests: 1152 -> 384 thread blocks, 0.6 to 8 us
  // less). In a batch, tiles may have far fewer rows than there is room for, too.
  const std::int64_t blocks = std::int64_t(device.multiprocessors) * kBlocksPerSm;
  const std::int64_t heads = params.num_qo_heads;
  const CombineUnits units{plan.splits_of_warp};
  std::int64_t grid = 0, blocks_per_tile = 1;
  if (plan.tile_list != nullptr) {
    // A unit combines eight rows of a head, or splits for eight warps: no fewer than eight partial rows.
    grid = std::clamp<std::int64_t>(plan.partial_rows * heads / kWarps, 1, blocks);
  } else {
    // Of a batch, the plan has the splits of all requests together.
    const int splits = plan.source == TileSource::kBatchByLength
                           ? (plan.num_splits + params.batch_size - 1) / params.batch_size
                           : plan.num_splits;
    blocks_per_tile = std::min<std::int64_t>(units.of_rows(int(std::min<std::int64_t>(rows * heads, 1 << 24)), splits),
                                             std::max<std::int64_t>(blocks / tiles, 1));
    grid = tiles * blocks_per_tile;
  }
  static_assert(kMostCombinedColumns <= 4 * 128, "Columns beyond those of four panels of 128 would never be combined.");
  const auto kernel = params.head_dim_vo <= 128   ? kernel_for<1>(plan)
                      : params.head_dim_vo <= 256 ? kernel_for<2>(plan)
                                                  : kernel_for<4>(plan);
  CombineParams combine_params;
  static_cast<LaunchParams&>(combine_params) = params;
  combine_params.heads = FastDivisor(std::uint32_t(heads));
  combine_params.blocks_per_tile = FastDivisor(std::uint32_t(blocks_per_tile));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(grid));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  // Blocks start while the last of the attention kernel's run, and wait for their results: 2 us less between the two.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = has_dependent_launch(device.compute_capability) ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, combine_params);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the kernel that combines splits", error);
}

}  // namespace cutlass_kernels
