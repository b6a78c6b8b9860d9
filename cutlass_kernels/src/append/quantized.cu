// New tokens of latent attention written to slots of quantized latent caches; their RoPE columns, and those of queries,
// are rotated first where a caller wants that.
//
//   lane         holds of a token
//   l            16 e4m3 columns from 16 l on: two loads of 16 bytes, and one store
//   8 i + c      8 RoPE columns from 8 c on, of the warp's token i
//
// A warp has up to 4 tokens, whose loads are all in flight before the first is used. A token of 656 bytes takes about
// 200 instructions. With a division per column it would take 600, and more time than memory does.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "append/group_scale.h"
#include "append/rotation.h"
#include "append/slots.h"
#include "common/dependent_launch.h"
#include "common/token_format.h"
#include "cuda_failure.h"
#include "device.h"
#include "latent/dims.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kRope = 64;              // RoPE columns
constexpr int kRopeLanes = kRope / 8;  // of a row of RoPE columns
constexpr int kTokens = 4;             // of a warp, at most
constexpr int kWarpsAtOnce = 4096;     // about as many run on an H200: tokens beyond are shared among them
constexpr int kRows = 4;               // of queries, of a lane

// Rows of columns, which are consecutive. Strides in bytes.
struct Rows {
  char* data;
  std::int64_t stride;
  std::int64_t stride_head;

  __device__ char* at(std::int64_t row, int column = 0) const { return data + row * stride + 2 * column; }
};

// The angles of tokens. Strides in bytes.
struct Rotation {
  const void* positions;
  const char* table;  // null: nothing is rotated
  std::int64_t num_positions, stride;
  bool positions_are_64_bit;
  bool table_is_fp32;
  bool interleaved;

  __device__ std::int64_t position_of(std::int64_t token) const {
    return positions_are_64_bit ? __ldg(static_cast<const long long*>(positions) + token)
                                : __ldg(static_cast<const int*>(positions) + token);
  }
  // The row of the table for a position; null: it has none.
  __device__ const char* row_of(std::int64_t position) const {
    return 0 <= position && position < num_positions ? table + position * stride : nullptr;
  }
  template <class In, int kCount>
  __device__ void load(const char* row, int pair, float (&cos)[kCount], float (&sin)[kCount]) const {
    if (table_is_fp32) {
      load_table<fp32>(row + 4 * pair, cos);
      load_table<fp32>(row + 4 * (pair + kRope / 2), sin);
    } else {
      load_table<In>(row + 2 * pair, cos);
      load_table<In>(row + 2 * (pair + kRope / 2), sin);
    }
  }
};

struct Params {
  SlotMap slots;
  TokenFormat format;
  int group_lanes_log2;  // of the 2, 4 or 8 lanes that share a scale
  bool powers_of_two;    // scales are
  Rows first, others;    // columns of tokens
  int first_columns;
  int loaded_columns;  // of e4m3, as they come
  int rope_column;     // of a token, where its RoPE columns begin; -1: it has none
  int tokens_of_warp;
  std::int64_t num_tokens;
  char* cache;
  std::int64_t stride_page, stride_token, scales_of_page;  // bytes

  Rotation rotation;
  Rows rotated;  // RoPE columns, if a caller wants them
  Rows queries, rotated_queries;
  FastDivisor heads;
  std::int64_t query_rows;  // tokens * heads
  unsigned token_blocks;    // thread blocks of tokens; those behind rotate queries

  __device__ const Rows& rows_of(int column) const { return column < first_columns ? first : others; }
  __device__ int column_of(int column) const { return column < first_columns ? column : column - first_columns; }
};

// --- Rotation --------------------------------------------------------------------------------------------------------

