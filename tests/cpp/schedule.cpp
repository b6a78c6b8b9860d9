// schedule/write_list.cu on the host, a thread for each of its thread block's: the list has every tile and split once,
// the most expensive first, and as many splits as the host would give each tile.
#include "schedule/write_list.cu"

#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>

namespace ck = cutlass_kernels;

ck::Status ck::cuda_failure(const char*, cudaError_t) { return Status::invalid("a launch failed"); }
ck::Status ck::upload(const VectorCopies&, cudaStream_t) { return Status::success(); }

namespace {

constexpr int kSplitsOfWarp = 2;

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

struct Requests {
  std::vector<int> qo_indptr{0}, kv_indptr{0};
};

void check(const Requests& requests, const ck::SplitRule& rule, int tile_rows) {
  struct Tile {
    int batch, tile, rows, cost;
  };
  std::vector<Tile> tiles;
  std::int64_t work = 0;
  const int batch_size = int(requests.qo_indptr.size()) - 1;
  for (int b = 0; b < batch_size; ++b) {
    const int rows = requests.qo_indptr[std::size_t(b) + 1] - requests.qo_indptr[std::size_t(b)];
    const int keys = requests.kv_indptr[std::size_t(b) + 1] - requests.kv_indptr[std::size_t(b)];
    for (int first = 0; first < rows; first += tile_rows) {
      const int last = std::min(first + tile_rows, rows) - 1;
      tiles.push_back({b, first / tile_rows, rows, std::clamp(last + 1 + keys - rows, 0, keys)});
      work += tiles.back().cost;
    }
  }
  const ck::ItemBudget budget = ck::item_budget(rule, std::int64_t(tiles.size()), work);
  std::set<std::tuple<int, int, int, int>> expected;  // request, tile, split, splits
  for (const Tile& tile : tiles) {
    const int splits = ck::splits_of(rule, budget, tile.cost, tile.rows);
    for (int i = 0; i < splits; ++i) expected.emplace(tile.batch, tile.tile, i, splits);
  }

  ck::AttentionParams params;
  params.batch_size = batch_size;
  params.total_q = requests.qo_indptr.back();
  params.total_kv = requests.kv_indptr.back();
  params.qo_indptr = requests.qo_indptr.data();
  params.kv_indptr = requests.kv_indptr.data();
  const int capacity = int(tiles.size() + std::size_t(rule.extra_tiles)) + 3;
  std::vector<ck::WorkItem> list(std::size_t(capacity), ck::WorkItem{});
  std::vector<ck::SplitTile> split_tiles(std::size_t(rule.split_tile_capacity) + 1);
  ck::TileListHeader header{};
  const ck::Status status =
      ck::launch_write_list(ck::ListArgs{params, params.num_qo_heads, kSplitsOfWarp, tile_rows, rule, capacity,
                                         /*fills=*/true, &header, list.data(), split_tiles.data(), nullptr},
                            {}, {});
  require(status.ok(), status.message);

  std::set<std::tuple<int, int, int, int>> found;
  int before = 1 << 30;
  for (const ck::WorkItem& item : list) {
    if (item.batch < 0) continue;
    require(found.emplace(item.batch, item.tile, item.split, item.num_splits).second, "an entry comes twice");
    require(item.kv_len >= 0, "a split has no room");
    const int last = std::min((item.tile + 1) * tile_rows, item.qo_len) - 1;
    const int cost = std::clamp(last + 1 + item.kv_len - item.qo_len, 0, item.kv_len) / item.num_splits;
    require(cost <= before + (1 << 6), "longer tiles come first, but for a bucket");
    before = cost;
  }
  require(header.num_items == int(expected.size()), "the list counts its entries");
  require(found == expected, "the list has other splits than the host finds");
}

/// Requests that overlap have more splits than 32 bits count: none is computed, and nothing is written beside the list.
void check_overlapping_requests() {
  constexpr int kRequests = 160, kRows = 16 * 900, kKeys = 32767, kGuard = 40000;
  std::vector<int> qo_indptr, kv_indptr;
  for (int b = 0; b <= kRequests; ++b) {  // up and down
    qo_indptr.push_back(b % 2 * kRows);
    kv_indptr.push_back(b % 2 * kKeys);
  }
  ck::SplitRule rule;
  rule.fixed = 1;
  rule.most_splits = kKeys;
  const int tiles = kRows / 16, capacity = 3 * tiles;
  rule.extra_tiles = capacity - tiles;
  ck::AttentionParams params;
  params.batch_size = kRequests;
  params.total_q = kRows;
  params.total_kv = kKeys;
  params.qo_indptr = qo_indptr.data();
  params.kv_indptr = kv_indptr.data();
  std::vector<ck::WorkItem> list(std::size_t(capacity + 2 * kGuard), ck::WorkItem{});
  std::vector<ck::SplitTile> split_tiles(1);
  ck::TileListHeader header{};
  require(
      ck::launch_write_list(ck::ListArgs{params, params.num_qo_heads, kSplitsOfWarp, 16, rule, capacity, /*fills=*/true,
                                         &header, list.data() + kGuard, split_tiles.data(), nullptr},
                            {}, {})
          .ok(),
      "a list is written");
  require(header.num_split_tiles == 0 && header.num_items == 0, "nothing is computed");
  for (int i = -kGuard; i < capacity + kGuard; ++i) {
    const ck::WorkItem& item = list[std::size_t(i + kGuard)];
    require(item.batch == (0 <= i && i < capacity ? -1 : 0) && item.num_splits == 0,
            "an entry of a tile, or beside the list");
  }
}

/// Even shares: each request's blocks are cut into as many splits as it says, a share has no more than its length, and
/// partial results do not overlap.
void check_even_shares(std::mt19937& random, int round) {
  const auto draw = [&](int least, int most) { return least + int(random() % unsigned(most - least + 1)); };
  constexpr int kTileRows = 4, kGuard = 64;
  const int batch_size = draw(2, round % 5 == 0 ? 1024 : 40), tiles = round % 3 == 0 ? draw(1, 3) : 1;
  const int longest = round % 4 == 3 ? draw(70000, 300000) : round % 2 == 0 ? 500 : draw(1, 30000);
  Requests requests;
  std::vector<int> used;
  for (int b = 0; b < batch_size; ++b) {
    const int rows = tiles > 1 ? tiles * kTileRows - 1 : draw(0, 9) > 0 ? draw(1, kTileRows) : 0;
    requests.qo_indptr.push_back(requests.qo_indptr.back() + rows);
    used.push_back(draw(0, 3) > 0 ? draw(0, longest) : longest);
    requests.kv_indptr.push_back(requests.kv_indptr.back() + used.back());
  }
  ck::AttentionParams params;
  params.batch_size = batch_size;
  params.total_q = requests.qo_indptr.back();
  params.total_kv = requests.kv_indptr.back();
  params.num_qo_heads = draw(1, 128);
  params.max_qo_len = tiles > 1 ? tiles * kTileRows - 1 : kTileRows;
  params.qo_indptr = requests.qo_indptr.data();
  params.kv_indptr = requests.kv_indptr.data();
  ck::SplitRule rule;
  rule.shares = draw(8, 132);
  rule.share_tiles = tiles;
  rule.most_keys = ck::kMaxKeys;
  rule.least_split_keys = 256;
  const ck::SharesLayout layout{rule.shares, batch_size, tiles};
  const int capacity = int(layout.capacity());
  rule.split_tile_capacity = batch_size * tiles;
  rule.partial_rows = layout.most_splits() * kTileRows;
  std::vector<ck::WorkItem> list(std::size_t(capacity + kGuard), ck::WorkItem{});
  std::vector<ck::SplitTile> split_tiles(std::size_t(rule.split_tile_capacity));
  ck::TileListHeader header{};
  require(ck::launch_write_list(ck::ListArgs{params, params.num_qo_heads, kSplitsOfWarp, kTileRows, rule, capacity,
                                             /*fills=*/false, &header, list.data(), split_tiles.data(), nullptr},
                                {}, {})
              .ok(),
          "a list is written");
  require(header.num_items <= std::max(rule.shares, batch_size) * tiles, "too many shares");

  std::map<std::pair<int, int>, std::map<int, ck::WorkItem>> found;  // (request, tile): its splits
  int most = 0, whole = 0;
  for (int rank = 0; rank < header.num_items; ++rank) {
    int cost = 0;
    for (int at = rank; at >= 0;) {
      require(at < capacity, "an entry beside the list");
      const ck::WorkItem& item = list[std::size_t(at)];
      if (item.batch < 0) break;
      require(item.kv_len == used[std::size_t(item.batch)] && item.tile == rank % tiles, "another tile");
      require(found[{item.batch, item.tile}].emplace(item.split, item).second, "a split comes twice");
      cost += item.cut_end - item.cut_begin + ck::EvenShares::kStart;
      at = item.next > 0 ? item.next : -1;
    }
    most = std::max(most, cost);
  }
  std::vector<bool> taken(std::size_t(rule.partial_rows), false);
  int expected = 0, split = 0;
  for (int b = 0; b < batch_size; ++b) {
    const int rows = requests.qo_indptr[std::size_t(b) + 1] - requests.qo_indptr[std::size_t(b)];
    if (rows == 0) continue;
    const int blocks = ck::EvenShares::blocks_of(used[std::size_t(b)]);
    whole += blocks + ck::EvenShares::kStart;
    for (int tile = 0; tile < tiles; ++tile, ++expected) {
      const auto& splits = found[{b, tile}];
      int end = 0;
      for (const auto& [index, item] : splits) {
        require(item.cut_begin == end && item.cut_end >= end && item.cut_all == blocks, "blocks are left out");
        require(item.num_splits == int(splits.size()), "another number of splits");
        end = item.cut_end;
      }
      require(end == blocks, "the last blocks are left out");
      if (splits.size() < 2) continue;
      ++split;
      const int tile_rows = std::min(kTileRows, rows - tile * kTileRows);
      for (int i = 0; i < tile_rows * int(splits.size()); ++i) {
        const std::size_t row = std::size_t(splits.begin()->second.partial_row + i);
        require(row < taken.size() && !taken[row], "partial results overlap");
        taken[row] = true;
      }
    }
  }
  require(int(found.size()) == expected, "a tile that does not exist");
  for (int rank = tiles; split == 0 && rank < header.num_items; ++rank) {
    const ck::WorkItem &item = list[std::size_t(rank)], &before = list[std::size_t(rank - tiles)];
    int shift = 0;  // lengths that agree to so many bits have any order
    while (ck::EvenShares::blocks_of(longest) >> shift >= ck::kListThreads) ++shift;
    require(before.cut_all >> shift >= item.cut_all >> shift,
            "of requests that are not split, a longer one comes later");
  }
  require(header.num_split_tiles == split, "tiles are combined that were split, and no others");
  int units = 0;
  for (int i = 0; i < split; ++i) {
    const ck::SplitTile& tile = split_tiles[std::size_t(i)];
    require(tile.first_unit == units, "units of combining do not follow one another");
    units += ck::CombineUnits{kSplitsOfWarp}.of_rows(tile.rows * params.num_qo_heads, tile.num_splits);
  }
  require(header.num_units == units, "another number of units");
  // An equal share, or a whole request where there are more of these; two cuts may be moved.
  const int fair = (whole + rule.shares - 1) / rule.shares;
  const int longest_blocks = ck::EvenShares::blocks_of(longest);
  require(most <= std::max(2 * fair, 4 + 2) + ck::EvenShares::kStart + 2 * ck::EvenShares::kLeastBlocks ||
              most <= longest_blocks + ck::EvenShares::kStart,
          "a share is too long");
}

}  // namespace

