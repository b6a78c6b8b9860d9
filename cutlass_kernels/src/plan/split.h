// How many KV splits tiles get. Keys are split where tiles alone would leave SMs idle, or into splits of a fixed size.
//
// Only tiles of packed heads are split. They serve short queries, and all queries where results must not depend on the
// batch. The rule is made on the host from sizes. The number of splits of each tile follows from it on the device,
// where lengths are: schedule/write_list.cu for a tile list, schedule/batch_splits.h without.
#pragma once

#include <cmath>
#include <cstdint>
#include <tuple>

#include "plan/launch_params.h"
#include "plan/tile_shape.h"

namespace cutlass_kernels {

struct Device;

/// The rule, and bounds of what comes of it.
struct SplitRule {
  std::int32_t wave = 0;  ///< tiles of one head that run at once; 0: keys are not split to fill the device
  std::int32_t most_waves = 1;
  std::int32_t most_items = 0;          ///< most (tile, split) pairs of one head that are dealt out
  std::int32_t most_rounded_items = 0;  ///< the same with what may be rounded up
  std::int32_t least_split_keys = 1;
  std::int32_t few_items = 0;            ///< pairs up to which splits may be shorter; 0: none
  std::int64_t partial_rows_of_one = 1;  ///< of all heads, if each tile came in one split
  std::int32_t least_split_keys_of_few = 1;
  std::int32_t fixed = 0;        ///< keys of a split; 0: by `own` or `wave`
  OwnSplits own;                 ///< by the lengths of the request alone
  std::int32_t shares = 0;       ///< > 0: even shares (schedule/even_shares.h), so many for each tile of a head
  std::int32_t share_tiles = 1;  ///< of a request, at most
  std::int32_t per_request = 0;  ///< > 0: without a list, so many splits of each row: splits_rows_equally()
  std::int32_t most_keys = 0;    ///< that rows of one tile see
  std::int32_t most_splits = 1;  ///< of a tile
  std::int64_t extra_tiles = 0;  ///< entries of the tile list beside one per tile
  std::int64_t split_tile_capacity = 0;
  std::int64_t partial_rows = 0;
  std::int64_t combine_counters = 0;

  bool operator==(const SplitRule& other) const {
    const auto all = [](const SplitRule& r) {
      return std::tie(r.wave, r.most_waves, r.most_items, r.most_rounded_items, r.least_split_keys, r.few_items,
                      r.partial_rows_of_one, r.least_split_keys_of_few, r.fixed, r.own, r.shares, r.share_tiles,
                      r.per_request, r.most_keys, r.most_splits, r.extra_tiles, r.split_tile_capacity, r.partial_rows,
                      r.combine_counters);
    };
    return all(*this) == all(other);
  }
};

constexpr int kCombinedAtOnce = 32;

/// Fewer splits, where the last few would be combined after all others, in the same time again: a warp of the kernel
/// that combines loads eight at once, and up to eight warps share a row.
CK_HOST_DEVICE inline std::int64_t combined_at_once(std::int64_t splits) {
  return splits % kCombinedAtOnce <= splits / 8 ? splits - splits % kCombinedAtOnce : splits;
}

/// (tile, split) pairs that `tiles` tiles of one head come in: as many as fill as few waves of thread blocks as they
/// can fill well. Waves are added as long as equal tiles would leave more than 15 % of the device idle.
CK_HOST_DEVICE inline std::int64_t items_for(const SplitRule& rule, std::int64_t tiles) {
  std::int64_t items = rule.wave;
  for (int waves = 2; waves <= rule.most_waves && items / tiles * tiles * 100 < 85 * items; ++waves) {
    items = std::int64_t(rule.wave) * waves;
  }
  return items > rule.most_items ? rule.most_items : items;
}

/// What is dealt out among tiles, and the keys of the smallest split.
struct ItemBudget {
  std::int64_t items;
  std::int64_t least_keys;
  std::int64_t work;  ///< keys that all tiles see together
  bool rounds_up;     ///< whether nearly a split counts as one

