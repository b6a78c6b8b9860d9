// The parts in which a batch-invariant call is computed. A request's tile must not depend on the others of its batch, but
// no tile is fast for all lengths of queries. So each part of the batch has its own kernel, which leaves other requests
// out: those of so few rows that a tile for decoding holds them, those whose heads are packed, and longer ones.
#pragma once

#include <array>

#include "cutlass_kernels/attention.h"
#include "device.h"

namespace cutlass_kernels {

struct RowRanges {
  static constexpr int kMost = 3;
  int count = 0;
  std::array<AttentionParams, kMost> parts;  ///< the problem, with least_rows and most_rows

  const AttentionParams* begin() const { return parts.data(); }
  const AttentionParams* end() const { return parts.data() + count; }
};

/// The parts of `params`: one, unless batch_invariant is set, and only those that the host cannot rule out.
RowRanges row_ranges(const AttentionParams& params, Backend backend, const Device& device);

}  // namespace cutlass_kernels
