#include "plan/estimate.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <tuple>

#include "common/element_bytes.h"
#include "common/mask.h"
#include "device.h"
#include "plan/plan.h"
#include "plan/split.h"
#include "plan/tile_source.h"
#include "registry/registry.h"

namespace cutlass_kernels {
namespace {

// Fitted, together with the TileTime of each tile, to 12,000 measurements on an H200 (benchmarks/tile_times.py):
// problems of 1 to 32 requests of 8 to 4096 rows over up to 32k keys, nine head counts, each in every tile that may
// compute it.
constexpr double kCall = 3;         // us: of any call
constexpr double kCombine = 3;      // us: of the kernel that combines partial results, beside their traffic
constexpr double kList = 12;        // us: to write a list and to read tiles from it
constexpr double kKeptList = 3;     // us: of these, to read; the kernel that writes takes about 9
constexpr double kTraffic = 2.9e4;  // bytes per us and SM: 3.8 TB/s on an H200
constexpr double kAlone = 0.63;     // of its time, what a thread block takes that has its SM to itself

/// Of each request, if all are as long.
struct Sizes {
  std::int64_t rows, keys;
  std::int64_t read;  // keys of all requests that a window or a chunk leaves

  explicit Sizes(const AttentionParams& params)
      : rows((params.total_q + params.batch_size - 1) / params.batch_size), keys(all_keys(params) / params.batch_size) {
    if (keys <= 0) keys = rows;
    read = std::min(keys, most_keys_of_rows(params, rows)) * params.batch_size;
    if (const std::int64_t present = keys_in_memory(params); present > 0) read = std::min(read, present);
  }
};

struct Splits {
  std::int64_t of_tile;
  bool are_combined;
};

Splits expected_splits(const AttentionParams& params, const TileShape& tile, TileSource source, std::int64_t tiles,
                       const Device& device) {
  const SplitRule rule = split_rule(params, tile, source, device);
  if (source == TileSource::kList || source == TileSource::kBatchBySplit) {
    const std::int64_t splits = likely_splits(rule, params, tiles);
    return {splits, splits > 1};
  }
  const std::int64_t splits = splits_without_list(rule, params, tile, source);
  if (params.batch_size == 1) return {std::max<std::int64_t>(splits, 1), splits > 1};
  if (rule.per_request > 0) return {rule.per_request, rule.per_request > 1};
  // One per request more than are shared out: schedule/batch_splits.h.
  return {std::max<std::int64_t>(splits / params.batch_size - 1, 1), splits > params.batch_size};
}

void estimate(const AttentionParams& params, const Sizes& sizes, const Device& device, bool schedule_is_kept,
              Choice* choice) {
  const TileShape& tile = choice->candidate.shape;
  const TileTime& time = choice->candidate.time;
  const std::int64_t tiles = (sizes.rows + tile.rows - 1) / tile.rows * params.batch_size;
  const Splits splits = expected_splits(params, tile, choice->source, tiles, device);
  choice->splits = splits.of_tile;
  choice->combines = splits.are_combined;

  // Keys that the last rows see, the first ones, and rows on average.
  const auto most = double(std::min(sizes.keys, most_keys_of_rows(params, tile.rows)));
  const auto first_rows = std::min<std::int64_t>(tile.rows, sizes.rows);
  const double least =
      hides_later_keys(params) ? std::clamp(double(sizes.keys - sizes.rows + first_rows), 0.0, most) : most;
  const double mean = (most + least) / 2;
  const auto time_of = [&](double keys) { return time.start + time.per_key * 1e-3 * keys / double(splits.of_tile); };

  // Tiles with many keys come first. Thread blocks of the last wave have fewer others beside them on their SM.
  const double blocks = double(tiles * (params.num_qo_heads / std::max(tile.packed_heads, 1)) * splits.of_tile);
  const double sms = std::max(device.multiprocessors / tile.blocks_per_tile, 1);
  const double at_once = sms * tile.blocks_per_sm;
  const double whole_waves = std::ceil(blocks / at_once) - 1;
  const double last_per_sm = std::ceil((blocks - whole_waves * at_once) / sms);
  const double others = tile.blocks_per_sm > 1 ? (last_per_sm - 1) / (tile.blocks_per_sm - 1) : 1;
  const double speed = kAlone + (1 - kAlone) * others;
  choice->compute = std::max({blocks / at_once * time_of(mean), whole_waves * time_of(mean) + time_of(least) * speed,
                              time_of(most) * (whole_waves > 0 ? 1 : speed)});

  const double columns = params.head_dim_qk + params.head_dim_vo;
  const double rows = double(params.total_q) * params.num_qo_heads;
  const double bytes = rows * columns * size_of(params.q_dtype) +
                       double(sizes.read) * params.num_kv_heads * columns * size_of(params.kv_dtype);
  const double partial_bytes =
      splits.of_tile > 1 ? rows * double(splits.of_tile) * params.head_dim_vo * 2 * sizeof(float) : 0;
  const double per_us = kTraffic * std::max(device.multiprocessors, 1);
  choice->traffic = bytes / per_us;
  choice->time = kCall + std::max(choice->compute, choice->traffic) + partial_bytes / per_us +
                 (splits.are_combined ? kCombine : 0) +
                 (choice->source == TileSource::kList ? (schedule_is_kept ? kKeptList : kList) : 0);
}

/// Where from the tiles of a candidate may come.
struct Sources {
  std::array<TileSource, 2> all{};
  int count = 0;

