// The tiles whose partial results are to be combined: of a list, of a batch without one, of a single request, or of
// requests with equal splits.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "plan/launch_params.h"
#include "schedule/batch_splits.h"
#include "schedule/requests.h"

namespace cutlass_kernels {

// As in find_work(): a request outside the tensors is not computed.
CUTE_DEVICE bool is_inside(const LaunchParams& p, const SplitTile& tile) {
  return min(tile.q_begin, tile.kv_begin) >= 0 && tile.q_begin <= tile.q_end && tile.q_end <= p.total_q &&
         tile.kv_len >= 0 && (p.pages.page_size > 0 || std::int64_t(tile.kv_begin) + tile.kv_len <= p.total_kv);
}

// The tile of a single request, or of a batch with equal_splits, from its index. With equal splits a request has one
// row, as each has whose keys are slots.
CUTE_DEVICE SplitTile undescribed_tile(const LaunchParams& p, int index) {
  const LaunchPlan& plan = p.plan;
  const bool are_equal = plan.equal_splits > 0;
  const int batch = are_equal ? index : 0, first_row = are_equal ? 0 : index * plan.tile_rows;
  RowsOfRequest rows{0, int(p.total_q)};
  KeysOfRequest keys{0, int(p.total_kv)};
  int count = plan.num_splits, room = plan.num_splits, split_rows = plan.tile_rows;
  if (plan.source == TileSource::kBatchByLength) {
    rows = rows_of_request(p, batch);
    rows.length = min(rows.length, p.max_qo_len);
    keys = keys_of_request(p, batch);
    count = are_equal ? plan.equal_splits : BatchSplits::find_in_one(p, 0).count;
    if (are_equal) room = plan.equal_splits;
    split_rows = rows_of_split(p);
  }
  if (rows.begin < 0) return {};
  return {rows.begin + first_row,
          min(plan.tile_rows, rows.length - first_row),
          index * room * split_rows,
          count,
          rows.begin + rows.length,
          keys.begin,
          keys.length,
          batch,
          0};
}

// Whether the attention kernel describes tiles: those of a batch without a list.
CUTE_DEVICE bool is_described_by_kernel(const LaunchPlan& plan) {
  return plan.split_tiles != nullptr && plan.tile_list == nullptr;
}

// Whether the attention kernel may have described a tile so. Where calls that overlap in time share a counter, against
// the contract, it may have missed the tile: what is read then must not lead out of memory.
CUTE_DEVICE bool is_possible(const LaunchParams& p, const SplitTile& tile, int index) {
  const LaunchPlan& plan = p.plan;
  return tile.batch == index % p.batch_size && 0 < tile.rows && std::int64_t(tile.q_begin) + tile.rows <= tile.q_end &&
         tile.partial_row >= 0 && tile.partial_row + std::int64_t(tile.rows) * tile.num_splits <= plan.partial_rows;
}

// The tile with this index, of a list below its num_split_tiles; without rows, if there is none.
CUTE_DEVICE SplitTile tile_at(const LaunchParams& p, int index) {
  const LaunchPlan& plan = p.plan;
  SplitTile tile;
  if (plan.split_tiles == nullptr) {
    tile = undescribed_tile(p, index);
  } else {
    static_assert(sizeof(SplitTile) == 3 * sizeof(int4));
    const int4* words = reinterpret_cast<const int4*>(plan.split_tiles) + 3 * std::int64_t(index);
    CUTE_UNROLL
    for (int i = 0; i < 3; ++i) reinterpret_cast<int4*>(&tile)[i] = __ldcg(words + i);
    if (plan.tile_list == nullptr && !is_possible(p, tile, index)) tile.rows = 0;
  }
  if (!is_inside(p, tile)) tile.rows = 0;
  return tile;
}

}  // namespace cutlass_kernels