// Rotates the columns of a row of kRopeLanes lanes, by the angles of `row`. All lanes of the warp call it.
template <class In>
__device__ void rotate(const Rotation& rotation, const char* row, int column, Unit<In, 8>& x) {
  float own[8], other[8], cos[8], sin[8];
  x.widen(own);
  const bool is_second = column >= kRope / 2;  // of pairs that are halves
  Unit<In, 8> partner;
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    partner.chunk.words[i] = __shfl_xor_sync(kAllLanes, x.chunk.words[i], kRopeLanes / 2);
  }
  if (row == nullptr) return;
  if (rotation.interleaved) {
    float cos_of_pair[4], sin_of_pair[4];
    rotation.load<In>(row, column / 2, cos_of_pair, sin_of_pair);
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      other[i] = i % 2 == 0 ? -own[i + 1] : own[i - 1];
      cos[i] = cos_of_pair[i / 2], sin[i] = sin_of_pair[i / 2];
    }
  } else {
    rotation.load<In>(row, column % (kRope / 2), cos, sin);
    partner.widen(other);
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) other[i] = is_second ? other[i] : -other[i];
  }
  CUTE_UNROLL
  for (int i = 0; i < 8; i += 2) {
    x.chunk.words[i / 2] =
        In::pack(rotated(own[i], other[i], cos[i], sin[i]), rotated(own[i + 1], other[i + 1], cos[i + 1], sin[i + 1]));
  }
}

// Rows of queries, kRopeLanes lanes for each.
template <class In>
__device__ void rotate_queries(const Params& p, unsigned block) {
  constexpr int kRowsAtOnce = kThreads / kRopeLanes;
  const int column = int(threadIdx.x) % kRopeLanes * 8;
  const std::int64_t first = std::int64_t(block) * kRowsAtOnce * kRows + threadIdx.x / kRopeLanes;
  Unit<In, 8> x[kRows];
  std::int64_t positions[kRows];
  const auto place = [&](const Rows& rows, unsigned row) {
    const unsigned token = p.heads.divide(row);
    return rows.at(token, column) + (row - token * p.heads.divisor) * rows.stride_head;
  };
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const std::int64_t row = first + i * kRowsAtOnce;
    x[i] = {}, positions[i] = -1;
    if (row < p.query_rows) {
      x[i].load_coherent(place(p.queries, unsigned(row)));
      positions[i] = p.rotation.position_of(p.heads.divide(unsigned(row)));
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const char* const angles = p.rotation.row_of(positions[i]);
    rotate(p.rotation, angles, column, x[i]);
    if (angles != nullptr) x[i].chunk.store(place(p.rotated_queries, unsigned(first) + i * kRowsAtOnce));
  }
}

// --- Tokens ----------------------------------------------------------------------------------------------------------

// Where a token goes, in bytes of the cache; negative: nowhere.
struct Target {
  std::int64_t record = -1;
  std::int64_t scales = -1;

  __device__ Target(const Params& p, std::int64_t slot) {
    if (slot < 0) return;
    const Place place = p.slots.place_of(slot);
    const std::int64_t page = place.page * p.stride_page;
    record = page + place.entry * p.stride_token;
    scales =
        p.format.by_page ? page + p.scales_of_page + place.entry * p.format.scale_bytes : record + p.format.scales_at;
  }
  __device__ Target of_lane(int lane) const {
    Target target = *this;
    target.record = __shfl_sync(kAllLanes, record, lane);
    target.scales = __shfl_sync(kAllLanes, scales, lane);
    return target;
  }
};

// Quantizes the columns of the warp's tokens, 16 of each lane, and stores them with their scales. kPowers: scales are
// powers of two. A branch in the loop would add about 12 instructions per token.
template <class In, bool kPowers>
__device__ void store_columns(const Params& p, const Target& target, const Unit<In, 8> (&x)[kTokens][2], int tokens) {
  const int lane = threadIdx.x % 32;
  const bool has_columns = lane * kColumns < p.format.columns;
  int group = lane >> p.group_lanes_log2;
  if (group << p.group_lanes_log2 != lane) group = -1;  // another lane stores its scale
  CUTE_UNROLL
  for (int i = 0; i < kTokens; ++i) {
    if (i == tokens) break;
    const Target to = target.of_lane(i * kRopeLanes);
    if (to.record < 0) continue;
    const GroupScale<kPowers> scale(absmax_of<In>(x[i], p.group_lanes_log2));
    if (has_columns) {
      float columns[kColumns];
      CUTE_UNROLL
      for (int j = 0; j < kColumns; j += 2) {
        const float2 pair = widen<In>(x[i][j / 8].chunk.words[j % 8 / 2]);
        columns[j] = pair.x, columns[j + 1] = pair.y;
      }
      scale.divide_all(columns);
      store_narrow(columns, p.cache + to.record + lane * kColumns, __NV_E4M3);
    }
    if (group < 0) continue;
    char* const scales = p.cache + to.scales;
    if (kPowers && p.format.has_exponents) {  // those behind the columns are padding
      scales[group] = has_columns ? scale.exponent() : char(0);
    } else {
      reinterpret_cast<float*>(scales)[group] = scale.value;
    }
  }
}

