// Writes new keys and values to slots of a paged cache, converted to its type.
//
// A team of 4 to 256 threads takes a token, or four in turn: all units of its keys, then all of its values. A unit is
// what a thread converts at once: 8 elements where addresses and strides allow it, else one.
#include "append/slots.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "cuda_failure.h"

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
  std::int64_t from_token;
  std::int64_t from_head;
  CachePart to;
  FastDivisor units_of_head;
};

struct Params {
  Part parts[2];  // keys, values
  std::int64_t num_tokens;
  int units_of_keys;  // of a token: all heads
  int units;          // of a token: keys and values
  int log2_team;
  int tokens_of_team;
  SlotMap slots;
};

template <class In, CacheType kType, int kCount>
__global__ void __launch_bounds__(kThreads, 4) append_kernel(const __grid_constant__ Params p) {
  const int team = 1 << p.log2_team;
  const int teams = kThreads >> p.log2_team;
  const std::int64_t first_token = std::int64_t(blockIdx.x) * teams * p.tokens_of_team + (threadIdx.x >> p.log2_team);
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
      slots[i] = i < p.tokens_of_team && token < p.num_tokens ? p.slots.of_token(token) : -1;
      // Not of the token's slot alone: the load need not wait for it.
      if (i < p.tokens_of_team && token < p.num_tokens) {
        loaded[i].load(part.from + (token * part.from_token + head * part.from_head + column) * In::kBytes);
      }
    }
    const Divisor divide = part.to.divisor_of(head);
    CUTE_UNROLL
    for (int i = 0; i < kTokens; ++i) {
      if (slots[i] < 0) continue;
      const std::int64_t to = part.to.entry_at(p.slots.place_of(slots[i]), head) + column;
      float x[kCount];
      loaded[i].widen(x);
      part.to.store_divided<In, kType>(x, to, divide);
    }
  }
}

Part make_part(const ConstTensorView& from, const CachePart& to) {
  return {static_cast<const char*>(from.data), from.stride_token, from.stride_head, to, {}};
}

// Whether units of 8 elements lie at multiples of their size.
bool is_aligned(const Part& part, int head_dim) {
  return (part.from_token | part.from_head | head_dim) % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(part.from) % 16 == 0 && part.to.is_aligned();
}

template <class In, CacheType kType, int kCount>
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
  return cudaLaunchKernelEx(&config, &append_kernel<In, kType, kCount>, p);
}

template <class In>
cudaError_t launch_to(Params& p, const AppendBySlotParams& params, cudaStream_t stream) {
  if (!is_aligned(p.parts[0], params.head_dim_qk) || !is_aligned(p.parts[1], params.head_dim_vo)) {
    return launch<In, CacheType::kAny, 1>(p, params, stream);
  }
  switch (params.cache_dtype) {
    case DType::kFloat8E4M3:
      return launch<In, CacheType::kE4M3, 8>(p, params, stream);
    case DType::kFloat8E5M2:
      return launch<In, CacheType::kE5M2, 8>(p, params, stream);
    default:
      return launch<In, CacheType::kSame, 8>(p, params, stream);
  }
}

}  // namespace

std::string fault_in(const AppendBySlotParams& p) {
  for (const auto& [name, value] : {std::pair("num_kv_heads", p.num_kv_heads), std::pair("head_dim_qk", p.head_dim_qk),
                                    std::pair("head_dim_vo", p.head_dim_vo), std::pair("page_size", p.page_size)}) {
    if (value <= 0) return std::string(name) + "=" + std::to_string(value) + " must be positive.";
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (p.num_tokens < 0 || p.num_tokens > kMost) {
    return "num_tokens=" + std::to_string(p.num_tokens) + " must lie between 0 and " + std::to_string(kMost) +
           ": split the batch.";
  }
  if (std::int64_t(p.num_kv_heads) * (std::int64_t(p.head_dim_qk) + p.head_dim_vo) > kMost) {
    return "num_kv_heads=" + std::to_string(p.num_kv_heads) + " heads of head_dim_qk=" + std::to_string(p.head_dim_qk) +
           " and head_dim_vo=" + std::to_string(p.head_dim_vo) + " are too many elements for one token.";
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
  if (p.slots == nullptr || p.k.data == nullptr || p.v.data == nullptr || p.k_cache.data == nullptr ||
      p.v_cache.data == nullptr) {
    return "slots, k, v, k_cache and v_cache are needed, but one of them is null.";
  }
  return "";
}

Status append_paged_kv_cache_by_slot(const AppendBySlotParams& params, cudaStream_t stream) {
  if (std::string fault = fault_in(params); !fault.empty()) {
    return Status::invalid(std::move(fault));
  }
  if (params.num_tokens == 0 || params.num_pages == 0) return Status::success();
  Params p{};
  p.parts[0] =
      make_part(params.k, {params.k_cache, params.cache_dtype, params.k_stride_page, params.k_scale, params.k_scales});
  p.parts[1] =
      make_part(params.v, {params.v_cache, params.cache_dtype, params.v_stride_page, params.v_scale, params.v_scales});
  p.num_tokens = params.num_tokens;
  p.slots = SlotMap(params);
  const cudaError_t error =
      params.dtype == DType::kFloat16 ? launch_to<fp16>(p, params, stream) : launch_to<bf16>(p, params, stream);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the kernel that appends by slot", error);
}

}  // namespace cutlass_kernels
