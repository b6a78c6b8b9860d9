// Writes new keys and values to slots of a paged cache, converted to its type.
//
// A team of 4 to 256 threads takes a token, or four in turn: all units of its keys, then all of its values. A unit is
// what a thread converts at once: 8 elements where addresses and strides allow it, else one.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "common/chunk.h"
#include "common/element_bytes.h"
#include "common/element_types.h"
#include "common/fast_divisor.h"
#include "cuda_failure.h"
#include "cutlass_kernels/append.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kLeastTeam = 4;
// Tokens of a team, whose loads are in flight together. One where they are too few for all SMs.
constexpr int kTokens = 4;
constexpr std::int64_t kManyUnits = 1 << 19;

// New keys or new values, and their cache. Strides in elements.
struct Part {
  const char* from;
  char* to;
  std::int64_t from_token;
  std::int64_t from_head;
  std::int64_t to_page;
  std::int64_t to_token;
  std::int64_t to_head;
  float scale;
  const float* scales;  // by head, or null
  std::int32_t stride_scale;
  FastDivisor units_of_head;
};

struct Params {
  Part parts[2];  // keys, values
  std::int64_t num_tokens;
  int units_of_keys;  // of a token: all heads
  int units;          // of a token: keys and values
  int log2_team;
  int tokens_of_team;
  std::int64_t page_size;
  FastDivisor small_page_size;  // if slots are numbers of 31 bits
  std::int64_t num_slots;       // of the cache
  const void* slots;
  bool slots_are_64_bit;
};

// Two elements of 8 bits, the first in the lower ones.
template <class Out>
__device__ std::uint32_t narrow(float a, float b) {
  constexpr auto kKind = Out::kDType == DType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2;
  return __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, kKind);
}

// kCount elements of a head, as they come.
template <class In, int kCount>
struct Unit {
  Chunk<kCount * In::kBytes> chunk;

  __device__ void load(const char* from) { chunk = chunk.load(from); }
  __device__ void widen(float (&x)[kCount]) const { decode<In, kCount>(chunk, x); }
};
template <class In>
struct Unit<In, 1> {
  std::uint16_t bits;

  __device__ void load(const char* from) { bits = *reinterpret_cast<const std::uint16_t*>(from); }
  __device__ void widen(float (&x)[1]) const {
    if constexpr (In::kDType == DType::kFloat16) {
      x[0] = __half2float(__ushort_as_half(bits));
    } else {
      x[0] = __bfloat162float(__ushort_as_bfloat16(bits));
    }
  }
};

// What elements are divided by. A power of two, which a scale mostly is, is a factor of the same bits: divisions of other
// scales take longer than memory does.
struct Divisor {
  float scale;
  float factor;  // 1 / scale
  bool is_power_of_two;

  __device__ explicit Divisor(float divisor) : scale(divisor), factor(1.0f / divisor) {
    const std::uint32_t bits = __float_as_uint(divisor);
    const std::uint32_t exponent = bits >> 23 & 0xff;
    is_power_of_two = (bits & 0x7fffff) == 0 && 1 <= exponent && exponent <= 253;
  }
  __device__ float operator()(float x) const { return is_power_of_two ? x * factor : x / scale; }
};

// Converts a unit and stores it.
template <class In, class Out, int kCount>
__device__ void convert(const Unit<In, kCount>& unit, char* to, const Divisor& divide) {
  float x[kCount];
  unit.widen(x);
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) x[i] = divide(x[i]);
  if constexpr (Out::kBytes == 1) {
    if constexpr (kCount == 1) {
      *reinterpret_cast<std::uint8_t*>(to) = std::uint8_t(narrow<Out>(x[0], 0.0f));
    } else {
      Chunk<kCount> packed{};
      CUTE_UNROLL
      for (int i = 0; i < kCount; i += 2) {
        packed.words[i / 4] |= narrow<Out>(x[i], x[i + 1]) << i % 4 * 8;
      }
      packed.store(to);
    }
  } else if constexpr (kCount == 1) {
    const typename Out::Pair pair = Out::encode(x[0], x[0]);
    std::memcpy(to, &pair, 2);
  } else {
    store<Out, kCount>(x, to);
  }
}

