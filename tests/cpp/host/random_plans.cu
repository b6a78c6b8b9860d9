// Plans of any problem that the API can express. Most sizes are small, where divisions meet zero; some are as large as
// their types allow.
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "checks.h"
#include "fa2/choose_tile.h"
#include "fa3/choose_tile.h"
#include "plan/estimate.h"
#include "plan_checks.h"
#include "random.h"
#include "registry/registry.h"
#include "registry/validate.h"

namespace {

constexpr int kMost = std::numeric_limits<std::int32_t>::max();

/// A number near the ends of its range, a small one, or any.
int any_size(Random& random, int least) {
  switch (random.in(0, 9)) {
    case 0:
      return least;
    case 1:
      return kMost - random.in(0, 2000);
    case 2:
      return random.log_in(1, kMost - 1);
    case 3:
      return (1 << 30) + random.in(-3, 3);
    default:
      return random.in(0, 9);
  }
}

ck::AttentionParams any_problem(Random& random) {
  const int kv_heads = random.of({1, 2, 3, 8}), requests = random.log_in(1, 300);
  const auto dtype = random.of({ck::DType::kFloat16, ck::DType::kFloat16, ck::DType::kFloat8E4M3});
  const auto kv_dtype = random.in(0, 3) == 0 ? ck::DType::kFloat8E4M3 : dtype;
  ck::AttentionParams params =
      batch(dtype, kv_dtype, random.of({16, 64, 64, 128, 256, 512}), kv_heads * random.of({1, 2, 7, 8, 32}), kv_heads,
            requests, 1, random.log_in(1, 5000));
  if (random.in(0, 7) == 0) {  // latent attention
    params.head_dim_qk = 576;
    params.head_dim_vo = 512;
    params.num_kv_heads = 1;
  }
  params.total_q = any_size(random, -1);
  if (random.in(0, 1) == 0) params.total_q = random.in(0, 2 * requests);
  if (random.in(0, 2) == 0) params.total_kv = any_size(random, -1);
  params.causal = random.in(0, 1) == 1;
  params.window_left = random.in(0, 2) == 0 ? any_size(random, -1) : -1;
  params.window_right = random.in(0, 3) == 0 ? any_size(random, -1) : -1;
  if (random.in(0, 2) == 0) params.chunk_size = any_size(random, 0);
  if (random.in(0, 1) == 0) params.max_qo_len = any_size(random, 0);
  if (random.in(0, 1) == 0) params.max_kv_len = any_size(random, 0);
  if (random.in(0, 3) == 0) params.fixed_split_size = any_size(random, -7);
  if (random.in(0, 3) == 0) params.num_splits = any_size(random, 0);
  params.batch_invariant = random.in(0, 3) == 0;
  params.disable_split_kv = random.in(0, 5) == 0;
  if (params.batch_invariant && random.in(0, 3) == 0) {
    params.least_rows = any_size(random, 0);
    params.most_rows = any_size(random, 0);
  }
  if (random.in(0, 2) == 0) {
    ck::PageTable& pages = params.pages;
    pages.page_size = random.of({1, 16, 64, any_size(random, 0)});
    pages.num_pages = any_size(random, 0);
    pages.num_indices = any_size(random, -1);
    pages.k_stride_page = pages.v_stride_page = std::int64_t(16) * kv_heads * params.head_dim_qk;
    pages.indices = pages.last_page_len = params.kv_indptr;
    if (random.in(0, 2) == 0) pages.table_stride = pages.table_width = any_size(random, 0);
  } else if (random.in(0, 3) == 0) {
    params.kv_indptr = nullptr;
    params.kv_stride_request = any_size(random, -1);
  }
  if (random.in(0, 4) == 0) params.qo_indptr = nullptr;
  if (random.in(0, 4) == 0) params.seqused_k = params.kv_indptr;
  if (random.in(0, 4) == 0) {
    params.mask.words = static_cast<const std::uint32_t*>(at(std::uintptr_t(8) << 40));
    params.mask.indptr = static_cast<const std::int32_t*>(at(std::uintptr_t(9) << 40));
    params.mask.num_words = std::int64_t(1) << 30;
  }
  return params;
}

/// Tiles as a kernel's table chooses them, compiled here and so under this program's sanitizer.
template <int HeadDim>
void choose_tiles(const ck::AttentionParams& params, const ck::Device& device) {
  ck::fa2::candidates<HeadDim, ck::fa2::AmpereTiles::kEverywhere>(params, device);
  ck::fa3::candidates<HeadDim, HeadDim>(params, device);
}

/// All candidates have a time that can be compared.
void check_estimates(const ck::AttentionParams& params, ck::Backend backend, const ck::Device& device) {
  if (!ck::contradiction(params, /*with_tensors=*/false).empty() || params.total_q == 0) return;
  std::vector<std::string> reasons;
  const ck::KernelEntry* kernel = ck::choose(backend, params, device.compute_capability, &reasons);
  if (kernel == nullptr) return;
  for (const bool is_kept : {false, true}) {
    std::vector<ck::Choice> all;
    ck::fastest(*kernel, params, device, is_kept, &all);
    require(!all.empty(), describe(params) + ": no candidates");
    for (const ck::Choice& choice : all) {
      require(std::isfinite(choice.time) && choice.time > 0 && choice.splits > 0,
              describe(params) + ": " + choice.candidate.name + " takes " + std::to_string(choice.time) + " us");
    }
  }
}

}  // namespace

void check_random_plans() {
  Random random(3);
  for (int i = 0; i < 30000; ++i) {
    stand_in::device.compute_capability = random.of({80, 86, 90});
    stand_in::device.multiprocessors = random.of({1, 20, 78, 108, 132, 142});
    ck::Device device;
    require(ck::current_device(&device).ok(), "the stand-in is a device");
    const ck::AttentionParams params = any_problem(random);
    ck::Plan plan;
    if (ck::make_plan(params, &plan).ok()) {
      // A call with batch_invariant is planned in parts, each of which takes less.
      require(params.batch_invariant || plan.workspace_size() <= ck::workspace_size(params),
              describe(params) + ": the plan takes more than workspace_size() says");
      choose_tiles<64>(params, device);
      choose_tiles<128>(params, device);
      choose_tiles<256>(params, device);
    }
    for (const ck::Backend backend : {ck::Backend::kAuto, ck::Backend::kFa2, ck::Backend::kFa3}) {
      ck::workspace_size(params, backend);
      check_estimates(params, backend, device);
    }
  }
  stand_in::device = {};
}
