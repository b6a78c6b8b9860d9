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

}  // namespace

int main() {
  check_schedule_and_attention_share_a_workspace();
  std::printf("OK\n");
  return 0;
}
