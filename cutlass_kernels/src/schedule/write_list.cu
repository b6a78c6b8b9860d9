// Writes the tile list of a batch, in one thread block: a counting sort of its tiles by cost, or even shares.
#include "schedule/write_list.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>

#include "common/dependent_launch.h"
#include "cuda_failure.h"
#include "schedule/even_shares.h"
#include "schedule/requests.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kBuckets = 1024;  // one per thread in the prefix sum
// Keys the last row of a tile sees under a causal mask: [0, kv_len], none of a length that makes no sense.
__host__ __device__ inline int tile_cost(int qo_len, int kv_len, int tile, int tile_rows) {
  const int hidden = qo_len - min((tile + 1) * tile_rows, qo_len);
  return max(0, max(0, kv_len) - hidden);
}

// Offsets on the device were never checked: a request outside [0, total_q] has no tiles, so that it can
// neither make the sums below overflow nor push others out of the list.
__host__ __device__ inline int tile_count(int begin, int length, std::int64_t total_q,
                                          int tile_rows) {
  return 0 <= begin && 0 <= length && begin + std::int64_t(length) <= total_q
             ? (length + tile_rows - 1) / tile_rows
             : 0;
}

// Costs share a bucket when they agree to `shift` bits; buckets are numbered from the most expensive.
__device__ inline int bucket_of(int cost, int shift) { return kBuckets - 1 - (cost >> shift); }

struct ScheduleArgs {
  // Of AttentionParams.
  const std::int32_t* qo_indptr;
  const std::int32_t* kv_indptr;
  const std::int32_t* seqused_q;
  const std::int32_t* seqused_k;
  KvShard kv_shard;
  std::int32_t max_qo_len;
  std::int32_t max_kv_len;
  std::int32_t kv_stride_request;
  std::int32_t least_rows;
  std::int32_t most_rows;
  int batch_size;
  std::int64_t total_q;
  int num_qo_heads;
  int splits_of_warp;
  int tile_rows;
  SplitRule rule;
  int capacity;
  bool fills;
  TileListHeader* header;
  WorkItem* list;
  SplitTile* split_tiles;
  std::uint64_t* combine_counters;
  PageTable pages;
};

__device__ inline int tiles_of_request(const ScheduleArgs& args, int batch) {
  const auto [begin, length] = rows_of_request(args, batch);
  return is_in_part(args, length) ? tile_count(begin, length, args.total_q, args.tile_rows) : 0;
}

// Calls visit(batch, tile) for every tile, spread over the block: a thread per request where requests are known to have
// few tiles, else a warp, its lanes over tiles.
template <class Visit>
__device__ void for_each_tile(const ScheduleArgs& args, Visit&& visit) {
  constexpr int kFewTiles = 4;
  const bool has_few = 0 < args.max_qo_len && args.max_qo_len <= kFewTiles * args.tile_rows;
  const int lanes = has_few ? 1 : 32;
  const int lane = has_few ? 0 : threadIdx.x % 32;
  for (int batch = threadIdx.x / lanes; batch < args.batch_size; batch += kThreads / lanes) {
    const int tiles = tiles_of_request(args, batch);
    for (int tile = lane; tile < tiles; tile += lanes) visit(batch, tile);
  }
}

// By all threads: the sum of the values of the threads before each, and of all.
struct BlockSum {
  std::uint64_t before, all;
};
__device__ inline std::uint64_t sum_in_warp(std::uint64_t value) {
  for (int step = 1; step < 32; step *= 2) {
    const std::uint64_t other = __shfl_up_sync(0xffffffffu, value, step);
    if (int(threadIdx.x % 32) >= step) value += other;
  }
  return value;
}
__device__ inline BlockSum block_sum(std::uint64_t value, std::uint64_t (&of_warps)[32]) {
  const int warp = int(threadIdx.x / 32);
  const std::uint64_t inclusive = sum_in_warp(value);
  if (threadIdx.x % 32 == 31) of_warps[warp] = inclusive;
  __syncthreads();
  const std::uint64_t warps = sum_in_warp(of_warps[threadIdx.x % 32]);
  const std::uint64_t before = __shfl_sync(0xffffffffu, warps, warp > 0 ? warp - 1 : 0);
  return {(warp > 0 ? before : 0) + inclusive - value, __shfl_sync(0xffffffffu, warps, 31)};
}

// The list of split tiles: how many there are, and how many units of combining they have.
struct SplitTiles {
  unsigned long long tiles_and_units;  // in the upper half, and in the lower one

