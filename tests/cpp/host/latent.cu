// Latent attention: splits of requests on devices with little shared memory, tensors that TMA cannot describe, and keys
// by slots.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "checks.h"
#include "fa3/make_tensor_maps.h"
#include "plan/call.h"
#include "plan_checks.h"

namespace {

/// One key head of 576 columns, whose first 512 are the values.
ck::AttentionParams latent(int heads, int requests, int rows, int keys, ck::DType kv_dtype = ck::DType::kFloat16) {
  ck::AttentionParams params = batch(ck::DType::kFloat16, kv_dtype, 576, heads, 1, requests, rows, keys);
  params.head_dim_vo = 512;
  params.v = params.k;
  params.o = {params.o.data, heads * 512, 512};
  params.max_qo_len = rows;
  params.max_kv_len = keys;
  return params;
}

/// The splits that the part with requests of one row gives them.
ck::OwnSplits splits_of_one_row(const ck::AttentionParams& params) {
  ck::Device device;
  require(ck::current_device(&device).ok(), "the stand-in is a device");
  for (const ck::AttentionParams& part : ck::row_ranges(params, ck::Backend::kFa2, device)) {
    if (part.least_rows > 1 || part.most_rows < 1) continue;
    ck::PlanState plan;
    const ck::Status made = ck::make_plan(part, ck::Backend::kFa2, device, {}, &plan);
    require(made.ok(), made.message);
    return plan.own_splits;
  }
  require(false, "a part has requests of one row");
  return {};
}

void check_splits_beside_longer_requests(ck::DType kv_dtype) {
  for (const int kilobytes : {227, 163, 99}) {
    stand_in::device.shared_memory_per_block = kilobytes << 10;
    ck::AttentionParams alone = latent(16, 1, 1, 4096, kv_dtype);
    ck::AttentionParams beside = latent(16, 2, 5, 4096, kv_dtype);
    alone.batch_invariant = beside.batch_invariant = true;
    const ck::OwnSplits a = splits_of_one_row(alone), b = splits_of_one_row(beside);
    require(a.of(1, 4096) > 1 && a.of(1, 4096) == b.of(1, 4096),
            "a request has the same splits whatever is beside it, with " + std::to_string(kilobytes) +
                " KB of shared memory");
  }
  stand_in::device = {};
}

void check_ropes_that_are_broadcast() {
  ck::AttentionParams params = latent(64, 4, 1, 1000);
  ck::Plan plan;
  require(ck::make_plan(params, &plan).ok() && std::string(plan.kernel()).substr(0, 3) == "fa3", "fa3 serves 64 rows");
  params.q_rope = {at(std::uintptr_t(8) << 40), 64, 0};
  const auto reasons = ck::not_supported_reasons(ck::Backend::kFa3, params, 90);
  require(reasons.size() == 1 && reasons[0].find("q_rope has a head stride of 0") == 0,
          "TMA cannot address a stride of 0");
  require(ck::make_plan(params, &plan).ok() && std::string(plan.kernel()).substr(0, 3) == "fa2", "fa2 can");
}

/// In a workspace without room for splits there is no list, which would only order equal tiles.
void check_small_workspaces() {
  ck::Device device;
  require(ck::current_device(&device).ok(), "the stand-in is a device");
  for (std::size_t bytes = 0; bytes <= 64 << 20; bytes = bytes * 2 + 1024) {
    ck::PlanOptions options;
    options.workspace_bytes = bytes;
    ck::PlanState plan;
    const ck::Status made = ck::make_plan(latent(128, 32, 1, 8192), ck::Backend::kFa3, device, options, &plan);
    require(made.ok(), made.message);
    require(plan.source != ck::TileSource::kList || plan.rule.most_splits > 1,
            "a list without splits in " + std::to_string(bytes) + " bytes");
  }
}

void list_slots(ck::AttentionParams& p) {
  p.pages.page_size = 1;
  p.pages.slots_per_page = 64;
  p.pages.num_pages = 100;
  p.pages.k_stride_page = p.pages.v_stride_page = 64 * 576 + 64;  // padded
  p.pages.indices = p.kv_indptr;
  p.pages.table_stride = p.pages.table_width = 1000;
  p.qo_indptr = p.kv_indptr = nullptr;
}

/// fa3 finds a slot of a cache beyond 2^32 bytes, with padded pages, by numbers of 32 bits.
void check_units_of_slots() {
  const std::int64_t slot_bytes = 576 * 2;
  for (const std::int64_t padding : {0, 16, 4096}) {
    for (const int slots : {1, 3, 64}) {
      const std::int64_t page_bytes = slots * slot_bytes + padding;
      ck::PageTable table;
      table.page_size = 1;
      table.slots_per_page = slots;
      table.num_pages = (std::int64_t(40) << 30) / page_bytes;
      ck::fa3::PageUnits units{};
      const ck::Status made = ck::fa3::make_units("k", {nullptr, 0, page_bytes, slot_bytes}, table, &units);
      require(made.ok(), made.message);
      const std::uint32_t last =
          std::uint32_t(table.num_pages - 1) * units.page + std::uint32_t(slots - 1) * units.slot;
      require(std::int64_t(last) * units.bytes == (table.num_pages - 1) * page_bytes + (slots - 1) * slot_bytes,
              "the last slot lies where its page and its place in it say");
    }
  }
  ck::PageTable table;
  table.page_size = 1;
  table.slots_per_page = 64;
  table.num_pages = 1 << 24;
  ck::fa3::PageUnits units{};
  require_refusal(ck::fa3::make_units("k", {nullptr, 0, 64 * slot_bytes + 16, slot_bytes}, table, &units),
                  "fa3 counts places of rows in 32 bits: 16777216 pages of k");
}

/// Keys by slots, and what is asked for beside them, are for latent attention alone.
void check_slots() {
  ck::AttentionParams params = latent(16, 4, 1, 1000),
                      others = batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 16, 1, 4, 1, 1000);
  others.max_qo_len = 1;
  list_slots(params);
  list_slots(others);
  params.max_logits = static_cast<float*>(at(kWorkspace));
  params.flash_mla_lse = true;
  for (const ck::Backend backend : {ck::Backend::kFa2, ck::Backend::kFa3}) {
    auto reasons = ck::not_supported_reasons(backend, others, 90);
    require(reasons.size() == 1 && reasons[0].find("slots_per_page=64 is for the kernels of latent attention") == 0,
            reasons.empty() ? "slots are refused" : reasons[0]);
    reasons = ck::not_supported_reasons(backend, params, 90);
    require(reasons.empty(), reasons.empty() ? "" : reasons[0]);
  }
  ck::Plan plan;
  require(ck::make_plan(params, &plan).ok() && std::string(plan.kernel()).substr(0, 3) == "fa3",
          "fa3 takes keys by slots however few rows there are");
}

