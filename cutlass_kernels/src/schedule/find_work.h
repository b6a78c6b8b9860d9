// From the rank of a tile to what it is: its request, rows, keys, and KV split.
#pragma once

#include <cute/config.hpp>

#include <algorithm>
#include <cstdint>

#include "common/fast_divisor.h"
#include "plan/launch_params.h"
#include "schedule/batch_splits.h"
#include "schedule/requests.h"

namespace cutlass_kernels {

// Tiles without a list, by rank (TileSource):
//   kSingleRequest   tiles of the request, last rows first, each once per KV split
//   kBatchByLength   tiles of the longest request, last rows first, each once per request, or once per split of the
//                    batch
//   kBatchInOrder    in the order of rows, last request first: a request whose rows begin at q has the indices from
//                    q / tile_rows + (requests before it) on, up to one more than it needs
//   kBatchBySplit    for each request as many as one can have tiles and splits of its own: find_own_split()
struct RowTiles {
  FastDivisor repeats;    // of a tile: KV splits, or requests
  FastDivisor tile_rows;  // of kBatchInOrder
  int tiles;              // of the longest request; 0 for kBatchInOrder

  static RowTiles make(const LaunchParams& p) {
    const LaunchPlan& plan = p.plan;
    const bool in_order = plan.source == TileSource::kBatchInOrder;
    const bool by_split = plan.source == TileSource::kBatchBySplit;
    const int repeats =
        by_split ? plan.tile_indices / p.batch_size : std::max(plan.num_splits, is_batch(p) ? p.batch_size : 1);
    return {FastDivisor(std::uint32_t(repeats)), FastDivisor(std::uint32_t(std::max(plan.tile_rows, 1))),
            in_order ? 0 : plan.tile_indices / repeats};
  }