  /// Of each of so many tiles that see so many keys on average.
  CK_HOST_DEVICE std::int64_t splits(std::int64_t tiles, std::int64_t keys) const {
    const std::int64_t each = items / tiles, longest = keys / least_keys;
    return each < longest ? each : longest;
  }
};

/// An eighth of a split less than a whole number may count as that number: where tiles of about the same cost do not
/// get as many splits, all wait for the ones that got fewer. Of 15 / 8 it makes 2, so that all tiles that are split
/// together get a fifteenth more than is dealt out, at most.
constexpr int kRoundedUp = 8;
CK_HOST_DEVICE inline std::int64_t rounded_up(std::int64_t items) { return items + (items + 14) / 15; }

/// For `tiles` tiles that see `work` keys together. Splits are short where these are more: shorter splits read keys in
/// less time, more of them take longer to combine. If a tile takes 19 ns for a key (0.6 us for 32) and a partial row of
/// a head 0.33 ns (1 KB at 3 TB/s), sqrt(57 keys / rows) splits are the fastest. Half as many more, what is allowed
/// here, cost 8 %.
CK_HOST_DEVICE inline ItemBudget item_budget(const SplitRule& rule, std::int64_t tiles, std::int64_t work) {
  if (rule.wave <= 0 || tiles <= 0 || work <= 0) return {0, 1, 1, false};
  const std::int64_t keys = work / tiles;
  ItemBudget chosen{items_for(rule, tiles), rule.least_split_keys, work, false};
  std::int64_t at_once = (chosen.items + rule.wave - 1) / rule.wave * rule.wave;
  if (rule.few_items >= 2 * tiles) {
    const ItemBudget few{rule.few_items, rule.least_split_keys_of_few, work, false};
    const auto most = std::int64_t(sqrtf(128.0f * float(keys) / float(rule.partial_rows_of_one)));
    const std::int64_t each = few.splits(tiles, keys) < most ? few.splits(tiles, keys) : most;
    if (each > chosen.splits(tiles, keys)) {
      chosen = {each * tiles, few.least_keys, work, false};
      at_once = rule.few_items;
    }
  }
  // Not if equal tiles would then need another wave for a few thread blocks.
  const std::int64_t each = (kRoundedUp * chosen.items + tiles) / (kRoundedUp * tiles);
  chosen.rounds_up = rounded_up(chosen.items) <= rule.most_rounded_items && each * tiles <= at_once;
  return chosen;
}

/// KV splits of a tile that sees `cost` keys, of a request of `rows` rows, in a batch (of one head) whose tiles share
/// `budget`.
CK_HOST_DEVICE inline int splits_of(const SplitRule& rule, const ItemBudget& budget, std::int64_t cost,
                                    std::int32_t rows) {
  std::int64_t count = 1;
  if (rule.fixed > 0) {
    count = (cost + rule.fixed - 1) / rule.fixed;
  } else if (rule.own.most > 1) {
    count = rule.own.of(rows, std::int32_t(cost));
  } else if (budget.items > 0) {
    count = (cost * budget.items + (budget.rounds_up ? budget.work / kRoundedUp : 0)) / budget.work;
    if (count > cost / budget.least_keys) count = cost / budget.least_keys;
    count = combined_at_once(count);
  }
  if (count > rule.most_splits) count = rule.most_splits;
  return count < 1 ? 1 : int(count);
}

/// Partial results take no more, unless fixed_split_size or batch_invariant ask for it; even shares up to twice as
/// much. A wave of 264 tiles of 128 rows, two on each SM of an H200, leaves 16.8 MiB at head dimension 128.
constexpr std::size_t kMostPartialBytes = 20 << 20;
/// A workspace of so many bytes, the smallest in common use, suffices: keys are then split into fewer parts.
constexpr std::size_t kLeastPartialBytes = 16 << 20;

/// Whether requests are rows with lists of slots, of which each has as many splits where there is no list of tiles.
inline bool splits_rows_equally(const AttentionParams& params, const TileShape& tile) {
  return tile.has_shares && has_lists(params);
}

/// KV splits of each of these rows, if memory does not matter: of lists of slots that have no lengths; and of a few
/// lists, which get many splits each, whatever their lengths. They need no list of tiles, whose kernel takes 5 us. Else
/// 0: even shares.
int splits_of_equal_rows(const AttentionParams& params, int shares, int least_split_keys);

/// The rule for tiles from `source`, with partial results of up to `partial_bytes`.
SplitRule split_rule(const AttentionParams& params, const TileShape& tile, TileSource source, const Device& device,
                     std::size_t partial_bytes = kMostPartialBytes);

/// About how many a tile of a list has, of so many, if all requests are as long.
std::int64_t likely_splits(const SplitRule& rule, const AttentionParams& params, std::int64_t tiles);

/// KV splits without a list: of every tile of a single request; of a batch the total over requests, for each tile of
/// the longest, one per request and the rest in proportion to KV length (schedule/batch_splits.h); with equal splits,
/// as many of each.
std::int64_t splits_without_list(const SplitRule& rule, const AttentionParams& params, const TileShape& tile,
                                 TileSource source);

/// Of a batch without a list whose requests have splits of their own: how many tile indices and rows of partial results
/// there are at most; 0 if nothing is split. Each request has room for the same number of rows.
struct OwnBounds {
  std::int64_t tile_indices;
  std::int64_t partial_rows = 0;
};
OwnBounds own_bounds(const SplitRule& rule, const AttentionParams& params, const TileShape& tile);

/// Rows of partial results of so many splits; 0 if nothing is split.
std::int64_t partial_rows_without_list(const AttentionParams& params, const TileShape& tile, TileSource source,
                                       std::int64_t splits);

/// Whether the last thread block of a tile combines its partial results, of about `splits` splits.
bool combines_in_kernel(const AttentionParams& params, const TileShape& tile, std::int64_t splits);

/// Counters that this takes, for so many partial rows.
std::int64_t combine_counters(const AttentionParams& params, const TileShape& tile, std::int64_t partial_rows);

}  // namespace cutlass_kernels