template <class In>
__device__ void store_rope(const Unit<In, 8>& x, char* to) {
  if constexpr (In::kDType == DType::kBFloat16) {
    x.chunk.store(to);
  } else {
    float columns[8];
    x.widen(columns);
    store<bf16, 8>(columns, to);
  }
}

// kRotates: whether there is a table of angles.
template <class In, bool kRotates>
__global__ void __launch_bounds__(kThreads, kRotates ? 6 : 8) append_kernel(const __grid_constant__ Params p) {
  await_previous_kernel();
  allow_next_kernel();  // all that it reads before this kernel ends was written before this kernel began
  if constexpr (kRotates) {
    if (blockIdx.x >= p.token_blocks) {
      rotate_queries<In>(p, blockIdx.x - p.token_blocks);
      return;
    }
  }
  const std::int64_t first = (std::int64_t(blockIdx.x) * kWarps + threadIdx.x / 32) * p.tokens_of_warp;
  const int tokens = int(min(std::int64_t(p.tokens_of_warp), p.num_tokens - first));
  if (tokens <= 0) return;
  const int lane = threadIdx.x % 32;

  // ---- Loads. Those of columns come first: what follows waits for its slot. ----
  Unit<In, 8> x[kTokens][2];
  if (lane * kColumns < p.loaded_columns) {
    const Rows& rows = p.rows_of(lane * kColumns);
    const char* from = rows.at(first, p.column_of(lane * kColumns));
    CUTE_UNROLL
    for (int i = 0; i < kTokens; ++i, from += rows.stride) {
      if (i == tokens) break;
      x[i][0].load_coherent(from);
      x[i][1].load_coherent(from + 16);
    }
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kTokens; ++i) x[i][0] = x[i][1] = {};
  }
  const int own = lane / kRopeLanes;  // this lane's token of RoPE columns
  const int rope_column = lane % kRopeLanes * 8;
  Unit<In, 8> rope{};  // zeros where tokens have none
  if (p.rope_column >= 0 && own < tokens) {
    const int column = p.rope_column + rope_column;
    rope.load_coherent(p.rows_of(column).at(first + own, p.column_of(column)));
  }
  std::int64_t slot = -1, position = -1;
  if (own < tokens) {
    if constexpr (kRotates) position = p.rotation.position_of(first + own);
    slot = p.slots.of_token(first + own);
  }

  // ---- RoPE columns. Formats that quantize them have them in their last lanes. ----
  if constexpr (kRotates) {
    const char* const angles = p.rotation.row_of(position);
    if (angles == nullptr) slot = -1;
    rotate(p.rotation, angles, rope_column, rope);
    if (p.rotated.data != nullptr && angles != nullptr) rope.chunk.store(p.rotated.at(first + own, rope_column));
    if (p.format.positions == 0) {
      CUTE_UNROLL
      for (int i = 0; i < 8 * kTokens; ++i) {
        const int from = i / 8 * kRopeLanes + (2 * lane + i / 4 % 2) % kRopeLanes;
        const std::uint32_t word = __shfl_sync(kAllLanes, rope.chunk.words[i % 4], from);
        if (lane * kColumns >= p.loaded_columns) x[i / 8][i / 4 % 2].chunk.words[i % 4] = word;
      }
    }
  }

  // ---- Stores. ----
  const Target target(p, slot);
  if (p.powers_of_two) {
    store_columns<In, true>(p, target, x, tokens);
  } else {
    store_columns<In, false>(p, target, x, tokens);
  }
  if (p.format.positions > 0 && target.record >= 0) {
    store_rope(rope, p.cache + target.record + p.format.positions_at + 2 * rope_column);
  }
}