  struct Place {
    int index, first_unit;
  };
  __device__ Place add(const ScheduleArgs& args, int rows, int num_splits) {
    const int units =
        CombineUnits{args.splits_of_warp}.of_rows(rows * args.num_qo_heads, num_splits);
    const unsigned long long before = atomicAdd(&tiles_and_units, (1ull << 32) + unsigned(units));
    return {int(before >> 32), int(before & 0xffffffffu)};
  }
  __device__ void count(const ScheduleArgs& args) const {
    args.header->num_split_tiles =
        int(min(std::int64_t(tiles_and_units >> 32), args.rule.split_tile_capacity));
    args.header->num_units = int(tiles_and_units & 0xffffffffu);
  }
};

// The list of even shares. A thread for each request.
__device__ void write_even_shares(const ScheduleArgs& args, std::uint64_t (&of_warps)[32]) {
  // By request that has rows: its first share, and, an entry later, its last.
  __shared__ int first_share[EvenShares::kMostRequests + 1];
  __shared__ int last_share[EvenShares::kMostRequests + 1];
  __shared__ int longest, partial_rows;
  __shared__ SplitTiles combined;
  static_assert(EvenShares::kMostRequests <= kThreads);
  const int thread = threadIdx.x;
  const int batch = thread;
  const int tiles = args.rule.share_tiles;
  if (thread == 0) {
    longest = partial_rows = 0;
    combined.tiles_and_units = 0;
  }
  __syncthreads();

  const bool is_there = batch < args.batch_size && tiles_of_request(args, batch) > 0;
  KeysOfRequest keys{0, 0};
  EvenShares::Request request{0, 0, 0};
  if (is_there) {
    keys = keys_of_request(args, batch);
    request.blocks = EvenShares::blocks_of(min(keys.length, args.rule.most_keys));
    atomicMax(&longest, request.blocks);
  }
  // Requests in the upper half, what they cost in the lower one.
  constexpr std::uint64_t kOne = std::uint64_t(1) << 32;
  const BlockSum sum =
      block_sum(is_there ? kOne + unsigned(EvenShares::kStart + request.blocks) : 0, of_warps);
  const int requests = int(sum.all / kOne);
  request.index = int(sum.before / kOne);
  request.first_block = int(sum.before % kOne) + EvenShares::kStart;
  const EvenShares shares =
      EvenShares::make(args.rule.shares, requests, int(sum.all % kOne), longest,
                       max(args.rule.least_split_keys / EvenShares::kBlockKeys, 1));
  EvenShares::Range range{0, -1};
  if (is_there) {
    range = shares.shares_of(request);
    first_share[request.index] = range.first;
    last_share[request.index + 1] = range.last;
  }
  if (thread == 0) {
    last_share[0] = -1;
    first_share[requests] = -1;
  }
  // A share whose cuts were moved may have nothing.
  WorkItem none{};
  none.batch = -1;
  for (int i = thread; i < shares.count * tiles; i += kThreads) args.list[i] = none;
  __syncthreads();

  if (is_there) {
    const SharesLayout layout{args.rule.shares, args.batch_size, tiles};
    const RowsOfRequest rows = rows_of_request(args, batch);
    WorkItem item{};
    item.batch = batch;
    item.q_begin = rows.begin;
    item.qo_len = min(rows.length, args.max_qo_len);
    item.kv_begin = keys.begin;
    item.num_splits = std::int16_t(range.last + 1 - range.first);
    item.cut_all = request.blocks;
    for (int tile = 0; tile < tiles; ++tile) {
      const int first_row = tile * args.tile_rows;
      const int tile_rows = max(min(args.tile_rows, item.qo_len - first_row), 0);
      item.tile = tile;
      item.kv_len = tile_rows > 0 ? keys.length : -1;
      if (item.num_splits > 1 && tile_rows > 0) {
        const int room = tile_rows * item.num_splits;
        item.partial_row = atomicAdd(&partial_rows, room);
        const bool fits = item.partial_row + room <= args.rule.partial_rows;
        const auto [index, first_unit] = combined.add(args, tile_rows, item.num_splits);
        if (!fits) item.kv_len = -1;
        args.split_tiles[index] = {item.q_begin + first_row,
                                   fits ? tile_rows : 0,
                                   item.partial_row,
                                   item.num_splits,
                                   item.q_begin + item.qo_len,
                                   item.kv_begin,
                                   item.kv_len,
                                   batch,
                                   first_unit};
      }
      for (int share = range.first; share <= range.last; ++share) {
        item.split = std::int16_t(share - range.first);
        item.cut_begin = shares.cut(request, share);
        item.cut_end = shares.cut(request, share + 1);
        const bool is_followed = first_share[request.index + 1] == share;
        item.next = is_followed ? layout.following(share, request.index + 1, tile) : 0;
        const bool is_first = last_share[request.index] < share;
        args.list[is_first ? layout.first_of_share(share, tile)
                           : layout.following(share, request.index, tile)] = item;
      }
    }
  }
  __syncthreads();
  if (thread == 0) {
    combined.count(args);
    args.header->num_items = shares.count * tiles;
  }
}

