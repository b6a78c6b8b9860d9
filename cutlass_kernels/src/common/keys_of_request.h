// Where the keys of a request are, from indptrs on the device that nobody has checked.
#pragma once

#include "plan/launch_params.h"

namespace cutlass_kernels {

/// Of a request, so that the end of a KV block is a 32-bit number, too.
constexpr int kMaxKeys = (1 << 30) - 1;

struct KeysOfRequest {
  std::int32_t begin;   ///< in the tensor, or among the entries of its page table
  std::int32_t length;  ///< -1: the indptrs or the page table's sizes make no sense
};

CK_HOST_DEVICE inline KeysOfRequest keys_of_request(const std::int32_t* kv_indptr,
                                                    const PageTable& pages, int batch) {
  const std::int32_t begin = kv_indptr[batch];
  const std::int32_t end = kv_indptr[batch + 1];
  if (pages.page_size == 0) return {begin, end - begin};
  const bool ordered = 0 <= begin && begin <= end;
  if (pages.table_stride > 0) {
    const std::int64_t room = std::int64_t(pages.table_width) * pages.page_size;
    const bool fits = ordered && end - begin <= room && end - begin <= kMaxKeys;
    return {std::int32_t(batch * pages.table_stride), fits ? end - begin : -1};
  }
  if (!ordered || end > pages.num_indices) return {begin, -1};
  if (begin == end) return {begin, 0};
  const std::int32_t last = pages.last_page_len[batch];
  const std::int64_t length = std::int64_t(end - begin - 1) * pages.page_size + last;
  const bool fits = 1 <= last && last <= pages.page_size && length <= kMaxKeys;
  return {begin, fits ? std::int32_t(length) : -1};
}

}  // namespace cutlass_kernels