/// Keys of 512 columns without others for the position: by slots the kernels of 576 read them, also where there is one
/// of head dimension 512, which serves pages and tensors.
void check_narrow_slots() {
  const auto narrow = [](ck::DType kv_dtype, int heads) {
    ck::AttentionParams params = latent(heads, 4, 1, 1000, kv_dtype);
    params.head_dim_qk = 512;
    params.q = {params.q.data, heads * 512, 512};
    params.k = params.v = {params.k.data, 512, 512};
    list_slots(params);
    params.pages.k_stride_page = params.pages.v_stride_page = 64 * 512 + 64;
    return params;
  };
  for (const ck::DType kv_dtype : {ck::DType::kFloat16, ck::DType::kFloat8E4M3}) {
    for (const int heads : {1, 16, 128}) {
      for (const auto& [capability, kilobytes] : {std::pair(80, 163), std::pair(86, 99), std::pair(90, 227)}) {
        if (capability < ck::list_kernels().front().min_compute_capability) continue;  // this build has none for it
        stand_in::device.compute_capability = capability;
        stand_in::device.shared_memory_per_block = kilobytes << 10;
        const ck::AttentionParams params = narrow(kv_dtype, heads);
        stand_in::launches.clear();
        const ck::Status status = ck::attention(params, at(kWorkspace), 1 << 30, nullptr, ck::Backend::kFa2);
        require(status.ok(), status.message);
        require(last_attention().head_dim_qk == 512 && std::any_of(stand_in::launches.begin(), stand_in::launches.end(),
                                                                   [](const auto& one) { return one.is("BySlots"); }),
                "fa2's kernel of slots, which is told that there are 512 columns");
      }
    }
  }
  stand_in::device = {};
  ck::AttentionParams params = narrow(ck::DType::kFloat16, 16);
  ck::Plan plan;
  require(ck::make_plan(params, &plan, ck::Backend::kFa2).ok() && plan.kernel() == std::string("fa2_float16_hd576_512"),
          "the kernel of 576 columns");
  ck::AttentionParams dense = params;
  dense.pages.slots_per_page = 0;
  const ck::Status made = ck::make_plan(dense, &plan, ck::Backend::kFa2);
  require(!made.ok() || plan.kernel() == std::string("fa2_float16_hd512"), "pages have a kernel of 512 columns");
  const auto refused = [](const ck::AttentionParams& params, const std::string& start) {
    const auto reasons = ck::not_supported_reasons(ck::Backend::kFa2, params, 90);
    require(reasons.size() == 1 && reasons[0].find(start) == 0, reasons.empty() ? "it is refused" : reasons[0]);
  };
  ck::AttentionParams changed = params;
  changed.v.data = at(std::uintptr_t(6) << 40);
  refused(changed, "Values of 512 columns beside latent keys must be the first columns of the keys");
  changed = params;
  changed.k_rope = {at(std::uintptr_t(8) << 40), 64, 64};
  refused(changed, "k_rope is given with head_dim_qk=512");
  changed = params;
  changed.head_dim_qk = 448;
  refused(changed, "head_dim_qk=448 and head_dim_vo=512 are not supported");
}

