// The work list of a ragged batch: which query tile of which request a block computes, longest first.
//
// A tile's cost is the number of keys its last row sees under a causal mask. That order is right for
// causal and for windowed masks and harmless for full ones, so one list serves every mask and a plan
// need not know it. The list is a counting sort by cost, made by one block on the device; no length
// ever travels to the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "copy_vectors.h"
#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"

#ifdef __CUDACC__
#define CK_SCHEDULE_HD __host__ __device__
#else
#define CK_SCHEDULE_HD
#endif

namespace cutlass_kernels {

/// One entry of the list: a tile and what a block needs to find its rows and keys, so that it
/// waits for one load instead of three dependent ones. batch < 0 marks the entries past the last tile. kv_begin is the
/// request's first key, or the first entry of its page table; kv_len is -1 where the offsets on the device make no sense.
struct alignas(16) WorkItem {
  std::int32_t batch;
  std::int32_t tile;  ///< rows [tile * tile_rows, (tile + 1) * tile_rows) of the request
  std::int32_t q_begin;
  std::int32_t qo_len;
  std::int32_t kv_begin;
  std::int32_t kv_len;
  std::int16_t piece;  ///< of the keys that the tile sees
  std::int16_t pieces;
  std::int32_t partial_row;  ///< first row of the partial results of the tile's pieces
};

/// A tile whose keys are split: piece i of its rows begins at row partial_row + i * rows of the partial results.
struct alignas(16) SplitTile {
  std::int32_t q_begin;  ///< first row, in the tensor
  std::int32_t rows;
  std::int32_t partial_row;
  std::int32_t pieces;
  // Of its request, to be told from one that does not lie inside the tensors, whose tiles are not computed.
  std::int32_t q_end;
  std::int32_t kv_begin;
  std::int32_t kv_len;
  std::int32_t unused;
};

/// Counters for a call without a list, int32: Schedule::next_tile, then Schedule::merge_counters. 8 KB are enough for the keys of
/// 16 rows of 8 heads in 60 pieces.
constexpr int kCallCounters = 2048;
constexpr std::size_t kCallCounterBytes = kCallCounters * sizeof(std::int32_t);

inline void take_counters(std::int32_t* counters, Schedule* schedule) {
  constexpr int kFirstMergeCounter = 4;
  if (counters == nullptr) return;
  schedule->next_tile = counters;
  schedule->merge_counters = counters + kFirstMergeCounter;
  schedule->num_merge_counters = kCallCounters - kFirstMergeCounter;
}

/// Refuses memory that is not 16-byte aligned. `what` begins the sentence.
inline Status check_aligned(const char* what, const void* memory) {
  const auto beyond = reinterpret_cast<std::uintptr_t>(memory) % 16;
  if (beyond == 0) return Status::success();
  return Status::invalid(std::string(what) + " starts " + std::to_string(beyond) +
                         " bytes after a multiple of 16: it must be 16-byte aligned.");
}

/// What a workspace begins with; work list and split tiles follow. In front, the counters stay where they are when another
/// batch is planned into the same memory: captured kernels know their address.
struct alignas(16) ScheduleHeader {
  std::int32_t next_tile[2];  ///< Schedule::next_tile
  std::int32_t split_tiles;
  std::int32_t unused;
};

/// Which of Schedule::merge_counters is that of a tile of split keys, and of a pack of heads. No two tiles' partial rows begin
/// less than two rows apart: each has two pieces or more.
CK_SCHEDULE_HD inline int merge_counter(int partial_row, int pack, int packs) {
  return partial_row / 2 * packs + pack;
}

/// The rule by which keys are split, and bounds of what comes of it.
struct SplitRule {
  std::int32_t wave =
      0;  ///< tiles of one head that run at once; 0: keys are not split to fill the device
  std::int32_t most_waves = 1;
  std::int32_t most_slots = 0;   ///< tiles and pieces of one head, at most, that `wave` leads to
  std::int32_t least_piece = 1;  ///< keys
  std::int32_t fixed = 0;        ///< keys of a piece; 0: by `wave`
  std::int32_t most_pieces = 1;  ///< of a tile
  std::int64_t extra_tiles = 0;  ///< entries of the work list beside those of unsplit tiles
  std::int64_t split_tiles = 0;
  std::int64_t partial_rows = 0;
  std::int64_t merge_counters = 0;
};

constexpr int kMergedAtOnce = 32;

/// Fewer, where a few of so many pieces would be merged after all others, in the same time again.
CK_SCHEDULE_HD inline std::int64_t merged_at_once(std::int64_t pieces) {
  return pieces % kMergedAtOnce <= pieces / 8 ? pieces - pieces % kMergedAtOnce : pieces;
}

/// Pieces that a batch (of one head) of `tiles` tiles is to come in: as many as fill as few waves of blocks as they can fill
/// well, waves being added as long as equal tiles would leave more than 15 % of the device idle.
CK_SCHEDULE_HD inline std::int64_t slots_for(const SplitRule& rule, std::int64_t tiles) {
  std::int64_t slots = rule.wave;
  for (int waves = 2; waves <= rule.most_waves && slots / tiles * tiles * 100 < 85 * slots;
       ++waves) {
    slots = std::int64_t(rule.wave) * waves;
  }
  return slots > rule.most_slots ? rule.most_slots : slots;
}

/// Pieces of a tile that sees `cost` keys, in a batch (of one head) of `tiles` tiles that see `work` keys together.
CK_SCHEDULE_HD inline int pieces_of(const SplitRule& rule, std::int64_t cost, std::int64_t tiles,
                                    std::int64_t work) {
  std::int64_t count = 1;
  if (rule.fixed > 0) {
    count = (cost + rule.fixed - 1) / rule.fixed;
  } else if (rule.wave > 0 && work > 0 && tiles > 0) {
    count = cost * slots_for(rule, tiles) / work;
    if (count > cost / rule.least_piece) count = cost / rule.least_piece;
    count = merged_at_once(count);
  }
  if (count > rule.most_pieces) count = rule.most_pieces;
  return count < 1 ? 1 : int(count);
}

/// Whether requests have offsets. A single request without them starts at 0 and is as long as the tensors.
inline bool is_batch(const AttentionParams& params) {
  return params.batch_size > 1 || params.qo_indptr != nullptr;
}

/// Whether tiles are found in a work list. Those of a single request, and of a batch whose longest query is known, follow
/// from their numbers (common/work.h); but for 8-bit keys under queries of another type, whose kernels have no registers for that.
inline bool needs_list(const AttentionParams& params) {
  return is_batch(params) && (params.max_qo_len <= 0 || params.fixed_split_size > 0 ||
                              params.kv_dtype != params.q_dtype);
}

/// Tiles of a batch's longest request.
inline std::int64_t tiles_of_longest(const AttentionParams& params, int tile_rows) {
  const std::int64_t rows = params.max_qo_len < params.total_q ? params.max_qo_len : params.total_q;
  return (rows + tile_rows - 1) / tile_rows;
}

/// Numbers for the tiles of a batch without a list: for each request as many as the longest has tiles, so that the long tiles of
/// all requests come first; or as many as tiles in the order of rows need.
inline std::int64_t numbers_by_length(const AttentionParams& params, int tile_rows) {
  return tiles_of_longest(params, tile_rows) * params.batch_size;
}
inline std::int64_t numbers_in_order(const AttentionParams& params, int tile_rows) {
  return params.total_q / tile_rows + params.batch_size;
}

/// How many numbers the tiles of a head have where there is no list and keys are not split (RowTiles in common/work.h). Of a
/// batch by length, but in order where more than one in five would be nobody's, which costs a persistent block as much as half
/// a microsecond.
inline std::int64_t tile_numbers(const AttentionParams& params, int tile_rows, bool persistent) {
  if (!is_batch(params)) return (params.total_q + tile_rows - 1) / tile_rows;
  const std::int64_t by_length = numbers_by_length(params, tile_rows);
  const std::int64_t in_order = numbers_in_order(params, tile_rows);
  return persistent && 4 * by_length > 5 * in_order ? in_order : by_length;
}

/// Parts into which the keys of all requests of a batch without a list are split, for each tile of the longest: one a request, and
/// more that requests get in proportion to their keys (KeyParts in common/work.h).
inline std::int64_t parts_of_batch(const SplitRule& rule, const AttentionParams& params,
                                   int tile_rows) {
  const std::int64_t requests = params.batch_size;
  const std::int64_t tiles = tiles_of_longest(params, tile_rows);
  if (rule.wave <= 0 || tiles == 0) return requests;
  std::int64_t parts = slots_for(rule, tiles * requests) / tiles;
  if (parts > requests * rule.most_pieces) parts = requests * rule.most_pieces;
  if (requests == 1) parts = merged_at_once(parts);
  return parts < requests ? requests : parts;
}

/// Where the keys of a request begin, in the tensor or among the entries of its page table, and how many there are: -1 if
/// its offsets or its entries, which were never checked, make no sense.
struct KeysOfRequest {
  std::int32_t begin;
  std::int32_t length;
};
constexpr int kMaxKeys =
    (1 << 30) - 1;  // of a request, so that the end of a block of keys is a 32-bit number, too

CK_SCHEDULE_HD inline KeysOfRequest keys_of_request(const std::int32_t* kv_indptr,
                                                    const PageTable& pages, int batch) {
  const std::int32_t begin = kv_indptr[batch];
  const std::int32_t end = kv_indptr[batch + 1];
  if (pages.page_size == 0) return {begin, end - begin};
  const bool ordered = 0 <= begin && begin <= end;
  if (pages.table_stride > 0) {
    const std::int64_t room = std::int64_t(pages.table_width) * pages.page_size;
    const bool fits = ordered && end - begin <= room && end - begin <= kMaxKeys;
    return {std::int32_t(batch * pages.table_stride), fits ? end - begin : -1};
  }
  if (!ordered || end > pages.num_indices) return {begin, -1};
  if (begin == end) return {begin, 0};
  const std::int32_t last = pages.last_page_len[batch];
  const std::int64_t length = std::int64_t(end - begin - 1) * pages.page_size + last;
  const bool fits = 1 <= last && last <= pages.page_size && length <= kMaxKeys;
  return {begin, fits ? std::int32_t(length) : -1};
}

/// Upper bound of the tiles of `batch_size` requests with `total_q` rows in all.
inline std::int64_t schedule_capacity(std::int64_t total_q, std::int32_t batch_size,
                                      std::int32_t tile_rows) {
  // sum_b ceil(n_b / t) <= floor(total / t) + (number of non-empty requests)
  const std::int64_t requests = batch_size < total_q ? batch_size : total_q;
  return total_q / tile_rows + requests;
}

/// Enqueues the kernel that writes the header, `capacity` entries of the list, the split tiles and their counters.
Status launch_schedule(const AttentionParams& params, std::int32_t tile_rows, const SplitRule& rule,
                       std::int32_t capacity, ScheduleHeader* header, WorkItem* list,
                       SplitTile* split_tiles, std::int32_t* merge_counters, cudaStream_t stream);

/// make_schedule() of attention.h, which copies vectors just before it enqueues the list that is made from them: where it
/// fails, they are as before.
Status make_schedule(const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                     cudaStream_t stream, Schedule* schedule, Backend backend,
                     const VectorCopies& copies);

/// Bytes of the header, the list and the split tiles: what make_schedule() needs of workspace_size(), which also counts the
/// results of pieces that attention() may need.
std::size_t schedule_size(const AttentionParams& params, Backend backend);

/// Bytes of the results of pieces that attention() needs for `params` on the current device, with a schedule that has been
/// made for it, or, of a single request, to split its keys.
Status partial_size(const AttentionParams& params, Backend backend, std::size_t* bytes);

/// Bytes of workspace with which attention() lacks nothing for `params` on the current device: partial_size(), and the list,
/// where there must be one, of a call that has none yet.
Status call_size(const AttentionParams& params, Backend backend, std::size_t* bytes);

/// Whether a batch whose longest query is known had better have a list all the same: where most numbers of its tiles would be
/// nobody's, each a block of fa2, or where its keys are worth splitting, which without a list they cannot be.
bool prefers_list(const AttentionParams& params, Backend backend);

/// The same list computed on the host from host lengths (for tests and for reading).
std::vector<WorkItem> schedule_on_host(const std::vector<std::int32_t>& qo_indptr,
                                       const std::vector<std::int32_t>& kv_indptr,
                                       std::int32_t tile_rows);

}  // namespace cutlass_kernels
