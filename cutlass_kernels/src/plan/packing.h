// Which problems have tiles of packed heads: rows of several query heads that share their keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cutlass_kernels/params.h"
#include "plan/launch_params.h"

namespace cutlass_kernels {

// Where results must not depend on the batch, heads are packed up to so many query rows of a request: half of a tile of
// one head would be empty.
constexpr int kPackedUpToRows = 64;

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

}  // namespace cutlass_kernels
