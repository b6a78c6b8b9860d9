// What calls of the C++ API enqueue, and where in the workspace: seen through a stand-in for the CUDA runtime, so on
// any machine. Exit status 0 if all is as documented.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "mask_extents.h"
#include "plan/call.h"
#include "plan_checks.h"
#include "random.h"

namespace {

/// Regions of a workspace lie inside it, nothing on top of anything else, and the kernel was given their addresses.
void check_layout(const ck::WorkspaceLayout& layout, const ck::LaunchPlan& plan, const std::string& what) {
  struct Placed {
    std::size_t begin, end;
    const void* given;
    const char* name;
  };
  std::vector<Placed> regions;
  const auto add = [&](const ck::Region& region, std::size_t base, const void* given, const char* name) {
    if (region.bytes == 0) return;
    regions.push_back({base + region.offset, base + region.offset + region.bytes, given, name});
  };
  const std::size_t scratch = layout.schedule_bytes;
  add(layout.header, 0, plan.tile_counter, "header");
  add(layout.tile_list, 0, plan.tile_list, "tile list");
  add(layout.split_tiles, plan.tile_list == nullptr ? scratch : 0, plan.split_tiles, "split tiles");
  add(layout.combine_counters, 0, plan.combine_counters, "combine counters");
  add(layout.tile_counter, scratch, plan.tile_counter, "tile counters");
  add(layout.partial_o, scratch, plan.partial_o, "partial O");
  add(layout.partial_max_sum, scratch, plan.partial_max_sum, "partial maxima and sums");
  add(layout.mask_extents, scratch, plan.mask_extents, "mask extents");
  std::sort(regions.begin(), regions.end(), [](const Placed& a, const Placed& b) { return a.begin < b.begin; });
  std::size_t end = 0;
  for (const Placed& region : regions) {
    const std::string name = what + ": " + region.name;
    require(end <= region.begin, name + " overlaps what is before it");
    require(region.begin % 16 == 0, name + " is not aligned");
    require(reinterpret_cast<std::uintptr_t>(region.given) == kWorkspace + region.begin,
            name + " is not where the kernel looks for it");
    end = region.end;
  }
  require(end <= layout.bytes(), what + ": the workspace ends before its regions");
}

/// A plan's list, partial results and counters have a place each in one workspace, which is exactly as large as it
/// says.
void check_planned_calls() {
  const ck::AttentionParams params = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 3, 40, 20000);
  ck::Plan plan;
  require_refusal(ck::attention(plan, params, at(kWorkspace), 1 << 20, nullptr), "plan is empty");
  ck::Status status = ck::make_plan(params, &plan);
  require(status.ok(), status.message);
  require(plan.needs_schedule() && std::string(plan.kernel()).find("float16_hd64") != std::string::npos,
          "a batch has a kernel and a tile list");
  const std::size_t bytes = plan.workspace_size();
  require(bytes == ck::workspace_size(params, ck::Backend::kFa3), "one answer to how large a workspace is");
  stand_in::launches.clear();
  for (const std::size_t less : {std::size_t(1), bytes}) {
    status = ck::make_schedule(plan, params, at(kWorkspace), bytes - less, nullptr);
    require(status.code == ck::StatusCode::kWorkspaceTooSmall, "no list in less than it needs");
    status = ck::attention(plan, params, at(kWorkspace), bytes - less, nullptr);
    require(status.code == ck::StatusCode::kWorkspaceTooSmall, "no call in less than it needs");
  }
  require_refusal(ck::make_schedule(plan, params, at(kWorkspace + 8), bytes, nullptr), "16-byte aligned");
  require_refusal(ck::attention(plan, params, at(kWorkspace + 4), bytes, nullptr), "16-byte aligned");
  require(stand_in::launches.empty(), "what is refused enqueues nothing");
  status = ck::make_schedule(plan, params, at(kWorkspace), bytes, nullptr);
  require(status.ok(), status.message);
  for (int layer = 0; layer < 2; ++layer) {
    status = ck::attention(plan, params, at(kWorkspace), bytes, nullptr);
    require(status.ok(), status.message);
    const ck::LaunchPlan launched = last_attention().plan;
    require(launched.split_tile_capacity > 0, "the problem is one to split");
    check_layout(layout_of(params), launched, "a planned call");
  }
  ck::AttentionParams other = params;
  other.num_kv_heads = 4;
  require_refusal(ck::attention(plan, other, at(kWorkspace), bytes, nullptr), "num_kv_heads=4, but the plan is for 2");
}

