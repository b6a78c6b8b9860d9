#include "common/element_bytes.h"
#include "fa3/tensor_map.h"

#include "registry/registry.h"

namespace cutlass_kernels::fa3 {
namespace {

// Bounds of an encoded stride: a multiple of 16 (which the contract asks of every backend) below 2^40. The stride of
// a token also appears as 2^34 minus itself (tensor_map.h).
constexpr std::int64_t kLeastStride = 16;
constexpr std::int64_t kMostTokenStride = (std::int64_t(1) << 34) - 16;
constexpr std::int64_t kMostHeadStride = (std::int64_t(1) << 40) - 16;

struct View {
  const char* name;
  const void* data;
  std::int64_t stride_token;
  std::int64_t stride_head;
  DType dtype;
  std::int64_t tokens;  // of a page, if paged
  int heads;
  std::int64_t pages = 0;
  std::int64_t stride_page = 0;
};

std::string stride_out_of_range(const View& view, const char* what, std::int64_t elements, std::int64_t most) {
  const std::int64_t bytes = elements * size_of(view.dtype);
  if (kLeastStride <= bytes && bytes <= most) return "";
  return std::string(view.name) + " has a " + what + " stride of " + std::to_string(bytes) +
         " bytes, but fa3 reads and writes through tensor maps, whose " + what + " strides are " +
         std::to_string(kLeastStride) + " to " + std::to_string(most) +
         " bytes: copy it into such a layout, or let fa2 take it as it is (backend 'auto').";
}

std::string too_many_rows(const char* name, std::int64_t rows) {
  if (rows <= kMapRows) return "";
  return std::string(name) + "=" + std::to_string(rows) + " is more than the " + std::to_string(kMapRows) +
         " rows of a tensor map of fa3: split the batch, or let fa2 compute it (backend 'auto').";
}

}  // namespace

std::string refusal(const AttentionParams& p, const char* q_name, const char* k_name) {
  std::string fault = too_many_rows("total_q", p.total_q);
  const PageTable& table = p.pages;
  const bool paged = table.page_size > 0;
  if (fault.empty() && !paged) fault = too_many_rows("total_kv", p.total_kv);
  const View views[] = {{q_name, p.q.data, p.q.stride_token, p.q.stride_head, p.q_dtype, p.total_q, p.num_qo_heads},
                        {k_name, p.k.data, p.k.stride_token, p.k.stride_head, p.kv_dtype,
                         paged ? table.page_size : p.total_kv, p.num_kv_heads, table.num_pages, table.k_stride_page},
                        {"v", p.v.data, p.v.stride_token, p.v.stride_head, p.kv_dtype,
                         paged ? table.page_size : p.total_kv, p.num_kv_heads, table.num_pages, table.v_stride_page},
                        {"o", p.o.data, p.o.stride_token, p.o.stride_head, p.o_dtype, p.total_q, p.num_qo_heads}};
  for (const View& view : views) {
    if (view.data == nullptr && view.stride_token == 0 && view.stride_head == 0) continue;
    if (view.pages > 0) {
      // Read row by row, without a map.
      if (table.page_size % 8 != 0 || size_of(p.kv_dtype) < size_of(p.q_dtype)) continue;
      if (fault.empty() && view.pages > 1) {
        fault = stride_out_of_range(view, "page", view.stride_page, kMostHeadStride);
      }
    }
    // A stride along a dimension of size one is never used.
    if (fault.empty() && view.tokens > 1) {
      fault = stride_out_of_range(view, "token", view.stride_token, kMostTokenStride);
    }
    if (fault.empty() && view.heads > 1) {
      fault = stride_out_of_range(view, "head", view.stride_head, kMostHeadStride);
    }
  }
  return fault;
}

std::string refusal(const AttentionParams& p) { return refusal(p, "q", "k"); }

std::string fp8_refusal(const AttentionParams& p) {
  if (p.pages.page_size % 8 != 0) {
    return "page_size=" + std::to_string(p.pages.page_size) +
           " is no multiple of 8, as the fp8 kernels of fa3 need it: convert q, k and v to 16 "
           "bits.";
  }
  return refusal(p);
}

}  // namespace cutlass_kernels::fa3
