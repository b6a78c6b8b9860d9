// The fused prefill, described as TensorRT-LLM's plugins describe it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cutlass_kernels/attention.h"
#include "cutlass_kernels/fmha_v2.h"
#include "support.h"

/// The fused prefill of two requests, in a layout.
inline ck::FmhaV2Params fused(ck::FmhaV2Layout layout) {
  ck::FmhaV2Params params;
  params.layout = layout;
  params.batch_size = 2;
  params.num_qo_heads = params.num_kv_heads = 2;
  params.head_dim = 64;
  params.total_q = params.total_kv = 9;
  params.max_q_len = params.max_kv_len = 6;
  return params;
}

inline ck::Status run_fused(const ck::FmhaV2Params& params) { return ck::fmha_v2(params, nullptr, 0, nullptr); }

inline void check_fmha_v2_without_gpu() {
  using Layout = ck::FmhaV2Layout;
  const ck::FmhaV2Params packed = fused(Layout::kPackedQkv);
  const std::size_t least = ck::fmha_v2_workspace_size(packed);
  require(least >= ck::kFmhaV2CounterBytes && least < ck::kFmhaV2CounterBytes + 4096,
          "a fused prefill of few keys needs counters, and room for a list");
  ck::FmhaV2Params many = fused(Layout::kContiguousQKv);
  many.max_kv_len = 100000;
  many.total_kv = 100000;
  // Of each row 4 bytes a column, and an LSE.
  const std::size_t row = std::size_t(many.num_qo_heads) * (many.head_dim + 1) * 4;
  require(ck::fmha_v2_workspace_size(many) > ck::kFmhaV2CounterBytes + 2 * many.total_q * row,
          "the results of split keys need room");
  require_refusal(run_fused(packed), "cum_seq_lens_q and cum_seq_lens_kv");
  ck::FmhaV2Params wrong = packed;
  wrong.max_kv_len = 7;
  require_refusal(run_fused(wrong), "max_kv_len=7 must equal max_q_len=6");
  wrong = packed;
  wrong.num_kv_heads = 1;
  require_refusal(run_fused(wrong), "num_kv_heads=1");
  wrong = fused(Layout::kContiguousQKv);
  wrong.max_kv_len = 5;
  require_refusal(run_fused(wrong), "max_kv_len=5 must be at least max_q_len=6");
  wrong.max_q_len = 0;
  require_refusal(run_fused(wrong), "max_q_len=0");
  wrong = fused(Layout::kContiguousQKv);
  wrong.head_dim_vo = 32;
  require_refusal(run_fused(wrong), "head_dim_vo=32");
  wrong = packed;
  wrong.chunked_attention_size = 12;
  require_refusal(run_fused(wrong), "chunked_attention_size=12");
  wrong.chunked_attention_size = 4;
  wrong.window_left = 3;
  require_refusal(run_fused(wrong), "exclude each other");
  wrong.mask_mode = ck::FmhaV2Mask::kPadding;
  require_refusal(run_fused(wrong), "padding");
  wrong = packed;
  wrong.mask_mode = ck::FmhaV2Mask::kChunked;
  require_refusal(run_fused(wrong), "needs a positive chunked_attention_size");

  // What has no right default is refused: left at a wrong one, requests would not be computed, without a word.
  alignas(16) static const std::int32_t numbers[32] = {};  // never read
  wrong = fused(Layout::kContiguousQKv);
  wrong.cum_seq_lens_q = wrong.cum_seq_lens_kv = numbers;
  wrong.total_kv = ck::FmhaV2Params{}.total_kv;
  require_refusal(run_fused(wrong), "total_kv is not set");
  wrong.total_q = ck::FmhaV2Params{}.total_q;
  require_refusal(run_fused(wrong), "total_q is not set");
  wrong.batch_size = ck::FmhaV2Params{}.batch_size;
  require_refusal(run_fused(wrong), "batch_size=-1");

  ck::FmhaV2Params paged = fused(Layout::kQPagedKvHnd);
  paged.cum_seq_lens_q = paged.cum_seq_lens_kv = numbers;
  require_refusal(run_fused(paged), "page_size=0");
  paged.page_size = 16;
  require_refusal(run_fused(paged), "num_pages=-1 is not set");
  paged.num_pages = 5;
  require_refusal(run_fused(paged), "block_tables");
  paged.block_tables = numbers;
  require_refusal(run_fused(paged), "max_pages=-1");
  paged.max_pages = 3;
  require_refusal(run_fused(paged), "v lies 0 bytes behind k");
  paged.kv = numbers;
  require_refusal(run_fused(paged), "q is null");
  paged.max_pages = 1 << 30;
  require_refusal(run_fused(paged), "table_stride=1073741824");

  ck::FmhaV2Params called = packed;
  called.cum_seq_lens_q = numbers;
  char* const workspace = reinterpret_cast<char*>(const_cast<std::int32_t*>(numbers));
  require_refusal(ck::fmha_v2(called, workspace + 4, 1 << 20, nullptr), "4 bytes after");
  require_refusal(ck::fmha_v2(called, workspace + 8, 0, nullptr), "16-byte aligned");
  const ck::Status small = ck::fmha_v2(called, workspace, 100, nullptr);
  require(small.code == ck::StatusCode::kWorkspaceTooSmall && small.message.find("got 100") != std::string::npos,
          "a workspace of 100 bytes is too small, not '" + small.message + "'");

  ck::FmhaV2Params empty = packed;
  empty.total_q = 0;
  require(run_fused(empty).ok(), "there is nothing to compute");
  float slopes[3];
  ck::fmha_v2_alibi_slopes(3, slopes);
  require(slopes[0] == 1.0f / 16 && slopes[1] == 1.0f / 256 && slopes[2] == 0.25f, "slopes of three heads");
}