/// Partial results, counters and lists have room for all that kernels write: of every split a row for each row of its
/// tile, and of every tile an entry.
void check_room(const ck::AttentionParams& params, const ck::PlanState& plan) {
  const ck::WorkspaceLayout& layout = plan.layout;
  const std::int64_t heads = params.num_qo_heads;
  const auto holds = [&](const ck::Region& region, std::int64_t elements, std::size_t bytes, const char* name) {
    require(region.bytes >= std::size_t(elements) * bytes, describe(params) + ": " + name + " have no room");
  };
  if (plan.source == ck::TileSource::kList) {
    holds(layout.tile_list, plan.tile_indices, sizeof(ck::WorkItem), "tiles");
  }
  if (plan.source == ck::TileSource::kList || (params.batch_size > 1 && plan.combine_counters == 0)) {
    holds(layout.split_tiles, plan.split_tile_capacity, sizeof(ck::SplitTile), "split tiles");
  }
  if (layout.mask_extents.bytes > 0) {
    holds(layout.mask_extents, plan.tile_indices, sizeof(ck::MaskExtent), "extents of a mask");
  }
  const bool listed = plan.source == ck::TileSource::kList;
  const bool may_split = plan.tile.packed_heads > 0 && !params.disable_split_kv && params.stats == nullptr &&
                         (listed || !ck::is_batch(params) || plan.tile.splits_without_list);
  std::int64_t fixed_splits = 1;
  if (params.fixed_split_size > 0 && may_split) {
    const std::int64_t keys = listed && params.max_kv_len > 0 ? params.max_kv_len : params.total_kv;
    fixed_splits = std::clamp<std::int64_t>((keys + params.fixed_split_size - 1) / params.fixed_split_size, 1,
                                            std::numeric_limits<std::int16_t>::max());
    const int splits = listed ? plan.rule.most_splits : plan.num_splits;
    require(splits == fixed_splits || (!listed && params.max_kv_len > 0),
            describe(params) + ": another number of fixed splits");
  }
  require(plan.combine_counters == 0 || (may_split && plan.tile.combines),
          describe(params) + ": the kernel does not combine");
  if (plan.split_tile_capacity == 0) return;
  require(may_split, describe(params) + ": keys are split");
  const std::int64_t tile_rows = std::min<std::int64_t>(plan.tile.rows, params.total_q);
  std::int64_t rows = 0;
  if (plan.source == ck::TileSource::kSingleRequest) {
    rows = params.total_q * plan.num_splits;
  } else if (plan.source == ck::TileSource::kBatchByLength) {
    // Rows of a request beyond max_qo_len are not computed.
    rows = ck::tiles_of_longest(params, plan.tile.rows) * plan.num_splits *
           std::min<std::int64_t>(tile_rows, params.max_qo_len);
  } else {
    rows = params.fixed_split_size > 0 ? params.total_q * fixed_splits : 0;
    // Each tile that is split takes two entries or more.
    const std::int64_t tiles = plan.tile_indices - plan.rule.extra_tiles;
    require(params.fixed_split_size > 0 ||
                plan.split_tile_capacity >= std::min<std::int64_t>(plan.rule.most_items / 2, tiles),
            describe(params) + ": split tiles have no room");
  }
  holds(layout.partial_o, rows * heads * params.head_dim_vo, sizeof(float), "partial O");
  holds(layout.partial_max_sum, rows * heads * 2, sizeof(float), "partial maxima and sums");
  if (!listed || plan.combine_counters == 0) return;
  const int packs = params.num_qo_heads / plan.tile.packed_heads;
  const int last = int(layout.partial_max_sum.bytes / (heads * 2 * sizeof(float))) - 2;
  holds(layout.combine_counters, ck::combine_counter(last, packs - 1, packs) + 1, sizeof(std::uint64_t),
        "combine counters");
}

