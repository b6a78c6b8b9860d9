// Which backend kAuto gives a problem to that both serve.
#include "plan_checks.h"

#include "checks.h"

/// 8-bit keys in pages below 16-bit queries: fa2 reads those of few rows, as the Python package says.
void check_backends_of_8_bit_pages() {
  ck::Device device;
  require(ck::current_device(&device).ok(), "the stand-in is a device");
  const auto backend = [&](int rows, bool alone) {
    ck::AttentionParams params = batch(ck::DType::kFloat16, ck::DType::kFloat8E4M3, 64, 8, 2, 4, rows, 1000);
    put_into_pages(&params);
    params.disable_split_kv = alone;
    params.least_rows = rows;
    ck::PlanState plan;
    const ck::Status made = ck::make_plan(params, ck::Backend::kAuto, device, {}, &plan);
    require(made.ok(), made.message);
    return plan.kernel->info.backend;
  };
  require(backend(1, false) == ck::Backend::kFa2, "fa2 decodes");
  require(backend(8, false) == ck::Backend::kFa2, "32 rows of four heads are few");
  require(backend(9, false) == ck::Backend::kFa3, "more are not");
  require(backend(100, true) == ck::Backend::kFa2, "alone: fa2, however many");
}
