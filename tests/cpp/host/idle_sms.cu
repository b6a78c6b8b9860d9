// How the tiles that heuristics choose fill devices that nobody here has: heuristics are given facts of the device, and
// this checks that they use them. fa2's must leave no more than a third of the SMs' time idle where another tile would
// not. fa3's tiles differ more in speed, so that time is compared. To see each choice:
//   python -m pytest --basetemp=build/checks -k stand_in tests/cpp && build/checks/*/host_checks --idle-sms
#include "plan_checks.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <queue>
#include <string>
#include <vector>

#include "checks.h"
#include "fa2/choose_tile.h"
#include "fa3/choose_tile.h"
#include "plan/split.h"

namespace {

struct NamedDevice {
  const char* name;
  ck::Device facts;
};

// Compute capability, SMs, shared memory per block, L2.
const NamedDevice kDevices[] = {
    {"A100", ck::kA100},
    {"A10", {0, 86, 72, 99 << 10, 6 << 20}},
    {"RTX 4090", {0, 89, 128, 99 << 10, 72 << 20}},
    {"L40S", {0, 89, 142, 99 << 10, 96 << 20}},
    {"H20", {0, 90, 78, 227 << 10, 60 << 20}},
    {"H100 PCIe", {0, 90, 114, 227 << 10, 50 << 20}},
    {"H200", ck::kH200},
};

struct Choice {
  std::string name;
  ck::TileShape tile;
  ck::TileSpeed speed;
};

// Of fa2, whose tiles are compared by what they leave idle: 32 keys for the start.
constexpr ck::TileSpeed kAnySpeed{1, 1, 32, 0};

bool same(const ck::TileShape& a, const ck::TileShape& b) {
  return a.kind == b.kind && a.rows == b.rows && a.packed_heads == b.packed_heads;
}

std::string name_of(const ck::TileShape& tile) {
  return (tile.packed_heads > 0 ? std::to_string(tile.packed_heads) + " x " : "") + std::to_string(tile.rows) + " rows";
}

/// All tiles of fa2 that may serve the problem.
template <int HeadDim>
std::vector<Choice> fa2_choices(const ck::AttentionParams& params, const ck::Device& device) {
  namespace fa2 = ck::fa2;
  std::vector<ck::TileShape> shapes = fa2::all_shapes<HeadDim>(params, device);
  shapes.push_back(fa2::tile_shape<HeadDim, ck::fa2::AmpereTiles::kEverywhere>(params, device));
  std::vector<Choice> choices;
  for (const ck::TileShape& shape : shapes) choices.push_back({name_of(shape), shape, kAnySpeed});
  return choices;
}

template <int HeadDim>
std::vector<Choice> fa3_choices(const ck::AttentionParams& params) {
  namespace fa3 = ck::fa3;
  using Tiles = fa3::TileTable<HeadDim, HeadDim>;
  using Large = typename Tiles::Large;
  using Small = typename Tiles::Small;
  using Packed = typename Tiles::Packed;
  const int heads = ck::packed_heads(params, fa3::kWarpgroupRows);
  return {{"Large", fa3::row_tile_shape<Large>(fa3::kRows), fa3::tile_speed<Large>()},
          {"Small", fa3::row_tile_shape<Small>(fa3::kRows), fa3::tile_speed<Small>()},
          {"Packed", fa3::packed_tile_shape<Packed>(params, heads), fa3::tile_speed<Packed>()}};
}

struct Outcome {
  int thread_blocks = 0;
  double waves = 0;
  double idle = 0;  // the share of the SMs' time until the last thread block ends
  double time = 0;  // in the unit of TileSpeed
};

/// Thread blocks start in the order of their costs, as in lists, wherever one has ended.
Outcome simulate(const ck::AttentionParams& params, const ck::Device& device, const Choice& choice, bool causal) {
  const ck::TileShape& tile = choice.tile;
  const ck::TileSpeed& speed = choice.speed;
  const int rows = int(params.total_q / params.batch_size);
  const int keys = int(params.total_kv / params.batch_size);
  const int heads = params.num_qo_heads / std::max(tile.packed_heads, 1);
  std::vector<std::int64_t> costs;  // of the tiles of a request and a head
  for (int first = 0; first < rows; first += tile.rows) {
    const int last = std::min(first + tile.rows, rows) - 1;
    costs.push_back(causal ? last + 1 + keys - rows : keys);
  }
  std::int64_t work = 0;
  for (const std::int64_t cost : costs) work += cost * params.batch_size;
  const std::int64_t tiles = std::int64_t(costs.size()) * params.batch_size;
  const ck::SplitRule rule = ck::split_rule(params, tile, ck::TileSource::kList, device);
  const ck::ItemBudget budget = ck::item_budget(rule, tiles, work);
  std::vector<double> blocks;
  double partial_rows = 0;
  for (const std::int64_t cost : costs) {
    const int splits = tile.packed_heads > 0 ? ck::splits_of(rule, budget, cost, rows) : 1;
    const int count = params.batch_size * heads * splits;
    blocks.insert(blocks.end(), std::size_t(count), double(cost) / splits + speed.start);
    if (splits > 1) partial_rows += double(count) * speed.block_rows;
  }
  std::sort(blocks.begin(), blocks.end(), std::greater<>());

  // Each SM runs up to blocks_per_sm at a time, one alone in kTimeAlone of the time.
  const int sms = device.multiprocessors / tile.blocks_per_tile;
  struct Sm {
    std::vector<double> left;  // of each of its thread blocks
    double now = 0;
    double rate() const { return left.size() == 1 ? 1 / ck::kTimeAlone : 1; }
    double next() const { return now + *std::min_element(left.begin(), left.end()) / rate(); }
  };
  std::vector<Sm> all(std::size_t(sms), Sm{});
  std::size_t started = 0;
  for (int i = 0; i < tile.blocks_per_sm; ++i) {
    for (Sm& sm : all)
      if (started < blocks.size()) sm.left.push_back(blocks[started++]);
  }
  using Event = std::pair<double, int>;  // when a thread block of which SM ends
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
  const auto expect = [&](int i) {
    if (!all[std::size_t(i)].left.empty()) events.push({all[std::size_t(i)].next(), i});
  };
  for (int i = 0; i < sms; ++i) expect(i);
  double last = 0;
  while (!events.empty()) {
    const auto [time, i] = events.top();
    events.pop();
    Sm& sm = all[std::size_t(i)];
    const double done = (time - sm.now) * sm.rate();
    for (double& left : sm.left) left -= done;
    sm.now = last = time;
    sm.left.erase(std::min_element(sm.left.begin(), sm.left.end()));
    if (started < blocks.size()) sm.left.push_back(blocks[started++]);
    expect(i);
  }
  double busy = 0;
  for (const Sm& sm : all) busy += sm.now;
  const double per_key = tile.blocks_per_sm * speed.block_rows * speed.per_key;
  return {int(blocks.size()), double(blocks.size()) / (sms * tile.blocks_per_sm), 1 - busy / (sms * last),
          last * per_key + partial_rows * speed.per_partial_row};
}

struct Totals {
  int cells = 0, idle = 0, avoidable = 0;
  double worst = 0;
};

// A third of the SMs, as heuristics estimate it; and what simulated times may differ from estimates.
constexpr double kMostIdle = 0.37;
constexpr double kMostTime = 1.15;

bool is_better(const Outcome& other, const Outcome& chosen, bool by_time) {
  if (by_time) return chosen.time > kMostTime * other.time;
  return chosen.idle > kMostIdle && other.idle <= kMostIdle;
}

void judge(const std::string& cell, const NamedDevice& device, const ck::AttentionParams& params,
           const ck::TileShape& chosen, const std::vector<Choice>& choices, bool causal, bool print, Totals* totals) {
  const bool by_time = cell[2] == '3';
  const std::int64_t rows = params.total_q / params.batch_size;
  // The keys are read once: memory takes the time, whichever SMs read it.
  if (chosen.packed_heads > 0 && rows <= chosen.rows) return;
  const auto found =
      std::find_if(choices.begin(), choices.end(), [&](const Choice& choice) { return same(choice.tile, chosen); });
  require(found != choices.end(), cell + " on " + device.name + ": an unknown tile");
  const Outcome outcome = simulate(params, device.facts, *found, causal);
  ++totals->cells;
  totals->idle += outcome.idle > kMostIdle;
  totals->worst = std::max(totals->worst, outcome.idle);
  for (const Choice& choice : choices) {
    const Outcome other = simulate(params, device.facts, choice, causal);
    if (!is_better(other, outcome, by_time)) continue;
    ++totals->avoidable;
    if (print) {
      std::printf("%-10s %-34s %-10s %5d blocks %6.2f waves %3.0f %% idle; %s: %.0f %%, in %.2f\n", device.name,
                  cell.c_str(), found->name.c_str(), outcome.thread_blocks, outcome.waves, 100 * outcome.idle,
                  choice.name.c_str(), 100 * other.idle, other.time / outcome.time);
    }
    return;
  }
}

template <int HeadDim>
void judge_everywhere(const std::string& cell, const ck::AttentionParams& params, bool causal, bool print,
                      std::vector<Totals>* totals) {
  std::size_t i = 0;
  for (const NamedDevice& device : kDevices) {
    judge("fa2 " + cell, device, params,
          ck::fa2::tile_shape<HeadDim, ck::fa2::AmpereTiles::kEverywhere>(params, device.facts),
          fa2_choices<HeadDim>(params, device.facts), causal, print, &(*totals)[i++]);
    if (device.facts.compute_capability != 90) continue;
    judge("fa3 " + cell, device, params, ck::fa3::tile_shape<HeadDim, HeadDim>(params, device.facts),
          fa3_choices<HeadDim>(params), causal, print, &(*totals)[i++]);
  }
}

ck::AttentionParams problem(int head_dim, int heads, int kv_heads, int requests, int rows, int keys, bool causal) {
  const auto dtype = ck::DType::kBFloat16;
  ck::AttentionParams params = batch(dtype, dtype, head_dim, heads, kv_heads, requests, rows, keys);
  params.max_qo_len = rows;
  params.max_kv_len = keys;
  params.causal = causal;
  return params;
}

template <int HeadDim>
void judge_prompts(bool print, std::vector<Totals>* totals) {
  for (int length = 512; length <= 16384; length *= 2) {
    for (const bool causal : {false, true}) {
      const int heads = 2048 / HeadDim;
      judge_everywhere<HeadDim>(
          "hd" + std::to_string(HeadDim) + (causal ? " causal " : " full ") + std::to_string(length),
          problem(HeadDim, heads, heads, 16384 / length, length, length, causal), causal, print, totals);
    }
  }
}

}  // namespace