/// What a call enqueues beside attention: counters are cleared before it, and partial results combined behind it.
void check_helpers(const ck::PlanState& plan, const std::string& what) {
  const ck::Region& counter = plan.layout.tile_counter;
  const auto clears = [&](const stand_in::Launch& launch) {
    return launch.is("memset") && launch.bytes == counter.bytes &&
           launch.destination == at(kWorkspace + plan.layout.schedule_bytes + counter.offset);
  };
  const auto& launches = stand_in::launches;
  require(counter.bytes == 0 || std::any_of(launches.begin(), launches.end() - 1, clears),
          what + ": the tile counter is not cleared");
  const bool combines = plan.split_tile_capacity > 0 && last_attention().plan.combine_counters == nullptr;
  require(launches.back().is("combine") == combines, what + ": partial results are combined where there are some");
}

/// A list has an entry for every tile, whatever the lengths; exactly so many where the host knows them.
void check_tiles_of_lists() {
  ck::AttentionParams params = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 5, 0, 20000);
  ck::Device device;
  require(ck::current_device(&device).ok(), "the stand-in is a device");
  const std::vector<std::vector<int>> batches = {{1, 1, 1, 1, 1}, {0, 0, 0, 0, 1}, {700, 1, 64, 65, 1}};
  for (const std::vector<int>& lengths : batches) {
    std::vector<std::int32_t> indptr = {0};
    for (const int length : lengths) indptr.push_back(indptr.back() + length);
    params.total_q = indptr.back();
    for (const bool known : {false, true}) {
      params.qo_indptr_host = known ? indptr.data() : nullptr;
      ck::PlanState plan;
      require(ck::make_plan(params, ck::Backend::kFa2, device, {}, &plan).ok(), "there is a plan");
      std::int64_t tiles = 0;
      for (const int length : lengths) tiles += (length + plan.tile.rows - 1) / plan.tile.rows;
      const std::int64_t room = plan.tile_indices - plan.rule.extra_tiles;
      require(known ? room == tiles : room >= tiles, "an entry for every tile");
    }
  }
  const std::int32_t none[2] = {0, 0};
  params.batch_size = 1;
  params.qo_indptr_host = none;
  params.total_q = 5;  // rows of q that belong to no request
  ck::PlanState plan;
  require(ck::make_plan(params, ck::Backend::kFa2, device, {}, &plan).ok() &&
              plan.tile_indices == plan.rule.extra_tiles + 1,
          "a list of no tiles has an entry that says so");
}

/// The number of fixed splits follows from the pages of a request, not from an estimate of all keys.
void check_fixed_splits_of_pages() {
  ck::AttentionParams params = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 2, 1, 100);
  params.pages.page_size = 16;
  params.pages.num_pages = 5000;
  params.pages.k_stride_page = params.pages.v_stride_page = 16 * 2 * 64;
  params.pages.indices = params.pages.last_page_len = params.kv_indptr;
  params.fixed_split_size = 100;
  ck::Device device;
  ck::PlanState plan;
  require(ck::current_device(&device).ok(), "the stand-in is a device");
  params.pages.num_indices = 1001;
  require(ck::make_plan(params, ck::Backend::kAuto, device, {}, &plan).ok() && plan.rule.most_splits == 161,
          "1001 pages of 16 keys are 161 splits of 100");
  params.pages.table_stride = params.pages.table_width = 626;
  require(ck::make_plan(params, ck::Backend::kAuto, device, {}, &plan).ok() && plan.rule.most_splits == 101,
          "626 pages of 16 keys are 101 splits of 100");
}

