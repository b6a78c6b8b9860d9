// schedule/split_tiles.h on the host: the kernel that combines partial results finds the very tiles that find_work()
// has given to attention, with requests that make no sense among them; and what nobody has described leads nowhere. And
// where requests have splits of their own, each tile and split is found once.
#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

// What the headers take from CUDA. Of a warp there is one lane, which then finds the splits of a batch by itself, or
// there are 32 threads (run_warp).
struct int4 {
  int x, y, z, w;
};
static thread_local struct {
  unsigned x = 0;
} threadIdx;

class Warp {
 public:
  // What every lane gives.
  std::array<int, 32> exchange(int value) {
    values_[threadIdx.x] = value;
    wait();
    const std::array<int, 32> all = values_;
    wait();
    return all;
  }

 private:
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++waiting_ == 32) {
      waiting_ = 0;
      ++round_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return round_ != round; });
    }
  }

  std::array<int, 32> values_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  int waiting_ = 0, round_ = 0;
};
static thread_local Warp* warp = nullptr;

template <class Function>
void run_warp(Function function) {
  Warp of_all;
  std::vector<std::thread> lanes;
  for (unsigned lane = 0; lane < 32; ++lane) {
    lanes.emplace_back([&, lane] {
      threadIdx.x = lane;
      warp = &of_all;
      function();
    });
  }
  for (std::thread& lane : lanes) lane.join();
}

template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fdividef(float a, float b) { return a / b; }
static int __shfl_up_sync(unsigned, int value, int step) {
  if (warp == nullptr) return value;
  const std::array<int, 32> all = warp->exchange(value);
  return int(threadIdx.x) < step ? value : all[threadIdx.x - unsigned(step)];
}
static int __shfl_sync(unsigned, int value, int) { return value; }
static unsigned __ballot_sync(unsigned, bool value) { return value; }
static unsigned __reduce_add_sync(unsigned, unsigned value) {
  if (warp == nullptr) return value;
  unsigned sum = 0;
  for (const int one : warp->exchange(int(value))) sum += unsigned(one);
  return sum;
}
static int __ffs(int value) { return __builtin_ffs(value); }
using std::max;
using std::min;

#include "schedule/find_work.h"
#include "schedule/split_tiles.h"

namespace {

using namespace cutlass_kernels;

std::mt19937 generator(1);

int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }
bool one_in(int n) { return draw(1, n) == 1; }

struct Batch {
  std::vector<std::int32_t> qo_indptr, seqused_k;
  std::vector<SplitTile> tiles;  // as many as longest * requests
  LaunchParams params;
  int longest = 0;  // tiles of the longest request

  // False if there is nothing to split.
  bool make() {
    const int requests = draw(1, 9);
    int rows = 0, most_rows = 0;
    for (int b = 0; b < requests; ++b) {
      const int own = one_in(4) ? 0 : draw(0, 90);
      qo_indptr.push_back(rows);
      seqused_k.push_back(one_in(6) ? 0 : draw(0, 5000));
      rows += own;
      most_rows = std::max(most_rows, own);
    }
    qo_indptr.push_back(rows);
    if (rows == 0) return false;
    if (one_in(8)) spoil(draw(0, requests - 1));
    params.batch_size = requests;
    params.total_q = rows;
    params.max_qo_len = one_in(4) ? std::max(1, most_rows / 2) : most_rows + draw(0, 5);
    params.qo_indptr = qo_indptr.data();
    params.seqused_k = seqused_k.data();
    params.pages.page_size = 16;
    params.pages.table_stride = params.pages.table_width = 400;
    LaunchPlan& plan = params.plan;
    plan.source = TileSource::kBatchByLength;
    plan.tile_rows = draw(1, 40);
    plan.num_splits = draw(2, 60) + (requests > 1 ? requests : 0);
    plan.least_split_keys = one_in(2) ? 256 : 64;
    plan.most_split_keys = kMaxKeys;
    longest = int(tiles_of_longest(params, plan.tile_rows));
    plan.tile_indices = longest * plan.num_splits;
    plan.split_tile_capacity = longest * requests;
    plan.partial_rows = longest * plan.num_splits * rows_of_split(params);
    tiles.resize(std::size_t(plan.split_tile_capacity));
    fill_tiles(false);
    if (requests > 1) plan.split_tiles = tiles.data();
    return true;
  }

