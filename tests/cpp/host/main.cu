// What calls of the C++ API enqueue, and where in the workspace: seen through a stand-in for the CUDA runtime, so on
// any machine. Exit status 0 if all is as documented.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cutlass_kernels/attention.h"
#include "fa2/params.h"
#include "fa3/params.h"
#include "mask_extents.h"
#include "plan/plan.h"
#include "stand_in_cuda.h"

namespace ck = cutlass_kernels;

namespace {

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

void require_refusal(const ck::Status& status, const std::string& fragment) {
  require(status.code == ck::StatusCode::kInvalidArgument &&
              status.message.find(fragment) != std::string::npos,
          "a refusal that says '" + fragment + "', not '" + status.message + "'");
}

constexpr std::uintptr_t kWorkspace = std::uintptr_t(1) << 40;  // addresses are never read
void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

/// A batch of requests of equal lengths with all its tensors.
ck::AttentionParams batch(ck::DType q_dtype, ck::DType kv_dtype, int head_dim, int heads,
                          int kv_heads, int requests, int rows, int keys) {
  ck::AttentionParams params;
  params.q_dtype = params.o_dtype = q_dtype;
  params.kv_dtype = kv_dtype;
  if (kv_dtype == q_dtype && q_dtype == ck::DType::kFloat8E4M3)
    params.o_dtype = ck::DType::kFloat16;
  params.num_qo_heads = heads;
  params.num_kv_heads = kv_heads;
  params.head_dim_qk = params.head_dim_vo = head_dim;
  params.batch_size = requests;
  params.total_q = std::int64_t(requests) * rows;
  params.total_kv = std::int64_t(requests) * keys;
  params.qo_indptr = static_cast<const std::int32_t*>(at(std::uintptr_t(2) << 40));
  params.kv_indptr = static_cast<const std::int32_t*>(at(std::uintptr_t(3) << 40));
  params.q = {at(std::uintptr_t(4) << 40), heads * head_dim, head_dim};
  params.k = {at(std::uintptr_t(5) << 40), kv_heads * head_dim, head_dim};
  params.v = {at(std::uintptr_t(6) << 40), kv_heads * head_dim, head_dim};
  params.o = {at(std::uintptr_t(7) << 40), heads * head_dim, head_dim};
  return params;
}

/// Regions of a workspace lie inside it, nothing on top of anything else, and the kernel was given their addresses.
void check_layout(const ck::WorkspaceLayout& layout, const ck::LaunchPlan& plan,
                  const std::string& what) {
  struct Placed {
    std::size_t begin, end;
    const void* given;
    const char* name;
  };
  std::vector<Placed> regions;
  const auto add = [&](const ck::Region& region, std::size_t base, const void* given,
                       const char* name) {
    if (region.bytes == 0) return;
    regions.push_back({base + region.offset, base + region.offset + region.bytes, given, name});
  };
  const std::size_t scratch = layout.schedule_bytes;
  add(layout.header, 0, plan.tile_counter, "header");
  add(layout.tile_list, 0, plan.tile_list, "tile list");
  add(layout.split_tiles, 0, plan.split_tiles, "split tiles");
  add(layout.combine_counters, 0, plan.combine_counters, "combine counters");
  add(layout.tile_counter, scratch, plan.tile_counter, "tile counters");
  add(layout.partial_o, scratch, plan.partial_o, "partial O");
  add(layout.partial_max_sum, scratch, plan.partial_max_sum, "partial maxima and sums");
  add(layout.mask_extents, scratch, plan.mask_extents, "mask extents");
  std::sort(regions.begin(), regions.end(),
            [](const Placed& a, const Placed& b) { return a.begin < b.begin; });
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

/// The parameters of the attention kernel that was enqueued last.
ck::LaunchParams last_attention() {
  for (auto launch = stand_in::launches.rbegin(); launch != stand_in::launches.rend(); ++launch) {
    if (!launch->is("attention_kernel")) continue;
    return launch->is("fa3") ? launch->argument<ck::fa3::KernelParams>().attention
                             : launch->argument<ck::fa2::KernelParams>().attention;
  }
  require(false, "no attention kernel was enqueued");
  return {};
}

std::string describe(const ck::AttentionParams& p) {
  return std::string(ck::to_string(p.q_dtype)) + "/" + ck::to_string(p.kv_dtype) + ", hd" +
         std::to_string(p.head_dim_qk) + ", " + std::to_string(p.num_qo_heads) + "/" +
         std::to_string(p.num_kv_heads) + " heads, " + std::to_string(p.batch_size) +
         " requests, total_q=" + std::to_string(p.total_q) +
         ", total_kv=" + std::to_string(p.total_kv);
}

ck::WorkspaceLayout layout_of(const ck::AttentionParams& params) {
  ck::Device device;
  ck::PlanState plan;
  require(ck::current_device(&device).ok() &&
              ck::make_plan(params, ck::Backend::kAuto, device, {}, &plan).ok(),
          "there is a plan");
  return plan.layout;
}

/// A plan's list, partial results and counters have a place each in one workspace, which is exactly as large as it
/// says.
void check_planned_calls() {
  const ck::AttentionParams params =
      batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 3, 40, 20000);
  ck::Plan plan;
  require_refusal(ck::attention(plan, params, at(kWorkspace), 1 << 20, nullptr), "plan is empty");
  ck::Status status = ck::make_plan(params, &plan);
  require(status.ok(), status.message);
  require(
      plan.needs_schedule() && std::string(plan.kernel()).find("float16_hd64") != std::string::npos,
      "a batch has a kernel and a tile list");
  const std::size_t bytes = plan.workspace_size();
  require(bytes == ck::workspace_size(params, ck::Backend::kFa3),
          "one answer to how large a workspace is");
  stand_in::launches.clear();
  for (const std::size_t less : {std::size_t(1), bytes}) {
    status = ck::make_schedule(plan, params, at(kWorkspace), bytes - less, nullptr);
    require(status.code == ck::StatusCode::kWorkspaceTooSmall, "no list in less than it needs");
    status = ck::attention(plan, params, at(kWorkspace), bytes - less, nullptr);
    require(status.code == ck::StatusCode::kWorkspaceTooSmall, "no call in less than it needs");
  }
  require_refusal(ck::make_schedule(plan, params, at(kWorkspace + 8), bytes, nullptr),
                  "16-byte aligned");
  require_refusal(ck::attention(plan, params, at(kWorkspace + 4), bytes, nullptr),
                  "16-byte aligned");
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
  require_refusal(ck::attention(plan, other, at(kWorkspace), bytes, nullptr),
                  "num_kv_heads=4, but the plan is for 2");
}

/// What a plan was not made for is refused, not computed in part. A plan that cannot be made leaves the one before.
void check_refused_plans() {
  ck::AttentionParams params =
      batch(ck::DType::kFloat16, ck::DType::kFloat8E4M3, 64, 8, 2, 4, 40, 20000);
  ck::Plan plan;
  require(ck::make_plan(params, &plan, ck::Backend::kFa3).code == ck::StatusCode::kUnsupported,
          "fa3 has no kernel for e4m3 keys under float16 queries");
  require_refusal(ck::attention(plan, params, at(kWorkspace), 1 << 20, nullptr), "plan is empty");
  require(ck::make_plan(params, &plan).ok(), "fa2 has one");
  const std::string kernel = plan.kernel();
  const std::size_t bytes = plan.workspace_size();
  require(!ck::make_plan(params, &plan, ck::Backend::kFa3).ok() && plan.kernel() == kernel &&
              plan.workspace_size() == bytes,
          "a plan that cannot be made leaves the one before");

  stand_in::launches.clear();
  const auto refused = [&](const auto& change, const char* fragment) {
    ck::AttentionParams other = params;
    change(other);
    require_refusal(ck::make_schedule(plan, other, at(kWorkspace), 1 << 30, nullptr), fragment);
    require_refusal(ck::attention(plan, other, at(kWorkspace), 1 << 30, nullptr), fragment);
  };
  refused([](auto& p) { p.max_qo_len = 50; }, "max_qo_len=50, but the plan is for 0");
  refused([](auto& p) { p.fixed_split_size = 512; }, "fixed_split_size=512, but the plan is for 0");
  refused([](auto& p) { p.disable_split_kv = true; }, "disable_split_kv=1, but");
  ck::AttentionParams more = params;
  more.total_q *= 4;
  require_refusal(ck::make_schedule(plan, more, at(kWorkspace), 1 << 30, nullptr),
                  "may make more tiles than fit the list");
  more = params;
  more.total_q /= 2;
  require(ck::make_schedule(plan, more, at(kWorkspace), 1 << 30, nullptr).ok(), "fewer rows fit");

  ck::AttentionParams one = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 1, 40, 20000);
  one.qo_indptr = one.kv_indptr = nullptr;
  require(ck::make_plan(one, &plan).ok(), "a single request has a plan");
  params = one;
  refused([](auto& p) { p.qo_indptr = p.kv_indptr = static_cast<const int*>(at(8 << 20)); },
          "qo_indptr is given, but the plan is for a problem without");