/// FlashMLA's LSE of pages is for latent attention alone, too, and of no matter without an LSE.
void check_flash_mla_lse() {
  const auto with_lse = [](ck::AttentionParams params) {
    params.flash_mla_lse = true;
    params.lse = static_cast<float*>(at(kWorkspace));
    return params;
  };
  for (const ck::DType kv_dtype : {ck::DType::kFloat16, ck::DType::kFloat8E4M3}) {
    ck::Plan plan;
    const ck::Status made = ck::make_plan(with_lse(latent(16, 4, 1, 1000, kv_dtype)), &plan);
    require(made.ok(), made.message);
  }
  ck::AttentionParams others = with_lse(batch(ck::DType::kFloat16, ck::DType::kFloat16, 64, 16, 1, 4, 1, 1000));
  const auto reasons = ck::not_supported_reasons(ck::Backend::kFa2, others, 90);
  require(reasons.size() == 1 && reasons[0].find("flash_mla_lse is for the kernels of latent attention") == 0,
          reasons.empty() ? "other kernels refuse it" : reasons[0]);
  others.lse = nullptr;
  require(ck::not_supported_reasons(ck::Backend::kFa2, others, 90).empty(), "no LSE is FlashMLA's, too");
}

/// fa2 has separate kernels for keys by slots, which divide entries of the table by the slots of a page.
void check_kernels_of_slots() {
  for (const ck::DType kv_dtype : {ck::DType::kFloat16, ck::DType::kFloat8E4M3}) {
    for (const int heads : {16, 128}) {
      for (const bool by_slots : {false, true}) {
        ck::AttentionParams params = latent(heads, 4, 1, 1000, kv_dtype);
        list_slots(params);
        if (!by_slots) params.pages.slots_per_page = 0;
        stand_in::launches.clear();
        const ck::Status status = ck::attention(params, at(kWorkspace), 1 << 30, nullptr, ck::Backend::kFa2);
        require(status.ok(), status.message);
        const auto launch = std::find_if(stand_in::launches.begin(), stand_in::launches.end(),
                                         [](const auto& one) { return one.is("attention_kernel"); });
        require(launch != stand_in::launches.end() && launch->is("BySlots") == by_slots,
                "a kernel for slots, or pages");
        const auto kernel_params = launch->argument<ck::fa2::KernelParams>();
        require(kernel_params.page_size.divisor == (by_slots ? 64 : 1) && kernel_params.num_pages == 100,
                "entries are slots, or pages");
      }
    }
  }
}

/// What fa3 plans for rows with lists of slots, with or without lengths.
ck::PlanState plan_of_rows(ck::AttentionParams params, bool has_lengths,
                           std::size_t workspace_bytes = std::numeric_limits<std::size_t>::max()) {
  list_slots(params);
  params.pages.table_stride = params.pages.table_width = params.max_kv_len;
  if (has_lengths) params.seqused_k = static_cast<const std::int32_t*>(at(kWorkspace));
  ck::Device device;
  require(ck::current_device(&device).ok(), "the stand-in is a device");
  ck::PlanOptions options;
  options.workspace_bytes = workspace_bytes;
  ck::PlanState plan;
  const ck::Status made = ck::make_plan(params, ck::Backend::kFa3, device, options, &plan);
  require(made.ok(), made.message);
  return plan;
}

