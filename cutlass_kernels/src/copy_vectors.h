// Copies of a few int32 vectors: on the device by one kernel, and from the host to the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cutlass_kernels/status.h"

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
Status copy_vectors(const VectorCopies& copies, cudaStream_t stream);

/// Copies `count` int32 of pageable host memory, which may change when this returns. Up to 4000 bytes travel as the
/// parameters of a kernel: behind a kernel in the same stream that takes less than cudaMemcpyAsync() does,
/// which changes from one engine of the GPU to another and back.
Status upload(const std::int32_t* from, std::int64_t count, std::int32_t* to, cudaStream_t stream);

}  // namespace cutlass_kernels