  ck::AttentionParams paged =
      batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 4, 40, 20000);
  paged.pages.page_size = 16;
  paged.pages.num_pages = 10000;
  paged.pages.k_stride_page = paged.pages.v_stride_page = 16 * 2 * 64;
  require(ck::make_plan(paged, &plan).ok(), "pages have a plan");
  require_refusal(ck::make_schedule(plan, paged, at(kWorkspace), 1 << 30, nullptr),
                  "num_indices is not set");
}

/// Whether attention() may refuse a workspace that is too small, in place of doing without.
bool needs_workspace(const ck::AttentionParams& params) {
  const bool is_batch = params.batch_size > 1 || params.qo_indptr != nullptr;
  return params.fixed_split_size > 0 ||
         (is_batch && (params.max_qo_len <= 0 || params.kv_dtype != params.q_dtype));
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
    const std::string what = describe(params) + " in " + std::to_string(given) + " of " +
                             std::to_string(bytes) + " bytes";
    if (status.code == ck::StatusCode::kUnsupported) return;  // e4m3 queries on Ampere
    if (params.fixed_split_size > 0 && status.code == ck::StatusCode::kInvalidArgument)
      return;  // too many tiles
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
  }
}

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int in(int least, int most) { return std::uniform_int_distribution<int>(least, most)(engine_); }
  /// Small numbers as often as large ones.
  int log_in(int least, int most) {
    const double x =
        std::uniform_real_distribution<double>(std::log(least), std::log(most + 1.0))(engine_);
    return std::clamp(int(std::exp(x)), least, most);
  }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[in(0, int(values.size()) - 1)];
  }

 private:
  std::mt19937 engine_;
};

