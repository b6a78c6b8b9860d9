// New tokens of latent attention written to slots of quantized latent caches: a warp per token, whose lanes have 16
// columns each.
#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "append/slots.h"
#include "common/token_format.h"
#include "cuda_failure.h"
#include "latent/dims.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 16;             // of a lane
constexpr float kLargest = 448.0f;       // of e4m3
constexpr float kLeastOfPowers = 1e-4f;  // of a group's largest value, as vLLM's writer of 584 bytes has it

struct Params {
  SlotMap slots;
  TokenFormat format;
  const char* first;
  const char* others;
  std::int64_t first_stride, others_stride;  // bytes
  int first_columns, others_columns;
  std::int64_t num_tokens;
  char* cache;
  std::int64_t stride_page, stride_token, scales_of_page;  // bytes
  bool powers_of_two;
  bool is_half;

  // Columns of the token, some of the first tensor or of the other.
  __device__ const char* at(std::int64_t token, int column) const {
    return column < first_columns ? first + token * first_stride + 2 * column
                                  : others + token * others_stride + 2 * (column - first_columns);
  }
};

__device__ void widen(bool is_half, const char* from, float (&x)[kColumns]) {
  CUTE_UNROLL
  for (int part = 0; part < 2; ++part) {
    const Chunk<16> chunk = Chunk<16>::load(from + 16 * part);
    float half[8];
    if (is_half) {
      decode<fp16, 8>(chunk, half);
    } else {
      decode<bf16, 8>(chunk, half);
    }
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) x[8 * part + i] = half[i];
  }
}

// The exponent of the least power of two that is not below positive x, as ue8m0. 255, which is NaN, of infinity.
__device__ std::uint32_t exponent_above(float x) {
  const std::uint32_t bits = __float_as_uint(x);
  return (bits >> 23) + (x < INFINITY && (bits & 0x7fffff) != 0);
}
__device__ float power_of(std::uint32_t exponent) {
  return __uint_as_float(exponent == 255 ? 0x7fc00000u : exponent << 23);
}

__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ Params p) {
  const std::int64_t token = (std::int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (token >= p.num_tokens) return;
  const int lane = threadIdx.x % 32;
  const TokenFormat& format = p.format;
  const std::int64_t slot = p.slots.of_token(token);
  if (slot < 0) return;
  const int column = lane * kColumns;
  const bool has_columns = column < format.columns;
  float x[kColumns] = {};
  if (has_columns) widen(p.is_half, p.at(token, column), x);
  float largest = 0.0f;
  CUTE_UNROLL
  for (int i = 0; i < kColumns; ++i) largest = fmaxf(largest, fabsf(x[i]));  // NaN is no maximum
  for (int distance = format.group / kColumns / 2; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  std::uint32_t exponent = 0;
  float scale = fmaxf(__fdiv_rn(largest, kLargest), FLT_MIN);
  if (p.powers_of_two) {
    exponent = exponent_above(__fdiv_rn(fmaxf(largest, kLeastOfPowers), kLargest));
    scale = power_of(exponent);
  }
  const Place place = p.slots.place_of(slot);
  char* const page = p.cache + place.page * p.stride_page;
  char* const record = page + place.entry * p.stride_token;
  char* const scales =
      format.by_page ? page + p.scales_of_page + place.entry * format.scale_bytes : record + format.scales_at;
  if (has_columns) {
    const Divisor divide(scale);
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) x[i] = divide(x[i]);
    store_narrow(x, record + column, __NV_E4M3);
    const int lanes = format.group / kColumns;
    if (lane % lanes == 0) {
      if (format.has_exponents) {
        reinterpret_cast<std::uint8_t*>(scales)[lane / lanes] = std::uint8_t(exponent);
      } else {
        reinterpret_cast<float*>(scales)[lane / lanes] = scale;
      }
    }
  }
  const int groups = format.columns / format.group;
  if (format.has_exponents && lane >= groups && lane < format.scale_bytes) scales[lane] = 0;  // padding
  if (column < format.positions) {
    float positions[kColumns] = {};
    if (format.columns + column < p.first_columns + p.others_columns) {
      widen(p.is_half, p.at(token, format.columns + column), positions);
    }
    char* const to = record + format.positions_at + 2 * column;
    CUTE_UNROLL
    for (int part = 0; part < 2; ++part) {
      float half[8];
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) half[i] = positions[8 * part + i];
      store<bf16, 8>(half, to + 16 * part);
    }
  }
}

