// Rotates queries and keys by their positions, and writes keys and values to slots of a paged cache.
//
// A team of 4 to 256 threads takes a token: all items of its queries, of its keys, then of its values. An item is two
// units of a head that a thread computes together: the two halves of 8 pairs (a, b), or 16 elements in a row where
// pairs lie side by side, or where nothing is rotated. Where addresses and strides do not allow 8, a unit is one
// element.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "append/rotation.h"
#include "append/slots.h"
#include "cuda_failure.h"
#include "cutlass_kernels/rope.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kLeastTeam = 4;
// Where there are so many items that all SMs are busy, a team takes several items each, and as many in each turn: of
// 320 items for a token (32/8 heads, hd128), 256 threads would leave 64 to a second turn (132 us instead of 122).
constexpr std::int64_t kManyItems = 1 << 19;

// Queries, keys or values. Strides in elements; where there is no `to` or no cache, nothing is written there.
struct Part {
  const char* from;
  char* to;
  std::int64_t from_token;
  std::int64_t from_head;
  std::int64_t to_token;
  std::int64_t to_head;
  CachePart cache;
  int first_item;  // of a token
  int rotated;     // items of a head that are rotated: the first ones
  FastDivisor items_of_head;
};

struct Params {
  Part parts[3];  // queries, keys, values
  std::int64_t num_tokens;
  int items;  // of a token
  int log2_team;
  int rotary_dim;
  bool interleaved;
  bool table_is_fp32;  // else of the type of the queries
  const void* positions;
  bool positions_are_64_bit;
  std::int64_t num_positions;
  const char* cos_sin;
  std::int64_t stride_position;
  SlotMap slots;
};

// Both units of an item, as fp32. Results may lie where they come from: loads are not from the read-only cache.
template <class In, int kCount>
struct Item {
  float a[kCount], b[kCount];

  __device__ Item(const char* first, const char* second) {
    Unit<In, kCount> one, two;
    one.load_coherent(first);
    two.load_coherent(second);
    one.widen(a);
    two.widen(b);
  }
  template <bool kInterleaved>
  __device__ void rotate(const float (&cos)[kCount], const float (&sin)[kCount]) {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      // Pair i: (a[i], b[i]); or elements 2 i and 2 i + 1 of a and b, one after the other.
      float& x = kInterleaved ? (2 * i < kCount ? a[2 * i] : b[2 * i - kCount]) : a[i];
      float& y = !kInterleaved ? b[i] : 2 * i + 1 < kCount ? a[2 * i + 1] : b[2 * i + 1 - kCount];
      const float first = rotated(x, -y, cos[i], sin[i]);
      y = rotated(y, x, cos[i], sin[i]);
      x = first;
    }
  }
  // To the precision of In, so that the cache holds what would be read back.
  __device__ void round() {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const float2 rounded = In::decode(In::encode(a[i], b[i]));
      a[i] = rounded.x, b[i] = rounded.y;
    }
  }
};

// Table: the type of the table; kOrder: whether pairs lie side by side. Where addresses do not allow 8 elements at
// once, both are branches; elsewhere those would take 23 % more time on average (H200, 2k tokens of 8/1 heads: 2.7 ->
// 3.8 us).
enum class PairOrder { kHalves, kInterleaved, kAtRunTime };
struct AnyTable {};

