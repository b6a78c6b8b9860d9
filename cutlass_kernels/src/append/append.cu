// Writes new keys and values into their pages.
//
// A team of 4 to 256 threads takes a token: all units of its keys, then all of its values. A unit is what a thread
// moves at once: 16 bytes where all addresses and strides allow it, else 1. A step of decoding is a few hundred
// such tokens, so what counts is the chain of loads that finds the page: the first unit of every thread is on its way
// before.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>

#include "common/element_bytes.h"
#include "common/fast_divisor.h"
#include "cuda_failure.h"
#include "cutlass_kernels/append.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kLeastTeam = 4;

// New keys or new values, and their cache. Strides in bytes.
struct Part {
  const char* from;
  char* to;
  std::int64_t from_token;
  std::int64_t from_head;
  std::int64_t to_page;
  std::int64_t to_token;
  std::int64_t to_head;
  FastDivisor units_of_head;
};

struct AppendKernelParams {
  Part parts[2];  // keys, values
  int num_tokens;
  int units_of_keys;  // of a token: all heads
  int units;          // of a token: keys and values
  int log2_team;
  int batch_size;
  FastDivisor page_size;
  std::int64_t num_indices;
  std::int64_t num_pages;
  const std::int32_t* batch_indices;
  const std::int32_t* positions;
  const std::int32_t* kv_indptr;
  const std::int32_t* indices;
};

// Where a token goes.
struct Place {
  bool exists;
  int page;
  int entry;
};

__device__ Place find_place(const AppendKernelParams& p, int token) {
  constexpr Place kNowhere = {false, 0, 0};
  const int batch = __ldg(p.batch_indices + token);
  const int position = __ldg(p.positions + token);
  if (batch < 0 || batch >= p.batch_size || position < 0) return kNowhere;
  const int page_of_request = int(p.page_size.divide(unsigned(position)));
  const int begin = __ldg(p.kv_indptr + batch), end = __ldg(p.kv_indptr + batch + 1);
  const std::int64_t index = std::int64_t(begin) + page_of_request;
  if (begin < 0 || index >= end || index >= p.num_indices) return kNowhere;
  const int page = __ldg(p.indices + index);
  return {0 <= page && page < p.num_pages, page, position - page_of_request * int(p.page_size.divisor)};
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendKernelParams p) {
  const int team = 1 << p.log2_team;
  const std::int64_t number = std::int64_t(blockIdx.x) * (kThreads >> p.log2_team) + (threadIdx.x >> p.log2_team);
  int unit = int(threadIdx.x) & (team - 1);
  if (number >= p.num_tokens || unit >= p.units) return;
  const int token = int(number);

  // What a unit is of: act(keys or values, head, bytes from the beginning of the head).
  auto for_unit = [&](auto&& act) {
    const bool is_value = unit >= p.units_of_keys;
    const Part& part = p.parts[is_value];
    const int of_part = is_value ? unit - p.units_of_keys : unit;
    const int head = int(part.units_of_head.divide(unsigned(of_part)));
    const int in_head = of_part - head * int(part.units_of_head.divisor);
    act(part, std::int64_t(head), in_head * int(sizeof(Unit)));
  };
  Unit moved;
  auto load = [&](const Part& part, std::int64_t head, int offset) {
    moved = __ldg(reinterpret_cast<const Unit*>(part.from + token * part.from_token + head * part.from_head + offset));
  };
  for_unit(load);
  const Place place = find_place(p, token);
  if (!place.exists) return;
  while (true) {
    for_unit([&](const Part& part, std::int64_t head, int offset) {
      *reinterpret_cast<Unit*>(part.to + place.page * part.to_page + place.entry * part.to_token + head * part.to_head +
                               offset) = moved;
    });
    unit += team;
    if (unit >= p.units) return;
    for_unit(load);
  }
}

