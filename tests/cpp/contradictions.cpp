// registry/validate.cpp: every contradiction of a problem is refused in its sentence, alone, and the limits themselves
// are served. Exit status 0 if so.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "registry/validate.h"

namespace {

using namespace cutlass_kernels;

constexpr std::int64_t kMostTokens = std::numeric_limits<std::int32_t>::max() - 1023;
constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
alignas(16) char memory[32];  // never read
const std::int32_t indptr[3] = {0, 3, 8};

float* floats(int offset = 0) { return reinterpret_cast<float*>(memory + offset); }

/// Two requests of fp16, with all that they need.
AttentionParams ragged() {
  AttentionParams p;
  p.q_dtype = p.kv_dtype = p.o_dtype = DType::kFloat16;
  p.num_qo_heads = 4;
  p.num_kv_heads = 2;
  p.head_dim_qk = 64;
  p.head_dim_vo = 128;
  p.batch_size = 2;
  p.total_q = 8;
  p.total_kv = 30;
  p.qo_indptr = p.kv_indptr = indptr;
  p.q = {memory, 256, 64};
  p.k = {memory, 128, 64};
  p.v = {memory, 256, 128};
  p.o = {memory, 512, 128};
  p.lse = floats();
  p.lse_stride_token = 4;
  p.lse_stride_head = 1;
  return p;
}

AttentionParams paged() {
  AttentionParams p = ragged();
  p.pages.indices = p.pages.last_page_len = indptr;
  p.pages.page_size = 16;
  p.pages.num_indices = 3;
  p.pages.num_pages = 10;
  p.pages.k_stride_page = p.pages.v_stride_page = 4096;
  return p;
}

AttentionParams block_table() {
  AttentionParams p = paged();
  p.pages.last_page_len = nullptr;
  p.pages.num_indices = kNotSet;
  p.pages.table_stride = 4;
  p.pages.table_width = 3;
  return p;
}

/// Latent attention whose last 64 columns of q and k have tensors of their own.
AttentionParams latent() {
  AttentionParams p = block_table();
  p.num_kv_heads = 1;
  p.head_dim_qk = 576;
  p.head_dim_vo = 512;
  p.v = p.k;
  p.pages.v_stride_page = p.pages.k_stride_page;
  p.q_rope = {memory, 64 * p.num_qo_heads, 64};
  p.k_rope = {memory, 64, 64};
  p.pages.k_rope_stride_page = 64 * p.pages.page_size;
  return p;
}

/// Latent attention over keys by slots: each row is a request, with three keys of ten pages of 64.
AttentionParams by_slots() {
  AttentionParams p = latent();
  p.q_rope = p.k_rope = {};
  p.batch_size = int(p.total_q);
  p.qo_indptr = p.kv_indptr = nullptr;
  p.max_qo_len = 1;
  p.max_kv_len = p.pages.table_width;
  p.pages.page_size = 1;
  p.pages.slots_per_page = 64;
  return p;
}

/// The same over a quantized latent cache, whose strides are in bytes.
AttentionParams by_slots_of_tokens() {
  AttentionParams p = by_slots();
  p.kv_dtype = DType::kLatentV32;
  p.k = p.v = {memory, 656, 656};
  p.pages.k_stride_page = p.pages.v_stride_page = 64 * 656;
  return p;
}

/// The same with tokens whose scales lie behind the data of their page.
AttentionParams by_slots_of_planes() {
  AttentionParams p = by_slots_of_tokens();
  p.kv_dtype = DType::kLatentV4;
  p.head_dim_qk = 512;
  p.k = p.v = {memory, 576, 576};
  p.pages.k_stride_page = p.pages.v_stride_page = 65 * 576;
  return p;
}

/// The same with a second cache: five keys of seven pages of 2, padded to a multiple of 576 bytes.
AttentionParams by_two_lists() {
  AttentionParams p = by_slots_of_planes();
  p.second.data = memory;
  p.second.stride_token = 576;
  p.second.stride_page = 3 * 576;
  p.second.num_pages = 7;
  p.second.slots_per_page = 2;
  p.second.table_width = p.second.table_stride = 5;
  p.second.indices = p.pages.indices;
  p.max_kv_len = 64 + 5;
  return p;
}

AttentionParams single() {
  AttentionParams p = ragged();
  p.batch_size = 1;
  p.qo_indptr = p.kv_indptr = nullptr;
  return p;
}

using Problem = AttentionParams (*)();
using Change = std::function<void(AttentionParams&)>;

struct Case {
  Problem problem;
  Change change;
  const char* fragment;  // null: served
  bool needs_tensors = false;
};

/// What is wrong with sizes, whether or not there are tensors.
std::vector<Case> sizes() {
  static const std::int32_t decreasing[3] = {0, 8, 3}, negative[3] = {-1, 3, 8}, long_rows[3] = {0, 3, 9};
  std::vector<Case> cases;
  const auto add = [&](Problem problem, const char* fragment, Change change) {
    cases.push_back({problem, std::move(change), fragment});
  };
  for (const Problem problem : {ragged, paged, block_table, latent, by_slots, single}) {
    add(problem, nullptr, [](auto&) {});
  }
  for (const std::int32_t value : {0, -4}) {
    add(ragged, "num_qo_heads=", [=](auto& p) { p.num_qo_heads = value; });
    add(ragged, "num_kv_heads=", [=](auto& p) { p.num_kv_heads = value; });
    add(ragged, "head_dim_qk=", [=](auto& p) { p.head_dim_qk = value; });
    add(ragged, "head_dim_vo=", [=](auto& p) { p.head_dim_vo = value; });
    add(ragged, "batch_size=", [=](auto& p) { p.batch_size = value; });
  }
  add(ragged, "is not a multiple of num_kv_heads=3", [](auto& p) { p.num_kv_heads = 3; });
  add(ragged, "must be multiples of 8", [](auto& p) { p.head_dim_qk = 60; });
  add(ragged, "must be multiples of 8", [](auto& p) { p.head_dim_vo = 60; });
  add(ragged, nullptr, [](auto& p) { p.head_dim_qk = p.head_dim_vo = 56; });
  const auto fp8 = [](AttentionParams& p) { p.kv_dtype = DType::kFloat8E4M3; };
  add(ragged, nullptr, fp8);
  add(ragged, "must be multiples of 16", [=](auto& p) { fp8(p), p.head_dim_vo = 56; });
  add(ragged, "must be multiples of 16", [=](auto& p) { fp8(p), p.head_dim_qk = 56; });
  add(ragged, "total_q is not set", [](auto& p) { p.total_q = kNotSet; });
  add(ragged, "total_kv is not set", [](auto& p) { p.total_kv = kNotSet; });
  add(paged, nullptr, [](auto& p) { p.total_kv = kNotSet; });
  add(ragged, nullptr, [](auto& p) { p.total_q = p.total_kv = kMostTokens; });
  add(ragged, "must lie between 0 and", [](auto& p) { p.total_q = kMostTokens + 1; });
  add(ragged, "must lie between 0 and", [](auto& p) { p.total_kv = kMostTokens + 1; });
  add(ragged, "must lie between 0 and", [](auto& p) { p.total_q = -2; });
  add(ragged, "fixed_split_size=-7 must not be negative", [](auto& p) { p.fixed_split_size = -7; });
  add(ragged, "num_splits=-1 must not be negative", [](auto& p) { p.num_splits = -1; });
  add(paged, "must lie between 0 and", [](auto& p) { p.total_kv = -2; });
  add(ragged, "sm_scale=", [](auto& p) { p.sm_scale = kInfinity; });
  add(ragged, "logits_soft_cap=", [](auto& p) { p.logits_soft_cap = -kInfinity; });
  add(ragged, "v_scale=", [](auto& p) { p.v_scale = kInfinity - kInfinity; });
  add(ragged, "skip_softmax_factor=", [](auto& p) { p.skip_softmax_factor = kInfinity; });
  add(ragged, "skip_softmax_factor=", [](auto& p) { p.skip_softmax_factor = -1.0f; });
  add(ragged, nullptr, [](auto& p) { p.qo_indptr_host = indptr; });
  add(ragged, "offsets start at 0", [](auto& p) { p.qo_indptr_host = decreasing; });
  add(ragged, "offsets start at 0", [](auto& p) { p.qo_indptr_host = negative; });
  add(ragged, "qo_indptr_host ends at 9", [](auto& p) { p.qo_indptr_host = long_rows; });
  const auto mask = [](AttentionParams& p) { p.mask.words = reinterpret_cast<std::uint32_t*>(memory); };
  add(ragged, "mask.indptr is null", mask);
  add(single, nullptr, mask);
  add(ragged, nullptr, [=](auto& p) { mask(p), p.mask.indptr = indptr; });
  add(ragged, "page_size=-1", [](auto& p) { p.pages.page_size = -1; });
  add(ragged, "page_size=0", [](auto& p) { p.pages.indices = indptr; });
  add(block_table, "table_stride=-4 with batch_size=2", [](auto& p) { p.pages.table_stride = -4; });
  add(block_table, nullptr, [](auto& p) { p.pages.table_stride = kMost / 2; });
  add(block_table, "makes a page table of more than", [](auto& p) { p.pages.table_stride = kMost / 2 + 1; });
  add(block_table, nullptr, [](auto& p) { p.pages.table_width = 4; });
  add(block_table, nullptr, [](auto& p) { p.pages.table_width = 0; });
  add(block_table, "table_width=5", [](auto& p) { p.pages.table_width = 5; });
  add(block_table, "table_width=-1", [](auto& p) { p.pages.table_width = -1; });
  add(block_table, nullptr, [](auto& p) { p.pages.v_offset = kMost - 10; });
  add(block_table, "v_offset=", [](auto& p) { p.pages.v_offset = kMost - 9; });
  add(block_table, "v_offset=-1", [](auto& p) { p.pages.v_offset = -1; });
  add(paged, "k_stride_page=4100", [](auto& p) { p.pages.k_stride_page += 4; });
  add(paged, "v_stride_page=4100", [](auto& p) { p.pages.v_stride_page += 4; });
  add(paged, "k_stride_page=4104", [=](auto& p) { fp8(p), p.pages.k_stride_page += 8; });
  add(ragged, "max_qo_len=-1", [](auto& p) { p.max_qo_len = -1; });
  const auto invariant = [](AttentionParams& p) { p.batch_invariant = true; };
  add(ragged, nullptr, [=](auto& p) { invariant(p), p.least_rows = p.most_rows = 3; });
  add(ragged, "most_rows=2", [=](auto& p) { invariant(p), p.least_rows = 3, p.most_rows = 2; });
  add(ragged, "least_rows=-1", [=](auto& p) { invariant(p), p.least_rows = -1; });
  add(ragged, "need batch_invariant", [](auto& p) { p.least_rows = 1; });
  add(ragged, "need batch_invariant", [](auto& p) { p.most_rows = 64; });
  add(ragged, "chunk_size=-1", [](auto& p) { p.chunk_size = -1; });
  add(ragged, "q has a token stride of 520 bytes", [](auto& p) { p.q.stride_token += 4; });
  add(ragged, "q has a head stride of 136 bytes", [](auto& p) { p.q.stride_head += 4; });
  add(ragged, "k has a token stride of 264 bytes", [](auto& p) { p.k.stride_token += 4; });
  add(ragged, "k has a head stride of 136 bytes", [](auto& p) { p.k.stride_head += 4; });
  add(latent, nullptr, [](auto& p) { p.q_rope = {}; });
  add(latent, nullptr, [](auto& p) { p.k_rope = {}; });
  add(latent, "q_rope is given with head_dim_qk=512", [](auto& p) { p.head_dim_qk = 512; });
  add(latent, "q_rope is given with head_dim_qk=576 and head_dim_vo=256", [](auto& p) { p.head_dim_vo = 256; });
  add(latent, "q_rope has a token stride of ", [](auto& p) { p.q_rope.stride_token += 4; });
  add(latent, "q_rope has a head stride of 136 bytes", [](auto& p) { p.q_rope.stride_head += 4; });
  add(latent, "k_rope has a token stride of 136 bytes", [](auto& p) { p.k_rope.stride_token += 4; });
  add(latent, "k_rope_stride_page=", [](auto& p) { p.pages.k_rope_stride_page += 4; });
  add(latent, "Set v to k", [](auto& p) { p.v.data = memory + 16; });
  add(ragged, "k_rope is given with head_dim_qk=", [](auto& p) { p.k_rope = p.k; });
  add(latent, "max_logits is for keys by slots", [](auto& p) { p.max_logits = reinterpret_cast<float*>(memory); });
  add(latent, nullptr, [](auto& p) { p.flash_mla_lse = true; });
  add(by_slots, "slots_per_page=-1 must not be negative", [](auto& p) { p.pages.slots_per_page = -1; });
  add(by_slots, "slots_per_page=64 with page_size=64", [](auto& p) { p.pages.page_size = 64; });
  add(by_slots, "rows_per_length=0 must be positive", [](auto& p) { p.rows_per_length = 0; });
  add(by_slots, "needs a page table with a row per request", [](auto& p) { p.pages.table_stride = 0; });
  add(by_slots, "but max_qo_len=2: make each row a request", [](auto& p) { p.max_qo_len = 2; });
  add(by_slots, "but max_qo_len=0: make each row a request", [](auto& p) { p.max_qo_len = 0; });
  add(by_slots, "but qo_indptr is given", [](auto& p) { p.qo_indptr = indptr; });
  add(by_slots, "but kv_indptr is given", [](auto& p) { p.kv_indptr = indptr; });
  add(by_slots, "but seqused_q is given", [](auto& p) { p.seqused_q = indptr; });
  add(by_slots, "cannot be used with causal: ", [](auto& p) { p.causal = true; });
  add(by_slots, "cannot be used with window_left=7", [](auto& p) { p.window_left = 7; });
  add(by_slots, "cannot be used with window_right=0", [](auto& p) { p.window_right = 0; });
  add(by_slots, "cannot be used with chunk_size=1", [](auto& p) { p.chunk_size = 1; });
  add(by_slots, "cannot be used with kv_shard.world=2", [](auto& p) {
    p.kv_shard = {2, 1, 16};
    p.seqused_k = indptr;
  });
  add(by_slots, "cannot be used with a bit mask", [=](auto& p) { mask(p), p.mask.indptr = indptr; });
  add(by_slots, "cannot be used with ALiBi", [](auto& p) { p.alibi.slopes = floats(4); });
  add(by_slots_of_tokens, nullptr, [](auto&) {});
  add(by_slots_of_tokens, "kv_dtype of tokens of 656 bytes needs keys by slots", [](auto& p) {
    p.pages.slots_per_page = 0;
    p.pages.page_size = 64;
  });
  add(by_slots_of_tokens, "with k_rope: they have its columns", [](auto& p) { p.k_rope = {memory, 64, 64}; });
  add(by_slots_of_planes, nullptr, [](auto&) {});
  add(by_slots_of_planes, "by page, with a token stride of 592 bytes in k: it is 576",
      [](auto& p) { p.k.stride_token = p.v.stride_token = 592; });
  add(by_slots_of_tokens, "with a token stride of 576 bytes in k",
      [](auto& p) { p.k.stride_token = p.v.stride_token = 576; });
  add(by_two_lists, nullptr, [](auto&) {});
  add(by_two_lists, nullptr, [](auto& p) { p.second.num_pages = 0; });
  add(by_slots, "second is for tokens of a quantized latent cache", [](auto& p) { p.second.data = memory; });
  add(by_two_lists, "lists of table_width=5, but no data", [](auto& p) { p.second.data = nullptr; });
  add(by_two_lists, "but no indices: give each request a list", [](auto& p) { p.second.indices = nullptr; });
  add(by_two_lists, "lists of table_width=0, 5 apart", [](auto& p) { p.second.table_width = 0; });
  add(by_two_lists, "lists of table_width=5, 4 apart", [](auto& p) { p.second.table_stride = 4; });
  add(by_two_lists, "slots_per_page=0", [](auto& p) { p.second.slots_per_page = 0; });
  add(by_two_lists, "num_pages=1073741824 of slots_per_page=2", [](auto& p) { p.second.num_pages = kMost / 2 + 1; });
  add(by_two_lists, "a token stride of 592 bytes: it is 576", [](auto& p) { p.second.stride_token = 592; });
  add(by_two_lists, "pages 1152: they would overlap", [](auto& p) { p.second.stride_page = 1152; });
  add(by_two_lists, "that are no multiples of 16", [](auto& p) { p.second.stride_page += 8; });
  add(by_two_lists, "max_kv_len=5 with second: it is 69", [](auto& p) { p.max_kv_len = 5; });
  add(by_slots, nullptr, [](auto& p) { p.pages.num_pages = kMost / 64; });
  add(by_slots, "num_pages=33554432 of slots_per_page=64", [](auto& p) { p.pages.num_pages = kMost / 64 + 1; });
  add(by_slots, nullptr, [](auto& p) { p.pages.slots_per_page = 1, p.pages.num_pages = kMost; });
  add(ragged, "v has a token stride of 520 bytes", [](auto& p) { p.v.stride_token += 4; });
  add(ragged, "v has a head stride of 264 bytes", [](auto& p) { p.v.stride_head += 4; });
  add(ragged, "o has a token stride of 1032 bytes", [](auto& p) { p.o.stride_token += 4; });
  add(ragged, "o has a head stride of 264 bytes", [](auto& p) { p.o.stride_head += 4; });
  add(ragged, "k has a token stride of 136 bytes", [=](auto& p) { fp8(p), p.k.stride_token += 8; });
  add(ragged, "v has a token stride of 264 bytes", [=](auto& p) { fp8(p), p.v.stride_token += 8; });
  for (const KvShard shard : {KvShard{2, 2, 1}, {2, -1, 1}, {0, 0, 1}, {2, 0, 0}, {1 << 15, 0, 1 << 15}}) {
    add(ragged, "rank must lie between 0 and world - 1", [=](auto& p) {
      p.kv_shard = shard;
      p.seqused_k = long_rows;
    });
  }
  add(ragged, "cannot be used with a bit mask or ALiBi", [](auto& p) {
    p.kv_shard = {2, 1, 16};
    p.seqused_k = long_rows;
    p.alibi.slopes = floats(4);
  });
  add(ragged, nullptr, [](auto& p) {
    p.kv_shard = {2, 1, 16};
    p.seqused_k = long_rows;
  });
  return cases;
}

/// What is wrong with tensors. Sizes alone are served.
std::vector<Case> tensors() {
  std::vector<Case> cases;
  const auto add = [&](Problem problem, const char* fragment, Change change) {
    cases.push_back({problem, std::move(change), fragment, true});
  };
  add(by_slots, "A page table needs lengths", [](auto& p) { p.max_kv_len = 0; });
  add(ragged, "q starts at", [](auto& p) { p.q.data = memory + 8; });
  add(ragged, "k starts at", [](auto& p) { p.k.data = memory + 8; });
  add(ragged, "v starts at", [](auto& p) { p.v.data = memory + 8; });
  add(ragged, "o starts at", [](auto& p) { p.o.data = memory + 8; });
  add(ragged, "q is null although total_q=8", [](auto& p) { p.q.data = nullptr; });
  add(ragged, "o is null although total_q=8", [](auto& p) { p.o.data = nullptr; });
  add(ragged, "k is null although total_kv=30", [](auto& p) { p.k.data = nullptr; });
  add(ragged, "v is null although total_kv=30", [](auto& p) { p.v.data = nullptr; });
  add(paged, "k is null although num_pages=10", [](auto& p) { p.k.data = nullptr; });
  add(paged, "v is null although num_pages=10", [](auto& p) { p.v.data = nullptr; });
  add(ragged, nullptr, [](auto& p) { p.total_q = 0, p.q.data = p.o.data = nullptr; });
  add(ragged, nullptr, [](auto& p) { p.total_kv = 0, p.k.data = p.v.data = nullptr; });
  add(paged, nullptr, [](auto& p) { p.pages.num_pages = 0, p.k.data = p.v.data = nullptr; });
  add(ragged, "qo_indptr is null, so every request has", [](auto& p) { p.qo_indptr = nullptr; });
  add(ragged, "kv_indptr is null, so every request has", [](auto& p) { p.kv_indptr = nullptr; });
  add(single, "kv_indptr is null, so every request has", [](auto& p) { p.qo_indptr = indptr; });
  add(ragged, "kv_stride_request=-2 must not be negative", [](auto& p) {
    p.kv_indptr = nullptr;
    p.kv_stride_request = -2;
  });
  add(ragged, "kv_stride_request=10 is for requests without kv_indptr", [](auto& p) { p.kv_stride_request = 10; });
  add(block_table, "kv_stride_request=0 is for requests without kv_indptr", [](auto& p) { p.kv_stride_request = 0; });
  add(ragged, "seqused_k is null although kv_shard.world=2", [](auto& p) { p.kv_shard = {2, 1, 16}; });
  add(ragged, nullptr, [](auto& p) {
    p.kv_shard = {2, 1, 16};
    p.seqused_k = indptr;
  });
  add(ragged, nullptr, [](auto& p) {  // every request is as long
    p.qo_indptr = p.kv_indptr = nullptr;
    p.max_qo_len = int(p.total_q) / p.batch_size;
    p.max_kv_len = int(p.total_kv) / p.batch_size;
  });
  add(single, nullptr, [](auto& p) { p.qo_indptr = p.kv_indptr = indptr; });
  add(single, "qo_indptr is null, so every request has", [](auto& p) { p.kv_indptr = indptr; });
  add(single, nullptr, [](auto& p) { p.kv_indptr = indptr, p.max_qo_len = int(p.total_q); });
  add(paged, "kv_indptr is null: a paged cache", [](auto& p) { p.kv_indptr = nullptr; });
  add(paged, nullptr, [](auto& p) {
    p.seqused_k = indptr;
    p.pages.last_page_len = nullptr;
  });
  add(ragged, "o has a stride of 0", [](auto& p) { p.o.stride_token = 0; });
  add(ragged, "o has a stride of 0", [](auto& p) { p.o.stride_head = 0; });
  add(ragged, "lse has a stride of 0", [](auto& p) { p.lse_stride_token = 0; });
  add(ragged, "lse has a stride of 0", [](auto& p) { p.lse_stride_head = 0; });
  add(ragged, nullptr, [](auto& p) { p.total_q = 1, p.o.stride_token = p.lse_stride_token = 0; });
  add(ragged, nullptr, [](auto& p) {
    p.num_qo_heads = p.num_kv_heads = 1;
    p.o.stride_head = p.lse_stride_head = 0;
  });
  add(ragged, nullptr, [](auto& p) { p.lse = nullptr, p.lse_stride_token = p.lse_stride_head = 0; });
  add(ragged, nullptr, [](auto& p) { p.k.stride_token = p.v.stride_head = 0; });
  add(ragged, nullptr, [](auto& p) { p.stats = floats(8); });
  add(ragged, "stats starts at", [](auto& p) { p.stats = floats(4); });
  add(paged, "num_pages is not set", [](auto& p) { p.pages.num_pages = kNotSet; });
  add(paged, "num_indices is not set", [](auto& p) { p.pages.num_indices = kNotSet; });
  add(paged, "num_indices=3 pages, but", [](auto& p) { p.pages.indices = nullptr; });
  add(paged, "num_indices=3 pages, but", [](auto& p) { p.pages.last_page_len = nullptr; });
  add(paged, nullptr, [](auto& p) {
    p.pages.num_indices = 0;
    p.pages.indices = p.pages.last_page_len = nullptr;
  });
  add(block_table, "table_width=3 pages, but", [](auto& p) { p.pages.indices = nullptr; });
  add(block_table, nullptr, [](auto& p) { p.pages.table_width = 0, p.pages.indices = nullptr; });
  add(block_table, "neither kv_indptr nor seqused_k", [](auto& p) {
    p.kv_indptr = nullptr;
    p.max_kv_len = 0;
  });
  add(block_table, nullptr, [](auto& p) {
    p.kv_indptr = nullptr;
    p.seqused_k = indptr;
  });
  return cases;
}

void check(const Case& entry, int number, bool with_tensors) {
  AttentionParams params = entry.problem();
  entry.change(params);
  const std::string text = contradiction(params, with_tensors);
  const bool served = entry.fragment == nullptr || (entry.needs_tensors && !with_tensors);
  if (served ? text.empty() : text.find(entry.fragment) != std::string::npos) return;
  std::printf("Case %d %s tensors: '%s' instead of '%s'\n", number, with_tensors ? "with" : "without", text.c_str(),
              served ? "" : entry.fragment);
  std::exit(1);
}

}  // namespace

int main() {
  int number = 0;
  for (const std::vector<Case>& cases : {sizes(), tensors()}) {
    for (const Case& entry : cases) {
      for (const bool with_tensors : {false, true}) check(entry, number, with_tensors);
      ++number;
    }
  }
  std::printf("%d cases\n", number);
  return 0;
}
