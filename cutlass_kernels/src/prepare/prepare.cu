// Copies q, K and V for attention(): rotates, converts to 16 bits, lays pages out by entry of the page table.
//
// Bound by memory. One kernel rotates (q, K), one converts: both have the rows of one tensor per block. A team of up to
// 32 threads takes a row, its threads 16 bytes (of the copy) of as many heads as fit, and walks on over heads: all
// heads of a row turn by the same angles, which a thread computes once. Rows that nobody sees end their team at once.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "common/element_bytes.h"
#include "common/element_types.h"
#include "cuda_failure.h"
#include "cutlass_kernels/prepare.h"
#include "prepare/params.h"
#include "prepare/rows.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMostTeam = 32;

// Elements that a thread takes at once. Where halves of a head are no multiple of 8, rotation takes 4 of each.
constexpr int kElements = 8;
__host__ __device__ inline bool is_narrow(int head_dim) { return head_dim / 2 % kElements != 0; }

// A thread's share of a row: of a head, one chunk in every `lanes`, and one head in every `heads_at_once`.
struct Share {
  int lane;
  int head;

  __device__ Share(const Part& part, unsigned thread)
      : lane(thread % unsigned(part.lanes)), head(thread / unsigned(part.lanes)) {}
};

// Calls load(i, head) for the next kBatch heads of a thread, and only then store(i, head): so several loads are under
// way.
template <int kBatch, class LoadHead, class StoreHead>
__device__ void for_each_head(const Part& part, int head_of_thread, LoadHead&& load, StoreHead&& store) {
#pragma unroll 1
  for (int first = head_of_thread; first < part.heads; first += kBatch * part.heads_at_once) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (const int head = first + i * part.heads_at_once; head < part.heads) load(i, head);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (const int head = first + i * part.heads_at_once; head < part.heads) store(i, head);
    }
  }
}

template <class In, class Out>
__device__ void convert_row(const Part& part, const Share& share, const char* from, char* to) {
  constexpr int kBatch = 4;
#pragma unroll 1
  for (int chunk = share.lane; chunk < part.head_dim / kElements; chunk += part.lanes) {
    const char* source = from + chunk * (kElements * In::kBytes);
    char* target = to + chunk * (kElements * 2);
    Chunk<kElements * In::kBytes> loaded[kBatch];
    for_each_head<kBatch>(
        part, share.head, [&](int i, int head) { loaded[i] = loaded[i].load(source + head * part.stride_head); },
        [&](int i, int head) {
          float values[kElements];
          decode<In>(loaded[i], values);
          store<Out>(values, target + head * part.head_dim * 2);
        });
  }
}

template <class In, class Out, int kCount>
__device__ void rotate_row(const Part& part, const Share& share, const char* from, char* to, const std::uint64_t* turns,
                           int position) {
  constexpr int kBatch = 2;
  const int half = part.head_dim / 2;
#pragma unroll 1
  for (int chunk = share.lane; chunk < half / kCount; chunk += part.lanes) {
    float sine[kCount], cosine[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sincospif(half_turns(turns[chunk * kCount + i], position), &sine[i], &cosine[i]);
    }
    const char* source = from + chunk * (kCount * In::kBytes);
    char* target = to + chunk * (kCount * 2);
    Chunk<kCount * In::kBytes> loaded[kBatch][2];
    for_each_head<kBatch>(
        part, share.head,
        [&](int i, int head) {
          const char* of_head = source + head * part.stride_head;
          loaded[i][0] = loaded[i][0].load(of_head);
          loaded[i][1] = loaded[i][1].load(of_head + half * In::kBytes);
        },
        [&](int i, int head) {
          float low[kCount], high[kCount];
          decode<In>(loaded[i][0], low);
          decode<In>(loaded[i][1], high);
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
            const float x = low[j], y = high[j];
            low[j] = x * cosine[j] - y * sine[j];
            high[j] = y * cosine[j] + x * sine[j];
          }
          char* of_head = target + head * part.head_dim * 2;
          store<Out>(low, of_head);
          store<Out>(high, of_head + half * 2);
        });
  }
}