/// Vectors that come as parameters of the kernel.
template <int kWords>
struct Carried {
  struct Vector {
    std::int32_t* to;
    int begin, count;
  };
  Vector vectors[VectorCopies::kMost];
  int count = 0;
  std::int32_t words[kWords];

  /// Takes a vector along; false where there is no room.
  bool add(const VectorCopy& vector) {
    const int begin = count == 0 ? 0 : vectors[count - 1].begin + vectors[count - 1].count;
    if (vector.count > kWords - begin) return false;
    vectors[count++] = {vector.to, begin, int(vector.count)};
    std::memcpy(words + begin, vector.from, std::size_t(vector.count) * sizeof(std::int32_t));
    return true;
  }
};

constexpr int kNone = 1, kMany = 900;  // words
static_assert(sizeof(ScheduleArgs) + sizeof(Carried<kMany>) <= 4096, "parameters of a kernel");

template <int kWords>
__global__ void __launch_bounds__(kThreads)
    schedule_kernel(__grid_constant__ const ScheduleArgs args,
                    __grid_constant__ const Carried<kWords> carried) {
  __shared__ int position[kBuckets];
  __shared__ std::uint64_t of_warps[32];
  __shared__ int max_kv_len;
  __shared__ SplitTiles combined;
  __shared__ SplitSlots slots;
  __shared__ unsigned long long work, tile_total, partial_rows;  // of the batch

  allow_next_kernel();  // the attention kernel, which then waits for the list
  const int thread = threadIdx.x;
  position[thread] = 0;
  for (std::int64_t i = thread; i < args.rule.combine_counters; i += kThreads) {
    args.combine_counters[i] = 0;
  }
  if (thread == 0) {
    max_kv_len = 0;
    combined.tiles_and_units = 0;
    work = tile_total = partial_rows = 0;
    args.header->tile_counter = 0;
  }
  for (int i = 0; i < carried.count; ++i) {
    const auto& vector = carried.vectors[i];
    for (int j = thread; j < vector.count; j += kThreads) {
      vector.to[j] = carried.words[vector.begin + j];
    }
  }
  __syncthreads();
  if (args.rule.shares > 0) {
    write_even_shares(args, of_warps);
    return;
  }
  unsigned long long own_tiles = 0;
  for (int batch = thread; batch < args.batch_size; batch += kThreads) {
    atomicMax(&max_kv_len, keys_of_request(args, batch).length);
    own_tiles += tiles_of_request(args, batch);
  }
  atomicAdd(&tile_total, own_tiles);
  __syncthreads();
  // Requests that overlap, which offsets on the device may, can have more tiles and splits than 32 bits count: then none
  // is computed.
  const int most_splits = max(args.rule.most_splits, max(args.rule.own.most, 1));
  const bool countable =
      tile_total <= (unsigned long long)(args.capacity - args.rule.extra_tiles) ||
      tile_total * most_splits <= 0x7fffffffull;
  int shift = 0;
  while ((max_kv_len >> shift) >= kBuckets) ++shift;

  auto cost_of = [&](int batch, int tile) {
    return tile_cost(rows_of_request(args, batch).length, keys_of_request(args, batch).length, tile,
                     args.tile_rows);
  };
  auto for_all = [&](auto&& visit) {
    if (countable) for_each_tile(args, visit);
  };
  if (args.rule.wave > 0) {
    unsigned long long own_work = 0;
    for_all([&](int batch, int tile) { own_work += cost_of(batch, tile); });
    atomicAdd(&work, own_work);
    __syncthreads();
  }
  if (thread == 0) {
    slots = split_slots(args.rule, std::int64_t(tile_total), std::int64_t(work));
  }
  __syncthreads();
  // A request's own splits follow from all of its keys, as they do without a list.
  auto splits_of_tile = [&](int batch, int cost) {
    if (args.rule.own.most > 1) cost = keys_of_request(args, batch).length;
    return splits_of(args.rule, slots, cost, rows_of_request(args, batch).length);
  };

  for_all([&](int batch, int tile) {
    const int cost = cost_of(batch, tile);
    const int num_splits = splits_of_tile(batch, cost);
    // By the cost of what a thread block does: one split.
    atomicAdd(&position[bucket_of(cost / num_splits, shift)], num_splits);
  });
  __syncthreads();

  const BlockSum buckets = block_sum(std::uint64_t(position[thread]), of_warps);
  position[thread] = int(buckets.before);
  const int total = int(buckets.all);
  __syncthreads();

  for_all([&](int batch, int tile) {
    const int cost = cost_of(batch, tile);
    const int num_splits = splits_of_tile(batch, cost);
    WorkItem item{};
    item.batch = batch;
    item.tile = tile;
    const RowsOfRequest rows_of = rows_of_request(args, batch);
    item.q_begin = rows_of.begin;
    item.qo_len = rows_of.length;
    const KeysOfRequest keys = keys_of_request(args, batch);
    item.kv_begin = keys.begin;
    item.kv_len = keys.length;
    item.num_splits = std::int16_t(num_splits);
    const int slot = atomicAdd(&position[bucket_of(cost / num_splits, shift)], num_splits);
    if (num_splits > 1) {
      const int first_row = tile * args.tile_rows;
      const int rows = min(args.tile_rows, item.qo_len - first_row);
      const auto [index, first_unit] = combined.add(args, rows, num_splits);
      const std::int64_t row =
          std::int64_t(atomicAdd(&partial_rows, (unsigned long long)(rows * num_splits)));
      // Requests that overlap, which offsets on the device may, have more tiles than there is room for: not computed.
      const bool fits = index < args.rule.split_tile_capacity &&
                        row + std::int64_t(rows) * num_splits <= args.rule.partial_rows &&
                        slot + num_splits <= args.capacity;
      if (!fits) item.kv_len = -1;
      item.partial_row = fits ? int(row) : 0;
      if (index < args.rule.split_tile_capacity) {
        args.split_tiles[index] = {item.q_begin + first_row,
                                   fits ? rows : 0,
                                   item.partial_row,
                                   num_splits,
                                   item.q_begin + item.qo_len,
                                   item.kv_begin,
                                   item.kv_len,
                                   batch,
                                   first_unit};
      }
    }
    for (int split = 0; split < num_splits && slot + split < args.capacity; ++split) {
      item.split = std::int16_t(split);
      args.list[slot + split] = item;
    }
  });
  __syncthreads();
  if (thread == 0) {
    combined.count(args);
    args.header->num_items = min(total, args.capacity);
  }
  if (!args.fills) return;
  WorkItem none{};
  none.batch = -1;
  for (int i = total + thread; i < args.capacity; i += kThreads) args.list[i] = none;
}