std::string fault_in(const AppendParams& p) {
  for (const auto& [name, value] :
       {std::pair("num_kv_heads", p.num_kv_heads), std::pair("head_dim_qk", p.head_dim_qk),
        std::pair("head_dim_vo", p.head_dim_vo), std::pair("pages.page_size", p.pages.page_size)}) {
    if (value <= 0) return std::string(name) + "=" + std::to_string(value) + " must be positive.";
  }
  if (p.batch_size < 0) {
    return "batch_size=" + std::to_string(p.batch_size) + " must not be negative.";
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (p.num_tokens < 0 || p.num_tokens > kMost) {
    return "num_tokens=" + std::to_string(p.num_tokens) + " must lie between 0 and " + std::to_string(kMost) +
           ": split the batch.";
  }
  const std::int64_t bytes = std::int64_t(p.num_kv_heads) * (std::int64_t(p.head_dim_qk) + p.head_dim_vo) * 4;
  if (bytes > kMost) {
    return "num_kv_heads=" + std::to_string(p.num_kv_heads) + " heads of head_dim_qk=" + std::to_string(p.head_dim_qk) +
           " and head_dim_vo=" + std::to_string(p.head_dim_vo) + " are too many elements for one token.";
  }
  if (p.pages.num_indices < 0) {
    return "pages.num_indices is not set: it counts the entries of pages.indices.";
  }
  if (p.pages.num_pages < 0) {
    return "pages.num_pages is not set: it counts the pages of the caches.";
  }
  if (p.pages.table_stride != 0 || p.pages.v_offset != 0 || p.pages.slots_per_page != 0) {
    return "pages.table_stride=" + std::to_string(p.pages.table_stride) +
           ", pages.v_offset=" + std::to_string(p.pages.v_offset) +
           " and pages.slots_per_page=" + std::to_string(p.pages.slots_per_page) +
           " are for attention() only: requests' pages must follow one another here.";
  }
  if (p.num_tokens == 0 || p.pages.num_indices == 0 || p.pages.num_pages == 0) return "";
  if (p.batch_indices == nullptr || p.positions == nullptr || p.kv_indptr == nullptr || p.pages.indices == nullptr) {
    return "batch_indices, positions, kv_indptr and pages.indices are needed, but one of them is "
           "null.";
  }
  if (p.k.data == nullptr || p.v.data == nullptr || p.k_cache.data == nullptr || p.v_cache.data == nullptr) {
    return "k, v, k_cache and v_cache are needed, but one of them is null.";
  }
  return "";
}

Part make_part(const ConstTensorView& from, const TensorView& to, std::int64_t stride_page, int bytes) {
  Part part{};
  part.from = static_cast<const char*>(from.data);
  part.from_token = from.stride_token * bytes;
  part.from_head = from.stride_head * bytes;
  part.to = static_cast<char*>(to.data);
  part.to_page = stride_page * bytes;
  part.to_token = to.stride_token * bytes;
  part.to_head = to.stride_head * bytes;
  return part;
}

// All addresses and strides, or-ed: divisible by powers of two that divide each.
std::uintptr_t alignment_of(const Part& part) {
  return reinterpret_cast<std::uintptr_t>(part.from) | reinterpret_cast<std::uintptr_t>(part.to) |
         std::uintptr_t(part.from_token | part.from_head | part.to_page | part.to_token | part.to_head);
}

template <class Unit>
cudaError_t launch(AppendKernelParams& p, int heads, int k_bytes, int v_bytes, cudaStream_t stream) {
  const int k_units = k_bytes / int(sizeof(Unit)), v_units = v_bytes / int(sizeof(Unit));
  p.parts[0].units_of_head = FastDivisor(unsigned(k_units));
  p.parts[1].units_of_head = FastDivisor(unsigned(v_units));
  p.units_of_keys = heads * k_units;
  p.units = heads * (k_units + v_units);
  p.log2_team = 0;
  while ((1 << p.log2_team) < std::clamp(p.units, kLeastTeam, kThreads)) ++p.log2_team;
  const int tokens_of_block = kThreads >> p.log2_team;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((std::int64_t(p.num_tokens) + tokens_of_block - 1) / tokens_of_block));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, &append_kernel<Unit>, p);
}

}  // namespace

Status append_paged_kv_cache(const AppendParams& params, cudaStream_t stream) {
  if (std::string fault = fault_in(params); !fault.empty()) return Status::invalid(std::move(fault));
  const PageTable& pages = params.pages;
  if (params.num_tokens == 0 || pages.num_indices == 0 || pages.num_pages == 0) {
    return Status::success();
  }
  const int bytes = size_of(params.dtype);
  AppendKernelParams p{};
  p.parts[0] = make_part(params.k, params.k_cache, pages.k_stride_page, bytes);
  p.parts[1] = make_part(params.v, params.v_cache, pages.v_stride_page, bytes);
  p.num_tokens = int(params.num_tokens);
  p.batch_size = params.batch_size;
  p.page_size = FastDivisor(unsigned(pages.page_size));
  p.num_indices = pages.num_indices;
  p.num_pages = pages.num_pages;
  p.batch_indices = params.batch_indices;
  p.positions = params.positions;
  p.kv_indptr = params.kv_indptr;
  p.indices = pages.indices;

  const int k_bytes = params.head_dim_qk * bytes, v_bytes = params.head_dim_vo * bytes;
  const std::uintptr_t alignment =
      alignment_of(p.parts[0]) | alignment_of(p.parts[1]) | unsigned(k_bytes) | unsigned(v_bytes);
  const auto launch_units = alignment % 16 == 0 ? &launch<uint4> : &launch<std::uint8_t>;
  const cudaError_t error = launch_units(p, params.num_kv_heads, k_bytes, v_bytes, stream);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the appending kernel", error);
}

}  // namespace cutlass_kernels
