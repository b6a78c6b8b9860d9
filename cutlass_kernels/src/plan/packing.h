// Which problems have tiles of packed heads: rows of several query heads that share their keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cutlass_kernels/params.h"
#include "plan/launch_params.h"

namespace cutlass_kernels {

// Up to so many query rows per request, on average, heads are packed: half of a tile of one head would be empty.
constexpr int kPackedUpToRows = 64;
constexpr int kLeastKeysToSplit = 1024;  // of a request, on average

// Query heads that share a tile: as many of those that share their keys as fit `rows` rows.
inline int packed_heads(const AttentionParams& params, int rows) {
  const int group_size = params.num_qo_heads / params.num_kv_heads;
  int heads = std::min(group_size, rows);
  while (group_size % heads != 0) --heads;
  return heads;
}

// Whether results of a request must not depend on the others of its batch: then no tile may.
inline bool is_alone(const AttentionParams& params) {
  return params.batch_invariant || params.disable_split_kv || params.fixed_split_size > 0;
}

// Whether all rows of a request, on average, that share a key head fit a tile of kDecodeRows rows. Where results must
// not depend on the batch, all requests of the part (plan/call.h).
constexpr int kDecodeRows = 16;

inline bool decodes(const AttentionParams& params) {
  const int group_size = params.num_qo_heads / params.num_kv_heads;
  if (group_size > kDecodeRows) return false;
  if (params.batch_invariant) return params.most_rows <= kDecodeRows / group_size;
  return !is_alone(params) && params.total_q * group_size <= std::int64_t(kDecodeRows) * params.batch_size;
}

// Whether requests have keys worth splitting, on average, as far as the host knows.
inline bool can_split(const AttentionParams& params) {
  return params.stats == nullptr && all_keys(params) / params.batch_size >= kLeastKeysToSplit;
}

// Whether half of a tile of one head would be empty. Where results must not depend on the batch, a tile must not depend
// on it either: the packed one is right for all, or for all of its part.
inline bool has_short_queries(const AttentionParams& params, int packed_heads) {
  if (is_alone(params)) return params.least_rows <= kPackedUpToRows;
  return params.total_q / params.batch_size <= kPackedUpToRows && packed_heads > 1;
}

// Whether tiles of one head, of `tile_rows` rows, would be fewer than the `at_once` that the device computes at once
// while there are keys worth splitting, and `keys_per_row` times as many as rows: under a causal mask of as many rows
// as keys, tiles differ too much.
inline bool leaves_device_idle(const AttentionParams& params, int tile_rows, int at_once, int keys_per_row) {
  const std::int64_t tiles =
      std::max<std::int64_t>((params.total_q + tile_rows - 1) / tile_rows, params.batch_size) * params.num_qo_heads;
  return !is_alone(params) && can_split(params) && tiles < at_once && all_keys(params) >= keys_per_row * params.total_q;
}

}  // namespace cutlass_kernels
