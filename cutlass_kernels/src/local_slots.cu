// Lists of positions as lists of a device's slots (local_slots.h): a thread block per row, a thread per position.
#include <cuda_runtime.h>

#include <limits>
#include <string>

#include "cuda_failure.h"
#include "cutlass_kernels/local_slots.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;  // of 2048 positions eight each
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The slot of a position of a request, or -1. A request that does not exist has no table.
__device__ int slot_of(const LocalSlotsParams& p, int position, const std::int32_t* table) {
  if (position < 0) return -1;
  const unsigned block = unsigned(p.shard.block), period = unsigned(p.shard.world) * block;
  const unsigned rounds = unsigned(position) / period;
  const unsigned place = unsigned(position) - rounds * period - unsigned(p.shard.rank) * block;  // wraps below 0
  if (place >= block) return -1;
  const unsigned local = rounds * block + place;
  if (p.page_table == nullptr) return int(local);
  const unsigned column = local / unsigned(p.page_size);
  if (table == nullptr || column >= unsigned(p.table_width)) return -1;
  const int page = __ldg(table + column);
  return page < 0 ? -1 : int(unsigned(page) * unsigned(p.page_size) + local - column * unsigned(p.page_size));
}

__global__ void __launch_bounds__(kThreads)
    local_slots_kernel(const __grid_constant__ LocalSlotsParams p, const int rows_per_request) {
  __shared__ int of_warps[2][kWarps];  // keys of this device; turns, so that a barrier per turn suffices
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const std::int64_t row = blockIdx.x;
  const std::int32_t* table = nullptr;
  if (p.page_table != nullptr) {
    const std::int64_t request = p.batch_indices == nullptr ? row / rows_per_request : __ldg(p.batch_indices + row);
    if (request >= 0 && request < p.num_requests) table = p.page_table + request * p.table_stride;
  }
  const int length = p.lengths == nullptr ? p.width : __ldg(p.lengths + row);
  int most = 0, turn = 0;
  for (int list = 0; list < p.lists_per_row; ++list) {
    const std::int64_t begin = (row * p.lists_per_row + list) * p.width;
    int count = 0;
    for (int first = 0; first < p.width; first += kThreads, turn ^= 1) {
      const int i = first + thread;
      const int slot = i < p.width && i < length ? slot_of(p, p.positions[begin + i], table) : -1;
      if (p.counts == nullptr) {
        if (i < p.width) p.slots[begin + i] = slot;
        continue;
      }
      const unsigned held = __ballot_sync(kAllLanes, slot >= 0);
      if (lane == 0) of_warps[turn][warp] = __popc(held);
      __syncthreads();
      int at = count + __popc(held & ((1u << lane) - 1));
      for (int other = 0; other < kWarps; ++other) {
        const int keys = of_warps[turn][other];
        if (other < warp) at += keys;
        count += keys;
      }
      if (slot >= 0) p.slots[begin + at] = slot;
    }
    if (p.counts == nullptr) continue;
    for (int i = count + thread; i < p.width; i += kThreads) p.slots[begin + i] = -1;
    most = count > most ? count : most;
  }
  if (p.counts != nullptr && thread == 0) p.counts[row] = most;
}

std::string number(std::int64_t value) { return std::to_string(value); }

std::string fault_in(const LocalSlotsParams& p) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const KvShard& shard = p.shard;
  if (p.num_rows < 0 || p.num_rows > kMost) {
    return "num_rows=" + number(p.num_rows) + " must lie between 0 and " + number(kMost) + ": split the batch.";
  }
  if (p.width < 0 || p.lists_per_row < 0) {
    return "width=" + number(p.width) + " and lists_per_row=" + number(p.lists_per_row) + " must not be negative.";
  }
  if (shard.world < 1 || shard.rank < 0 || shard.rank >= shard.world || shard.block < 1 ||
      std::int64_t(shard.world) * shard.block >= std::int64_t(1) << 30) {
    return "shard.world=" + number(shard.world) + ", rank=" + number(shard.rank) + ", block=" + number(shard.block) +
           ": rank must lie between 0 and world - 1, and world * block between 1 and 2^30 - 1.";
  }
  const bool empty = p.width == 0 || p.lists_per_row == 0;
  if (!empty && (p.positions == nullptr || p.slots == nullptr)) {
    return "positions and slots are needed, but one of them is null.";
  }
  if (!empty && p.counts != nullptr && p.slots == p.positions) {
    return "slots are positions, and counts is not null: compacted lists need memory of their own.";
  }
  if (p.page_table == nullptr) {
    return p.batch_indices == nullptr ? "" : "batch_indices is given without page_table: set both, or neither.";
  }
  if (p.page_size < 1 || p.table_width < 0 || p.table_stride < p.table_width || p.num_requests < 0) {
    return "page_size=" + number(p.page_size) + ", table_width=" + number(p.table_width) +
           ", table_stride=" + number(p.table_stride) + ", num_requests=" + number(p.num_requests) +
           ": page_size must be positive, the others not negative, and table_stride at least table_width.";
  }
  if (p.batch_indices == nullptr && (p.num_requests == 0 || p.num_rows % p.num_requests != 0)) {
    return "num_rows=" + number(p.num_rows) + " of num_requests=" + number(p.num_requests) +
           ", which cannot have equally many rows: pass batch_indices.";
  }
  return "";
}

}  // namespace

Status find_local_slots(const LocalSlotsParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return Status::success();
  if (std::string fault = fault_in(params); !fault.empty()) return Status::invalid(std::move(fault));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(params.num_rows));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const int rows_per_request = params.num_requests > 0 ? int(params.num_rows / params.num_requests) : 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, local_slots_kernel, params, rows_per_request);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the kernel of local slots", error);
}

}  // namespace cutlass_kernels