template <class In, class Out, bool kRotated>
__device__ void copy_row(const Part& part, const Share& share, const char* from, char* to, const std::uint64_t* turns,
                         int position) {
  if constexpr (!kRotated) {
    convert_row<In, Out>(part, share, from, to);
  } else if (is_narrow(part.head_dim)) {
    rotate_row<In, Out, kElements / 2>(part, share, from, to, turns, position);
  } else {
    rotate_row<In, Out, kElements>(part, share, from, to, turns, position);
  }
}

template <class Out, bool kRotated>
__global__ void __launch_bounds__(kThreads, kRotated ? 3 : 4)
    prepare_kernel(const __grid_constant__ PrepareKernelParams p) {
  __shared__ std::uint64_t turns[kRotated ? kMaxRotatedDim / 2 : 1];
  int index = kQ;
  while (index + 1 < kParts && blockIdx.x >= p.parts[index + 1].first_block) ++index;
  const Part& part = p.parts[index];
  if constexpr (kRotated) {
    // Threads need other entries each, which constant memory hands out one at a time: once per block, not once per row.
    for (int d = threadIdx.x; d < part.head_dim / 2; d += kThreads) turns[d] = p.turns[d];
    __syncthreads();
  }
  const unsigned thread = threadIdx.x & ((1u << part.log2_team) - 1);
  const std::int64_t number =
      std::int64_t(blockIdx.x - part.first_block) * (kThreads >> part.log2_team) + (threadIdx.x >> part.log2_team);
  if (number >= part.rows) return;
  const int row = int(number);

  const bool paged = index != kQ && p.pages.page_size > 0;
  const Row place = index == kQ ? row_of_queries(p, part, row)
                    : paged     ? row_of_pages(p, part, row)
                                : row_of_keys(p, part, row);
  if (paged && index == kK && thread == 0) {
    const int entry = int(p.page_size.divide(row));
    if (entry * p.pages.page_size == row) write_tables(p, entry);
  }
  const Share share(part, thread);
  if (!place.wanted || share.head >= part.heads_at_once) return;
  const char* from = part.from + place.offset;
  char* to = part.to + std::int64_t(row) * (2 * part.heads * part.head_dim);
  switch (part.dtype) {
    case DType::kFloat8E4M3:
      return copy_row<e4m3, Out, kRotated>(part, share, from, to, turns, place.position);
    case DType::kFloat8E5M2:
      return copy_row<e5m2, Out, kRotated>(part, share, from, to, turns, place.position);
    default:
      return copy_row<Out, Out, kRotated>(part, share, from, to, turns, place.position);
  }
}

// --- host --------------------------------------------------------------------------------------------------------

std::string misaligned(const char* name, const ConstTensorView& view, std::int64_t stride_page, DType dtype) {
  const int bytes = kElements * size_of(dtype);
  const std::int64_t strides = view.stride_token | view.stride_head | stride_page;
  if (reinterpret_cast<std::uintptr_t>(view.data) % bytes == 0 && strides % kElements == 0) {
    return "";
  }
  return std::string(name) + " lies at an address, or has strides, that are no multiples of " + std::to_string(bytes) +
         " bytes. Copy it into such a layout.";
}

std::string wrong_type(const char* name, DType given, DType wanted) {
  if (given == wanted || size_of(given) == 1) return "";
  return std::string(name) + "=" + to_string(given) + " cannot be copied to " + to_string(wanted) +
         ": convert it, or copy to its own type.";
}

