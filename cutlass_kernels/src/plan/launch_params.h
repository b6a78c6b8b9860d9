// What kernels are given: the problem, and what its plan says about tiles and memory. Shared by host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cutlass_kernels/params.h"
#include "schedule/own_splits.h"

namespace cutlass_kernels {

struct MaskExtent;  // mask_extents.h

/// Where a kernel's tiles come from. The device finds them in schedule/find_work.h, rows with lists of slots on fa3 in
/// fa3/find_tiles.h.
enum class TileSource : std::int32_t {
  kList,           ///< a list in the workspace, by cost or in even shares: schedule/write_list.cu
  kSingleRequest,  ///< one request without indptrs: its tiles, last rows first
  kBatchByLength,  ///< as many tile indices per request as the longest one has tiles: all long tiles come first
  kBatchInOrder,   ///< tile indices in the order of rows: few of them map to no tile
  kBatchBySplit,   ///< request after request, as many tiles and KV splits for each as one can have
};

/// What a thread block computes: an entry of the list, or found without one (schedule/find_work.h). It says where rows
/// and keys are, so that a thread block waits for one load instead of three dependent ones.
struct alignas(16) WorkItem {
  std::int32_t batch;    ///< < 0: past the last tile
  std::int32_t tile;     ///< rows [tile * tile_rows, (tile + 1) * tile_rows) of the request
  std::int32_t q_begin;  ///< first row of the request
  std::int32_t qo_len;
  std::int32_t kv_begin;  ///< first key of the request, or first entry of its page table
  std::int32_t kv_len;    ///< -1: not computed: the request's indptrs make no sense, or there is no room
  std::int16_t split;     ///< which KV split of the tile
  std::int16_t num_splits;
  std::int32_t partial_row;  ///< first row of the tile's partial results
  /// The split's KV blocks: [cut_begin, cut_end) of each cut_all. 0: all splits are as long.
  std::int32_t cut_begin, cut_end, cut_all;
  std::int32_t next;  ///< the entry that the same thread block computes next; 0: none
};

/// A tile whose keys are split, or a request whose splits are its own. Its partial results have rows * num_splits rows:
/// merge/partial_results.h.
struct alignas(16) SplitTile {
  std::int32_t q_begin;  ///< first row, in the tensor
  std::int32_t rows;
  std::int32_t partial_row;
  std::int32_t num_splits;
  // Of its request: tiles of a request that does not lie inside the tensors are not computed.
  std::int32_t q_end;
  std::int32_t kv_begin;
  std::int32_t kv_len;
  std::int32_t batch;
  std::int32_t first_unit;  ///< of a list: the units of combining (CombineUnits) of the tiles before it
};

/// What the memory of a schedule begins with. The counter comes first: where another batch is planned into the same
/// memory, captured kernels find it at the same address.
struct alignas(16) TileListHeader {
  std::uint64_t tile_counter;
  std::int32_t num_split_tiles;  ///< entries of the list of split tiles
  std::int32_t num_items;        ///< entries of the list that are claimed: those behind WorkItem::next are not
  std::int32_t num_units;        ///< of combining, of all split tiles
};

/// Tiles and KV splits of a plan.
struct TilePlan {
  TileSource source = TileSource::kSingleRequest;
  std::int32_t tile_indices = 0;  ///< per head (or pack of heads); some may map to no tile
  /// Without a list: KV splits of each tile. For a batch, the total over requests: one each, others in proportion to
  /// KV length, but no more than one per least_split_keys keys. By split: of each request, at most.
  std::int32_t num_splits = 1;
  /// By length, of rows with lists of slots on fa3: KV splits of each, whatever its length. 0: num_splits are shared
  /// out.
  std::int32_t equal_splits = 0;
  std::int32_t split_tile_capacity = 0;  ///< most tiles whose keys are split; 0: none is
  std::int32_t splits_of_warp = 1;       ///< CombineUnits::splits_of_warp
  std::int32_t partial_rows = 0;         ///< that there is room for, of all heads each
  OwnSplits own_splits;                  ///< by split
};

/// What a launched kernel is given of the plan, with addresses.
struct LaunchPlan : TilePlan {
  std::int32_t tile_rows = 0;     ///< TileShape::rows
  std::int32_t tile_kind = 0;     ///< TileShape::kind
  std::int32_t packed_heads = 0;  ///< TileShape::packed_heads
  std::int32_t least_split_keys = 1;
  std::int32_t most_split_keys = 0;  ///< no more of a request's keys count for its share of splits
  const TileListHeader* list_header = nullptr;
  const WorkItem* tile_list = nullptr;  ///< [tile_indices]; null without a list
  /// A counter from which persistent thread blocks claim tiles (schedule/tickets.h). Zero it once: every call leaves it
  /// zero, and restarts it where it holds anything else. Null: tiles are dealt out beforehand.
  std::uint64_t* tile_counter = nullptr;
  /// Counters with which the last thread block of a split tile knows that it is, and combines the partial results.
  /// Null: a second kernel combines them.
  std::uint64_t* combine_counters = nullptr;
  std::int32_t num_combine_counters = 0;
  /// [split_tile_capacity]. Of a batch without a list, written by the attention kernel: tile t of request b at
  /// [t * batch_size + b]; with splits of its own, all of request b at [b]. Null without a list where no second kernel
  /// combines, there is one request, or there are equal_splits: tiles then follow from the index.
  SplitTile* split_tiles = nullptr;
  float* partial_o = nullptr;                ///< [rows, num_qo_heads, head_dim_vo]
  float* partial_max_sum = nullptr;          ///< [rows, num_qo_heads, 2]: merge/partial_results.h
  const MaskExtent* mask_extents = nullptr;  ///< [tile_indices], or null
};

/// How many ranks each head has: what the list says, or all tile indices where there is no list.
CK_HOST_DEVICE inline std::int32_t num_ranks(const LaunchPlan& plan) {
  return plan.tile_list == nullptr ? plan.tile_indices : plan.list_header->num_items;
}

/// How partial results are combined: a row of a head has a warp for every splits_of_warp of its splits, up to all of a
/// thread block. A unit is what a thread block combines at a time.
struct CombineUnits {
  static constexpr int kWarps = 8;

