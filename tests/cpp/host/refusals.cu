// What plans and calls refuse: other sizes than were planned, and what cannot be enqueued.
#include <cstdint>
#include <string>
#include <utility>

#include "checks.h"
#include "cuda_failure.h"
#include "device.h"

namespace {

/// What a plan was not made for is refused, not computed in part. A plan that cannot be made leaves the one before.
void check_refused_plans() {
  ck::AttentionParams params = batch(ck::DType::kFloat16, ck::DType::kFloat8E4M3, 64, 8, 2, 4, 40, 20000);
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

  ck::AttentionParams paged = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 4, 40, 20000);
  paged.pages.page_size = 16;
  paged.pages.num_pages = 10000;
  paged.pages.k_stride_page = paged.pages.v_stride_page = 16 * 2 * 64;
  require(ck::make_plan(paged, &plan).ok(), "pages have a plan");
  require_refusal(ck::make_schedule(plan, paged, at(kWorkspace), 1 << 30, nullptr), "num_indices is not set");
}

/// The other sizes, types and index vectors that a plan is for, each alone.
void check_misfits() {
  const ck::AttentionParams listed = batch(ck::DType::kFloat16, ck::DType::kFloat8E4M3, 64, 8, 2, 4, 40, 20000);
  ck::AttentionParams unlisted = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 4, 40, 20000);
  unlisted.max_qo_len = 40;
  ck::AttentionParams paged = unlisted;
  paged.pages.page_size = 16;
  paged.pages.num_pages = paged.pages.num_indices = 10000;
  paged.pages.k_stride_page = paged.pages.v_stride_page = 16 * 2 * 64;
  paged.pages.indices = paged.pages.last_page_len = paged.kv_indptr;
  const auto refused = [](const ck::AttentionParams& params, const auto& change, const char* fragment) {
    ck::Plan plan;
    require(ck::make_plan(params, &plan).ok(), "there is a plan");
    ck::AttentionParams other = params;
    change(other);
    stand_in::launches.clear();
    require_refusal(ck::make_schedule(plan, other, at(kWorkspace), 1 << 30, nullptr), fragment);
    require_refusal(ck::attention(plan, other, at(kWorkspace), 1 << 30, nullptr), fragment);
    require(stand_in::launches.empty(), "what is refused enqueues nothing");
  };
  refused(
      listed, [](auto& p) { p.q_dtype = p.o_dtype = ck::DType::kBFloat16; },
      "q_dtype=bfloat16, but the plan is for float16");
  refused(
      listed, [](auto& p) { p.kv_dtype = ck::DType::kFloat8E5M2; },
      "kv_dtype=float8_e5m2, but the plan is for float8_e4m3fn");
  refused(listed, [](auto& p) { p.num_qo_heads = 4; }, "num_qo_heads=4, but the plan is for 8");
  refused(listed, [](auto& p) { p.head_dim_qk = 48; }, "head_dim_qk=48, but the plan is for 64");
  refused(listed, [](auto& p) { p.head_dim_vo = 48; }, "head_dim_vo=48, but the plan is for 64");
  refused(listed, [](auto& p) { p.batch_size = 5; }, "batch_size=5, but the plan is for 4");
  refused(unlisted, [](auto& p) { p.total_q = 159; }, "total_q=159, but the plan is for 160");
  refused(paged, [](auto& p) { p.pages.page_size = 8; }, "page_size=8, but the plan is for 16");
  refused(
      paged, [](auto& p) { p.pages.table_stride = p.pages.table_width = 2500; },
      "pages.table_stride is given, but the plan is for a problem without");

  // What a list is made from.
  ck::Plan plan;
  require(ck::make_plan(listed, &plan).ok() && plan.needs_schedule(), "a batch has a list");
  for (const auto& [indptr, fragment] : {std::pair(&ck::AttentionParams::qo_indptr, "qo_indptr is null"),
                                         std::pair(&ck::AttentionParams::kv_indptr, "kv_indptr is null")}) {
    ck::AttentionParams other = listed;
    other.*indptr = nullptr;
    require_refusal(ck::make_schedule(plan, other, at(kWorkspace), 1 << 30, nullptr), fragment);
  }
  paged.max_qo_len = 0;
  require(ck::make_plan(paged, &plan).ok() && plan.needs_schedule(), "pages have a list");
  for (auto vector : {&ck::PageTable::indices, &ck::PageTable::last_page_len}) {
    ck::AttentionParams other = paged;
    other.pages.*vector = nullptr;
    require_refusal(ck::make_schedule(plan, other, at(kWorkspace), 1 << 30, nullptr),
                    "indices or last_page_len is null");
  }
  unlisted.max_qo_len = 0;
  unlisted.batch_size = 1;
  unlisted.total_q = 1;
  require(ck::make_plan(unlisted, &plan).ok() && layout_of(unlisted).partial_o.bytes > 0,
          "the keys of one row are split");
  unlisted.stats = static_cast<float*>(at(std::uintptr_t(10) << 40));
  require_refusal(ck::attention(plan, unlisted, at(kWorkspace), 1 << 30, nullptr), "stats are not combined");
}