ck::AttentionParams random_problem(Random& random) {
  const auto [q_dtype, kv_dtype] =
      random.of({std::pair(ck::DType::kFloat16, ck::DType::kFloat16),
                 std::pair(ck::DType::kFloat16, ck::DType::kFloat8E4M3),
                 std::pair(ck::DType::kFloat8E4M3, ck::DType::kFloat8E4M3)});
  const int kv_heads = random.of({1, 2, 3, 8});
  const int heads = kv_heads * random.of({1, 2, 3, 4, 7, 8, 32});
  const int requests = random.log_in(1, 200), rows = random.log_in(1, 300);
  ck::AttentionParams params = batch(q_dtype, kv_dtype, random.of({16, 48, 64}), heads, kv_heads,
                                     requests, rows, random.log_in(1, 20000));
  params.total_q -= random.in(0, requests - 1);
  params.total_kv += random.in(0, 1000);
  params.causal = random.in(0, 1) == 1;
  if (random.in(0, 3) == 0) params.window_left = random.in(0, 500);
  if (random.in(0, 3) == 0) params.chunk_size = random.in(1, 500);
  if (random.in(0, 2) == 0) params.max_qo_len = rows + random.in(0, 100);
  if (random.in(0, 2) == 0) params.max_kv_len = random.log_in(1, 30000);
  if (random.in(0, 3) == 0) params.fixed_split_size = random.log_in(64, 4096);
  params.disable_split_kv = random.in(0, 5) == 0;
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

}  // namespace

int main() {
  check_planned_calls();
  check_refused_plans();
  check_promised_size(batch(ck::DType::kFloat16, ck::DType::kFloat8E4M3, 64, 4, 1, 7, 1, 1989 / 7),
                      0);
  check_promised_sizes_of_random_problems();
  std::printf("OK\n");
  return 0;
}
