// A failed call of the CUDA runtime as a Status.
#pragma once

#include <driver_types.h>

#include "cutlass_kernels/status.h"

namespace cutlass_kernels {

/// `what` is what failed, as the beginning of a sentence. Where the driver is too old, the sentence says that instead.
Status cuda_failure(const char* what, cudaError_t error);

}  // namespace cutlass_kernels