// The slot of a token; -1 where there is no such token or slot.
__device__ std::int64_t slot_of(const Params& p, std::int64_t token) {
  if (token >= p.num_tokens) return -1;
  const std::int64_t slot = p.slots_are_64_bit
                                ? __ldg(static_cast<const long long*>(p.slots) + token)
                                : __ldg(static_cast<const int*>(p.slots) + token);
  return slot < p.num_slots ? slot : -1;
}

// Where the slot's entry of a head begins, in elements.
__device__ std::int64_t entry_at(const Params& p, const Part& part, std::int64_t slot) {
  const std::int64_t page =
      p.small_page_size.divisor > 0 ? p.small_page_size.divide(unsigned(slot)) : slot / p.page_size;
  return page * part.to_page + (slot - page * p.page_size) * part.to_token;
}

template <class In, class Out, int kCount>
__global__ void __launch_bounds__(kThreads, 4) append_kernel(const __grid_constant__ Params p) {
  const int team = 1 << p.log2_team;
  const int teams = kThreads >> p.log2_team;
  const std::int64_t first_token =
      std::int64_t(blockIdx.x) * teams * p.tokens_of_team + (threadIdx.x >> p.log2_team);
  for (int unit = int(threadIdx.x) & (team - 1); unit < p.units; unit += team) {
    const bool is_value = unit >= p.units_of_keys;
    const Part& part = p.parts[is_value];
    const int of_part = is_value ? unit - p.units_of_keys : unit;
    const std::int64_t head = part.units_of_head.divide(unsigned(of_part));
    const int column = (of_part - int(head) * int(part.units_of_head.divisor)) * kCount;
    std::int64_t slots[kTokens];
    Unit<In, kCount> loaded[kTokens];
    CUTE_UNROLL
    for (int i = 0; i < kTokens; ++i) {
      const std::int64_t token = first_token + i * teams;
      slots[i] = i < p.tokens_of_team ? slot_of(p, token) : -1;
      // Not of the token's slot alone: the load need not wait for it.
      if (i < p.tokens_of_team && token < p.num_tokens) {
        loaded[i].load(part.from +
                       (token * part.from_token + head * part.from_head + column) * In::kBytes);
      }
    }
    const float of_head =
        part.scales == nullptr ? 1.0f : __ldg(part.scales + head * part.stride_scale);
    const Divisor divide(part.scale * of_head);
    CUTE_UNROLL
    for (int i = 0; i < kTokens; ++i) {
      if (slots[i] < 0) continue;
      char* to =
          part.to + (entry_at(p, part, slots[i]) + head * part.to_head + column) * Out::kBytes;
      convert<In, Out, kCount>(loaded[i], to, divide);
    }
  }
}