// --- Launch ----------------------------------------------------------------------------------------------------------

std::uintptr_t address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

// A fault in the tokens or the cache.
std::string fault_in(const AppendQuantizedParams& p, const TokenFormat& format, bool rotates) {
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
  const bool without_rope = format.columns == mla::kLatentDim && format.positions > 0 && columns == format.columns;
  if (p.first_columns <= 0 || p.others_columns < 0 || p.first_columns % kColumns != 0 ||
      (columns != format.columns + format.positions && !without_rope)) {
    return "first_columns=" + std::to_string(p.first_columns) +
           " and others_columns=" + std::to_string(p.others_columns) +
           " must be multiples of 16, together the columns of cache_dtype=" + to_string(p.cache_dtype) + ".";
  }
  if (rotates && (without_rope || p.cache_dtype == DType::kLatentV32Nope)) {
    return "Tokens of " + std::to_string(columns) +
           " columns have none to rotate in a cache of cache_dtype=" + std::string(to_string(p.cache_dtype)) +
           ": call append_quantized_by_slot().";
  }
  if (rotates && p.others_columns != 0 && p.others_columns != kRope) {
    return "others_columns=" + std::to_string(p.others_columns) + " must be the 64 that are rotated, or 0.";
  }
  if (format.by_page && p.page_size > 1 && p.stride_token != format.data_bytes()) {
    return "stride_token=" + std::to_string(p.stride_token) + " must be " + std::to_string(format.data_bytes()) +
           ": tokens of a page of cache_dtype=" + to_string(p.cache_dtype) + " lie side by side.";
  }
  if (p.num_tokens == 0 || (p.num_pages == 0 && !rotates)) return "";
  if (p.slots == nullptr || p.first == nullptr || (p.cache == nullptr && p.num_pages > 0) ||
      (p.others == nullptr && p.others_columns > 0)) {
    return "slots, first, others and cache are needed, but one of them is null.";
  }
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

// A fault in what is rotated.
std::string fault_of_rotation(const RopeParams& given) {
  RopeParams p = given;
  p.num_kv_heads = 0;  // keys are columns of the tokens
  if (std::string fault = fault_in(p); !fault.empty()) return fault;
  if (p.head_dim != kRope || p.rotary_dim != kRope) {
    return "head_dim=" + std::to_string(p.head_dim) + " and rotary_dim=" + std::to_string(p.rotary_dim) +
           " must be 64, the RoPE columns of latent caches.";
  }
  if (p.num_tokens * std::int64_t(p.num_qo_heads) > std::numeric_limits<std::int32_t>::max()) {
    return "num_tokens=" + std::to_string(p.num_tokens) + " of num_qo_heads=" + std::to_string(p.num_qo_heads) +
           " are too many rows: split the batch.";
  }
  std::int64_t strides = 0;
  std::uintptr_t all = address(p.cos_sin) | address(p.k_out.data);
  if (p.num_qo_heads > 0) all |= address(p.q.data) | address(p.q_out.data);
  if (p.num_qo_heads > 1) strides |= p.q.stride_head | p.q_out.stride_head;
  if (p.num_positions > 1) strides |= p.stride_position;
  if (p.num_tokens > 1 && p.num_qo_heads > 0) strides |= p.q.stride_token | p.q_out.stride_token;
  if (p.num_tokens > 1 && p.k_out.data != nullptr) strides |= p.k_out.stride_token;
  if (all % 16 != 0 || strides % 8 != 0) {
    return "Addresses of queries, rotated columns and cos_sin must be multiples of 16 bytes, strides of 8 elements.";
  }
  return "";
}

Rows rows(const void* data, std::int64_t stride, std::int64_t stride_head = 0) {
  return {static_cast<char*>(const_cast<void*>(data)), 2 * stride, 2 * stride_head};
}

void set_rotation(const RopeParams& rope, Params* p) {
  const int table_bytes = rope.cos_sin_dtype == DType::kFloat32 ? fp32::kBytes : bf16::kBytes;
  p->rotation = {rope.positions,
                 static_cast<const char*>(rope.cos_sin),
                 rope.num_positions,
                 rope.stride_position * table_bytes,
                 rope.positions_are_64_bit,
                 rope.cos_sin_dtype == DType::kFloat32,
                 rope.interleaved};
  p->rotated = rows(rope.k_out.data, rope.k_out.stride_token);
  p->queries = rows(rope.q.data, rope.q.stride_token, rope.q.stride_head);
  p->rotated_queries = rows(rope.q_out.data, rope.q_out.stride_token, rope.q_out.stride_head);
  p->heads = FastDivisor(unsigned(std::max(rope.num_qo_heads, 1)));
  p->query_rows = rope.num_tokens * rope.num_qo_heads;
}

Status append(const RopeParams* rope, const AppendQuantizedParams& params, cudaStream_t stream) {
  const TokenFormat format = token_format(params.cache_dtype);
  std::string fault = fault_in(params, format, rope != nullptr);
  if (fault.empty() && rope != nullptr) fault = fault_of_rotation(*rope);
  if (!fault.empty()) return Status::invalid(std::move(fault));
  if (params.num_tokens == 0 || (params.num_pages == 0 && rope == nullptr)) return Status::success();
  Device device;
  if (Status asked = current_device(&device); !asked.ok()) return asked;

  Params p{};
  p.slots = SlotMap(params);
  p.format = format;
  p.group_lanes_log2 = format.group == 128 ? 3 : format.group == 64 ? 2 : 1;
  p.powers_of_two = format.has_exponents || params.power_of_two_scales;
  p.first = rows(params.first, params.first_stride);
  p.others = rows(params.others, params.others_stride);
  p.first_columns = params.first_columns;
  const int columns = params.first_columns + params.others_columns;
  p.rope_column = rope != nullptr || (format.positions > 0 && columns > format.columns) ? columns - kRope : -1;
  p.loaded_columns = rope != nullptr ? std::min(format.columns, p.rope_column) : format.columns;
  p.num_tokens = params.num_tokens;
  p.tokens_of_warp = int(std::min<std::int64_t>((params.num_tokens + kWarpsAtOnce - 1) / kWarpsAtOnce, kTokens));
  p.cache = static_cast<char*>(params.cache);
  p.stride_page = params.stride_page;
  p.stride_token = params.stride_token;
  p.scales_of_page = std::int64_t(params.page_size) * format.data_bytes();
  if (rope != nullptr) set_rotation(*rope, &p);
  const auto blocks = [](std::int64_t count, int of_block) { return unsigned((count + of_block - 1) / of_block); };
  p.token_blocks = blocks(params.num_tokens, kWarps * p.tokens_of_warp);

  cudaLaunchConfig_t config{};
  config.gridDim = dim3(p.token_blocks + blocks(p.query_rows, kThreads / kRopeLanes * kRows));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = has_dependent_launch(device.compute_capability) ? 1 : 0;
  const bool is_fp16 = params.dtype == DType::kFloat16;
  const auto kernel = rope != nullptr ? (is_fp16 ? append_kernel<fp16, true> : append_kernel<bf16, true>)
                                      : (is_fp16 ? append_kernel<fp16, false> : append_kernel<bf16, false>);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, p);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the kernel that quantizes tokens", error);
}

}  // namespace

Status append_quantized_by_slot(const AppendQuantizedParams& params, cudaStream_t stream) {
  return append(nullptr, params, stream);
}

Status apply_rope_and_append_quantized_by_slot(const RopeParams& rope, const AppendQuantizedParams& append_params,
                                               cudaStream_t stream) {
  AppendQuantizedParams whole = append_params;
  whole.dtype = rope.dtype;
  whole.num_tokens = rope.num_tokens;
  return append(&rope, whole, stream);
}

}  // namespace cutlass_kernels
