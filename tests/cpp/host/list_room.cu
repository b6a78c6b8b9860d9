// Whether lists and partial results have room for all splits, whatever the lengths on the device are.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "checks.h"
#include "plan/split.h"
#include "plan/tile_source.h"
#include "plan_checks.h"

namespace {

/// `total` in so many parts, some of them empty.
std::vector<int> parts(std::mt19937& random, int count, int total) {
  std::vector<int> cuts(std::size_t(count - 1));
  for (int& cut : cuts) cut = int(random() % unsigned(total + 1));
  cuts.push_back(total);
  std::sort(cuts.begin(), cuts.end());
  for (std::size_t i = cuts.size() - 1; i > 0; --i) cuts[i] -= cuts[i - 1];
  return cuts;
}

/// As schedule/write_list.cu deals splits out.
void check_list(const ck::PlanState& plan, const std::vector<int>& rows, const std::vector<int>& keys) {
  struct Tile {
    int cost, rows, of_request;
  };
  std::vector<Tile> tiles;
  std::int64_t work = 0;
  for (std::size_t b = 0; b < rows.size(); ++b) {
    for (int first = 0; first < rows[b]; first += plan.tile.rows) {
      const int last = std::min(first + plan.tile.rows, rows[b]) - 1;
      const int cost = std::clamp(last + 1 + keys[b] - rows[b], 0, keys[b]);
      tiles.push_back({cost, last + 1 - first, rows[b]});
      work += cost;
    }
  }
  const ck::ItemBudget budget = ck::item_budget(plan.rule, std::int64_t(tiles.size()), work);
  std::int64_t entries = 0, split_tiles = 0, partial_rows = 0;
  for (const Tile& tile : tiles) {
    const int splits = ck::splits_of(plan.rule, budget, tile.cost, tile.of_request);
    entries += splits;
    split_tiles += splits > 1;
    partial_rows += splits > 1 ? std::int64_t(splits) * tile.rows : 0;
  }
  require(entries <= plan.tile_indices, std::to_string(entries) + " entries have no room");
  require(split_tiles <= plan.split_tile_capacity, std::to_string(split_tiles) + " split tiles have no room");
  require(partial_rows <= plan.rule.partial_rows, std::to_string(partial_rows) + " partial rows have no room");
}

}  // namespace

void check_room_of_lists() {
  std::mt19937 random(3);
  const auto one_of = [&](std::initializer_list<int> values) { return values.begin()[random() % values.size()]; };
  int split = 0;
  for (int i = 0; i < 20000; ++i) {
    const int kv_heads = one_of({1, 2, 8}), heads = kv_heads * one_of({1, 4, 7, 8});
    const int requests = one_of({1, 2, 3, 8, 40}), each = 1 + int(random() % 400);
    const int keys = one_of({64, 300, 1024, 5000, 40000});
    const auto dtype = ck::DType::kFloat16;
    ck::AttentionParams params = batch(dtype, dtype, 64, heads, kv_heads, requests, each, keys);
    if (random() % 4 == 0) params.num_splits = 1 + int(random() % 70);
    const bool known = random() % 2 == 0;
    if (!known) params.total_kv = 0;
    const ck::Device device{0, 90, one_of({1, 20, 78, 108, 132, 142}), one_of({99, 227}) << 10, 60 << 20};
    ck::PlanState plan;
    const ck::Backend backend = random() % 2 == 0 ? ck::Backend::kFa2 : ck::Backend::kFa3;
    require(ck::make_plan(params, backend, device, {}, &plan).ok(), "there is a plan");
    if (plan.source != ck::TileSource::kList) continue;
    split += plan.split_tile_capacity > 0;
    check_list(plan, parts(random, requests, requests * each), parts(random, requests, requests * keys));
  }
  require(split > 1000, "plans split keys");
}

/// Of many requests, keys are split with a list; where there is no room for it they are not split.
void check_splits_of_many_requests() {
  ck::Device device;
  require(ck::current_device(&device).ok(), "the stand-in is a device");
  const auto dtype = ck::DType::kFloat16;
  for (const int requests : {ck::kMostSearchedRequests, ck::kMostSearchedRequests + 1}) {
    for (const int rows : {1, 8}) {
      ck::AttentionParams params = batch(dtype, dtype, 64, 8, 2, requests, rows, 1000);
      params.max_qo_len = rows;
      params.max_kv_len = 20000;
      const bool many = requests > ck::kMostSearchedRequests;
      ck::PlanState plan;
      require(ck::make_plan(params, ck::Backend::kFa2, device, {}, &plan).ok() &&
                  (plan.source == ck::TileSource::kList) == many,
              "a list for many requests");
      ck::PlanOptions little;
      little.workspace_bytes = 1024;
      require(ck::make_plan(params, ck::Backend::kFa2, device, little, &plan).ok() &&
                  plan.source == ck::TileSource::kBatchByLength && plan.split_tile_capacity == 0,
              "without room nothing is split");
      params.disable_split_kv = true;
      require(ck::make_plan(params, ck::Backend::kFa2, device, {}, &plan).ok() &&
                  plan.source == ck::TileSource::kBatchByLength,
              "no list where nothing is split");
    }
  }
}
