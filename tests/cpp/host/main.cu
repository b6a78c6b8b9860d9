// What calls of the C++ API enqueue, and where in the workspace: seen through a stand-in for the CUDA runtime, so on any
// machine. Exit status 0 if all is as documented.
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
#include "registry.h"
#include "schedule.h"
#include "stand_in_cuda.h"

namespace ck = cutlass_kernels;

namespace {

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
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

/// Bytes [begin, end) that a kernel reads or writes in the workspace, and their name.
struct Range {
  std::uintptr_t begin, end;
  std::string name;
};

std::vector<Range> ranges_of(const ck::AttentionParams& params) {
  const ck::Schedule& s = params.schedule;
  std::vector<Range> ranges;
  const auto add = [&](const void* begin, std::size_t bytes, const char* name) {
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    if (begin != nullptr && bytes > 0) ranges.push_back({address, address + bytes, name});
  };
  add(s.next_tile, 2 * sizeof(std::int32_t), "tile counters");
  add(s.work_list, s.capacity * sizeof(ck::WorkItem), "tile list");
  add(s.split_list, s.split_capacity * sizeof(ck::SplitTile), "split tiles");
  add(s.merge_counters, s.num_merge_counters * sizeof(std::int32_t), "merge counters");
  add(s.partial_o, s.partial_bytes, "partial results");
  add(s.mask_extents, s.capacity * sizeof(ck::MaskExtent), "mask extents");
  return ranges;
}

/// Everything inside [kWorkspace, kWorkspace + bytes), nothing on top of anything else.
void check_ranges(const ck::AttentionParams& params, std::size_t bytes, const std::string& what) {
  std::vector<Range> ranges = ranges_of(params);
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    require(kWorkspace <= ranges[i].begin && ranges[i].end <= kWorkspace + bytes,
            what + ": " + ranges[i].name + " lies outside the workspace");
    if (i == 0) continue;
    require(ranges[i - 1].end <= ranges[i].begin,
            what + ": " + ranges[i].name + " overlaps " + ranges[i - 1].name);
  }
}

/// The parameters of the attention kernel that was enqueued last.
ck::AttentionParams last_attention() {
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

/// make_schedule() and attention() share a workspace: the list is still there when the kernel reads it.
void check_schedule_and_attention_share_a_workspace() {
  ck::AttentionParams params =
      batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 3, 40, 20000);
  const std::size_t bytes = ck::workspace_size(params);
  ck::Status status = ck::make_schedule(params, at(kWorkspace), bytes, nullptr, &params.schedule);
  require(status.ok(), status.message);
  require(params.schedule.split_capacity > 0, "the problem is one whose keys are split");
  status = ck::attention(params, at(kWorkspace), bytes, nullptr);
  require(status.ok(), status.message);
  check_ranges(last_attention(), bytes, "a schedule in the workspace of attention()");
}

/// A workspace of exactly the promised size is enough; with a byte less the call is refused, or did not need it.
void check_promised_size(const ck::AttentionParams& params) {
  const std::size_t bytes = ck::workspace_size(params);
  for (const std::size_t given : {bytes, bytes == 0 ? bytes : bytes - 1}) {
    stand_in::launches.clear();
    const ck::Status status = ck::attention(params, at(kWorkspace), given, nullptr);
    const std::string what = describe(params) + " in " + std::to_string(given) + " of " +
                             std::to_string(bytes) + " bytes";
    if (status.code == ck::StatusCode::kUnsupported) return;  // e4m3 queries on Ampere
    if (params.fixed_split_size > 0 && status.code == ck::StatusCode::kInvalidArgument)
      return;  // too many tiles
    if (given < bytes && status.code == ck::StatusCode::kWorkspaceTooSmall) return;
    require(status.ok(), what + ": " + status.message);
    check_ranges(last_attention(), given, what);
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
    check_promised_size(random_problem(random));
  }
  stand_in::device = {};
}

}  // namespace

int main() {
  check_schedule_and_attention_share_a_workspace();
  check_promised_size(batch(ck::DType::kFloat16, ck::DType::kFloat8E4M3, 64, 4, 1, 7, 1, 1989 / 7));
  check_promised_sizes_of_random_problems();
  std::printf("OK\n");
  return 0;
}
