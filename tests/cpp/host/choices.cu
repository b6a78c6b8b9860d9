// The tiles that are taken on devices that nobody here has: what is estimated in a line (plan/estimate.h) beside a
// simulation of thread blocks that start wherever one has ended. No other tile may be much faster there.
#include <algorithm>
#include <functional>
#include <queue>
#include <string>
#include <vector>

#include "checks.h"
#include "common/mask.h"
#include "plan/estimate.h"
#include "plan/split.h"
#include "plan_checks.h"
#include "registry/registry.h"

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

/// Microseconds that all thread blocks take, in the order of their costs, as in lists.
double simulate(const ck::AttentionParams& params, const ck::Device& device, const ck::Choice& choice) {
  const ck::TileShape& tile = choice.candidate.shape;
  const ck::TileTime& time = choice.candidate.time;
  const int rows = int(params.total_q / params.batch_size), keys = int(params.total_kv / params.batch_size);
  const int packs = params.num_qo_heads / std::max(tile.packed_heads, 1);
  std::vector<double> blocks;
  for (int first = 0; first < rows; first += tile.rows) {
    const int seen = params.causal ? std::min(first + tile.rows, rows) + keys - rows : keys;
    blocks.insert(blocks.end(), std::size_t(params.batch_size * packs * choice.splits),
                  time.start + time.per_key * 1e-3 * seen / double(choice.splits));
  }
  std::sort(blocks.begin(), blocks.end(), std::greater<>());

  // Each SM runs up to blocks_per_sm at a time, one of several alone in two thirds of the time.
  struct Sm {
    double rate_alone;
    std::vector<double> left;  // of each of its thread blocks
    double now = 0;
    double rate() const { return left.size() == 1 ? rate_alone : 1; }
    double next() const { return now + *std::min_element(left.begin(), left.end()) / rate(); }
  };
  std::vector<Sm> all(std::size_t(device.multiprocessors / tile.blocks_per_tile),
                      Sm{tile.blocks_per_sm > 1 ? 1.5 : 1.0, {}});
  std::size_t started = 0;
  for (int i = 0; i < tile.blocks_per_sm; ++i) {
    for (Sm& sm : all)
      if (started < blocks.size()) sm.left.push_back(blocks[started++]);
  }
  using Event = std::pair<double, std::size_t>;  // when a thread block of which SM ends
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
  const auto expect = [&](std::size_t i) {
    if (!all[i].left.empty()) events.push({all[i].next(), i});
  };
  for (std::size_t i = 0; i < all.size(); ++i) expect(i);
  double last = 0;
  while (!events.empty()) {
    const auto [when, i] = events.top();
    events.pop();
    Sm& sm = all[i];
    const double done = (when - sm.now) * sm.rate();
    for (double& left : sm.left) left -= done;
    sm.now = last = when;
    sm.left.erase(std::min_element(sm.left.begin(), sm.left.end()));
    if (started < blocks.size()) sm.left.push_back(blocks[started++]);
    expect(i);
  }
  return last;
}

void judge(const ck::AttentionParams& params, const NamedDevice& device, ck::Backend backend) {
  std::vector<std::string> reasons;
  const ck::KernelEntry* kernel = ck::choose(backend, params, device.facts.compute_capability, &reasons);
  if (kernel == nullptr) return;
  std::vector<ck::Choice> all;
  const ck::Choice taken = ck::fastest(*kernel, params, device.facts, /*schedule_is_kept=*/false, &all);
  const std::string what = std::string(device.name) + ", " + kernel->info.name + ": " + taken.candidate.name;
  require(!all.empty() && taken.candidate.shape.rows > 0, what + " of no candidates");
  // What the kernels beside this one take is as estimated.
  const auto simulated = [&](const ck::Choice& choice) {
    return choice.time - std::max(choice.compute, choice.traffic) +
           std::max(simulate(params, device.facts, choice), choice.traffic);
  };
  const double time = simulated(taken);
  for (const ck::Choice& other : all) {
    ck::Choice again = ck::fastest(*kernel, params, device.facts);
    require(again.candidate.name == taken.candidate.name, what + " where nothing is compared, " + again.candidate.name);
    require(time <= 1.2 * simulated(other), what + " takes " + std::to_string(time) + " us in a simulation, " +
                                                other.candidate.name + " " + std::to_string(simulated(other)) + ": " +
                                                describe(params));
  }
}

void judge_everywhere(int head_dim, int heads, int kv_heads, int requests, int rows, int keys, bool causal) {
  const auto dtype = ck::DType::kBFloat16;
  ck::AttentionParams params = batch(dtype, dtype, head_dim, heads, kv_heads, requests, rows, keys);
  params.max_qo_len = rows;
  params.max_kv_len = keys;
  params.causal = causal;
  for (const NamedDevice& device : kDevices) {
    judge(params, device, ck::Backend::kFa2);
    judge(params, device, ck::Backend::kFa3);
  }
}

}  // namespace

void check_choices() {
  const int head_counts[][2] = {{32, 8}, {8, 8}, {64, 8}, {28, 4}, {8, 1}};
  for (const auto& [heads, kv_heads] : head_counts) {
    for (const int rows : {1, 16, 32, 64, 128, 256, 512}) {
      for (const int keys : {1 << 10, 1 << 13, 1 << 15}) {
        for (const int requests : {1, 8}) judge_everywhere(128, heads, kv_heads, requests, rows, keys, true);
      }
    }
  }
  for (const int head_dim : {64, 128, 256}) {
    for (int length = 512; length <= 16384; length *= 2) {
      for (const bool causal : {false, true}) {
        judge_everywhere(head_dim, 2048 / head_dim, 2048 / head_dim, 16384 / length, length, length, causal);
      }
    }
  }
}