/// Splits are short while there are SMs without a thread block, and no longer.
void check_splits_of_few_rows() {
  ck::Device device;
  require(ck::current_device(&device).ok() && device.multiprocessors == 132, "an H200 stands in");
  const auto splits = [&](int requests, int keys) {
    const auto dtype = ck::DType::kFloat16;
    ck::AttentionParams params = batch(dtype, dtype, 64, 32, 8, requests, 16, keys);
    params.max_qo_len = 0;  // a list
    ck::PlanState plan;
    require(ck::make_plan(params, ck::Backend::kFa2, device, {}, &plan).ok(), "there is a plan");
    const int each = ck::splits_of(plan.rule, ck::item_budget(plan.rule, requests, params.total_kv), keys, 16);
    require(each <= plan.rule.most_splits && requests * each <= plan.tile_indices, "the list has room for the splits");
    return each;
  };
  require(splits(1, 1024) == 16, "128 thread blocks of 64 keys");
  require(splits(1, 8192) == 32, "256 thread blocks of 256 keys");
  require(splits(8, 1024) == 4, "256 thread blocks of 256 keys, of 8 requests");
  require(splits(10, 8192) == 9, "720 thread blocks in two waves of 396");
}

/// Extents of a custom mask are computed before kernels that use them.
void check_mask_extents() {
  ck::AttentionParams params = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 8, 3, 300, 300);
  for (const bool masked : {false, true}) {
    if (masked) {
      params.mask.words = static_cast<const std::uint32_t*>(at(std::uintptr_t(8) << 40));
      params.mask.indptr = static_cast<const std::int32_t*>(at(std::uintptr_t(9) << 40));
      params.mask.num_words = 1 << 20;
    }
    ck::Plan plan;
    require(ck::make_plan(params, &plan, ck::Backend::kFa3).ok(), "fa3 has a plan");
    stand_in::launches.clear();
    const ck::Status status = ck::attention(plan, params, at(kWorkspace), 1 << 30, nullptr);
    require(status.ok(), status.message);
    require((last_attention().plan.mask_extents != nullptr) == masked &&
                stand_in::launches.front().is("mask_extents") == masked,
            "extents for a mask, and for nothing else");
  }
}

/// Decoding takes fa2 first, unless results must not depend on the batch: its rows are the batch's.
void check_decoding() {
  const auto kernel = [](const auto& change) {
    ck::AttentionParams params = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 3, 1, 20000);
    change(params);
    ck::Plan plan;
    require(ck::make_plan(params, &plan).ok(), "there is a plan");
    return std::string(plan.kernel()).substr(0, 3);
  };
  require(kernel([](auto&) {}) == "fa2", "fa2 decodes");
  require(kernel([](auto& p) { p.total_q = 13; }) == "fa3", "52 rows are more than 16 for each");
  require(kernel([](auto& p) { p.disable_split_kv = true; }) == "fa3", "without splits fa3");
  require(kernel([](auto& p) { p.fixed_split_size = 512; }) == "fa3", "with fixed splits fa3");

  ck::AttentionParams one = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 1, 1, 20000);
  one.qo_indptr = one.kv_indptr = nullptr;
  require(layout_of(one).partial_o.bytes > 0, "the keys of one row are split");
}

/// A failure of anything that is enqueued is the call's failure, and nothing is enqueued behind it.
void check_failures() {
  ck::AttentionParams params = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 8, 1, 300, 20000);
  params.qo_indptr = params.kv_indptr = nullptr;
  params.mask.words = static_cast<const std::uint32_t*>(at(std::uintptr_t(8) << 40));
  params.mask.num_words = 1 << 20;
  ck::AttentionParams few = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 1, 4, 20000);
  few.qo_indptr = few.kv_indptr = nullptr;
  for (const ck::AttentionParams& called : {params, few}) {
    for (int before = 0;; ++before) {
      stand_in::launches.clear();
      stand_in::launches_until_failure = before;
      const ck::Status status = ck::attention(called, at(kWorkspace), 1 << 30, nullptr);
      stand_in::launches_until_failure = -1;
      require(int(stand_in::launches.size()) <= before, "a failure ends a call");
      if (status.ok()) {
        require(before == int(stand_in::launches.size()) && before >= 2, "several are enqueued");
        break;
      }
      require(status.code == ck::StatusCode::kCudaError, "a failure is told");
    }
  }
}

/// Whether attention() may refuse a workspace that is too small, in place of doing without.
bool needs_workspace(const ck::AttentionParams& params) {
  const bool is_batch = params.batch_size > 1 || params.qo_indptr != nullptr;
  return params.fixed_split_size > 0 || (is_batch && (params.max_qo_len <= 0 || params.kv_dtype != params.q_dtype));
}