/// Rows that have as many splits each need no list. Its kernel takes longer than it saves for a few, and nothing is
/// saved where all are as long; else lengths that only the device knows decide.
void check_rows_without_a_list() {
  const auto splits = [](const ck::PlanState& plan) {
    require((plan.source == ck::TileSource::kList) == (plan.equal_splits == 0), "a list, or splits of each row");
    return plan.equal_splits;
  };
  for (const bool has_lengths : {false, true}) {
    require(splits(plan_of_rows(latent(64, 1, 1, 2048), has_lengths)) > 4, "one row is split");
    require(splits(plan_of_rows(latent(64, 4, 1, 2048), has_lengths)) > 4, "a few are");
    require(splits(plan_of_rows(latent(64, 264, 1, 2048), has_lengths)) == (has_lengths ? 0 : 1), "many are not");
    require(splits(plan_of_rows(latent(64, 4096, 1, 2048), has_lengths)) == (has_lengths ? 0 : 1), "nor very many");
    ck::AttentionParams params = latent(64, 8, 1, 2048);
    params.num_splits = 3;
    require(splits(plan_of_rows(params, has_lengths)) == 3, "as many as the caller asks for");
  }
  // As many as there is room for, whatever the caller asks for.
  for (const int rows : {16, 300, 1024}) {
    for (const int splits : {0, 2, 32, 500}) {
      for (const std::size_t bytes : {std::size_t(16) << 20, std::size_t(64) << 20}) {
        ck::AttentionParams asked = latent(128, rows, 1, 2048);
        asked.num_splits = splits;
        const ck::PlanState plan = plan_of_rows(asked, false, bytes);
        require(plan.layout.bytes() <= std::min<std::size_t>(bytes, 44 << 20), "no more memory than others");
        require(rows > 16 || plan.partial_rows >= 2 * rows, "few rows are split in any case");
      }
    }
  }
  ck::AttentionParams params = latent(16, 4, 1, 5000);
  params.batch_invariant = true;
  require(splits(plan_of_rows(params, true)) == 0, "splits that follow from lengths have a list");
  const ck::PlanState alike = plan_of_rows(params, false);
  params.batch_size = 300;
  params.total_q = 300;
  require(splits(alike) > 1 && splits(alike) == splits(plan_of_rows(params, false)), "whatever rows there are beside");
  params = latent(16, 4, 1, 5000);
  params.batch_invariant = true;
  list_slots(params);
  params.pages.table_stride = params.pages.table_width = 5000;
  require(ck::fits_plan(alike, params, false).ok(), "the same rows, all entries of which count");
  params.seqused_k = static_cast<const std::int32_t*>(at(kWorkspace));
  require_refusal(ck::fits_plan(alike, params, false),
                  "Lengths of lists are given, but the plan, with batch_invariant");
  // A plan is for rows with lists, or for requests without.
  list_slots(params = latent(64, 4, 1, 1000));
  const ck::PlanState plan = plan_of_rows(latent(64, 4, 1, 1000), false);
  require(ck::fits_plan(plan, params, false).ok(), "the same rows");
  params.pages.slots_per_page = 0;
  require_refusal(ck::fits_plan(plan, params, false), "slots_per_page=0, but the plan is for rows with lists of slots");
}

}  // namespace

void check_latent_attention() {
  check_small_workspaces();
  check_units_of_slots();
  const auto& kernels = ck::list_kernels();
  const bool built =
      std::any_of(kernels.begin(), kernels.end(), [](const auto& kernel) { return kernel.head_dim_qk == 576; });
  if (!built) return;
  check_splits_beside_longer_requests(ck::DType::kFloat16);
  check_splits_beside_longer_requests(ck::DType::kFloat8E4M3);
  check_ropes_that_are_broadcast();
  check_slots();
  check_narrow_slots();
  check_flash_mla_lse();
  check_kernels_of_slots();
  check_rows_without_a_list();
}