/// Without rows there is nothing to plan, and nothing to enqueue; and more tiles than are counted are refused.
void check_no_rows_and_too_many() {
  ck::AttentionParams params = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 4, 40, 20000);
  const auto enqueues_nothing = [](const ck::Plan& plan, const ck::AttentionParams& empty) {
    stand_in::launches.clear();
    ck::Status status = ck::make_schedule(plan, empty, at(kWorkspace), 1 << 30, nullptr);
    require(status.ok(), status.message);
    const std::size_t listed = stand_in::launches.size();
    status = ck::attention(plan, empty, at(kWorkspace), 1 << 30, nullptr);
    require(status.ok() && stand_in::launches.size() == listed, "no rows, no attention");
    return listed;
  };
  ck::Plan plan;
  require(ck::make_plan(params, &plan).ok(), "there is a plan");
  params.total_q = 0;
  require(enqueues_nothing(plan, params) == 1, "a list of no tiles is a list");
  require(ck::make_plan(params, &plan).ok() && plan.workspace_size() == 0 && std::string(plan.kernel()).empty(),
          "no rows need nothing");
  require(enqueues_nothing(plan, params) == 0, "no rows, no list");
  require(ck::attention(params, at(kWorkspace), 1 << 20, nullptr).ok(), "nor does one call");

  params.total_q = (std::int64_t(1) << 31) - 1024;
  params.num_qo_heads = 2048;
  require_refusal(ck::make_plan(params, &plan), "tiles, more than the");
}

/// A driver that is older than the CUDA runtime, which is linked statically.
void check_old_driver() {
  const ck::AttentionParams params = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 8, 2, 4, 40, 20000);
  ck::Plan plan;
  stand_in::driver_version = 12080;
  const ck::Status status = ck::make_plan(params, &plan);
  require(status.code == ck::StatusCode::kCudaError &&
              status.message.find("driver supports CUDA 12.8") != std::string::npos &&
              status.message.find("built with CUDA 13.0") != std::string::npos,
          status.message);
  const auto launch = [](cudaError_t error) { return ck::cuda_failure("Launching a kernel", error).message; };
  require(launch(cudaErrorInsufficientDriver) == status.message, "every call says the same");
  stand_in::driver_version = 13000;
  require(launch(cudaErrorInvalidValue).find("Launching a kernel failed: ") == 0, "other errors");
  require(ck::driver_problem().empty() && ck::make_plan(params, &plan).ok(), "the driver serves");
}

}  // namespace

void check_refusals() {
  check_refused_plans();
  check_misfits();
  check_no_rows_and_too_many();
  check_old_driver();
}