std::string fault_in(const AppendQuantizedParams& p, const TokenFormat& format) {
  if (format.bytes == 0 || size_of(p.dtype) != 2) {
    return std::string("dtype=") + to_string(p.dtype) +
           " is not written to caches of cache_dtype=" + to_string(p.cache_dtype) +
           ": tokens are float16 or bfloat16, and cache_dtype is one of kLatentV32 and on.";
  }
  if (p.page_size <= 0 || p.num_pages < 0) {
    return "page_size=" + std::to_string(p.page_size) +
           " must be positive, and num_pages=" + std::to_string(p.num_pages) + " set.";
  }
  if (p.num_pages > std::numeric_limits<std::int64_t>::max() / p.page_size) {
    return "num_pages=" + std::to_string(p.num_pages) + " are more than slots can count.";
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (p.num_tokens < 0 || p.num_tokens > kMost) {
    return "num_tokens=" + std::to_string(p.num_tokens) + " must lie between 0 and " + std::to_string(kMost) +
           ": split the batch.";
  }
  const std::int64_t columns = std::int64_t(p.first_columns) + p.others_columns;
  const bool without_positions = format.columns == mla::kLatentDim && columns == format.columns;
  if (p.first_columns <= 0 || p.others_columns < 0 || p.first_columns % kColumns != 0 ||
      (columns != format.columns + format.positions && !without_positions)) {
    return "first_columns=" + std::to_string(p.first_columns) +
           " and others_columns=" + std::to_string(p.others_columns) +
           " must be multiples of 16, together the columns of cache_dtype=" + to_string(p.cache_dtype) + ".";
  }
  if (format.by_page && p.page_size > 1 && p.stride_token != format.data_bytes()) {
    return "stride_token=" + std::to_string(p.stride_token) + " must be " + std::to_string(format.data_bytes()) +
           ": tokens of a page of cache_dtype=" + to_string(p.cache_dtype) + " lie side by side.";
  }
  if (p.num_tokens == 0 || p.num_pages == 0) return "";
  if (p.slots == nullptr || p.first == nullptr || p.cache == nullptr || (p.others == nullptr && p.others_columns > 0)) {
    return "slots, first, others and cache are needed, but one of them is null.";
  }
  const auto address = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data); };
  const auto of_rows = [&](const void* data, std::int64_t stride) {
    return address(data) | (p.num_tokens > 1 ? std::uintptr_t(2 * stride) : 0);
  };
  std::uintptr_t all = of_rows(p.first, p.first_stride) | address(p.cache);
  if (p.others_columns > 0) all |= of_rows(p.others, p.others_stride);
  if (p.num_pages > 1) all |= std::uintptr_t(p.stride_page);
  if (p.page_size > 1) all |= std::uintptr_t(p.stride_token);
  if (all % 16 != 0) {
    return "Addresses and strides of tokens and of the cache must be multiples of 16 bytes.";
  }
  return "";
}

}  // namespace

Status append_quantized_by_slot(const AppendQuantizedParams& params, cudaStream_t stream) {
  const TokenFormat format = token_format(params.cache_dtype);
  if (std::string fault = fault_in(params, format); !fault.empty()) {
    return Status::invalid(std::move(fault));
  }
  if (params.num_tokens == 0 || params.num_pages == 0) return Status::success();
  Params p{};
  p.slots = SlotMap(params);
  p.format = format;
  p.first = static_cast<const char*>(params.first);
  p.others = static_cast<const char*>(params.others);
  p.first_stride = 2 * params.first_stride;
  p.others_stride = 2 * params.others_stride;
  p.first_columns = params.first_columns;
  p.others_columns = params.others_columns;
  p.num_tokens = params.num_tokens;
  p.cache = static_cast<char*>(params.cache);
  p.stride_page = params.stride_page;
  p.stride_token = params.stride_token;
  p.scales_of_page = std::int64_t(params.page_size) * format.data_bytes();
  p.powers_of_two = params.power_of_two_scales || format.has_exponents;
  p.is_half = params.dtype == DType::kFloat16;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((params.num_tokens * 32 + kThreads - 1) / kThreads));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, append_kernel, p);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the kernel that quantizes tokens", error);
}

}  // namespace cutlass_kernels
