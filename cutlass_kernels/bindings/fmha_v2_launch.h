// A fused prefill: a batch whose offsets and block tables kernels read on the device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "arguments.h"
#include "cutlass_kernels/attention.h"
#include "enqueue.h"
#include "plan/plan.h"
#include "registry/validate.h"

namespace cutlass_kernels {

/// All of a call but addresses. Tensors are views: their strides, in elements, take the place of those that a layout
/// means.
class FmhaV2Launch {
 public:
  FmhaV2Launch(const std::string& backend, const std::string& dtype, const std::string& o_dtype,
               int batch_size, int num_qo_heads, int num_kv_heads, int head_dim_qk, int head_dim_vo,
               std::int64_t total_q, std::int64_t total_kv, std::int64_t max_q_len,
               std::int64_t max_kv_len, std::int64_t q_st, std::int64_t q_sh, std::int64_t k_st,
               std::int64_t k_sh, std::int64_t v_st, std::int64_t v_sh, std::int64_t o_st,
               std::int64_t o_sh)
      : backend_(backend_of(backend)) {
    params_.q_dtype = params_.kv_dtype = dtype_of(dtype);
    params_.o_dtype = dtype_of(o_dtype);
    params_.batch_size = batch_size;
    params_.num_qo_heads = num_qo_heads;
    params_.num_kv_heads = num_kv_heads;
    params_.head_dim_qk = head_dim_qk;
    params_.head_dim_vo = head_dim_vo;
    params_.total_q = total_q;
    params_.total_kv = total_kv;
    params_.max_qo_len = limited(max_q_len);
    params_.max_kv_len = limited(max_kv_len);
    params_.q = {nullptr, q_st, q_sh};
    params_.k = {nullptr, k_st, k_sh};
    params_.v = {nullptr, v_st, v_sh};
    params_.o = {nullptr, o_st, o_sh};
  }

  // Block tables: rows of `width` entries, `stride` apart. Entries of v begin v_entries behind those of k; the page
  // that they call v_offset is the first of v.
  void set_pages(int page_size, std::int64_t num_pages, std::int64_t k_stride_page,
                 std::int64_t v_stride_page, std::int64_t stride, int width, std::int64_t v_entries,
                 std::int64_t v_offset) {
    PageTable& pages = params_.pages;
    pages.page_size = page_size;
    pages.num_pages = num_pages;
    pages.k_stride_page = k_stride_page;
    pages.v_stride_page = v_stride_page;
    pages.table_stride = stride;
    pages.table_width = width;
    pages.v_offset = limited(v_offset);
    v_entries_ = v_entries;
  }

  // Addresses of 0 stand for what is not there.
  void set_options(bool causal, std::int64_t window_left, std::int64_t chunk_size, float sm_scale,
                   float soft_cap, Address alibi_slopes, float v_scale, Address logits_scale,
                   Address output_scale, float skip_softmax_factor) {
    params_.causal = causal;
    params_.window_left = limited(window_left);
    params_.chunk_size = limited(chunk_size);
    params_.sm_scale = sm_scale;
    params_.logits_soft_cap = soft_cap;
    params_.alibi = {pointer<const float>(alibi_slopes), /*relative=*/false, /*after_cap=*/true};
    params_.v_scale = v_scale;
    params_.logits_scale.data = pointer<const float>(logits_scale);
    params_.output_scale.data = pointer<const float>(output_scale);
    params_.skip_softmax_factor = skip_softmax_factor;
  }

  // Bytes of the workspace that runs need, with all other options set, on the current device.
  std::size_t workspace_bytes(bool with_stats) const {
    AttentionParams params = params_;
    // Only whether there are any counts.
    const std::int32_t indptr = 0;
    float stats = 0.0f;
    params.qo_indptr = params.kv_indptr = &indptr;
    if (with_stats) params.stats = &stats;
    std::string fault = contradiction(params, /*with_tensors=*/false);
    if (!fault.empty()) raise_unless_ok(Status::invalid(std::move(fault)));
    Device device;
    raise_unless_ok(current_device(&device));
    PlanOptions options;
    options.call_counters = true;
    PlanState plan;
    raise_unless_ok(make_plan(params, backend_, device, options, &plan));
    return plan.layout.bytes();
  }

  void run(Address q, Address k, Address v, Address o, Address sinks, Address stats,
           Address qo_indptr, Address kv_indptr, Address tables, Address counters, Address stream,
           Address workspace, std::size_t workspace_bytes) const {
    AttentionParams params = params_;
    params.q.data = pointer<void>(q);
    params.k.data = pointer<void>(k);
    params.v.data = pointer<void>(v);
    params.o.data = pointer<void>(o);
    params.sinks = pointer<const float>(sinks);
    params.stats = pointer<float>(stats);
    params.qo_indptr = pointer<const std::int32_t>(qo_indptr);
    params.kv_indptr = pointer<const std::int32_t>(kv_indptr);
    if (params.pages.page_size > 0) {
      params.pages.indices = pointer<const std::int32_t>(tables);
      if (v_entries_ > 0) params.pages.v_indices = params.pages.indices + v_entries_;
    }
    // The workspace is this call's own.
    enqueue([&] {
      return run_once(params, backend_, pointer<void>(workspace), workspace_bytes,
                      pointer<std::int32_t>(counters), pointer<CUstream_st>(stream));
    });
  }

 private:
  // More than there can be is no limit.
  static std::int32_t limited(std::int64_t value) {
    return std::int32_t(
        std::min<std::int64_t>(value, std::numeric_limits<std::int32_t>::max() - 1023));
  }

  Backend backend_;
  AttentionParams params_;
  std::int64_t v_entries_ = 0;
};

}  // namespace cutlass_kernels