  // Lengths that make no sense.
  void spoil(int request) {
    switch (draw(0, 3)) {
      case 0:
        qo_indptr[std::size_t(request)] = -draw(1, 50);
        break;
      case 1:
        qo_indptr[std::size_t(request)] += 1000;
        break;
      default:
        seqused_k[std::size_t(request)] = one_in(2) ? -1 : 100000000;
    }
  }

  void fill_tiles(bool with_small_numbers) {
    for (SplitTile& tile : tiles) {
      auto* words = reinterpret_cast<std::uint32_t*>(&tile);
      for (std::size_t i = 0; i < sizeof(SplitTile) / 4; ++i) {
        words[i] = std::uint32_t(generator());
        if (with_small_numbers && !one_in(8)) words[i] %= 200;
      }
    }
  }

  // The request that a split belongs to, counted one after the other.
  RequestSplits find(int split) const {
    if (params.batch_size == 1) return BatchSplits::find_in_one(params, split);
    unsigned units = 0;
    for (int b = 0; b < params.batch_size; ++b) {
      units += SplitShares::units(params, keys_of_request(params, b));
    }
    const SplitShares shares(params, units);
    for (int b = 0, before = 0; b < params.batch_size; ++b) {
      const KeysOfRequest keys = keys_of_request(params, b);
      const int after = std::min(before + shares.of(SplitShares::units(params, keys)), shares.extra);
      if (split < b + 1 + after) return {b, b + before, 1 + after - before, keys};
      before = after;
    }
    return {0, 0, 0, {}};
  }
};

int failures = 0;

void require(bool holds, const char* what, int round, int index) {
  if (!holds && ++failures < 20) std::printf("batch %d, tile %d: %s\n", round, index, what);
}

// Returns how many tiles are to be combined.
int check_batch(Batch& batch, int round) {
  const LaunchParams& p = batch.params;
  std::vector<WorkItem> computed(batch.tiles.size(), WorkItem{});  // num_splits 0: is not
  const auto find_split = [&](int split) { return batch.find(split); };
  for (int rank = 0; rank < p.plan.tile_indices; ++rank) {
    WorkItem work;
    if (find_work<true, true, true>(p, RowTiles::make(p), find_split, rank, work)) {
      computed[std::size_t(work.tile * p.batch_size + work.batch)] = work;
    }
  }
  int combined = 0;
  for (int index = 0; index < int(computed.size()); ++index) {
    const WorkItem& work = computed[std::size_t(index)];
    const SplitTile tile = tile_at(p, index);
    const bool is_split = work.num_splits > 1;
    require((tile.num_splits > 1 && tile.rows > 0) == is_split, "whether it is split", round, index);
    if (!is_split) continue;
    const int first_row = work.tile * p.plan.tile_rows;
    require(tile.q_begin == work.q_begin + first_row &&
                tile.rows == std::min(p.plan.tile_rows, work.qo_len - first_row) &&
                tile.partial_row == work.partial_row && tile.num_splits == work.num_splits && tile.batch == work.batch,
            "another description", round, index);
    ++combined;
  }
  return combined;
}

// Tiles that were not described in this call.
void check_garbage(Batch& batch, int round) {
  const LaunchParams& p = batch.params;
  if (p.batch_size == 1) return;
  batch.fill_tiles(true);
  for (int index = 0; index < int(batch.tiles.size()); ++index) {
    const SplitTile tile = tile_at(p, index);
    require(tile.rows >= 0, "rows are counted", round, index);
    if (tile.rows <= 0 || tile.num_splits <= 1) continue;
    require(tile.q_begin >= 0 && tile.q_begin + tile.rows <= p.total_q, "rows", round, index);
    require(
        tile.partial_row >= 0 && tile.partial_row + std::int64_t(tile.rows) * tile.num_splits <= p.plan.partial_rows,
        "partial results", round, index);
    require(tile.batch == index % p.batch_size, "request", round, index);
  }
}

