// What both ways to write a list share: requests, sums over the thread block, room for split tiles.
#pragma once

#include <cstdint>

#include "schedule/requests.h"
#include "schedule/warp_sum.h"
#include "schedule/write_list.h"

namespace cutlass_kernels {

constexpr int kListThreads = 1024;

// Offsets on the device were never checked: a request outside [0, total_q] has no tiles, so that it can neither make
// sums overflow nor push others out of the list.
CK_HOST_DEVICE inline int tile_count(int begin, int length, std::int64_t total_q, int tile_rows) {
  return 0 <= begin && 0 <= length && begin + std::int64_t(length) <= total_q ? (length + tile_rows - 1) / tile_rows
                                                                              : 0;
}

struct alignas(16) RequestOfList {
  int q_begin, qo_len, kv_begin, kv_len;

  __device__ static RequestOfList read(const ListArgs& args, int batch) {
    const RowsOfRequest rows = rows_of_request(args, batch);
    const KeysOfRequest keys = keys_of_request(args, batch);
    return {rows.begin, rows.length, keys.begin, keys.length};
  }
  __device__ int tiles(const ListArgs& args) const {
    return is_in_part(args, qo_len) ? tile_count(q_begin, qo_len, args.total_q, args.tile_rows) : 0;
  }
};

// By all threads: the sum of the values of the threads before each, and of all.
struct BlockSum {
  std::uint64_t before, all;
};
__device__ inline BlockSum block_sum(std::uint64_t value) {
  __shared__ std::uint64_t of_warps[32];
  const int warp = int(threadIdx.x / 32);
  const std::uint64_t inclusive = inclusive_sum(value);
  __syncthreads();  // others may still read the last sum
  if (threadIdx.x % 32 == 31) of_warps[warp] = inclusive;
  __syncthreads();
  const std::uint64_t warps = inclusive_sum(of_warps[threadIdx.x % 32]);
  const std::uint64_t before = __shfl_sync(0xffffffffu, warps, warp > 0 ? warp - 1 : 0);
  return {(warp > 0 ? before : 0) + inclusive - value, __shfl_sync(0xffffffffu, warps, 31)};
}

// What split tiles take, in this order: places in their list and units of combining (CombineUnits), in the upper and in
// the lower half of a word; and partial rows.
struct SplitRoom {
  std::uint64_t tiles_and_units, rows;

  __device__ static SplitRoom of(int tiles, int units, std::int64_t rows) {
    return {(std::uint64_t(unsigned(tiles)) << 32) + unsigned(units), std::uint64_t(rows)};
  }
  __device__ int tiles() const { return int(tiles_and_units >> 32); }
  __device__ int units() const { return int(tiles_and_units & 0xffffffffu); }
  __device__ void write_counts(const ListArgs& args) const {
    args.header->num_split_tiles = int(min(std::int64_t(tiles_and_units >> 32), args.rule.split_tile_capacity));
    args.header->num_units = units();
  }
};

}  // namespace cutlass_kernels