int main() {
  check_overlapping_requests();
  std::mt19937 random(5);
  for (int round = 0; round < 24; ++round) check_even_shares(random, round);
  for (int i = 0; i < 40; ++i) {
    Requests requests;
    const int count = 1 + int(random() % 9);
    for (int b = 0; b < count; ++b) {
      const int rows = int(random() % 3) * int(random() % 60);
      requests.qo_indptr.push_back(requests.qo_indptr.back() + rows);
      requests.kv_indptr.push_back(requests.kv_indptr.back() + rows + int(random() % 9000));
    }
    ck::SplitRule rule;  // i % 4 == 0: nothing is split
    if (i % 4 != 0) {
      rule.wave = 33;
      rule.most_waves = 2;
      rule.most_items = 40 + int(random() % 20);
      rule.most_rounded_items = i % 4 == 1 ? rule.most_items : int(ck::rounded_up(rule.most_items));
      rule.most_splits = rule.most_items;
      rule.least_split_keys = 256;
      rule.few_items = i % 2 == 0 ? 16 : 0;
      rule.least_split_keys_of_few = 64;
      rule.partial_rows_of_one = std::max(32 * requests.qo_indptr.back(), 1);
      rule.extra_tiles = rule.most_rounded_items;
      rule.split_tile_capacity = (rule.most_rounded_items + 1) / 2;
      rule.partial_rows = std::int64_t(rule.most_rounded_items) * 16;
    }
    check(requests, rule, 16);
  }
  std::printf("OK\n");
  return 0;
}