// Rows with lists of slots of one cache or two, whose splits follow from the index, with lengths that make no sense
// among them. Returns how many are to be combined.
int check_rows(int round) {
  const int rows = draw(1, 20), width = draw(1, 3000), second = one_in(2) ? draw(1, 500) : 0, splits = draw(1, 12);
  LaunchParams p;
  p.batch_size = rows;
  p.total_q = one_in(4) ? draw(1, rows) : rows;
  p.max_qo_len = 1;
  p.rows_per_length = one_in(2) ? 1 : draw(1, 5);
  p.pages.page_size = 1;
  p.pages.slots_per_page = 64;
  p.pages.table_stride = p.pages.table_width = width;
  p.max_kv_len = width;
  std::vector<std::int32_t> lengths, second_lengths;
  const auto some_length = [](int most) {
    const int wrong[] = {-1, most + 1, 2147483647, -2147483647 - 1};
    return one_in(5) ? wrong[draw(0, 3)] : draw(0, most);
  };
  for (int row = 0; row < rows; row += p.rows_per_length) {
    lengths.push_back(some_length(width));
    second_lengths.push_back(some_length(second));
  }
  if (one_in(2)) p.seqused_k = lengths.data();
  if (second > 0) {
    p.second.data = lengths.data();
    p.second.table_width = second;
    p.max_kv_len = keys_before_second(p) + second;
    if (one_in(2)) p.second.lengths = second_lengths.data();
  }
  p.plan.source = TileSource::kBatchByLength;
  p.plan.tile_rows = 1;
  p.plan.equal_splits = splits;
  p.plan.num_splits = p.plan.tile_indices = p.plan.partial_rows = rows * splits;
  p.plan.split_tile_capacity = rows;
  int combined = 0;
  for (int row = 0; row < rows; ++row) {
    const std::size_t entry = std::size_t(row / p.rows_per_length);
    const int of_first = p.seqused_k == nullptr ? width : lengths[entry];
    const int of_second = p.second.lengths == nullptr ? second : second_lengths[entry];
    const bool makes_sense = 0 <= of_first && of_first <= width && 0 <= of_second && of_second <= second;
    const bool is_computed = row < p.total_q && makes_sense;
    for (int split = 0; split < splits; ++split) {
      WorkItem work;
      find_split_of_row(p, FastDivisor(std::uint32_t(splits)), row * splits + split, work);
      require(lies_inside(p, work) == is_computed, "which rows are computed", round, row);
      require(work.batch == row && work.q_begin == row && work.qo_len == 1 && work.split == split &&
                  work.num_splits == splits && work.kv_begin == row * width,
              "another split", round, row);
      if (!is_computed) continue;
      require(work.kv_len == (second > 0 ? keys_before_second(p) + of_second : of_first), "its keys", round, row);
    }
    const SplitTile tile = tile_at(p, row);
    require((tile.rows > 0) == is_computed, "what is computed is combined, and nothing else", round, row);
    if (!is_computed) continue;
    require(tile.q_begin == row && tile.rows == 1 && tile.partial_row == row * splits && tile.num_splits == splits &&
                tile.batch == row,
            "another description of a row", round, row);
    combined += splits > 1;
  }
  return combined;
}

