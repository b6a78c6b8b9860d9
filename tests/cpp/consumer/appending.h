// What the consumer checks of append.h.
#pragma once

#include <cstdint>
#include <vector>

#include "cutlass_kernels/append.h"
#include "cutlass_kernels/rope.h"
#include "support.h"

/// Five new tokens of one head with eight elements, for a request that has seven, in pages of four.
inline ck::AppendParams append(void* tokens, void* cache, const std::int32_t* batch_indices,
                               const std::int32_t* positions, const std::int32_t* kv_indptr,
                               const std::int32_t* indices) {
  ck::AppendParams params;
  params.dtype = ck::DType::kFloat32;
  params.num_kv_heads = 1;
  params.head_dim_qk = params.head_dim_vo = 8;
  params.batch_size = 1;
  params.num_tokens = 5;
  params.batch_indices = batch_indices;
  params.positions = positions;
  params.kv_indptr = kv_indptr;
  params.k = params.v = {tokens, 8, 8};
  params.k_cache = params.v_cache = {cache, 8, 8};
  params.pages.indices = indices;
  params.pages.page_size = 4;
  params.pages.num_indices = 2;
  params.pages.num_pages = 3;
  params.pages.k_stride_page = params.pages.v_stride_page = 32;
  return params;
}

inline void check_pages_without_gpu() {
  ck::AppendParams pages = append(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
  require_refusal(ck::append_paged_kv_cache(pages, nullptr), "one of them is null");
  for (std::int64_t* count : {&pages.pages.num_indices, &pages.pages.num_pages}) {
    const std::int64_t before = *count;
    *count = ck::kNotSet;
    require_refusal(ck::append_paged_kv_cache(pages, nullptr), "is not set");
    *count = before;
  }
  pages.pages.page_size = 0;
  require_refusal(ck::append_paged_kv_cache(pages, nullptr), "pages.page_size=0");
  ck::BatchIndicesPositionsParams places;
  require_refusal(ck::get_batch_indices_positions(places, nullptr), "batch_size=-1");
  places.batch_size = 0;
  require_refusal(ck::get_batch_indices_positions(places, nullptr), "num_tokens=-1");
  places.num_tokens = 0;
  require(ck::get_batch_indices_positions(places, nullptr).ok(), "there are no tokens");
  places.num_tokens = 5;
  require_refusal(ck::get_batch_indices_positions(places, nullptr), "one of them is null");
}

inline void check_slots_without_gpu() {
  ck::AppendBySlotParams slots;
  require_refusal(ck::append_paged_kv_cache_by_slot(slots, nullptr), "num_kv_heads=0");
  slots.num_kv_heads = slots.page_size = 1;
  slots.head_dim_qk = slots.head_dim_vo = 8;
  require_refusal(ck::append_paged_kv_cache_by_slot(slots, nullptr), "num_tokens=-1");
  slots.num_tokens = 5;
  require_refusal(ck::append_paged_kv_cache_by_slot(slots, nullptr), "num_pages is not set");
  slots.num_pages = 3;
  require_refusal(ck::append_paged_kv_cache_by_slot(slots, nullptr), "one of them is null");
  slots.cache_dtype = ck::DType::kFloat16;
  require_refusal(ck::append_paged_kv_cache_by_slot(slots, nullptr), "cache_dtype=float16");
  slots.cache_dtype = ck::DType::kFloat8E5M2;
  slots.num_tokens = 0;
  require(ck::append_paged_kv_cache_by_slot(slots, nullptr).ok(), "there are no tokens");
}

inline void check_rope_without_gpu() {
  ck::RopeParams rope;
  rope.dtype = ck::DType::kFloat8E4M3;
  require_refusal(ck::apply_rope(rope, nullptr), "dtype=float8_e4m3fn");
  rope.dtype = rope.cos_sin_dtype = ck::DType::kFloat16;
  require_refusal(ck::apply_rope(rope, nullptr), "head_dim=0");
  rope.head_dim = 8;
  rope.rotary_dim = 7;
  require_refusal(ck::apply_rope(rope, nullptr), "rotary_dim=7");
  rope.rotary_dim = 8;
  rope.num_qo_heads = 1;
  require_refusal(ck::apply_rope(rope, nullptr), "num_tokens=-1");
  rope.num_tokens = 3;
  require_refusal(ck::apply_rope(rope, nullptr), "num_positions is not set");
  rope.num_positions = 5;
  require_refusal(ck::apply_rope(rope, nullptr), "one of them is null");
  rope.num_tokens = 0;
  require(ck::apply_rope(rope, nullptr).ok(), "there are no tokens");
  require_refusal(ck::apply_rope_and_append_by_slot(rope, {}, nullptr), "num_kv_heads=0");
}

inline void check_quantized_without_gpu() {
  ck::AppendQuantizedParams tokens;
  ck::RopeParams rope;
  const auto refuses = [&](const char* words) {
    require_refusal(ck::apply_rope_and_append_quantized_by_slot(rope, tokens, nullptr), words);
  };
  require_refusal(ck::append_quantized_by_slot(tokens, nullptr), "page_size=0");
  tokens.page_size = 64;
  tokens.num_pages = 2;
  tokens.num_tokens = 0;
  require_refusal(ck::append_quantized_by_slot(tokens, nullptr), "first_columns=0");
  tokens.first_columns = 512;
  require(ck::append_quantized_by_slot(tokens, nullptr).ok(), "tokens without RoPE");
  rope.num_tokens = 0;
  refuses("512 columns have none to rotate");
  tokens.first_columns = 496;
  tokens.others_columns = 80;
  require(ck::append_quantized_by_slot(tokens, nullptr).ok(), "columns of two tensors");
  refuses("others_columns=80 must be the 64");
  tokens.first_columns = 512;
  tokens.others_columns = 64;
  refuses("head_dim=0");
  rope.head_dim = rope.rotary_dim = 32;
  rope.num_positions = 5;
  refuses("rotary_dim=32 must be 64");
  rope.head_dim = rope.rotary_dim = 64;
  require(ck::apply_rope_and_append_quantized_by_slot(rope, tokens, nullptr).ok(), "there are no tokens");
  rope.num_tokens = 3;
  refuses("one of them is null");
  tokens.cache_dtype = ck::DType::kFloat8E4M3;
  refuses("cache_dtype is one of");
}

#ifdef CONSUMER_HAS_CUDA_RUNTIME
inline void check_pages_on_gpu() {
  const std::int32_t indices[] = {2, 0}, kv_indptr[] = {0, 2}, append_indptr[] = {0, 5}, len = 7;
  std::vector<float> tokens(5 * 8), cache(3 * 4 * 8, -1.0f);
  for (int i = 0; i < 5 * 8; ++i) tokens[i] = float(i / 8);
  const Buffer dev_tokens(5 * 32), dev_cache(3 * 4 * 32), dev_indices(8), dev_indptr(8);
  const Buffer dev_append(8), dev_len(4), owners(20), positions(20);
  dev_tokens.copy_from(tokens.data(), 5 * 32);
  dev_cache.copy_from(cache.data(), 3 * 4 * 32);
  dev_indices.copy_from(indices, 8);
  dev_indptr.copy_from(kv_indptr, 8);
  dev_append.copy_from(append_indptr, 8);
  dev_len.copy_from(&len, 4);
  ck::BatchIndicesPositionsParams places;
  places.batch_size = 1;
  places.num_tokens = 5;
  places.append_indptr = static_cast<std::int32_t*>(dev_append.data);
  places.seq_lens = static_cast<std::int32_t*>(dev_len.data);
  places.batch_indices = static_cast<std::int32_t*>(owners.data);
  places.positions = static_cast<std::int32_t*>(positions.data);
  ck::Status status = ck::get_batch_indices_positions(places, nullptr);
  require(status.ok(), status.message);
  status = ck::append_paged_kv_cache(
      append(dev_tokens.data, dev_cache.data, places.batch_indices, places.positions,
             static_cast<std::int32_t*>(dev_indptr.data), static_cast<std::int32_t*>(dev_indices.data)),
      nullptr);
  require(status.ok(), status.message);
  dev_cache.copy_to(cache.data(), 3 * 4 * 32);
  // Tokens 2, 3 of the request stand in page 2, tokens 4 to 6 in page 0.
  const float expected[] = {2, 3, 4, -1, -1, -1, -1, -1, -1, -1, 0, 1};
  for (int i = 0; i < 3 * 4 * 8; ++i) {
    require(cache[i] == expected[i / 8], "tokens stand where they belong, and nowhere else");
  }
}

/// Two heads of eight float16 elements, of which the second token is skipped, to an e4m3 cache.
inline void check_slots_on_gpu() {
  const std::int32_t slots[] = {6, -1, 1};
  std::vector<std::uint16_t> tokens(3 * 16, 0x4000);  // 2.0
  std::vector<unsigned char> cache(8 * 16, 0xaa);
  const float scales[] = {0.5f, 4.0f};
  const Buffer dev_tokens(3 * 32), dev_cache(8 * 16), dev_slots(12), dev_scales(8);
  dev_tokens.copy_from(tokens.data(), 3 * 32);
  dev_cache.copy_from(cache.data(), 8 * 16);
  dev_slots.copy_from(slots, 12);
  dev_scales.copy_from(scales, 8);
  ck::AppendBySlotParams params;
  params.dtype = ck::DType::kFloat16;
  params.cache_dtype = ck::DType::kFloat8E4M3;
  params.num_kv_heads = 2;
  params.head_dim_qk = params.head_dim_vo = 8;
  params.num_tokens = 3;
  params.slots = dev_slots.data;
  params.slots_are_64_bit = false;
  params.k = params.v = {dev_tokens.data, 16, 8};
  params.k_cache = params.v_cache = {dev_cache.data, 16, 8};
  params.page_size = 4;
  params.num_pages = 2;
  params.k_stride_page = params.v_stride_page = 64;
  params.k_scales.data = params.v_scales.data = static_cast<const float*>(dev_scales.data);
  params.k_scales.stride = params.v_scales.stride = 1;
  const ck::Status status = ck::append_paged_kv_cache_by_slot(params, nullptr);
  require(status.ok(), status.message);
  dev_cache.copy_to(cache.data(), 8 * 16);
  for (int i = 0; i < 8 * 16; ++i) {
    const bool written = i / 16 == 6 || i / 16 == 1;
    const int expected = !written ? 0xaa : i % 16 < 8 ? 0x48 : 0x30;  // 4.0 and 0.5
    require(cache[i] == expected, "tokens stand at their slots, converted");
  }
}

inline void check_appending_on_gpu() {
  check_pages_on_gpu();
  check_slots_on_gpu();
}
#endif

inline void check_appending_without_gpu() {
  check_pages_without_gpu();
  check_slots_without_gpu();
  check_rope_without_gpu();
  check_quantized_without_gpu();
}