  std::int32_t splits_of_warp;

  CK_HOST_DEVICE int warps_log2(int num_splits) const {
    int log2 = 0;
    while (1 << log2 < kWarps && splits_of_warp << log2 < num_splits) ++log2;
    return log2;
  }
  /// Of so many rows of a head.
  CK_HOST_DEVICE int of_rows(int rows, int num_splits) const {
    return ((rows << warps_log2(num_splits)) + kWarps - 1) / kWarps;
  }
};

struct LaunchParams : AttentionParams {
  LaunchPlan plan;
};

/// Which of LaunchPlan::combine_counters belongs to a split tile and a pack of heads. Partial rows of two tiles begin
/// at least two rows apart, as each has two splits or more.
CK_HOST_DEVICE inline int combine_counter(int partial_row, int pack, int packs) {
  return partial_row / 2 * packs + pack;
}

/// Whether each request is a row with a list of slots.
inline bool has_lists(const AttentionParams& params) { return params.pages.slots_per_page > 0; }
/// Whether the host knows that all lists are as long.
inline bool has_equal_lists(const AttentionParams& params) {
  return has_lists(params) && params.seqused_k == nullptr && params.second.lengths == nullptr;
}

/// Whether there are requests. Else there is one, which starts at 0 and is as long as the tensors.
inline bool is_batch(const AttentionParams& params) {
  return params.batch_size > 1 || params.qo_indptr != nullptr || params.kv_indptr != nullptr ||
         params.seqused_q != nullptr || params.seqused_k != nullptr || params.pages.page_size > 0;
}

/// Keys of all requests, as far as the host knows. There are more rows of k and v where a tensor has other requests,
/// too, or heads before tokens; there are fewer where requests share keys.
inline std::int64_t all_keys(const AttentionParams& params) {
  const std::int64_t keys = std::int64_t(params.batch_size) * params.max_kv_len;
  const bool may_share = params.kv_stride_request != kNotSet;
  const bool is_better = may_share || params.total_kv < 0 || keys < params.total_kv;
  return keys > 0 && is_better ? keys : params.total_kv;
}

/// Of these, those in memory: keys that requests share count once.
inline std::int64_t keys_in_memory(const AttentionParams& params) {
  const std::int64_t keys = all_keys(params);
  return params.total_kv < 0 || keys < params.total_kv ? keys : params.total_kv;
}

/// Tiles of a batch's longest request.
inline std::int64_t tiles_of_longest(const AttentionParams& params, int tile_rows) {
  const std::int64_t rows = params.max_qo_len < params.total_q ? params.max_qo_len : params.total_q;
  return (rows + tile_rows - 1) / tile_rows;
}

}  // namespace cutlass_kernels