// Makes the requests of a batch have splits of their own, and leaves some to other kernels.
void give_own_splits(Batch& batch) {
  LaunchParams& p = batch.params;
  LaunchPlan& plan = p.plan;
  plan.tile_rows = p.max_qo_len;  // requests of one tile
  if (one_in(3)) p.least_rows = draw(1, 40);
  if (one_in(3)) p.most_rows = p.least_rows + draw(0, 40);
  OwnSplits& own = plan.own_splits;
  own.most = draw(2, 40);
  own.tile_rows = plan.tile_rows;
  own.most_rows = plan.tile_rows;
  own.least_keys = 256;
  own.keys_per_row = draw(1, 30);
  own.most_keys = one_in(4) ? 700 : kMaxKeys;
  own.partial_rows = draw(20, 200);
  const int most = own.of(1, kMaxKeys);
  const int rows = std::min({p.max_qo_len, int(p.total_q), own.most_rows});
  plan.partial_rows = p.batch_size * std::min(rows * most, own.partial_rows);
  plan.source = TileSource::kBatchBySplit;
  plan.num_splits = most;
  plan.tile_indices = most * p.batch_size;
  plan.split_tile_capacity = p.batch_size;
  // What an earlier call may have left: a split tile of each request.
  batch.tiles.clear();
  for (int b = 0; b < p.batch_size; ++b) batch.tiles.push_back({0, 1, 0, 2, 1, 0, 100, b});
  plan.split_tiles = batch.tiles.data();
}

// Returns how many splits there are.
int check_own_splits(Batch& batch, int round) {
  const LaunchParams& p = batch.params;
  std::map<std::tuple<int, int, int>, int> found;  // (request, tile, split): how often
  std::map<int, int> partial_rows;                 // (request): where its partial results begin
  for (int rank = 0; rank < p.plan.tile_indices; ++rank) {
    WorkItem work;
    if (!find_own_split(p, RowTiles::make(p), rank, work)) continue;
    require(partial_rows.emplace(work.batch, work.partial_row).first->second == work.partial_row,
            "splits of a request leave their partial results apart", round, work.batch);
    ++found[{work.batch, work.tile, work.split}];
  }
  int count = 0;
  std::int64_t next_partial_row = 0;
  for (int b = 0; b < p.batch_size; ++b) {
    const RowsOfRequest rows = rows_of_request(p, b);
    const KeysOfRequest keys = keys_of_request(p, b);
    const int length = std::min(rows.length, p.max_qo_len);
    const bool is_computed = is_in_part(p, rows.length) && rows.begin >= 0 && length > 0 &&
                             rows.begin + length <= p.total_q && keys.length >= 0;
    const int tiles = is_computed ? (length + p.plan.tile_rows - 1) / p.plan.tile_rows : 0;
    const int splits = p.plan.own_splits.of(length, keys.length);
    for (int tile = 0; tile < tiles; ++tile) {
      for (int split = 0; split < splits; ++split, ++count) {
        require(found[{b, tile, split}] == 1, "a split is not found once", round, b);
        found.erase({b, tile, split});
      }
    }
    const SplitTile tile = tile_at(p, b);
    const bool is_combined = tile.rows > 0 && tile.num_splits > 1;
    require(is_combined == (is_computed && splits > 1), "whether it is split", round, b);
    if (!is_combined) continue;
    require(tile.q_begin == rows.begin && tile.rows == length && tile.num_splits == splits &&
                tile.partial_row == partial_rows[b],
            "another description", round, b);
    require(tile.partial_row >= next_partial_row && tile.partial_row + length * splits <= p.plan.partial_rows,
            "partial results overlap", round, b);
    next_partial_row = tile.partial_row + length * splits;
  }
  require(found.empty(), "a split that does not exist", round, 0);
  return count;
}

}  // namespace

int main() {
  int combined = 0;
  for (int round = 0; round < 5000; ++round) {
    Batch batch;
    if (!batch.make()) continue;
    combined += check_batch(batch, round);
    check_garbage(batch, round);
  }
  int own = 0;
  for (int round = 0; round < 600; ++round) {
    Batch batch;
    if (!batch.make()) continue;
    give_own_splits(batch);
    own += check_own_splits(batch, round);
  }
  int rows = 0;
  for (int round = 0; round < 2000; ++round) rows += check_rows(round);
  if (rows < 5000) std::printf("only %d rows with lists were split\n", rows);
  if (own < 2000) std::printf("only %d splits of requests' own\n", own);
  if (combined < 10000) std::printf("only %d tiles were split\n", combined);
  std::printf(failures == 0 && combined >= 10000 && own >= 2000 && rows >= 5000 ? "OK\n" : "FAILED\n");
}