template <class In, class Table, CacheType kType, PairOrder kOrder, int kCount>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ Params p) {
  const std::int64_t token = (std::int64_t(blockIdx.x) * kThreads + threadIdx.x) >> p.log2_team;
  if (token >= p.num_tokens) return;
  const std::int64_t position = p.positions_are_64_bit ? __ldg(static_cast<const long long*>(p.positions) + token)
                                                       : __ldg(static_cast<const int*>(p.positions) + token);
  if (position < 0 || position >= p.num_positions) return;
  const std::int64_t slot = p.slots.slots == nullptr ? -1 : p.slots.of_token(token);
  constexpr bool kAnyTable = std::is_same_v<Table, AnyTable>;
  const bool fp32_table = kAnyTable ? p.table_is_fp32 : std::is_same_v<Table, fp32>;
  const bool interleaved = kOrder == PairOrder::kAtRunTime ? p.interleaved : kOrder == PairOrder::kInterleaved;
  const int table_bytes = fp32_table ? fp32::kBytes : In::kBytes;
  const char* table = p.cos_sin + position * p.stride_position * table_bytes;
  const int team = 1 << p.log2_team;
  for (int item = int(threadIdx.x) & (team - 1); item < p.items; item += team) {
    const Part& part = p.parts[(item >= p.parts[1].first_item) + (item >= p.parts[2].first_item)];
    const int of_part = item - part.first_item;
    const int head = int(part.items_of_head.divide(unsigned(of_part)));
    const int index = of_part - head * int(part.items_of_head.divisor);
    const bool rotates = index < part.rotated;
    const bool halves = rotates && !interleaved;
    const int first = halves ? index * kCount : index * 2 * kCount;
    const int second = first + (halves ? p.rotary_dim / 2 : kCount);
    const char* from = part.from + (token * part.from_token + head * part.from_head) * In::kBytes;
    Item<In, kCount> x(from + first * In::kBytes, from + second * In::kBytes);
    if (rotates) {
      float cos[kCount], sin[kCount];
      const char* cos_at = table + index * kCount * table_bytes;
      const char* sin_at = cos_at + p.rotary_dim / 2 * table_bytes;
      if (fp32_table) {
        load_table<fp32>(cos_at, cos);
        load_table<fp32>(sin_at, sin);
      } else {
        load_table<In>(cos_at, cos);
        load_table<In>(sin_at, sin);
      }
      if (interleaved) {
        x.template rotate<true>(cos, sin);
      } else {
        x.template rotate<false>(cos, sin);
      }
    }
    if (part.to != nullptr) {
      char* to = part.to + (token * part.to_token + head * part.to_head) * In::kBytes;
      store_unit<In, kCount>(x.a, to + first * In::kBytes);
      store_unit<In, kCount>(x.b, to + second * In::kBytes);
    }
    if (part.cache.data != nullptr && slot >= 0) {
      x.round();
      const Divisor divide = part.cache.divisor_of(head);
      const std::int64_t to = part.cache.entry_at(p.slots.place_of(slot), head);
      part.cache.store_divided<In, kType>(x.a, to + first, divide);
      part.cache.store_divided<In, kType>(x.b, to + second, divide);
    }
  }
}

Part make_part(const ConstTensorView& from, const TensorView& to, const CachePart& cache) {
  return {static_cast<const char*>(from.data),
          static_cast<char*>(to.data),
          from.stride_token,
          from.stride_head,
          to.stride_token,
          to.stride_head,
          cache,
          0,
          0,
          {}};
}

bool is_aligned(const Part& part) {
  const std::uintptr_t addresses =
      reinterpret_cast<std::uintptr_t>(part.from) | reinterpret_cast<std::uintptr_t>(part.to);
  const std::int64_t strides = part.from_token | part.from_head | part.to_token | part.to_head;
  return strides % 8 == 0 && addresses % 16 == 0 && (part.cache.data == nullptr || part.cache.is_aligned());
}

// Rotated in place, other elements stay where they are.
bool is_in_place(const Part& part) {
  return part.to == part.from && part.to_token == part.from_token && part.to_head == part.from_head &&
         part.cache.data == nullptr;
}

struct Sizes {
  int heads;
  int head_dim;
  int rotary_dim;
};

int team_size(std::int64_t items, std::int64_t num_tokens) {
  int team = kLeastTeam;
  while (team < items && team < kThreads) team *= 2;
  if (num_tokens * items < kManyItems) return team;
  const auto idle = [&](int size) { return (items + size - 1) / size * size - items; };
  team = std::min(team, 64);
  while (team > kLeastTeam && 8 * idle(team) > items) team /= 2;  // an eighth
  return team;
}

