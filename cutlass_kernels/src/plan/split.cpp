#include "plan/split.h"

#include <algorithm>
#include <cmath>

#include "common/mask.h"
#include "device.h"
#include "plan/packing.h"
#include "plan/tile_source.h"
#include "plan/workspace.h"
#include "schedule/even_shares.h"
#include "schedule/requests.h"

namespace cutlass_kernels {
namespace {

/// Thread blocks that splits fill, at most: bounds lists, counters and partial results on devices with many SMs.
constexpr int kMostThreadBlocks = 512;

/// Keys of the longest request, at most; 0 where the host does not know.
std::int64_t most_keys(const AttentionParams& params) {
  if (params.max_kv_len > 0) return params.max_kv_len;
  // total_kv of pages is an estimate, which must not decide where results must not depend on the batch.
  const bool estimated = params.pages.page_size > 0;
  if (!estimated || (params.total_kv > 0 && !is_alone(params))) return params.total_kv;
  const PageTable& pages = params.pages;
  const std::int64_t entries = pages.table_stride > 0 ? pages.table_width : pages.num_indices;
  return entries * pages.page_size;
}

SplitRule fixed_rule(const AttentionParams& params, std::int64_t tiles) {
  SplitRule rule;
  rule.fixed = params.fixed_split_size;
  const std::int64_t splits = (most_keys(params) + rule.fixed - 1) / rule.fixed;
  rule.most_splits = int(std::clamp<std::int64_t>(splits, 1, 32767));  // 16 bits of a WorkItem
  if (rule.most_splits == 1) return rule;
  rule.extra_tiles = tiles * (rule.most_splits - 1);
  rule.split_tile_capacity = tiles;
  rule.partial_rows = params.total_q * rule.most_splits;
  return rule;
}

/// Splits that follow from a request alone. At head dimension 128, to write and to combine the partial results of a row
/// of a head takes 1 KB of traffic, as much as two keys: 32 keys for each row cost a sixteenth more, and 16 no more
/// than that in tiles that do not wait for memory alone.
OwnSplits own_splits(const AttentionParams& params, const TileShape& tile, const Device& device) {
  // H200, 32/8 heads, beside splits chosen from the batch: 1.10 of the time for 16 requests of 4k keys, 0.92 for one.
  // With 512 keys 1.06 and 1.12.
  constexpr int kLeastKeys = 256;
  constexpr int kMostPartialRows = 8192;  // of all heads
  const bool decodes = tile.combines;
  const int packs = params.num_qo_heads / tile.packed_heads;
  OwnSplits own;
  own.most = std::max(device.multiprocessors / tile.blocks_per_tile / packs, 1);
  own.tile_rows = tile.rows;
  own.most_rows = decodes ? tile.rows : kPackedUpToRows;
  own.least_keys = kLeastKeys;
  own.keys_per_row = (decodes ? 32 : 16) * tile.packed_heads;
  own.most_keys = int(std::min<std::int64_t>(most_keys_of_rows(params, tile.rows), kMaxKeys));
  // No request has more: whatever its length says, its splits do not exceed the room.
  if (const std::int64_t keys = most_keys(params); keys > 0 && keys < own.most_keys) {
    own.most_keys = int(keys);
  }
  own.partial_rows = kMostPartialRows / params.num_qo_heads;
  return own;
}

SplitRule own_rule(const AttentionParams& params, const TileShape& tile, std::int64_t tiles, const Device& device) {
  SplitRule rule;
  rule.own = own_splits(params, tile, device);
  rule.most_splits = rule.own.of(1, kMaxKeys);
  if (rule.most_splits < 2 || params.least_rows > rule.own.most_rows) return {};
  const std::int64_t requests = std::min<std::int64_t>(params.batch_size, tiles);
  // All tiles of a request together have as many splits as fill the device, at most.
  rule.extra_tiles = std::min(requests * (rule.own.most - 1), tiles * (rule.most_splits - 1));
  rule.split_tile_capacity = tiles;
  rule.partial_rows = std::min(params.total_q * rule.most_splits, requests * std::int64_t(rule.own.partial_rows));
  return rule;
}

/// Rows of a split in a batch without a list: batch_splits.h.
std::int64_t rows_of_split(const AttentionParams& params, const TileShape& tile) {
  return std::min({std::int64_t(tile.rows), std::int64_t(params.max_qo_len), params.total_q});
}

/// Even shares of a batch, for each tile of a request and pack of heads; 0 where keys are split otherwise.
std::int64_t even_shares(const AttentionParams& params, const TileShape& tile, const SplitRule& rule) {
  // Few shares, times tiles and packs of heads, leave up to an eighth of the thread blocks idle. So would requests with
  // fewer tiles than the longest. What a caller asks for is dealt out as it is.
  constexpr int kFewShares = 8;
  if (!tile.has_shares || params.batch_size < 2 || params.max_qo_len <= 0 || params.mask.words != nullptr ||
      params.batch_size > EvenShares::kMostRequests || params.num_splits > 1) {
    return 0;
  }
  const std::int64_t tiles = tiles_of_longest(params, tile.rows);
  const bool same_tiles = tiles == 1 || (params.seqused_q == nullptr &&
                                         params.total_q == std::int64_t(params.batch_size) * params.max_qo_len);
  const std::int64_t shares = std::min(rule.wave, rule.most_items) / std::max<std::int64_t>(tiles, 1);
  return same_tiles && shares >= kFewShares ? shares : 0;
}

/// Splits that fill the device, of up to `rows` rows each.
SplitRule filling_rule(const AttentionParams& params, const TileShape& tile, bool with_list, std::int64_t tiles,
                       std::int64_t rows, std::int64_t keys, const Device& device, std::size_t partial_bytes) {
  SplitRule rule;
  const std::int64_t room = partial_bytes / std::max<std::size_t>(partial_row_bytes(params) * rows, 1);
  const int thread_blocks =
      std::min(device.multiprocessors * tile.blocks_per_sm / tile.blocks_per_tile, kMostThreadBlocks);
  rule.wave = thread_blocks / (params.num_qo_heads / tile.packed_heads);
  rule.most_waves = tile.most_waves;
  rule.least_split_keys = tile.least_split_keys;
  if (params.num_splits > 1) {
    rule.wave = int(std::min<std::int64_t>(tiles * params.num_splits, kMostThreadBlocks));
    rule.most_waves = 1;
    rule.least_split_keys = 1;
  }
  rule.most_items = int(std::min<std::int64_t>(std::int64_t(rule.most_waves) * rule.wave, room));
  // What a caller asks for is dealt out as it is.
  rule.most_rounded_items =
      params.num_splits > 1 ? rule.most_items : int(std::min<std::int64_t>(rounded_up(rule.most_items), room));
  if (tile.least_split_keys_of_few > 0 && params.num_splits <= 1) {
    rule.few_items = std::min(
        rule.most_items, device.multiprocessors / tile.blocks_per_tile / (params.num_qo_heads / tile.packed_heads));
    rule.least_split_keys_of_few = tile.least_split_keys_of_few;
    rule.partial_rows_of_one = std::max<std::int64_t>(params.total_q * params.num_qo_heads, 1);
  }
  rule.most_splits = rule.most_items;
  if (keys > 0) {
    const ItemBudget usual{rule.most_items, rule.least_split_keys, keys, false};
    const ItemBudget few{rule.few_items, rule.least_split_keys_of_few, keys, false};
    rule.most_splits = int(std::max(usual.splits(1, keys), few.splits(1, keys)));
  }
  if (rule.most_splits < 2) return {};
  if (!with_list && splits_rows_equally(params, tile)) {
    if (params.num_splits > 1) {
      rule.per_request = std::min(params.num_splits, rule.most_splits);
    } else if (params.batch_size <= EvenShares::kMostRequests) {
      rule.per_request = splits_of_equal_rows(params, rule.wave, rule.least_split_keys);
    }
    rule.per_request = int(std::clamp<std::int64_t>(room / params.batch_size, 1, std::max(rule.per_request, 1)));
  } else if (const std::int64_t shares = even_shares(params, tile, rule); with_list && shares > 0) {
    rule.shares = int(shares);
    rule.share_tiles = int(tiles_of_longest(params, tile.rows));
    rule.most_keys = int(std::min<std::int64_t>(most_keys_of_rows(params, tile.rows), kMaxKeys));
    const SharesLayout layout{rule.shares, params.batch_size, rule.share_tiles};
    rule.extra_tiles = std::max<std::int64_t>(layout.capacity() - tiles, 0);
    rule.split_tile_capacity = std::int64_t(params.batch_size) * rule.share_tiles;
    rule.partial_rows = layout.most_splits() * rows_of_split(params, tile);
    return rule;
  }
  const std::int64_t pairs = rule.most_rounded_items;
  rule.extra_tiles = std::min(pairs, tiles * (rule.most_splits - 1));
  rule.split_tile_capacity = std::min((pairs + 1) / 2, tiles);
  rule.partial_rows = std::min(pairs * rows, params.total_q * rule.most_splits);
  return rule;
}

}  // namespace

int splits_of_equal_rows(const AttentionParams& params, int shares, int least_split_keys) {
  constexpr int kLeastOfAnyLength = 4;
  const int blocks = EvenShares::blocks_of(params.max_kv_len), cost = EvenShares::kStart + blocks;
  const int splits = EvenShares::make(shares, params.batch_size, params.batch_size * cost, blocks,
                                      std::max(least_split_keys / EvenShares::kBlockKeys, 1),
                                      EvenShares::quotient_up(params.batch_size, shares) * cost)
                         .per_request;
  return has_equal_lists(params) || params.batch_size == 1 || splits >= kLeastOfAnyLength ? splits : 0;
}

SplitRule split_rule(const AttentionParams& params, const TileShape& tile, TileSource source, const Device& device,
                     std::size_t partial_bytes) {
  if (tile.packed_heads == 0 || params.disable_split_kv || params.num_splits == 1 || params.stats != nullptr) {
    return {};
  }
  if (params.batch_invariant && params.fixed_split_size == 0) {
    SplitRule rule = own_rule(params, tile, tile_index_count(source, params, tile.rows), device);
    if (source != TileSource::kList && splits_rows_equally(params, tile)) {
      rule.per_request = rule.own.of(1, int(std::min<std::int64_t>(params.max_kv_len, kMaxKeys)));
    }
    return rule;
  }
  const bool batch_without_list = is_batch(params) && source != TileSource::kList;
  if (batch_without_list && (!tile.splits_without_list || wastes_tile_indices(params, tile.rows) ||
                             params.batch_size > kMostSearchedRequests)) {
    return {};
  }
  // Tiles of a batch that is split without a list come by length.
  const std::int64_t tiles =
      tile_index_count(batch_without_list ? TileSource::kBatchByLength : source, params, tile.rows);
  SplitRule rule;
  if (params.fixed_split_size > 0) {
    rule = fixed_rule(params, tiles);
  } else {
    std::int64_t keys = most_keys(params);
    if (batch_without_list) keys = std::min(keys, most_keys_of_rows(params, tile.rows));
    const std::int64_t rows =
        batch_without_list ? rows_of_split(params, tile) : std::min<std::int64_t>(tile.rows, params.total_q);
    rule = filling_rule(params, tile, source == TileSource::kList, tiles, rows, keys, device, partial_bytes);
  }
  if (rule.most_splits < 2) return rule;
  if (combines_in_kernel(params, tile, rule.wave / std::max<std::int64_t>(tiles, 1))) {
    rule.combine_counters = combine_counters(params, tile, rule.partial_rows);
  }
  return rule;
}

std::int64_t likely_splits(const SplitRule& rule, const AttentionParams& params, std::int64_t tiles) {
  if (rule.own.most > 1) return rule.own.most;
  if (rule.shares > 0) return std::max(rule.shares / params.batch_size, 1);
  if (rule.wave <= 0 || tiles <= 0) return 1;
  const std::int64_t keys = all_keys(params) / params.batch_size;
  if (keys <= 0) return std::max<std::int64_t>(items_for(rule, tiles) / tiles, 1);
  return std::max<std::int64_t>(item_budget(rule, tiles, tiles * keys).splits(tiles, keys), 1);
}

std::int64_t splits_without_list(const SplitRule& rule, const AttentionParams& params, const TileShape& tile,
                                 TileSource source) {
  if (!is_batch(params)) {
    const std::int64_t tiles = tile_index_count(source, params, tile.rows);
    return splits_of(rule, item_budget(rule, tiles, tiles * params.total_kv), params.total_kv,
                     int(std::min<std::int64_t>(params.total_q, kMaxKeys)));
  }
  const std::int64_t requests = params.batch_size;
  const std::int64_t tiles = tiles_of_longest(params, tile.rows);
  if (tiles > 0 && rule.per_request > 0) return rule.per_request * requests;
  if (rule.wave <= 0 || tiles == 0) return requests;
  std::int64_t splits = items_for(rule, tiles * requests) / tiles;
  splits = std::min(splits, requests * rule.most_splits);
  if (requests == 1) return std::max<std::int64_t>(combined_at_once(splits), 1);
  // In proportion to their keys, all but the longest requests may get none: these have one more.
  return rule.most_splits > 1 ? splits + requests : requests;
}

OwnBounds own_bounds(const SplitRule& rule, const AttentionParams& params, const TileShape& tile) {
  const std::int64_t requests = params.batch_size;
  const std::int64_t longest =
      std::min<std::int64_t>(std::min<std::int64_t>(params.max_qo_len, params.total_q), params.most_rows);
  const std::int64_t tiles = (longest + tile.rows - 1) / tile.rows;
  if (rule.most_splits < 2) return {requests * tiles};
  // A request of more tiles has fewer splits of each.
  std::int64_t indices = tiles;
  for (std::int64_t some = 1; some <= tiles; ++some) {
    const std::int64_t rows = (some - 1) * tile.rows + 1;
    if (rows > rule.own.most_rows) break;
    indices = std::max(indices, some * rule.own.of(int(rows), kMaxKeys));
  }
  const std::int64_t rows = std::min<std::int64_t>(longest, rule.own.most_rows);
  return {requests * indices, requests * std::min<std::int64_t>(rows * rule.most_splits, rule.own.partial_rows)};
}

std::int64_t partial_rows_without_list(const AttentionParams& params, const TileShape& tile, TileSource source,
                                       std::int64_t splits) {
  if (source == TileSource::kSingleRequest) return splits > 1 ? params.total_q * splits : 0;
  const std::int64_t rows = rows_of_split(params, tile);
  return splits > params.batch_size ? tiles_of_longest(params, tile.rows) * splits * rows : 0;
}

bool combines_in_kernel(const AttentionParams& params, const TileShape& tile, std::int64_t splits) {
  if (!tile.combines || is_alone(params)) return false;
  if (tile.combined_splits > 0) return splits <= tile.combined_splits;
  // A warp of the thread block combines a row. With more rows than warps, or many splits, a second kernel is faster,
  // where up to eight warps share a row.
  const std::int64_t rows = (params.total_q + params.batch_size - 1) / params.batch_size * tile.packed_heads;
  return rows <= 4 ? splits <= 64 : rows <= 8 && splits <= 16 && params.batch_size > 1;
}

std::int64_t combine_counters(const AttentionParams& params, const TileShape& tile, std::int64_t partial_rows) {
  return (partial_rows + 1) / 2 * (params.num_qo_heads / tile.packed_heads);
}

}  // namespace cutlass_kernels
