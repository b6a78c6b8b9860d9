// A failed call of the CUDA runtime as a Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cutlass_kernels/status.h"

namespace cutlass_kernels {

inline Status cuda_failure(const char* what, cudaError_t error) {
  cudaGetLastError();  // not left behind for the caller's own error check
  return {StatusCode::kCudaError, std::string(what) + " failed: " + cudaGetErrorName(error) + " (" +
                                      cudaGetErrorString(error) + ")."};
}

}  // namespace cutlass_kernels
