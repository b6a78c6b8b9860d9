// Where the rows of a part come from and at which positions they stand. Index arrays on the device were never checked:
// whatever they hold, no access leaves a tensor.
#pragma once

#include <cstdint>

#include "prepare/params.h"

namespace cutlass_kernels {

struct Row {
  bool wanted;
  int position;
  std::int64_t offset;  // in bytes
};

// The last request that begins at `at` or before: the one that `at` belongs to, if any.
__device__ inline int find_request(const std::int32_t* indptr, int batch_size, int at) {
  int low = 0, high = batch_size;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (__ldg(indptr + middle) <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// [begin, end) of a request; empty where it does not lie inside [0, total].
struct Range {
  int begin = 0;
  int end = 0;
  bool sound = true;

  // A single request may have no offsets.
  __device__ Range(const std::int32_t* indptr, int batch, std::int64_t total) : end(int(total)) {
    if (indptr == nullptr) return;
    begin = __ldg(indptr + batch);
    end = __ldg(indptr + batch + 1);
    sound = 0 <= begin && begin <= end && end <= total;
    if (!sound) begin = end = 0;
  }
  __device__ bool contains(int at) const { return begin <= at && at < end; }
  __device__ int size() const { return end - begin; }
};

__device__ inline Range rows_of(const PrepareKernelParams& p, int batch) {
  return Range(p.qo_indptr, batch, p.total_q);
}

// Tokens, or entries of the page table.
__device__ inline Range keys_of(const PrepareKernelParams& p, int batch) {
  return Range(p.kv_indptr, batch, p.pages.page_size > 0 ? p.pages.num_indices : p.total_kv);
}

// -1 where the request makes no sense: the kernels do not compute it.
__device__ inline int kv_length(const PrepareKernelParams& p, int batch, const Range& keys) {
  if (!keys.sound) return -1;
  const int page_size = p.pages.page_size;
  if (page_size == 0 || keys.size() == 0) return keys.size();
  const int last = __ldg(p.pages.last_page_len + batch);
  // All pages together fit 31 bits: see prepare().
  return 1 <= last && last <= page_size ? (keys.size() - 1) * page_size + last : -1;
}

__device__ inline Row row_of_queries(const PrepareKernelParams& p, const Part& part, int row) {
  const std::int64_t offset = row * part.stride_token;
  if (!part.rotated) return {true, 0, offset};
  const int batch = p.qo_indptr == nullptr ? 0 : find_request(p.qo_indptr, p.batch_size, row);
  const Range rows = rows_of(p, batch);
  const int kv_len = kv_length(p, batch, keys_of(p, batch));
  const bool wanted = rows.contains(row) && kv_len >= 0;
  return {wanted, kv_len - rows.size() + row - rows.begin, offset};
}

// Keys that no row of their request sees need no copy: all where it has no rows, else those left of the first row's
// window.
__device__ inline bool is_seen(const PrepareKernelParams& p, int batch, int kv_len, int key) {
  const Range rows = rows_of(p, batch);
  if (rows.size() == 0 || key >= kv_len) return false;
  return p.window_left < 0 || key >= std::int64_t(kv_len) - rows.size() - p.window_left;
}

__device__ inline Row row_of_keys(const PrepareKernelParams& p, const Part& part, int token) {
  const int batch = p.kv_indptr == nullptr ? 0 : find_request(p.kv_indptr, p.batch_size, token);
  const Range keys = keys_of(p, batch);
  const int kv_len = kv_length(p, batch, keys);
  const int position = token - keys.begin;
  const bool wanted = keys.contains(token) && is_seen(p, batch, kv_len, position);
  return {wanted, position, token * part.stride_token};
}

__device__ inline bool is_page(const PrepareKernelParams& p, int page) { return 0 <= page && page < p.pages.num_pages; }

__device__ inline Row row_of_pages(const PrepareKernelParams& p, const Part& part, int row) {
  const int entry = int(p.page_size.divide(row));
  const int slot = row - entry * p.pages.page_size;
  const int batch = find_request(p.kv_indptr, p.batch_size, entry);
  const Range entries = keys_of(p, batch);
  if (!entries.contains(entry)) return {false, 0, 0};
  const int kv_len = kv_length(p, batch, entries);
  const int position = (entry - entries.begin) * p.pages.page_size + slot;
  const int page = __ldg(part.indices + entry);
  const bool wanted = is_page(p, page) && is_seen(p, batch, kv_len, position);
  return {wanted, position, page * part.stride_page + slot * part.stride_token};
}

// The entry's places in the two tables. Called once per entry.
__device__ inline void write_tables(const PrepareKernelParams& p, int entry) {
  const Part& v = p.parts[kV];
  const int v_page = __ldg(v.indices + entry);
  p.tables[entry] = is_page(p, __ldg(p.parts[kK].indices + entry)) ? entry : -1;
  p.tables[p.pages.num_indices + entry] = !is_page(p, v_page) ? -1 : v.to != nullptr ? entry : v_page;
}

}  // namespace cutlass_kernels
