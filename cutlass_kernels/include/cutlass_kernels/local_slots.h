// Keys that query rows select (PageTable::slots_per_page) where the keys of a request are spread over devices: lists of
// positions in the request become lists of slots of this device's cache.
#pragma once

#include <cstdint>

#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"

namespace cutlass_kernels {

/// A row has `lists_per_row` lists of `width` positions: negative ones, and those of keys on other devices, name no key
/// here. Keys of this device lie in its pages, in order of position.
struct LocalSlotsParams {
  std::int64_t num_rows = kNotSet;
  std::int32_t lists_per_row = 1;           ///< num_kv_heads
  std::int32_t width = kNotSet;             ///< positions of a list
  const std::int32_t* positions = nullptr;  ///< [num_rows, lists_per_row, width], device
  const std::int32_t* lengths = nullptr;    ///< optional [num_rows], device: only so many of a list count
  KvShard shard;
  /// [num_requests, table_stride], device: this device's pages of each request, of which a request has table_width.
  /// Null: slots are numbers of keys among those here.
  const std::int32_t* page_table = nullptr;
  std::int64_t table_stride = 0;
  std::int32_t table_width = 0;
  std::int32_t num_requests = 0;
  std::int32_t page_size = 0;
  /// Optional [num_rows], device: the request of each row. Null: num_rows / num_requests rows each, in order. A request
  /// that does not exist has no keys.
  const std::int32_t* batch_indices = nullptr;
  /// [num_rows, lists_per_row, width], device: slots of this device's cache, -1 for no key, also where the table has no
  /// page, or a negative one. May be `positions` unless they are compacted.
  std::int32_t* slots = nullptr;
  /// Optional [num_rows], device: compacts lists, keys of this device first, in their order. Written with their number,
  /// of several lists the largest: seqused_k of attention().
  std::int32_t* counts = nullptr;
};

/// One kernel on `stream`, for the current device. Nothing is allocated, nothing synchronises; it can be captured into
/// a CUDA graph.
CK_API Status find_local_slots(const LocalSlotsParams& params, cudaStream_t stream);

}  // namespace cutlass_kernels