/// A workspace of exactly the promised size is enough; with a byte less the call is refused, or did not need it.
void check_promised_size(const ck::AttentionParams& params, std::size_t any) {
  const std::size_t bytes = ck::workspace_size(params);
  ck::AttentionParams sizes = params;  // before there are tensors
  sizes.q.data = sizes.k.data = sizes.v.data = sizes.o.data = nullptr;
  if (params.batch_size > 1) sizes.qo_indptr = sizes.kv_indptr = nullptr;
  require(ck::workspace_size(sizes) == bytes, describe(params) + ": tensors change the size");
  for (const std::size_t given : {bytes, bytes == 0 ? bytes : bytes - 1, any % (bytes + 1)}) {
    stand_in::launches.clear();
    const ck::Status status = ck::attention(params, at(kWorkspace), given, nullptr);
    const std::string what =
        describe(params) + " in " + std::to_string(given) + " of " + std::to_string(bytes) + " bytes";
    if (status.code == ck::StatusCode::kUnsupported) return;  // e4m3 queries on Ampere
    if (params.fixed_split_size > 0 && status.code == ck::StatusCode::kInvalidArgument) return;  // too many tiles
    if (given < bytes && status.code == ck::StatusCode::kWorkspaceTooSmall) {
      require(needs_workspace(params), what + ": " + status.message);
      continue;
    }
    require(status.ok(), what + ": " + status.message);
    ck::Device device;
    require(ck::current_device(&device).ok(), "the stand-in is a device");
    ck::PlanOptions options;
    options.workspace_bytes = given;
    ck::PlanState plan;
    require(ck::make_plan(params, ck::Backend::kAuto, device, options, &plan).ok(), what);
    require(plan.layout.bytes() <= given, what + ": the plan takes more");
    check_layout(plan.layout, last_attention().plan, what);
    check_room(params, plan);
    check_helpers(plan, what);
  }
}

ck::AttentionParams random_problem(Random& random) {
  const auto [q_dtype, kv_dtype] = random.of({std::pair(ck::DType::kFloat16, ck::DType::kFloat16),
                                              std::pair(ck::DType::kFloat16, ck::DType::kFloat8E4M3),
                                              std::pair(ck::DType::kFloat8E4M3, ck::DType::kFloat8E4M3)});
  const int kv_heads = random.of({1, 2, 3, 8});
  const int heads = kv_heads * random.of({1, 2, 3, 4, 7, 8, 32});
  const int requests = random.log_in(1, 200), rows = random.log_in(1, 300);
  ck::AttentionParams params =
      batch(q_dtype, kv_dtype, random.of({16, 48, 64}), heads, kv_heads, requests, rows, random.log_in(1, 20000));
  params.total_q -= random.in(0, requests - 1);
  params.total_kv += random.in(0, 1000);
  params.causal = random.in(0, 1) == 1;
  if (random.in(0, 3) == 0) params.window_left = random.in(0, 500);
  if (random.in(0, 3) == 0) params.chunk_size = random.in(1, 500);
  if (random.in(0, 2) == 0) params.max_qo_len = rows + random.in(0, 100);
  if (random.in(0, 2) == 0) params.max_kv_len = random.log_in(1, 30000);
  if (random.in(0, 3) == 0) params.fixed_split_size = random.log_in(64, 4096);
  params.disable_split_kv = random.in(0, 5) == 0;
  if (q_dtype != kv_dtype && requests > 1 && random.in(0, 1) == 0) {
    put_into_pages(&params);
    params.fixed_split_size = 0;  // whose number follows from the pages: check_fixed_splits_of_pages()
  }
  const bool eight_bits = q_dtype == ck::DType::kFloat8E4M3;
  if (random.in(0, 3) == 0 && !eight_bits) {
    params.mask.words = static_cast<const std::uint32_t*>(at(std::uintptr_t(8) << 40));
    params.mask.indptr = static_cast<const std::int32_t*>(at(std::uintptr_t(9) << 40));
    params.mask.num_words = std::int64_t(1) << 30;
  }
  if (random.in(0, 5) == 0) params.logits_soft_cap = 30.0f;
  if (random.in(0, 7) == 0 && kv_dtype == q_dtype && !eight_bits) {
    params.stats = static_cast<float*>(at(std::uintptr_t(10) << 40));
  }
  if (requests == 1 && random.in(0, 1) == 0) params.qo_indptr = params.kv_indptr = nullptr;
  if (requests > 1 && params.pages.page_size == 0 && random.in(0, 4) == 0) {
    params.kv_indptr = nullptr;  // all requests share their keys
    params.kv_stride_request = 0;
    params.total_kv = params.max_kv_len;
  }
  return params;
}

