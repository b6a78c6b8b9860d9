// The table of compiled kernels, generated from instances.cmake.
#pragma once

#include "cutlass_kernels/attention.h"

namespace cutlass_kernels {

/// Tile sizes a launch may choose from, queried before the schedule is built.
struct KernelEntry {
  KernelInfo info;
  /// Query rows of the tile this kernel uses for the problem: a pure function of its host-known sizes.
  int (*tile_rows)(const AttentionParams& params);
  /// Enqueues the kernel; params are validated and params.schedule is complete.
  Status (*launch)(const AttentionParams& params, cudaStream_t stream);
};

const std::vector<KernelEntry>& registry();

}  // namespace cutlass_kernels
