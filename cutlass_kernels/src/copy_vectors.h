// Copies of a few int32 vectors: on the device by one kernel, or from the host to the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cutlass_kernels/status.h"
#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

struct VectorCopy {
  std::int32_t* to = nullptr;
  const std::int32_t* from = nullptr;
  std::int64_t count = 0;  // elements
};

struct VectorCopies {
  static constexpr int kMost = 4;  // the index vectors of a paged batch
  VectorCopy vectors[kMost];
  int count = 0;
};

/// One kernel on `stream`, for the current device; none where there is nothing to copy. Vectors must not overlap.
CK_API Status copy_vectors(const VectorCopies& copies, cudaStream_t stream);

/// Copies from pageable host memory, which may change when this returns, one by one: 4 us each.
CK_API Status upload(const VectorCopies& vectors, cudaStream_t stream);

}  // namespace cutlass_kernels