void check_promised_sizes_of_random_problems() {
  Random random(1);
  for (int i = 0; i < 20000; ++i) {
    stand_in::device.compute_capability = random.of({80, 86, 90});
    stand_in::device.multiprocessors = random.of({1, 20, 78, 84, 108, 132, 142});
    check_promised_size(random_problem(random), std::size_t(random.log_in(1, 1 << 30)));
  }
  stand_in::device = {};
}

/// The same of calls in parts, whose kernels nobody but attention() plans.
void check_promised_sizes_of_parts() {
  Random random(2);
  for (int i = 0; i < 5000; ++i) {
    stand_in::device.compute_capability = random.of({80, 86, 90});
    stand_in::device.multiprocessors = random.of({1, 20, 78, 84, 108, 132, 142});
    ck::AttentionParams params = random_problem(random);
    params.fixed_split_size = 0;
    params.batch_invariant = true;
    const std::size_t bytes = ck::workspace_size(params);
    ck::AttentionParams sizes = params;
    if (params.batch_size > 1) sizes.qo_indptr = sizes.kv_indptr = nullptr;
    require(ck::workspace_size(sizes) == bytes, describe(params) + ": tensors change the size");
    const int any = random.log_in(1, 1 << 30);
    for (const std::size_t given : {bytes, std::size_t(any) % (bytes + 1)}) {
      const ck::Status status = ck::attention(params, at(kWorkspace), given, nullptr);
      if (status.code == ck::StatusCode::kUnsupported) break;  // e4m3 queries on Ampere
      if (given < bytes && status.code == ck::StatusCode::kWorkspaceTooSmall) continue;
      require(status.ok(), describe(params) + " in parts, in " + std::to_string(given) + " of " +
                               std::to_string(bytes) + " bytes: " + status.message);
    }
  }
  stand_in::device = {};
}

}  // namespace

/// Calls that split keys by other rules share no schedule, even where both rules need as much memory.
void check_shared_schedules() {
  ck::Device device;
  require(ck::current_device(&device).ok(), "the stand-in is a device");
  for (int window = 1000; window < 9000; window += 250) {
    const auto planned = [&](int window_left) {
      ck::AttentionParams params = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 32, 8, 4, 30, 8192);
      params.max_qo_len = 30;
      params.max_kv_len = 8192;
      params.batch_invariant = params.causal = true;
      params.window_left = window_left;
      ck::CallPlan plan;
      require(ck::plan_call(params, ck::Backend::kFa3, device, {}, &plan).ok(), "there is a plan");
      return plan;
    };
    const ck::CallPlan all = planned(-1), some = planned(window);
    bool same = true;
    for (std::size_t i = 0; i < std::size_t(all.ranges.count); ++i) same &= all.plans[i].rule == some.plans[i].rule;
    require(ck::share_schedule(all, all) && ck::share_schedule(all, some) == same,
            "schedules of window_left=" + std::to_string(window) + " and of none");
  }
}

int main() {
  check_choices();
  check_planned_calls();
  check_refusals();
  check_tiles_of_lists();
  check_fixed_splits_of_pages();
  check_backends_of_8_bit_pages();
  check_latent_attention();
  check_shared_schedules();
  check_splits_of_few_rows();
  check_splits_of_many_requests();
  check_room_of_lists();
  check_mask_extents();
  check_failures();
  check_decoding();
  check_promised_size(batch(ck::DType::kFloat16, ck::DType::kFloat8E4M3, 64, 4, 1, 7, 1, 1989 / 7), 0);
  check_promised_sizes_of_random_problems();
  check_promised_sizes_of_parts();
  check_random_plans();
  check_mask_bounds();
  std::printf("OK\n");
  return 0;
}
