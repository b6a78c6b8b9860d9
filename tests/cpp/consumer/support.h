// What the checks have in common.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cutlass_kernels/attention.h"
#include "cutlass_kernels/status.h"
#include "cutlass_kernels/types.h"

#ifdef CONSUMER_HAS_CUDA_RUNTIME
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstring>
#endif

namespace ck = cutlass_kernels;

inline void require(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

inline void require_refusal(const ck::Status& status, const std::string& fragment) {
  require(status.code == ck::StatusCode::kInvalidArgument && status.message.find(fragment) != std::string::npos,
          "a refusal that says '" + fragment + "', not '" + status.message + "'");
}

/// Whether all heads of the kernel read one key of 576 columns, the first 512 of which are the value.
inline bool is_latent(const ck::KernelInfo& kernel) { return kernel.head_dim_qk == 576 && kernel.head_dim_vo == 512; }

#ifdef CONSUMER_HAS_CUDA_RUNTIME
inline std::uint16_t to_bits(float value, ck::DType dtype) {
  std::uint16_t bits = 0;
  if (dtype == ck::DType::kFloat16) {
    const __half half = __float2half(value);
    std::memcpy(&bits, &half, 2);
  } else {
    const __nv_bfloat16 half = __float2bfloat16(value);
    std::memcpy(&bits, &half, 2);
  }
  return bits;
}

inline float from_bits(std::uint16_t bits, ck::DType dtype) {
  if (dtype == ck::DType::kFloat16) {
    __half half;
    std::memcpy(&half, &bits, 2);
    return __half2float(half);
  }
  __nv_bfloat16 half;
  std::memcpy(&half, &bits, 2);
  return __bfloat162float(half);
}

/// A device buffer, freed at the end of its scope.
struct Buffer {
  void* data = nullptr;
  explicit Buffer(std::size_t bytes) { require(cudaMalloc(&data, bytes) == cudaSuccess, "cudaMalloc"); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  void copy_from(const void* host, std::size_t bytes) const {
    require(cudaMemcpy(data, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess, "copy to the GPU");
  }
  void copy_to(void* host, std::size_t bytes) const {
    require(cudaMemcpy(host, data, bytes, cudaMemcpyDeviceToHost) == cudaSuccess, "copy from the GPU");
  }
};

inline std::vector<std::uint16_t> random_bits(std::size_t count, ck::DType dtype, unsigned seed) {
  std::vector<std::uint16_t> bits(count);
  for (std::uint16_t& value : bits) {
    seed = seed * 1664525u + 1013904223u;
    value = to_bits(static_cast<float>(seed >> 8) / (1 << 23) - 1.0f, dtype);
  }
  return bits;
}

#endif