  // Rank of the n-th tile if all tiles of a request (or split) came before those of the next.
  CUTE_DEVICE int with_keys_together(int n) const {
    if (tiles <= 1) return n;
    const int repeat = int(unsigned(n) / unsigned(tiles));
    return (n - repeat * tiles) * int(repeats.divisor) + repeat;
  }
};

// The tile with this index, counted from the last, in the order of rows.
CUTE_DEVICE void find_in_order(const LaunchParams& p, const RowTiles& rows, int index, WorkItem& work) {
  const auto first_index = [&](int batch) {
    const int row = p.qo_indptr == nullptr ? batch * p.max_qo_len : __ldg(p.qo_indptr + batch);
    return int(rows.tile_rows.divide(row)) + batch;
  };
  int end = p.batch_size;
  work.batch = 0;
  CUTE_NO_UNROLL
  while (end - work.batch > 1) {
    const int middle = work.batch + (end - work.batch) / 2;
    if (first_index(middle) <= index) {
      work.batch = middle;
    } else {
      end = middle;
    }
  }
  work.tile = index - first_index(work.batch);
}

// Describes rows of a request of a batch without a list, from first_row on, to the kernel that combines partial results
// (merge/combine_splits.cu), by one thread of a thread block that has their first split, whether keys are split or not.
CUTE_DEVICE void describe_split_rows(const LaunchParams& p, const WorkItem& work, int first_row, int rows,
                                     int partial_row, int index) {
  SplitTile tile{};
  tile.q_begin = work.q_begin + first_row;
  tile.rows = min(rows, work.qo_len - first_row);
  tile.partial_row = partial_row;
  tile.num_splits = work.num_splits;
  tile.q_end = work.q_begin + work.qo_len;
  tile.kv_begin = work.kv_begin;
  tile.kv_len = work.q_begin < 0 ? -1 : work.kv_len;  // such a request is not computed
  tile.batch = work.batch;
  p.plan.split_tiles[index] = tile;
}

// Whether a request lies inside the tensors. Entries of a page table have been checked: keys_of_request().
CUTE_DEVICE bool lies_inside(const LaunchParams& p, const WorkItem& work) {
  if (min(work.q_begin, work.kv_begin) < 0 || work.kv_len < 0 || std::int64_t(work.q_begin) + work.qo_len > p.total_q) {
    return false;
  }
  return p.pages.page_size > 0 || std::int64_t(work.kv_begin) + work.kv_len <= p.total_kv;
}

// kBatchBySplit: the KV split of a rank; false where another part of the batch computes the request, too. kTiles:
// requests may have several tiles.
template <bool kTiles = false>
CUTE_DEVICE bool find_own_split(const LaunchParams& p, const RowTiles& row_tiles, int rank, WorkItem& work) {
  const OwnSplits& own = p.plan.own_splits;
  const int batch = int(row_tiles.repeats.divide(rank));
  const KeysOfRequest keys = keys_of_request(p, batch);
  const RowsOfRequest rows = rows_of_request(p, batch);
  const bool is_here = is_in_part(p, rows.length);
  work.batch = batch;
  work.q_begin = rows.begin;
  work.qo_len = min(rows.length, p.max_qo_len);
  work.kv_begin = keys.begin;
  work.kv_len = keys.length;
  work.tile = own.tiles(work.qo_len) - 1;
  work.split = 0;
  work.num_splits = std::int16_t(is_here ? own.of(work.qo_len, work.kv_len) : 1);
  const bool is_computed = is_here && work.qo_len > 0 && lies_inside(p, work);
  const int first_rank = batch * int(row_tiles.repeats.divisor);
  // Each request has room for the same number of rows.
  work.partial_row = batch * (p.plan.partial_rows / p.batch_size);
  if (rank == first_rank && p.plan.split_tiles != nullptr && threadIdx.x == 0) {
    describe_split_rows(p, work, 0, work.qo_len, work.partial_row, work.batch);
  }
  int split = rank - first_rank;
  if constexpr (kTiles) {
    const int position = int(unsigned(split) / unsigned(work.num_splits));
    split -= position * work.num_splits;
    work.tile -= position;
    work.partial_row += work.tile * own.tile_rows * work.num_splits;
    work.cut_all = work.next = 0;
  }
  work.split = std::int16_t(split);
  return is_computed && (kTiles ? work.tile >= 0 : work.tile == 0 && split < work.num_splits);
}

// Of rows with lists of slots, without a list of tiles: the KV split of a rank. All rows have as many.
CUTE_DEVICE void find_split_of_row(const LaunchParams& p, const FastDivisor& splits_of_row, int rank, WorkItem& work) {
  const int row = int(splits_of_row.divide(rank)), splits = int(splits_of_row.divisor);
  const KeysOfRequest keys = keys_in_lists(p, row);
  work = {};
  work.batch = work.q_begin = row;
  work.qo_len = 1;
  work.kv_begin = keys.begin;
  work.kv_len = keys.length;
  work.split = std::int16_t(rank - row * splits);
  work.num_splits = std::int16_t(splits);
  work.partial_row = row * splits;
}

// The tile of a rank. False if there is none: past the end of the list or of the request, or of a request that does not
// lie inside the tensors (indptrs on the device were never checked), which is not computed.
//
// kPaged, kInOrder: whether there may be pages, and kBatchInOrder or several tiles of kBatchBySplit. In a kernel of
// fa2, which has no warp of its own for this, a few instructions more here, or a call, make ptxas order the main loop
// anew. kSplits: whether keys of a batch may be split without a list. find_split(split) then finds the request.
// kBatches: whether a batch may come without a list.
template <bool kPaged, bool kInOrder, bool kSplits, bool kBatches = true, class FindSplit>
CUTE_DEVICE bool find_work(const LaunchParams& p, const RowTiles& rows, [[maybe_unused]] FindSplit find_split, int rank,
                           WorkItem& work) {
  if constexpr (kSplits) {
    if (p.plan.source == TileSource::kBatchBySplit) return find_own_split<kInOrder>(p, rows, rank, work);
  }
  if (p.plan.tile_list != nullptr) {
    work = p.plan.tile_list[rank];
    if (work.batch < 0) return false;
  } else {
    const int repeats = int(rows.repeats.divisor);
    const int position = int(rows.repeats.divide(rank));
    const int repeat = rank - position * repeats;
    work.tile = rows.tiles - 1 - position;
    work.batch = 0;
    work.q_begin = 0;
    work.kv_begin = 0;
    work.qo_len = int(p.total_q);
    work.kv_len = int(p.total_kv);
    work.split = std::int16_t(repeat);
    work.num_splits = std::int16_t(repeats);
    work.cut_all = 0;
    work.next = 0;
    [[maybe_unused]] int first_split = -1;  // of the request, in a batch that is split
    if (kBatches && p.plan.source != TileSource::kSingleRequest) {
      KeysOfRequest keys;
      work.batch = repeat;
      work.split = 0;
      work.num_splits = 1;
      if constexpr (kSplits) {
        if (repeats > p.batch_size) {
          const RequestSplits own = find_split(repeat);
          if (own.count == 0) return false;
          work.batch = own.batch;
          work.split = std::int16_t(repeat - own.first);
          work.num_splits = std::int16_t(own.count);
          first_split = own.first;
          keys = own.keys;
        }
      }
      if constexpr (kInOrder) {
        if (rows.tiles == 0) find_in_order(p, rows, p.plan.tile_indices - 1 - rank, work);
      }
      const RowsOfRequest own_rows = rows_of_request(p, work.batch);
      work.q_begin = own_rows.begin;
      work.qo_len = own_rows.length;
      if (!kSplits || first_split < 0) {
        keys = kPaged ? keys_of_request(p, work.batch) : keys_in_rows(p, work.batch);
      }
      work.kv_begin = keys.begin;
      work.kv_len = keys.length;
      if constexpr (kSplits) {
        if (first_split >= 0) {
          work.qo_len = min(work.qo_len, p.max_qo_len);
          if (p.plan.split_tiles != nullptr && work.split == 0 && threadIdx.x == 0) {
            describe_split_rows(p, work, work.tile * p.plan.tile_rows, p.plan.tile_rows,
                                (work.tile * repeats + first_split) * rows_of_split(p),
                                work.tile * p.batch_size + work.batch);
          }
        }
      }
      // In 64 bits: the length was never checked.
      if (work.tile < 0 || std::int64_t(work.tile) * p.plan.tile_rows >= work.qo_len) {
        return false;
      }
    }
    work.partial_row = work.tile * p.plan.tile_rows * repeats;
    if constexpr (kSplits) {
      if (first_split >= 0) {
        work.partial_row = (work.tile * repeats + first_split) * rows_of_split(p);
      }
    }
  }
  return lies_inside(p, work);
}

// KV blocks [begin, end) of a tile's `kv_blocks` that belong to its split: none where there are fewer of them than
// splits.
struct SplitBlocks {
  int begin;
  int end;
};

template <bool kCuts>
CUTE_DEVICE SplitBlocks blocks_of_split(const WorkItem& work, int kv_blocks) {
  if constexpr (kCuts) {
    if (work.cut_all > 0) {
      // A mask may leave the tile fewer KV blocks than the request has.
      const auto of_tile = [&](int n) {
        return kv_blocks == work.cut_all ? n : int(std::int64_t(n) * kv_blocks / work.cut_all);
      };
      return {of_tile(work.cut_begin), of_tile(work.cut_end)};
    }
  }
  const int each = int(unsigned(kv_blocks) / unsigned(work.num_splits));
  const int longer = kv_blocks - each * work.num_splits;  // the first splits, by one
  const int begin = work.split * each + min(int(work.split), longer);
  return {begin, begin + each + (work.split < longer ? 1 : 0)};
}

}  // namespace cutlass_kernels
