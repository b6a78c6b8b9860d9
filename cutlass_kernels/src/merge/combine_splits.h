// Combines the partial results of tiles whose keys were split.
#pragma once

#include "cutlass_kernels/status.h"
#include "plan/launch_params.h"

namespace cutlass_kernels {

/// Columns of O that the kernels have registers for. Tiles whose keys may be split assert that they have no more.
constexpr int kMostCombinedColumns = 512;

/// Splits of a row whose loads a warp has in flight together. Of 512 columns two: registers.
constexpr int combined_ahead(int columns) { return columns <= 256 ? 8 : 2; }

/// Enqueues the kernel that combines the partial results (partial_results.h) of all split tiles into params.o and
/// params.lse.
///
///   M = max_i m_i,  sum = sum_i 2^(m_i - M) sum_i + 2^(sink - M),  O = v_scale sum_i 2^(m_i - M) O_i / sum
Status launch_combine_splits(const LaunchParams& params, cudaStream_t stream);

}  // namespace cutlass_kernels
