// Where the rows and keys of a request are, from indptrs and lengths on the device, which the host cannot check.
#pragma once

#include "common/kv_shard.h"
#include "plan/launch_params.h"

namespace cutlass_kernels {

/// Of a request, so that the end of a KV block is a 32-bit number, too.
constexpr int kMaxKeys = (1 << 30) - 1;

struct RowsOfRequest {
  std::int32_t begin;   ///< in the tensor
  std::int32_t length;  ///< negative if the lengths make no sense
};

CK_HOST_DEVICE inline RowsOfRequest rows_of_request(const RequestParams& p, int batch) {
  RowsOfRequest rows{batch * p.max_qo_len, p.max_qo_len};
  if (p.qo_indptr != nullptr) {
    rows.begin = p.qo_indptr[batch];
    rows.length = p.qo_indptr[batch + 1] - rows.begin;
  }
  if (p.seqused_q != nullptr) {
    const std::int32_t used = p.seqused_q[batch];
    if (used < rows.length) rows.length = used;
  }
  return rows;
}

/// Whether this call computes a request of so many rows.
CK_HOST_DEVICE inline bool is_in_part(const RequestParams& p, int rows) {
  return p.least_rows <= rows && rows <= p.most_rows;
}

/// seqused_k of a request; where its keys are spread over devices, those of this one.
CK_HOST_DEVICE inline std::int32_t used_keys(const RequestParams& p, int batch) {
  const std::int32_t used = p.seqused_k[batch];
  if (p.kv_shard.world <= 1) return used;
  return 0 <= used && used <= kMaxKeys ? keys_held(p.kv_shard, used) : -1;
}

struct KeysOfRequest {
  std::int32_t begin;   ///< in the tensor, or among the entries of its page table
  std::int32_t length;  ///< -1: the lengths or the page table's sizes make no sense
};

// Rows from the first key of a request to that of the next one, where there is no indptr.
CK_HOST_DEVICE inline std::int32_t kv_stride_request(const RequestParams& p) {
  return p.kv_stride_request == kNotSet ? p.max_kv_len : p.kv_stride_request;
}

// In consecutive rows of k and v.
CK_HOST_DEVICE inline KeysOfRequest keys_in_rows(const RequestParams& p, int batch) {
  const std::int32_t begin = p.kv_indptr == nullptr ? batch * kv_stride_request(p) : p.kv_indptr[batch];
  if (p.seqused_k != nullptr) {
    const std::int32_t used = used_keys(p, batch);
    return {begin, p.kv_indptr == nullptr && used > p.max_kv_len ? -1 : used};
  }
  return {begin, p.kv_indptr == nullptr ? p.max_kv_len : p.kv_indptr[batch + 1] - begin};
}

/// Where the keys of a second cache begin among those of a request: a block of 64 keys lies in one cache. In between
/// there are none.
CK_HOST_DEVICE inline std::int32_t keys_before_second(const RequestParams& p) {
  return (p.pages.table_width + 63) / 64 * 64;
}
/// Entries that count of a row's list of either cache.
CK_HOST_DEVICE inline std::int32_t listed_keys(const RequestParams& p, const std::int32_t* lengths, std::int32_t width,
                                               int row) {
  return lengths == nullptr ? width : lengths[unsigned(row) / unsigned(p.rows_per_length)];
}
/// Of keys by slots, whose request is a row.
CK_HOST_DEVICE inline KeysOfRequest keys_in_lists(const RequestParams& p, int row) {
  const int width = p.pages.table_width;
  const std::int32_t first = listed_keys(p, p.seqused_k, p.second.data == nullptr ? p.max_kv_len : width, row);
  std::int32_t length = 0 <= first && first <= width ? first : -1;
  if (p.second.data != nullptr) {
    const std::int32_t second = listed_keys(p, p.second.lengths, p.second.table_width, row);
    const bool fits = length >= 0 && 0 <= second && second <= p.second.table_width;
    length = fits && keys_before_second(p) <= kMaxKeys - second ? keys_before_second(p) + second : -1;
  }
  return {std::int32_t(row * p.pages.table_stride), length};
}

// In a page table with a row per request.
CK_HOST_DEVICE inline KeysOfRequest keys_in_table(const RequestParams& p, int batch) {
  const PageTable& pages = p.pages;
  if (pages.slots_per_page > 0) return keys_in_lists(p, batch);
  std::int32_t begin = 0, end = p.max_kv_len;
  if (p.seqused_k != nullptr) {
    end = used_keys(p, batch);
  } else if (p.kv_indptr != nullptr) {
    begin = p.kv_indptr[batch];
    end = p.kv_indptr[batch + 1];
  }
  const std::int64_t room = std::int64_t(pages.table_width) * pages.page_size;
  const bool fits = 0 <= begin && begin <= end && end - begin <= room && end - begin <= kMaxKeys;
  return {std::int32_t(batch * pages.table_stride), fits ? end - begin : -1};
}

CK_HOST_DEVICE inline KeysOfRequest keys_of_request(const RequestParams& p, int batch) {
  const PageTable& pages = p.pages;
  if (pages.page_size == 0) return keys_in_rows(p, batch);
  if (pages.table_stride > 0) return keys_in_table(p, batch);
  const std::int32_t begin = p.kv_indptr[batch], end = p.kv_indptr[batch + 1];
  if (begin < 0 || begin > end || end > pages.num_indices) return {begin, -1};
  const std::int64_t room = std::int64_t(end - begin) * pages.page_size;
  if (p.seqused_k != nullptr) {
    const std::int32_t used = used_keys(p, batch);
    return {begin, 0 <= used && used <= room && used <= kMaxKeys ? used : -1};
  }
  if (begin == end) return {begin, 0};
  const std::int32_t last = pages.last_page_len[batch];
  const std::int64_t length = room - pages.page_size + last;
  const bool fits = 1 <= last && last <= pages.page_size && length <= kMaxKeys;
  return {begin, fits ? std::int32_t(length) : -1};
}

}  // namespace cutlass_kernels
