// plan/schedule.cu on the host, a thread for each of its thread block's: the list has every tile and split once, the most
// expensive first, and as many splits as the host would give each tile.
#include "plan/schedule.cu"

#include <cstdio>
#include <random>
#include <set>
#include <string>
#include <tuple>

namespace ck = cutlass_kernels;

ck::Status ck::cuda_failure(const char*, cudaError_t) { return Status::invalid("a launch failed"); }
ck::Status ck::upload(const VectorCopies&, cudaStream_t) { return Status::success(); }

namespace {

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
  const ck::SplitSlots slots = ck::split_slots(rule, std::int64_t(tiles.size()), work);
  std::set<std::tuple<int, int, int, int>> expected;  // request, tile, split, splits
  for (const Tile& tile : tiles) {
    const int splits = ck::splits_of(rule, slots, tile.cost, tile.rows);
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
      ck::launch_schedule(params, tile_rows, rule, capacity, /*fills=*/true, &header, list.data(),
                          split_tiles.data(), nullptr, {}, {});
  require(status.ok(), status.message);

  std::set<std::tuple<int, int, int, int>> found;
  int before = 1 << 30;
  for (const ck::WorkItem& item : list) {
    if (item.batch < 0) continue;
    require(found.emplace(item.batch, item.tile, item.split, item.num_splits).second,
            "an entry comes twice");
    require(item.kv_len >= 0, "a split has no room");
    const int last = std::min((item.tile + 1) * tile_rows, item.qo_len) - 1;
    const int cost =
        std::clamp(last + 1 + item.kv_len - item.qo_len, 0, item.kv_len) / item.num_splits;
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
  require(ck::launch_schedule(params, 16, rule, capacity, /*fills=*/true, &header,
                              list.data() + kGuard, split_tiles.data(), nullptr, {}, {})
              .ok(),
          "a list is written");
  require(header.num_split_tiles == 0 && header.num_items == 0, "nothing is computed");
  for (int i = -kGuard; i < capacity + kGuard; ++i) {
    const ck::WorkItem& item = list[std::size_t(i + kGuard)];
    require(item.batch == (0 <= i && i < capacity ? -1 : 0) && item.num_splits == 0,
            "an entry of a tile, or beside the list");
  }
}

}  // namespace

int main() {
  check_overlapping_requests();
  std::mt19937 random(5);
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
      rule.most_slots = 40 + int(random() % 20);
      rule.most_pairs = i % 4 == 1 ? rule.most_slots : int(ck::rounded_up(rule.most_slots));
      rule.most_splits = rule.most_slots;
      rule.least_split_keys = 256;
      rule.few_slots = i % 2 == 0 ? 16 : 0;
      rule.least_split_keys_of_few = 64;
      rule.partial_rows_of_one = std::max(32 * requests.qo_indptr.back(), 1);
      rule.extra_tiles = rule.most_pairs;
      rule.split_tile_capacity = (rule.most_pairs + 1) / 2;
      rule.partial_rows = std::int64_t(rule.most_pairs) * 16;
    }
    check(requests, rule, 16);
  }
  std::printf("OK\n");
  return 0;
}