std::string fault_in(const AppendBySlotParams& p) {
  for (const auto& [name, value] :
       {std::pair("num_kv_heads", p.num_kv_heads), std::pair("head_dim_qk", p.head_dim_qk),
        std::pair("head_dim_vo", p.head_dim_vo), std::pair("page_size", p.page_size)}) {
    if (value <= 0) return std::string(name) + "=" + std::to_string(value) + " must be positive.";
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (p.num_tokens < 0 || p.num_tokens > kMost) {
    return "num_tokens=" + std::to_string(p.num_tokens) + " must lie between 0 and " +
           std::to_string(kMost) + ": split the batch.";
  }
  if (std::int64_t(p.num_kv_heads) * (std::int64_t(p.head_dim_qk) + p.head_dim_vo) > kMost) {
    return "num_kv_heads=" + std::to_string(p.num_kv_heads) +
           " heads of head_dim_qk=" + std::to_string(p.head_dim_qk) +
           " and head_dim_vo=" + std::to_string(p.head_dim_vo) +
           " are too many elements for one token.";
  }
  if (p.num_pages < 0) return "num_pages is not set: it counts the pages of the caches.";
  if (p.num_pages > std::numeric_limits<std::int64_t>::max() / p.page_size) {
    return "num_pages=" + std::to_string(p.num_pages) + " are more than slots can count.";
  }
  if (size_of(p.dtype) != 2 || (size_of(p.cache_dtype) != 1 && p.cache_dtype != p.dtype)) {
    return std::string("dtype=") + to_string(p.dtype) +
           " is not written to caches of cache_dtype=" + to_string(p.cache_dtype) +
           ": keys and values are float16 or bfloat16, and caches have their type or 8 bits.";
  }
  if (p.num_tokens == 0 || p.num_pages == 0) return "";
  if (p.slots == nullptr || p.k.data == nullptr || p.v.data == nullptr ||
      p.k_cache.data == nullptr || p.v_cache.data == nullptr) {
    return "slots, k, v, k_cache and v_cache are needed, but one of them is null.";
  }
  return "";
}

Part make_part(const ConstTensorView& from, const TensorView& to, std::int64_t stride_page,
               float scale, const DeviceScale& scales) {
  Part part{};
  part.from = static_cast<const char*>(from.data);
  part.from_token = from.stride_token;
  part.from_head = from.stride_head;
  part.to = static_cast<char*>(to.data);
  part.to_page = stride_page;
  part.to_token = to.stride_token;
  part.to_head = to.stride_head;
  part.scale = scale;
  part.scales = scales.data;
  part.stride_scale = scales.stride;
  return part;
}

// Whether units of 8 elements lie at multiples of their size.
bool is_aligned(const Part& part, int head_dim, int out_bytes) {
  const std::int64_t strides =
      part.from_token | part.from_head | part.to_page | part.to_token | part.to_head | head_dim;
  return strides % 8 == 0 && reinterpret_cast<std::uintptr_t>(part.from) % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(part.to) % (8 * out_bytes) == 0;
}

template <class In, class Out, int kCount>
cudaError_t launch(Params& p, const AppendBySlotParams& params, cudaStream_t stream) {
  const int k_units = params.head_dim_qk / kCount, v_units = params.head_dim_vo / kCount;
  p.parts[0].units_of_head = FastDivisor(unsigned(k_units));
  p.parts[1].units_of_head = FastDivisor(unsigned(v_units));
  p.units_of_keys = params.num_kv_heads * k_units;
  p.units = params.num_kv_heads * (k_units + v_units);
  while ((1 << p.log2_team) < std::clamp(p.units, kLeastTeam, kThreads)) ++p.log2_team;
  p.tokens_of_team = p.num_tokens * p.units >= kManyUnits ? kTokens : 1;
  const int tokens_of_block = (kThreads >> p.log2_team) * p.tokens_of_team;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((p.num_tokens + tokens_of_block - 1) / tokens_of_block));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, &append_kernel<In, Out, kCount>, p);
}

template <class In, class Out>
cudaError_t launch_aligned(Params& p, const AppendBySlotParams& params, cudaStream_t stream) {
  const bool aligned = is_aligned(p.parts[0], params.head_dim_qk, Out::kBytes) &&
                       is_aligned(p.parts[1], params.head_dim_vo, Out::kBytes);
  return aligned ? launch<In, Out, 8>(p, params, stream) : launch<In, Out, 1>(p, params, stream);
}

template <class In>
cudaError_t launch_to(Params& p, const AppendBySlotParams& params, cudaStream_t stream) {
  switch (params.cache_dtype) {
    case DType::kFloat8E4M3:
      return launch_aligned<In, e4m3>(p, params, stream);
    case DType::kFloat8E5M2:
      return launch_aligned<In, e5m2>(p, params, stream);
    default:
      return launch_aligned<In, In>(p, params, stream);
  }
}

}  // namespace

Status append_paged_kv_cache_by_slot(const AppendBySlotParams& params, cudaStream_t stream) {
  if (std::string fault = fault_in(params); !fault.empty()) {
    return Status::invalid(std::move(fault));
  }
  if (params.num_tokens == 0 || params.num_pages == 0) return Status::success();
  Params p{};
  p.parts[0] =
      make_part(params.k, params.k_cache, params.k_stride_page, params.k_scale, params.k_scales);
  p.parts[1] =
      make_part(params.v, params.v_cache, params.v_stride_page, params.v_scale, params.v_scales);
  p.num_tokens = params.num_tokens;
  p.page_size = params.page_size;
  p.num_slots = params.num_pages * params.page_size;
  p.small_page_size.divisor = 0;
  if (p.num_slots <= std::numeric_limits<std::int32_t>::max()) {
    p.small_page_size = FastDivisor(std::uint32_t(params.page_size));
  }
  p.slots = params.slots;
  p.slots_are_64_bit = params.slots_are_64_bit;
  const cudaError_t error = params.dtype == DType::kFloat16 ? launch_to<fp16>(p, params, stream)
                                                            : launch_to<bf16>(p, params, stream);
  return error == cudaSuccess ? Status::success()
                              : cuda_failure("Launching the kernel that appends by slot", error);
}

}  // namespace cutlass_kernels