template <class In, class Table, CacheType kType, PairOrder kOrder, int kCount>
cudaError_t launch(Params& p, const Sizes (&sizes)[3], cudaStream_t stream) {
  for (int i = 0; i < 3; ++i) {
    Part& part = p.parts[i];
    const int dim = is_in_place(part) ? sizes[i].rotary_dim : sizes[i].head_dim;
    const int items = dim / (2 * kCount);
    part.first_item = p.items;
    part.rotated = sizes[i].rotary_dim / (2 * kCount);
    part.items_of_head = FastDivisor(unsigned(std::max(items, 1)));
    p.items += sizes[i].heads * items;
  }
  if (p.items == 0) return cudaSuccess;
  const int team = team_size(p.items, p.num_tokens);
  while (1 << p.log2_team < team) ++p.log2_team;
  const int tokens_of_block = kThreads >> p.log2_team;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((p.num_tokens + tokens_of_block - 1) / tokens_of_block));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, &rope_kernel<In, Table, kType, kOrder, kCount>, p);
}

template <class In, CacheType kType>
cudaError_t launch_pairs(Params& p, const Sizes (&sizes)[3], cudaStream_t stream) {
  const auto launch_table = [&](auto table) {
    using Table = decltype(table);
    return p.interleaved ? launch<In, Table, kType, PairOrder::kInterleaved, 8>(p, sizes, stream)
                         : launch<In, Table, kType, PairOrder::kHalves, 8>(p, sizes, stream);
  };
  return p.table_is_fp32 ? launch_table(fp32{}) : launch_table(In{});
}

template <class In>
cudaError_t launch_to(DType cache_dtype, Params& p, const Sizes (&sizes)[3], cudaStream_t stream) {
  bool aligned =
      reinterpret_cast<std::uintptr_t>(p.cos_sin) % 16 == 0 && p.stride_position % 8 == 0 && p.rotary_dim % 16 == 0;
  for (int i = 0; i < 3; ++i) aligned &= is_aligned(p.parts[i]) && sizes[i].head_dim % 16 == 0;
  if (!aligned) return launch<In, AnyTable, CacheType::kAny, PairOrder::kAtRunTime, 1>(p, sizes, stream);
  switch (cache_dtype) {
    case DType::kFloat8E4M3:
      return launch_pairs<In, CacheType::kE4M3>(p, sizes, stream);
    case DType::kFloat8E5M2:
      return launch_pairs<In, CacheType::kE5M2>(p, sizes, stream);
    default:
      return launch_pairs<In, CacheType::kSame>(p, sizes, stream);
  }
}

Status rotate(const RopeParams& params, const AppendBySlotParams* append, cudaStream_t stream) {
  if (std::string fault = fault_in(params); !fault.empty()) {
    return Status::invalid(std::move(fault));
  }
  if (params.num_tokens == 0) return Status::success();
  Params p{};
  p.num_tokens = params.num_tokens;
  p.rotary_dim = params.rotary_dim;
  p.interleaved = params.interleaved;
  p.table_is_fp32 = params.cos_sin_dtype == DType::kFloat32;
  p.positions = params.positions;
  p.positions_are_64_bit = params.positions_are_64_bit;
  p.num_positions = params.num_positions;
  p.cos_sin = static_cast<const char*>(params.cos_sin);
  p.stride_position = params.stride_position;
  CachePart k_cache{}, v_cache{};
  Sizes sizes[3] = {{params.num_qo_heads, params.head_dim, params.rotary_dim},
                    {params.num_kv_heads, params.head_dim, params.rotary_dim},
                    {0, 16, 0}};
  p.parts[0] = make_part(params.q, params.q_out, {});
  if (append != nullptr && append->num_pages > 0) {
    p.slots = SlotMap(*append);
    k_cache = {append->k_cache, append->cache_dtype, append->k_stride_page, append->k_scale, append->k_scales};
    v_cache = {append->v_cache, append->cache_dtype, append->v_stride_page, append->v_scale, append->v_scales};
    sizes[2] = {params.num_kv_heads, append->head_dim_vo, 0};
    p.parts[2] = make_part(append->v, {}, v_cache);
  }
  if (params.k_out.data == nullptr && k_cache.data == nullptr) sizes[1].heads = 0;
  p.parts[1] = make_part(params.k, params.k_out, k_cache);
  const DType cache_dtype = append == nullptr ? params.dtype : append->cache_dtype;
  const cudaError_t error = params.dtype == DType::kFloat16 ? launch_to<fp16>(cache_dtype, p, sizes, stream)
                                                            : launch_to<bf16>(cache_dtype, p, sizes, stream);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the kernel of rotary embeddings", error);
}

}  // namespace