std::string fault_in(const PrepareParams& p) {
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) {
    return "dtype=" + std::string(to_string(p.dtype)) + " is no type of copies: use float16 or bfloat16.";
  }
  std::string fault = p.q_copy == nullptr ? "" : wrong_type("q_dtype", p.q_dtype, p.dtype);
  if (fault.empty() && (p.k_copy != nullptr || p.v_copy != nullptr)) {
    fault = wrong_type("kv_dtype", p.kv_dtype, p.dtype);
  }
  if (!fault.empty()) return fault;
  const bool paged = p.pages.page_size > 0;
  for (const auto& [name, value] : {std::pair("num_qo_heads", p.num_qo_heads),
                                    std::pair("num_kv_heads", p.num_kv_heads), std::pair("batch_size", p.batch_size)}) {
    if (value <= 0) return std::string(name) + "=" + std::to_string(value) + " must be positive.";
  }
  for (const auto& [name, dim] : {std::pair("head_dim_qk", p.head_dim_qk), std::pair("head_dim_vo", p.head_dim_vo)}) {
    if (dim <= 0 || dim % kElements != 0) {
      return std::string(name) + "=" + std::to_string(dim) + " must be a positive multiple of 8.";
    }
  }
  if (p.rotate && p.head_dim_qk > kMaxRotatedDim) {
    return "head_dim_qk=" + std::to_string(p.head_dim_qk) + " is more than the " + std::to_string(kMaxRotatedDim) +
           " that are rotated.";
  }
  if (p.rotate && !(p.rope_scale > 0.0 && p.rope_theta > 0.0)) {
    return "rope_scale=" + std::to_string(p.rope_scale) + " and rope_theta=" + std::to_string(p.rope_theta) +
           " must be positive.";
  }
  constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();
  const std::int64_t keys = paged ? p.pages.num_indices * p.pages.page_size : p.total_kv;
  if (p.total_q < 0 || p.total_q > kMostRows || keys < 0 || keys > kMostRows) {
    return "total_q=" + std::to_string(p.total_q) + " rows and " + std::to_string(keys) +
           (paged ? " tokens in all pages of the page table" : " keys") + " must lie between 0 and " +
           std::to_string(kMostRows) + ": split the batch.";
  }
  const bool offsets = p.qo_indptr != nullptr && p.kv_indptr != nullptr;
  const bool none = p.qo_indptr == nullptr && p.kv_indptr == nullptr;
  if (!offsets && !(none && p.batch_size == 1 && !paged)) {
    return "qo_indptr and kv_indptr are needed; only a single request without pages may leave them "
           "out, both of them.";
  }
  if (p.pages.table_stride != 0 || p.pages.v_offset != 0 || p.pages.slots_per_page != 0) {
    return "pages.table_stride=" + std::to_string(p.pages.table_stride) +
           ", pages.v_offset=" + std::to_string(p.pages.v_offset) +
           " and pages.slots_per_page=" + std::to_string(p.pages.slots_per_page) +
           " are for attention() only: requests' pages must follow one another here.";
  }
  if (paged && p.pages.num_indices > 0 &&
      (p.pages.indices == nullptr || p.pages.last_page_len == nullptr || p.k_copy == nullptr || p.tables == nullptr)) {
    return "A paged cache needs indices, last_page_len, k_copy and tables.";
  }
  for (const auto& [name, copy] :
       {std::pair("q_copy", p.q_copy), std::pair("k_copy", p.k_copy), std::pair("v_copy", p.v_copy)}) {
    if (reinterpret_cast<std::uintptr_t>(copy) % 16 != 0) {
      return std::string(name) + " starts at an address that is not a multiple of 16 bytes.";
    }
  }
  if (p.q_copy != nullptr) fault = misaligned("q", p.q, 0, p.q_dtype);
  if (fault.empty() && p.k_copy != nullptr) {
    fault = misaligned("k", p.k, p.pages.k_stride_page, p.kv_dtype);
  }
  if (fault.empty() && p.v_copy != nullptr) {
    fault = misaligned("v", p.v, p.pages.v_stride_page, p.kv_dtype);
  }
  return fault;
}

