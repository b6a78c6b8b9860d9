// What the checks of host code have in common.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cutlass_kernels/attention.h"
#include "fa2/params.h"
#include "fa3/params.h"
#include "plan/plan.h"
#include "stand_in_cuda.h"

namespace ck = cutlass_kernels;

inline void require(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

inline void require_refusal(const ck::Status& status, const std::string& fragment) {
  require(status.code == ck::StatusCode::kInvalidArgument && status.message.find(fragment) != std::string::npos,
          "a refusal that says '" + fragment + "', not '" + status.message + "'");
}

inline constexpr std::uintptr_t kWorkspace = std::uintptr_t(1) << 40;  // addresses are never read
inline void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

/// A batch of requests of equal lengths with all its tensors.
inline ck::AttentionParams batch(ck::DType q_dtype, ck::DType kv_dtype, int head_dim, int heads, int kv_heads,
                                 int requests, int rows, int keys) {
  ck::AttentionParams params;
  params.q_dtype = params.o_dtype = q_dtype;
  params.kv_dtype = kv_dtype;
  if (kv_dtype == q_dtype && q_dtype == ck::DType::kFloat8E4M3) params.o_dtype = ck::DType::kFloat16;
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

/// The parameters of the attention kernel that was enqueued last.
inline ck::LaunchParams last_attention() {
  for (auto launch = stand_in::launches.rbegin(); launch != stand_in::launches.rend(); ++launch) {
    if (!launch->is("attention_kernel")) continue;
    return launch->is("fa3") ? launch->argument<ck::fa3::KernelParams>().attention
                             : launch->argument<ck::fa2::KernelParams>().attention;
  }
  require(false, "no attention kernel was enqueued");
  return {};
}

/// Keys and values of head dimension 64 in pages of 16.
inline void put_into_pages(ck::AttentionParams* params) {
  ck::PageTable& pages = params->pages;
  pages.page_size = 16;
  pages.num_pages = pages.num_indices = 5000;
  pages.k_stride_page = pages.v_stride_page = std::int64_t(16) * params->num_kv_heads * 64;
  pages.indices = pages.last_page_len = params->kv_indptr;
}

inline std::string describe(const ck::AttentionParams& p) {
  return std::string(ck::to_string(p.q_dtype)) + "/" + ck::to_string(p.kv_dtype) + ", hd" +
         std::to_string(p.head_dim_qk) + ", " + std::to_string(p.num_qo_heads) + "/" + std::to_string(p.num_kv_heads) +
         " heads, " + std::to_string(p.batch_size) + " requests, total_q=" + std::to_string(p.total_q) +
         ", total_kv=" + std::to_string(p.total_kv);
}

inline ck::WorkspaceLayout layout_of(const ck::AttentionParams& params) {
  ck::Device device;
  ck::PlanState plan;
  require(ck::current_device(&device).ok() && ck::make_plan(params, ck::Backend::kAuto, device, {}, &plan).ok(),
          "there is a plan");
  return plan.layout;
}

/// refusals.cu
void check_refusals();
