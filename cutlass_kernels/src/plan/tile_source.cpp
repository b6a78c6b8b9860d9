#include "plan/tile_source.h"

#include <algorithm>

#include "device.h"
#include "plan/split.h"
#include "registry/registry.h"

namespace cutlass_kernels {
namespace {

/// Whether a batch cannot do without a list. Tiles of one whose longest query is known follow from their indices
/// (schedule/find_work.h), but not with a fixed_split_size.
bool needs_list(const AttentionParams& params, const TileShape& tile) {
  return params.max_qo_len <= 0 || params.fixed_split_size > 0 || tile.needs_list;
}

std::int64_t indices_by_length(const AttentionParams& params, int tile_rows) {
  return tiles_of_longest(params, tile_rows) * params.batch_size;
}

// A request whose rows begin at q has the indices from q / tile_rows + (requests before it) on.
std::int64_t indices_in_order(const AttentionParams& params, int tile_rows) {
  return params.total_q / tile_rows + params.batch_size;
}

/// Whether requests with as many rows have far fewer keys than the longest, or the same ones: tiles of the same rows
/// then differ in keys. Two query segments of a prompt over 128k keys, one at its beginning and one at its end, take
/// 12 % longer in turn than one after the other (H100); requests of equal lengths up to 10 % less.
bool keys_differ_much(const AttentionParams& params) {
  const std::int64_t most = std::int64_t(params.max_kv_len) * params.batch_size;
  return params.pages.page_size == 0 && params.total_kv > 0 && 2 * most >= 3 * params.total_kv &&
         params.total_q / params.batch_size >= 1024;
}

/// Tiles of a list: exactly where the host has qo_indptr, else at most so many.
std::int64_t tiles_of_list(const AttentionParams& params, int tile_rows) {
  if (params.qo_indptr_host == nullptr) {
    // sum_b ceil(n_b / t) <= floor(total / t) + (number of non-empty requests)
    return params.total_q / tile_rows + std::min<std::int64_t>(params.batch_size, params.total_q);
  }
  std::int64_t count = 0;
  for (int b = 0; b < params.batch_size; ++b) {
    const std::int64_t rows = params.qo_indptr_host[b + 1] - params.qo_indptr_host[b];
    count += (std::max<std::int64_t>(rows, 0) + tile_rows - 1) / tile_rows;
  }
  return std::max<std::int64_t>(count, 1);  // if only an entry that says there is no tile
}

}  // namespace

TileSource tile_source(const AttentionParams& params, const KernelEntry& kernel, const TileShape& tile) {
  if (!is_batch(params)) return TileSource::kSingleRequest;
  if (needs_list(params, tile)) return TileSource::kList;
  if (params.batch_invariant) {
    if (splits_rows_equally(params, tile)) {
      return has_equal_lists(params) ? TileSource::kBatchByLength : TileSource::kList;
    }
    // A list leaves out requests that other kernels compute. Of one request it would take 3 us more than it saves.
    const bool by_split =
        tile.packed_heads > 0 && tile.splits_without_list && (!kernel.is_persistent || params.batch_size == 1);
    return by_split ? TileSource::kBatchBySplit : TileSource::kList;
  }
  if (kernel.is_persistent && keys_differ_much(params)) return TileSource::kBatchInOrder;
  // An index without a tile costs a persistent thread block up to half a microsecond: no more than one in five.
  const std::int64_t by_length = indices_by_length(params, tile.rows);
  const std::int64_t in_order = indices_in_order(params, tile.rows);
  return kernel.is_persistent && 4 * by_length > 5 * in_order ? TileSource::kBatchInOrder : TileSource::kBatchByLength;
}

std::int64_t tile_index_count(TileSource source, const AttentionParams& params, int tile_rows) {
  switch (source) {
    case TileSource::kList:
      return tiles_of_list(params, tile_rows);
    case TileSource::kSingleRequest:
      return (params.total_q + tile_rows - 1) / tile_rows;
    case TileSource::kBatchByLength:
    case TileSource::kBatchBySplit:
      return indices_by_length(params, tile_rows);
    case TileSource::kBatchInOrder:
      return indices_in_order(params, tile_rows);
  }
  return 0;
}

bool wastes_tile_indices(const AttentionParams& params, int tile_rows) {
  return indices_by_length(params, tile_rows) > 4 * indices_in_order(params, tile_rows);
}

ListUse list_use(const AttentionParams& params, const KernelEntry& kernel, const TileShape& tile,
                 const Device& device) {
  const auto always = [](bool pays) { return pays ? ListUse::kAlways : ListUse::kNever; };
  if (params.stats != nullptr) {  // keys are not split: only far more thread blocks count
    return always(!kernel.is_persistent &&
                  indices_by_length(params, tile.rows) > 64 * indices_in_order(params, tile.rows));
  }
  const bool wastes = wastes_tile_indices(params, tile.rows);
  if (wastes && !kernel.is_persistent) return ListUse::kAlways;
  const bool needs_none = !wastes && tile.splits_without_list && params.batch_size <= kMostSearchedRequests;
  if (tile.packed_heads == 0 || (needs_none && !tile.has_shares)) return ListUse::kNever;
  const SplitRule rule = split_rule(params, tile, TileSource::kList, device);
  if (rule.shares > 0) {
    const bool are_equal = needs_none && splits_rows_equally(params, tile) &&
                           splits_of_equal_rows(params, rule.shares, rule.least_split_keys) > 0;
    return are_equal ? ListUse::kNever : ListUse::kAlways;
  }
  if (params.batch_size > kMostSearchedRequests) {
    const bool are_alike = splits_rows_equally(params, tile) && has_equal_lists(params);
    return always(rule.most_splits > 1 && !are_alike);
  }
  return rule.most_splits > 1 && !needs_none ? ListUse::kIfFaster : ListUse::kNever;
}

}  // namespace cutlass_kernels