  Sources(const KernelEntry& kernel, const AttentionParams& params, const TileShape& tile, const Device& device,
          bool schedule_is_kept) {
    const TileSource source = tile_source(params, kernel, tile);
    const bool may_have_list = source != TileSource::kList && is_batch(params) && !params.batch_invariant;
    const ListUse use = may_have_list ? list_use(params, kernel, tile, device, schedule_is_kept) : ListUse::kNever;
    if (use != ListUse::kAlways) all[std::size_t(count++)] = source;
    if (use != ListUse::kNever) all[std::size_t(count++)] = TileSource::kList;
  }
  const TileSource* begin() const { return all.data(); }
  const TileSource* end() const { return all.data() + count; }
};

std::atomic<std::size_t> preferred{0};  // the hash of a name; 0: the fastest

std::size_t hash_of(std::string_view name) { return name.empty() ? 0 : std::hash<std::string_view>{}(name); }

Candidates candidates_of(const KernelEntry& kernel, const AttentionParams& params, const Device& device) {
  Candidates all = kernel.candidates(params, device);
  const std::size_t name = preferred.load(std::memory_order_relaxed);
  if (name == 0) return all;
  for (const Candidate& candidate : all) {
    if (hash_of(candidate.name) == name) return {candidate};
  }
  return all;
}

}  // namespace

void prefer_tile(const std::string& name) { preferred = hash_of(name); }

Choice fastest(const KernelEntry& kernel, const AttentionParams& params, const Device& device, bool schedule_is_kept,
               std::vector<Choice>* all) {
  const Candidates candidates = candidates_of(kernel, params, device);
  const Sizes sizes(params);
  Choice best;
  bool is_first = true;
  for (const Candidate& candidate : candidates) {
    const Sources sources(kernel, params, candidate.shape, device, schedule_is_kept);
    for (const TileSource source : sources) {
      Choice choice{candidate, source};
      const bool is_only = candidates.size() == 1 && sources.count == 1;
      if (!is_only || all != nullptr) estimate(params, sizes, device, schedule_is_kept, &choice);
      if (all != nullptr) all->push_back(choice);
      // Where memory is what takes the time, the least work.
      if (is_first || std::tie(choice.time, choice.compute) < std::tie(best.time, best.compute)) best = choice;
      is_first = false;
    }
  }
  return best;
}

bool logs_plans() {
  static const bool is_wanted = [] {
    const char* value = std::getenv("CUTLASS_KERNELS_LOG");
    return value != nullptr && std::string_view(value) == "plan";
  }();
  return is_wanted;
}

void log_plan(const AttentionParams& params, const Device& device, const PlanState& plan, bool schedule_is_kept) {
  std::vector<Choice> all;
  fastest(*plan.kernel, params, device, schedule_is_kept, &all);
  std::string text, taken;
  for (const Choice& choice : all) {
    const TileShape& tile = choice.candidate.shape;
    const bool is_taken = tile.kind == plan.tile.kind && tile.rows == plan.tile.rows;
    if (is_taken) taken = choice.candidate.name;
    text += choice.candidate.name;
    if (choice.splits > 1) text += " in " + std::to_string(choice.splits) + " splits";
    if (choice.source == TileSource::kList) text += " by a list";
    if (choice.candidate.time.per_key > 0) text += " " + std::to_string(std::lround(choice.time)) + " us";
    text += ", ";
  }
  const Sizes sizes(params);
  std::fprintf(stderr, "cutlass_kernels: %s, %d/%d heads, %d x %lld rows over %lld keys: %staken: %s%s%s\n",
               plan.kernel->info.name.c_str(), params.num_qo_heads, params.num_kv_heads, params.batch_size,
               static_cast<long long>(sizes.rows), static_cast<long long>(sizes.keys), text.c_str(), taken.c_str(),
               plan.source == TileSource::kList ? " by a list" : "", plan.partial_rows > 0 ? ", keys are split" : "");
}

}  // namespace cutlass_kernels