#ifdef CONSUMER_HAS_CUDA_RUNTIME
/// Statistics of a fused prefill say the LSE of the batch, all of whose rows see keys.
inline void check_stats(ck::FmhaV2Params params, const std::vector<float>& lse, ck::Backend backend) {
  const std::size_t rows = lse.size();
  std::vector<float> stats(2 * rows);
  const Buffer dev_stats(stats.size() * 4);
  params.stats = static_cast<float*>(dev_stats.data);
  const ck::Status status = ck::fmha_v2(params, nullptr, 0, nullptr, backend);
  require(status.ok(), status.message);
  dev_stats.copy_to(stats.data(), stats.size() * 4);
  for (std::size_t i = 0; i < rows; ++i) {
    require(stats[2 * i + 1] >= 1.0f - 1e-5f, "the largest logit adds 1 to the sum");
    // bmm1_scale * sqrt(head_dim) is 1.
    const double natural = double(stats[2 * i]) + std::log(double(stats[2 * i + 1]));
    const double error = natural * 1.4426950408889634 - lse[i];
    require(std::fabs(error) <= 1e-3, "statistics say the LSE");
  }
  params.stats = reinterpret_cast<float*>(4);
  require_refusal(ck::fmha_v2(params, nullptr, 0, nullptr, backend), "8 bytes");
}

/// Writes to the counters of a workspace what no call has left there.
inline void write_counters(const Buffer& workspace, int which) {
  const int bytes[] = {0xff, 0x01, 0x7f};
  const int byte = bytes[which % 3];
  require(cudaMemset(workspace.data, byte, ck::kFmhaV2CounterBytes) == cudaSuccess, "writing to the counters");
}

/// The first four rows as two requests over many keys: with a workspace, these are split.
inline void check_split(ck::FmhaV2Params params, const Buffer& dev_o, double tolerance, ck::Backend backend) {
  const std::int32_t offsets[2][3] = {{0, 2, 4}, {0, 2000, 3000}};
  const Buffer dev_offsets(sizeof(offsets));
  dev_offsets.copy_from(offsets, sizeof(offsets));
  params.cum_seq_lens_q = static_cast<const std::int32_t*>(dev_offsets.data);
  params.cum_seq_lens_kv = params.cum_seq_lens_q + 3;
  params.total_q = 4;
  params.max_q_len = 2;
  params.total_kv = 3000;
  params.max_kv_len = 2000;
  const std::size_t keys = std::size_t(params.total_kv) * params.num_kv_heads;
  const auto k = random_bits(keys * params.head_dim, params.dtype, 4);
  const auto v = random_bits(keys * params.head_dim_vo, params.dtype, 5);
  const Buffer dev_k(k.size() * 2), dev_v(v.size() * 2);
  dev_k.copy_from(k.data(), k.size() * 2);
  dev_v.copy_from(v.data(), v.size() * 2);
  params.k = dev_k.data;
  params.v = dev_v.data;

  const std::size_t bytes = ck::fmha_v2_workspace_size(params, backend);
  const Buffer workspace(bytes);
  std::vector<unsigned char> content(bytes, 0xff);
  const auto counters_end = content.begin() + ck::kFmhaV2CounterBytes;
  std::fill(content.begin(), counters_end, 0);
  workspace.copy_from(content.data(), bytes);
  const std::size_t elements = std::size_t(params.total_q) * params.num_qo_heads * params.head_dim_vo;
  std::vector<std::uint16_t> whole(elements), split(elements);
  for (int call = 0; call < 6; ++call) {
    require(cudaMemset(dev_o.data, 0xff, elements * 2) == cudaSuccess, "clearing the output");
    if (call >= 3) write_counters(workspace, call);
    const ck::Status status = call == 0 ? ck::fmha_v2(params, nullptr, 0, nullptr, backend)
                                        : ck::fmha_v2(params, workspace.data, bytes, nullptr, backend);
    require(status.ok(), status.message);
    dev_o.copy_to((call == 0 ? whole : split).data(), elements * 2);
    for (std::size_t i = 0; call > 0 && i < elements; ++i) {
      const double error = from_bits(split[i], params.o_dtype) - from_bits(whole[i], params.o_dtype);
      require(std::fabs(error) <= 2 * tolerance, "split keys give what whole ones give");
    }
    workspace.copy_to(content.data(), bytes);
    require(call >= 3 || std::count(content.begin(), counters_end, 0) == std::ptrdiff_t(ck::kFmhaV2CounterBytes),
            "counters of split keys are left zero");
    const bool written = std::count(counters_end, content.end(), 0xff) < content.end() - counters_end;
    require(written == (call > 0), "keys are split where there is a workspace");
  }
}

