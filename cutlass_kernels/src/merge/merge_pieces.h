// Puts together the results of tiles whose keys were split.
#pragma once

#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"

namespace cutlass_kernels {

/// Columns of O that the merge kernels have registers for. Tiles whose keys may be split assert that they have no more.
constexpr int kMostMergedColumns = 256;

/// Bytes of a row of the results of pieces: O, maximum and sum of every query head, in fp32.
inline std::size_t partial_row_bytes(const AttentionParams& params) {
  return std::size_t(params.num_qo_heads) * (params.head_dim_vo + 2) * sizeof(float);
}

/// Bytes of `rows` of them, rounded up so that what follows is aligned: by less than a row, of which there are so
/// partial_bytes / partial_row_bytes().
inline std::size_t partial_bytes(const AttentionParams& params, std::int64_t rows) {
  return (std::size_t(rows) * partial_row_bytes(params) + 15) / 16 * 16;
}

/// Enqueues the kernel that merges the pieces of all split tiles into params.o and params.lse. params.schedule says where
/// they are: partial_o [rows, num_qo_heads, head_dim_vo], partial_max_sum [rows, num_qo_heads, 2], without sinks and v_scale.
/// partial_results.h says what they hold.
///
///   M = max_i m_i,  O = sum_i 2^(m_i - M) O_i / sum,  sum = sum_i 2^(m_i - M) sum_i + 2^(sink - M)
Status launch_merge_pieces(const AttentionParams& params, cudaStream_t stream);

}  // namespace cutlass_kernels
