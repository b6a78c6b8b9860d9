// Writes the tile list of a batch, in one thread block: a counting sort of its tiles by cost, or even shares.
#include "schedule/write_list.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>

#include "common/dependent_launch.h"
#include "cuda_failure.h"
#include "schedule/list_writer.h"
#include "schedule/write_shares.h"

namespace cutlass_kernels {
namespace {

constexpr int kBuckets = kListThreads;  // one per thread in the prefix sum

// Keys the last row of a tile sees under a causal mask: [0, kv_len], none of a length that makes no sense.
__host__ __device__ inline int tile_cost(int qo_len, int kv_len, int tile, int tile_rows) {
  const int hidden = qo_len - min((tile + 1) * tile_rows, qo_len);
  return max(0, max(0, kv_len) - hidden);
}

// Costs share a bucket when they agree to `shift` bits; buckets are numbered from the most expensive.
__device__ inline int bucket_of(int cost, int shift) { return kBuckets - 1 - (cost >> shift); }

// Calls visit(batch, request, tile, is_there) for every tile, spread over the block: a thread per request where
// requests are known to have few tiles, else a warp, its lanes over tiles. All lanes of a warp call it together.
template <class Visit>
__device__ void for_each_tile(const ListArgs& args, const RequestOfList* requests, Visit&& visit) {
  constexpr int kFewTiles = 4;
  const bool has_few = 0 < args.max_qo_len && args.max_qo_len <= kFewTiles * args.tile_rows;
  const int lanes = has_few ? 1 : 32;
  const int lane = has_few ? 0 : int(threadIdx.x % 32);
  for (int begin = 0; begin < args.batch_size; begin += kListThreads / lanes) {
    const int batch = begin + int(threadIdx.x) / lanes;
    RequestOfList request{};
    int tiles = 0;
    if (batch < args.batch_size) {
      request = batch < kListThreads ? requests[batch] : RequestOfList::read(args, batch);
      tiles = request.tiles(args);
    }
    const int most = int(__reduce_max_sync(0xffffffffu, tiles));
    for (int tile = lane; tile - lane < most; tile += lanes) {
      visit(batch, request, tile, tile < tiles);
    }
  }
}

// By all lanes of a warp: room for the split tiles of all.
__device__ inline SplitRoom reserve_in_warp(SplitRoom* room, const SplitRoom& own) {
  const SplitRoom all{inclusive_sum(own.tiles_and_units), inclusive_sum(own.rows)};
  unsigned long long before = 0, rows_before = 0;
  if (threadIdx.x % 32 == 31) {
    using Word = unsigned long long;
    before = atomicAdd(reinterpret_cast<Word*>(&room->tiles_and_units), Word(all.tiles_and_units));
    rows_before = atomicAdd(reinterpret_cast<Word*>(&room->rows), Word(all.rows));
  }
  return {__shfl_sync(0xffffffffu, before, 31) + all.tiles_and_units - own.tiles_and_units,
          __shfl_sync(0xffffffffu, rows_before, 31) + all.rows - own.rows};
}

// By all lanes of a warp: each has an item that is to be written `count` times, once for each split, from `entry` on.
// Where one has many, all write them.
__device__ inline void write_splits(WorkItem* list, WorkItem item, int entry, int count) {
  constexpr int kMany = 8;
  if (!__any_sync(0xffffffffu, count > kMany)) {
    for (int split = 0; split < count; ++split) {
      item.split = std::int16_t(split);
      list[entry + split] = item;
    }
    return;
  }
  constexpr int kWords = sizeof(WorkItem) / sizeof(int);
  for (unsigned left = __ballot_sync(0xffffffffu, count > 0); left != 0; left &= left - 1) {
    const int lane = __ffs(int(left)) - 1;
    union Words {
      WorkItem item;
      int words[kWords];
    } theirs{item};
    for (int i = 0; i < kWords; ++i) {
      theirs.words[i] = __shfl_sync(0xffffffffu, theirs.words[i], lane);
    }
    const int first = __shfl_sync(0xffffffffu, entry, lane);
    const int end = __shfl_sync(0xffffffffu, count, lane);
    for (int split = int(threadIdx.x % 32); split < end; split += 32) {
      theirs.item.split = std::int16_t(split);
      list[first + split] = theirs.item;
    }
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

constexpr int kNone = 1, kMany = 880;  // words
static_assert(sizeof(ListArgs) + sizeof(Carried<kMany>) <= 4096, "parameters of a kernel");

template <int kWords>
__global__ void __launch_bounds__(kListThreads)
    write_list_kernel(__grid_constant__ const ListArgs args, __grid_constant__ const Carried<kWords> carried) {
  __shared__ RequestOfList requests[kListThreads];  // the first of the batch
  __shared__ SharedRequest shared[EvenShares::kMostRequests];
  __shared__ int position[kBuckets];
  __shared__ int max_kv_len;
  __shared__ SplitRoom room;
  __shared__ ItemBudget budget;

  allow_next_kernel();  // the attention kernel, which then waits for the list
  const int thread = int(threadIdx.x);
  position[thread] = 0;
  for (std::int64_t i = thread; i < args.rule.combine_counters; i += kListThreads) {
    args.combine_counters[i] = 0;
  }
  if (thread == 0) {
    max_kv_len = 0;
    room = {0, 0};
    budget = {0, 1, 1, false};
    args.header->tile_counter = 0;
  }
  for (int i = 0; i < carried.count; ++i) {
    const auto& vector = carried.vectors[i];
    for (int j = thread; j < vector.count; j += kListThreads) {
      vector.to[j] = carried.words[vector.begin + j];
    }
  }
  __syncthreads();
  std::uint64_t own_tiles = 0;
  int longest = 0;
  for (int batch = thread; batch < args.batch_size; batch += kListThreads) {
    const RequestOfList request = RequestOfList::read(args, batch);
    if (batch < kListThreads) requests[batch] = request;
    longest = max(longest, request.kv_len);
    own_tiles += unsigned(request.tiles(args));
  }
  if (args.rule.shares > 0) {
    SharesWriter(args, requests, shared, position).write();
    return;
  }
  longest = int(__reduce_max_sync(0xffffffffu, longest));
  if (thread % 32 == 0) atomicMax(&max_kv_len, longest);
  const std::uint64_t tiles = block_sum(own_tiles).all;
  // Requests that overlap, which offsets on the device may, can have more tiles, splits and units than 32 bits count:
  // then none is computed.
  const int most_splits = max(args.rule.most_splits, max(args.rule.own.most, 1));
  const int most_units = CombineUnits{args.splits_of_warp}.of_rows(args.tile_rows * args.num_qo_heads, most_splits);
  const bool countable =
      (tiles <= std::uint64_t(args.capacity - args.rule.extra_tiles) || tiles * unsigned(most_splits) <= 0x7fffffff) &&
      tiles * unsigned(most_units) <= 0x7fffffff;
  int shift = 0;
  while ((max_kv_len >> shift) >= kBuckets) ++shift;

  enum Pass { kAddWork, kCount, kWrite };
  int total = 0;
  for (int pass = args.rule.wave > 0 ? kAddWork : kCount; pass <= kWrite; ++pass) {
    std::uint64_t own_work = 0;
    const auto visit = [&](int batch, const RequestOfList& request, int tile, bool is_there) {
      const int cost = is_there ? tile_cost(request.qo_len, request.kv_len, tile, args.tile_rows) : 0;
      own_work += unsigned(cost);
      if (pass == kAddWork) return;
      // A request's own splits follow from all of its keys, as they do without a list.
      const int keys = args.rule.own.most > 1 ? request.kv_len : cost;
      const int num_splits = splits_of(args.rule, budget, keys, request.qo_len);
      // By the cost of what a thread block does: one split.
      int* const bucket = &position[bucket_of(int(unsigned(cost) / unsigned(num_splits)), shift)];
      const int entry = is_there ? atomicAdd(bucket, num_splits) : 0;
      if (pass == kCount) return;
      WorkItem item{};
      item.batch = batch;
      item.tile = tile;
      item.q_begin = request.q_begin;
      item.qo_len = request.qo_len;
      item.kv_begin = request.kv_begin;
      item.kv_len = request.kv_len;
      item.num_splits = std::int16_t(num_splits);
      const bool is_split = is_there && num_splits > 1;
      if (__any_sync(0xffffffffu, is_split)) {
        const int first_row = tile * args.tile_rows;
        const int rows = min(args.tile_rows, request.qo_len - first_row);
        SplitRoom own{0, 0};
        if (is_split) {
          const CombineUnits units{args.splits_of_warp};
          own = SplitRoom::of(1, units.of_rows(rows * args.num_qo_heads, num_splits), std::int64_t(rows) * num_splits);
        }
        const SplitRoom before = reserve_in_warp(&room, own);
        const int index = before.tiles();
        // Requests that overlap have more tiles than there is room for: not computed.
        const bool has_place = index < args.rule.split_tile_capacity;
        const bool fits = has_place && entry + num_splits <= args.capacity &&
                          std::int64_t(before.rows + own.rows) <= args.rule.partial_rows;
        if (is_split) {
          if (!fits) item.kv_len = -1;
          item.partial_row = fits ? int(before.rows) : 0;
        }
        if (is_split && has_place) {
          args.split_tiles[index] = {item.q_begin + first_row,
                                     fits ? rows : 0,
                                     item.partial_row,
                                     num_splits,
                                     item.q_begin + item.qo_len,
                                     item.kv_begin,
                                     item.kv_len,
                                     batch,
                                     before.units()};
        }
      }
      write_splits(args.list, item, entry, is_there ? min(num_splits, args.capacity - entry) : 0);
    };
    if (countable) for_each_tile(args, requests, visit);
    __syncthreads();
    if (pass == kAddWork) {
      const std::uint64_t work = block_sum(own_work).all;
      if (thread == 0) budget = item_budget(args.rule, std::int64_t(tiles), std::int64_t(work));
    } else if (pass == kCount) {
      const BlockSum buckets = block_sum(unsigned(position[thread]));
      position[thread] = int(buckets.before);
      total = int(buckets.all);
    }
    __syncthreads();
  }
  if (thread == 0) {
    room.write_counts(args);
    args.header->num_items = min(total, args.capacity);
  }
  if (!args.fills) return;
  WorkItem none{};
  none.batch = -1;
  for (int i = total + thread; i < args.capacity; i += kListThreads) args.list[i] = none;
}

template <int kWords>
cudaError_t launch(const ListArgs& args, const Carried<kWords>& carried, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kListThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, write_list_kernel<kWords>, args, carried);
}

}  // namespace

Status launch_write_list(const ListArgs& args, const VectorCopies& uploads, cudaStream_t stream) {
  Carried<kMany> carried;
  VectorCopies others;
  for (int i = 0; i < uploads.count; ++i) {
    if (!carried.add(uploads.vectors[i])) others.vectors[others.count++] = uploads.vectors[i];
  }
  if (Status status = upload(others, stream); !status.ok()) return status;
  const cudaError_t error = carried.count > 0 ? launch(args, carried, stream) : launch(args, Carried<kNone>{}, stream);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the kernel that writes the list", error);
}

}  // namespace cutlass_kernels