void check_idle_sms(bool print) {
  std::vector<Totals> totals(16);
  const int head_counts[][2] = {{32, 8}, {8, 8}, {64, 8}, {28, 4}, {8, 1}};
  for (const auto& [heads, kv_heads] : head_counts) {
    for (const int rows : {1, 16, 32, 64, 128, 256, 512}) {
      for (const int keys : {1 << 10, 1 << 13, 1 << 15}) {
        for (const int requests : {1, 8}) {
          judge_everywhere<128>(std::to_string(heads) + "/" + std::to_string(kv_heads) + " " +
                                    std::to_string(requests) + " x " + std::to_string(rows) + " over " +
                                    std::to_string(keys),
                                problem(128, heads, kv_heads, requests, rows, keys, true), true, print, &totals);
        }
      }
    }
  }
  judge_prompts<64>(print, &totals);
  judge_prompts<128>(print, &totals);
  judge_prompts<256>(print, &totals);
  std::size_t i = 0;
  for (const NamedDevice& device : kDevices) {
    for (const char* backend : {"fa2", "fa3"}) {
      if (backend[2] == '3' && device.facts.compute_capability != 90) continue;
      const Totals& of = totals[i++];
      if (print) {
        std::printf("%-10s %s: %d cells, %d leave more than a third idle, %d avoidable, worst %.0f %%\n", device.name,
                    backend, of.cells, of.idle, of.avoidable, 100 * of.worst);
      }
      require(of.avoidable == 0,
              std::string(device.name) + ": " + backend + " takes a tile where another one would be better");
    }
  }
}