std::string fault_in(const RopeParams& p) {
  if (size_of(p.dtype) != 2) {
    return std::string("dtype=") + to_string(p.dtype) + " is not rotated: use float16 or bfloat16.";
  }
  if (p.cos_sin_dtype != DType::kFloat32 && p.cos_sin_dtype != p.dtype) {
    return std::string("cos_sin_dtype=") + to_string(p.cos_sin_dtype) + " must be float32, or " + to_string(p.dtype) +
           " like queries and keys.";
  }
  if (p.head_dim <= 0) return "head_dim=" + std::to_string(p.head_dim) + " must be positive.";
  if (p.num_qo_heads < 0 || p.num_kv_heads < 0) {
    return "num_qo_heads=" + std::to_string(p.num_qo_heads) + " and num_kv_heads=" + std::to_string(p.num_kv_heads) +
           " must not be negative.";
  }
  if (p.rotary_dim <= 0 || p.rotary_dim > p.head_dim || p.rotary_dim % 2 != 0) {
    return "rotary_dim=" + std::to_string(p.rotary_dim) +
           " must be even, and at most head_dim=" + std::to_string(p.head_dim) + ".";
  }
  if (p.head_dim % 2 != 0) return "head_dim=" + std::to_string(p.head_dim) + " must be even.";
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (p.num_tokens < 0 || p.num_tokens > kMost) {
    return "num_tokens=" + std::to_string(p.num_tokens) + " must lie between 0 and " + std::to_string(kMost) +
           ": split the batch.";
  }
  if ((std::int64_t(p.num_qo_heads) + 2 * std::int64_t(p.num_kv_heads)) * p.head_dim > kMost) {
    return "num_qo_heads=" + std::to_string(p.num_qo_heads) + " and num_kv_heads=" + std::to_string(p.num_kv_heads) +
           " of head_dim=" + std::to_string(p.head_dim) + " are too many elements for one token.";
  }
  if (p.num_positions < 0) return "num_positions is not set: it counts the rows of cos_sin.";
  if (p.num_tokens == 0) return "";
  if (p.positions == nullptr || p.cos_sin == nullptr ||
      (p.num_qo_heads > 0 && (p.q.data == nullptr || p.q_out.data == nullptr)) ||
      (p.num_kv_heads > 0 && p.k.data == nullptr)) {
    return "positions, cos_sin, q, q_out and k are needed, but one of them is null.";
  }
  return "";
}

Status apply_rope(const RopeParams& params, cudaStream_t stream) { return rotate(params, nullptr, stream); }

Status apply_rope_and_append_by_slot(const RopeParams& params, const AppendBySlotParams& append, cudaStream_t stream) {
  AppendBySlotParams whole = append;
  whole.dtype = params.dtype;
  whole.num_kv_heads = params.num_kv_heads;
  whole.head_dim_qk = params.head_dim;
  whole.num_tokens = params.num_tokens;
  whole.k = params.k;
  if (std::string fault = fault_in(whole); !fault.empty()) return Status::invalid(std::move(fault));
  if (append.head_dim_vo % 2 != 0) {
    return Status::invalid("head_dim_vo=" + std::to_string(append.head_dim_vo) + " must be even.");
  }
  return rotate(params, &whole, stream);
}

}  // namespace cutlass_kernels