/// The batch as a fused prefill: close to what a schedule gave, the same with a workspace, whose counters stay zero,
/// and without.
inline void check_fused(const ck::AttentionParams& batch, const Buffer& dev_o, const std::vector<std::uint16_t>& o,
                        const std::vector<float>& lse, double tolerance, ck::Backend backend) {
  ck::FmhaV2Params params = fused(ck::FmhaV2Layout::kSeparateQKV);
  params.dtype = batch.q_dtype;
  params.o_dtype = batch.o_dtype;
  params.num_qo_heads = batch.num_qo_heads;
  params.num_kv_heads = batch.num_kv_heads;
  params.head_dim = batch.head_dim_qk;
  params.head_dim_vo = batch.head_dim_vo;
  params.total_q = batch.total_q;
  params.total_kv = batch.total_kv;
  params.max_q_len = 130;
  params.max_kv_len = 200;
  params.cum_seq_lens_q = batch.qo_indptr;
  params.cum_seq_lens_kv = batch.kv_indptr;
  params.q = batch.q.data;
  params.k = batch.k.data;
  params.v = batch.v.data;
  params.out = dev_o.data;
  const std::size_t bytes = ck::fmha_v2_workspace_size(params);
  const Buffer workspace(bytes);
  std::vector<char> counters(bytes, 0);
  workspace.copy_from(counters.data(), bytes);
  std::vector<std::uint16_t> first(o.size()), again(o.size());
  for (int call = 0; call < 4; ++call) {
    require(cudaMemset(dev_o.data, 0xff, o.size() * 2) == cudaSuccess, "clearing the output");
    const ck::Status status = call == 0 ? ck::fmha_v2(params, nullptr, 0, nullptr, backend)
                                        : ck::fmha_v2(params, workspace.data, bytes, nullptr, backend);
    require(status.ok(), status.message);
    dev_o.copy_to((call == 0 ? first : again).data(), o.size() * 2);
    require(call == 0 || first == again, "a workspace does not change a fused prefill");
  }
  workspace.copy_to(counters.data(), bytes);
  require(std::count(counters.begin(), counters.begin() + ck::kFmhaV2CounterBytes, 0) ==
              std::ptrdiff_t(ck::kFmhaV2CounterBytes),
          "a fused prefill leaves its counters zero");
  for (int call = 0; call < 6; ++call) {
    if (call % 2 == 0) write_counters(workspace, call);
    require(cudaMemset(dev_o.data, 0xff, o.size() * 2) == cudaSuccess, "clearing the output");
    const ck::Status status = ck::fmha_v2(params, workspace.data, bytes, nullptr, backend);
    require(status.ok(), status.message);
    dev_o.copy_to(again.data(), o.size() * 2);
    require(first == again, "counters that were not cleared do not change a fused prefill");
  }
  for (std::size_t i = 0; i < o.size(); ++i) {
    const double error = from_bits(first[i], batch.o_dtype) - from_bits(o[i], batch.o_dtype);
    require(std::fabs(error) <= 2 * tolerance, "a fused prefill gives what a schedule gives");
  }
  check_stats(params, lse, backend);
  check_split(params, dev_o, tolerance, backend);
}

#endif
