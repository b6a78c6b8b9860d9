// Outputs of e4m3 from those of float16: a thread takes eight elements of a row at a time, a block all heads of a row.
// Bound by memory.
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "common/fast_divisor.h"
#include "cuda_failure.h"
#include "cutlass_kernels/prepare.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;

// Strides in bytes.
struct RoundKernelParams {
  const char* from;
  char* to;
  std::int64_t from_token;
  std::int64_t from_head;
  std::int64_t to_token;
  std::int64_t to_head;
  int chunks;  // of a row, all heads
  FastDivisor chunks_of_head;
};

// kAligned: the rounded rows begin at multiples of 8 bytes.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads) round_output_kernel(const __grid_constant__ RoundKernelParams p) {
  constexpr std::uint32_t kUnwritten = kUnwrittenByte * 0x01010101u;
  for (int i = int(threadIdx.x); i < p.chunks; i += kThreads) {
    const int head = int(p.chunks_of_head.divide(unsigned(i)));
    const int chunk = i - head * int(p.chunks_of_head.divisor);
    const uint4 half = __ldg(reinterpret_cast<const uint4*>(p.from + blockIdx.x * p.from_token + head * p.from_head +
                                                            chunk * (kElements * 2)));
    if (half.x == kUnwritten && half.y == kUnwritten && half.z == kUnwritten && half.w == kUnwritten) {
      continue;
    }
    const std::uint32_t pairs[4] = {half.x, half.y, half.z, half.w};
    std::uint16_t rounded[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      __half2_raw both;
      std::memcpy(&both, &pairs[pair], 4);
      rounded[pair] = __nv_cvt_halfraw2_to_fp8x2(both, __NV_SATFINITE, __NV_E4M3);
    }
    char* to = p.to + blockIdx.x * p.to_token + head * p.to_head + chunk * kElements;
    if constexpr (kAligned) {
      uint2 bits;
      std::memcpy(&bits, rounded, 8);
      *reinterpret_cast<uint2*>(to) = bits;
    } else {
#pragma unroll
      for (int e = 0; e < kElements; ++e) to[e] = char(rounded[e / 2] >> e % 2 * 8);
    }
  }
}

std::string fault_in(const RoundParams& p) {
  if (p.rows < 0 || p.rows > std::numeric_limits<std::int32_t>::max()) {
    return "rows=" + std::to_string(p.rows) + " must lie between 0 and " +
           std::to_string(std::numeric_limits<std::int32_t>::max()) + ": split the batch.";
  }
  if (p.num_heads <= 0) {
    return "num_heads=" + std::to_string(p.num_heads) + " must be positive.";
  }
  if (p.head_dim <= 0 || p.head_dim % kElements != 0) {
    return "head_dim=" + std::to_string(p.head_dim) + " must be a positive multiple of 8.";
  }
  if (p.rows > 0 && (p.from.data == nullptr || p.to.data == nullptr)) {
    return "from and to are needed, but one of them is null.";
  }
  const std::int64_t strides = (p.from.stride_token | p.from.stride_head) * 2;
  if ((std::int64_t(reinterpret_cast<std::uintptr_t>(p.from.data)) | strides) % 16 != 0) {
    return "from has an address or strides that are no multiples of 16 bytes: lay it out so.";
  }
  return "";
}

}  // namespace

Status round_output(const RoundParams& params, cudaStream_t stream) {
  if (std::string fault = fault_in(params); !fault.empty()) {
    return Status::invalid(std::move(fault));
  }
  if (params.rows == 0) return Status::success();
  RoundKernelParams p{};
  p.from = static_cast<const char*>(params.from.data);
  p.to = static_cast<char*>(params.to.data);
  p.from_token = params.from.stride_token * 2;
  p.from_head = params.from.stride_head * 2;
  p.to_token = params.to.stride_token;
  p.to_head = params.to.stride_head;
  const int of_head = params.head_dim / kElements;
  p.chunks = params.num_heads * of_head;
  p.chunks_of_head = FastDivisor(unsigned(of_head));
  const bool aligned = (std::int64_t(reinterpret_cast<std::uintptr_t>(p.to)) | p.to_token | p.to_head) % kElements == 0;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(params.rows));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const cudaError_t error =
      cudaLaunchKernelEx(&config, aligned ? &round_output_kernel<true> : &round_output_kernel<false>, p);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the rounding kernel", error);
}

}  // namespace cutlass_kernels