template <int kWords>
cudaError_t launch(const ScheduleArgs& args, const Carried<kWords>& carried, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, schedule_kernel<kWords>, args, carried);
}

}  // namespace

Status launch_schedule(const AttentionParams& params, std::int32_t tile_rows, const SplitRule& rule,
                       std::int32_t splits_of_warp, std::int32_t capacity, bool fills,
                       TileListHeader* header, WorkItem* list, SplitTile* split_tiles,
                       std::uint64_t* combine_counters, const VectorCopies& uploads,
                       cudaStream_t stream) {
  ScheduleArgs args{params.qo_indptr,
                    params.kv_indptr,
                    params.seqused_q,
                    params.seqused_k,
                    params.kv_shard,
                    params.max_qo_len,
                    params.max_kv_len,
                    params.kv_stride_request,
                    params.least_rows,
                    params.most_rows,
                    params.batch_size,
                    params.total_q,
                    params.num_qo_heads,
                    splits_of_warp,
                    tile_rows,
                    rule,
                    capacity,
                    fills,
                    header,
                    list,
                    split_tiles,
                    combine_counters,
                    params.pages};
  Carried<kMany> carried;
  VectorCopies others;
  for (int i = 0; i < uploads.count; ++i) {
    if (!carried.add(uploads.vectors[i])) others.vectors[others.count++] = uploads.vectors[i];
  }
  if (Status status = upload(others, stream); !status.ok()) return status;
  const cudaError_t error =
      carried.count > 0 ? launch(args, carried, stream) : launch(args, Carried<kNone>{}, stream);
  return error == cudaSuccess ? Status::success()
                              : cuda_failure("Launching the schedule kernel", error);
}

std::vector<WorkItem> schedule_on_host(const std::vector<std::int32_t>& qo_indptr,
                                       const std::vector<std::int32_t>& kv_indptr,
                                       std::int32_t tile_rows) {
  std::vector<WorkItem> list;
  for (std::size_t batch = 0; batch + 1 < qo_indptr.size(); ++batch) {
    const int qo_len = qo_indptr[batch + 1] - qo_indptr[batch];
    const int kv_len = kv_indptr[batch + 1] - kv_indptr[batch];
    const int tiles = tile_count(qo_indptr[batch], qo_len, qo_indptr.back(), tile_rows);
    for (int tile = 0; tile < tiles; ++tile) {
      list.push_back({int(batch), tile, qo_indptr[batch], qo_len, kv_indptr[batch], kv_len, 0, 1, 0,
                      0, 0, 0, 0});
    }
  }
  auto cost_of = [&](const WorkItem& item) {
    return tile_cost(item.qo_len, item.kv_len, item.tile, tile_rows);
  };
  std::stable_sort(list.begin(), list.end(),
                   [&](const WorkItem& a, const WorkItem& b) { return cost_of(a) > cost_of(b); });
  return list;
}

}  // namespace cutlass_kernels