Part make_part(const ConstTensorView& view, DType dtype, void* to, int heads, int head_dim, std::int64_t rows,
               bool rotated) {
  const int bytes = size_of(dtype);
  Part part{};
  part.from = static_cast<const char*>(view.data);
  part.to = static_cast<char*>(to);
  part.stride_token = view.stride_token * bytes;
  part.stride_head = view.stride_head * bytes;
  part.rows = to == nullptr ? 0 : int(rows);
  part.heads = heads;
  part.head_dim = head_dim;
  part.dtype = dtype;
  part.rotated = rotated;
  const int elements = !rotated ? kElements : is_narrow(head_dim) ? kElements : 2 * kElements;
  const int chunks = head_dim / elements;
  while ((1 << part.log2_team) < std::min<std::int64_t>(kMostTeam, std::int64_t(heads) * chunks)) {
    ++part.log2_team;
  }
  part.lanes = std::min(chunks, 1 << part.log2_team);
  part.heads_at_once = (1 << part.log2_team) / part.lanes;
  return part;
}

// The parts that are rotated, or those that are not.
Status launch(PrepareKernelParams& p, bool rotated, DType dtype, cudaStream_t stream) {
  std::int64_t blocks = 0;
  for (Part& part : p.parts) {
    const int rows_of_block = kThreads >> part.log2_team;
    part.first_block = unsigned(blocks);
    if (part.rotated == rotated) {
      blocks += (std::int64_t(part.rows) + rows_of_block - 1) / rows_of_block;
    }
  }
  if (blocks == 0) return Status::success();
  if (blocks > std::numeric_limits<std::int32_t>::max()) {
    return Status::invalid("The copies take " + std::to_string(blocks) +
                           " blocks, more than one launch has: split the batch.");
  }
  auto* kernel = dtype == DType::kFloat16 ? (rotated ? &prepare_kernel<fp16, true> : &prepare_kernel<fp16, false>)
                                          : (rotated ? &prepare_kernel<bf16, true> : &prepare_kernel<bf16, false>);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, p);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the preparing kernel", error);
}

}  // namespace

Status prepare(const PrepareParams& params, cudaStream_t stream) {
  if (std::string fault = fault_in(params); !fault.empty()) return Status::invalid(std::move(fault));
  const PageTable& pages = params.pages;
  const bool paged = pages.page_size > 0;
  const std::int64_t keys = paged ? pages.num_indices * pages.page_size : params.total_kv;

  PrepareKernelParams p{};
  p.parts[kQ] = make_part(params.q, params.q_dtype, params.q_copy, params.num_qo_heads, params.head_dim_qk,
                          params.total_q, params.rotate);
  p.parts[kK] =
      make_part(params.k, params.kv_dtype, params.k_copy, params.num_kv_heads, params.head_dim_qk, keys, params.rotate);
  p.parts[kV] = make_part(params.v, params.kv_dtype, params.v_copy, params.num_kv_heads, params.head_dim_vo, keys,
                          /*rotated=*/false);
  p.batch_size = params.batch_size;
  p.total_q = int(params.total_q);
  p.total_kv = int(params.total_kv);
  p.window_left = params.window_left;
  p.qo_indptr = params.qo_indptr;
  p.kv_indptr = params.kv_indptr;
  if (paged) {
    const int bytes = size_of(params.kv_dtype);
    p.pages = pages;
    p.page_size = FastDivisor(pages.page_size);
    p.parts[kK].stride_page = pages.k_stride_page * bytes;
    p.parts[kV].stride_page = pages.v_stride_page * bytes;
    p.parts[kK].indices = pages.indices;
    p.parts[kV].indices = pages.v_indices != nullptr ? pages.v_indices : pages.indices;
    p.tables = params.tables;
  }
  if (params.rotate) {
    turns_per_position(params.head_dim_qk, params.rope_scale, params.rope_theta, p.turns);
  }

  for (const bool rotated : {true, false}) {
    if (Status status = launch(p, rotated, params.dtype, stream); !status.ok()) return status;
  }
  return Status::success();
}

}  // namespace cutlass_kernels
