// Merges whole attention states. Bound by memory: every v is read once, in 16 bytes per thread, and nothing else is of
// a size that counts.
//
// A row is a token of a head. A thread takes 16 bytes of a row, from all states; kAhead states are on their way
// together, values and LSEs alike, as none of these loads waits for another.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>

#include "common/element_bytes.h"
#include "common/fast_divisor.h"
#include "cuda_failure.h"
#include "cutlass_kernels/merge.h"
#include "merge/merge_chunk.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;

// As many as registers allow (32, 40, 80) with all these loads before the first use of one: 64 KiB of values of two
// states are then on their way to an SM, 96 of four, 72 of six. The memory of a Hopper GPU takes some 40 to be kept
// busy.
template <int kAhead>
constexpr int kBlocksPerSm = kAhead == 2   ? 8
                             : kAhead == 4 ? 6
                                           : 3;

struct State {
  const char* v;
  const float* s;
  std::int64_t v_token;  // strides of v in bytes, of s in elements
  std::int64_t v_head;
  std::int64_t s_token;
  std::int64_t s_head;
};

struct MergeKernelParams {
  State states[2];  // the first of many, or both of two
  std::int64_t v_state;
  std::int64_t s_state;
  char* merged_v;
  float* merged_s;
  std::int64_t merged_v_token;
  std::int64_t merged_v_head;
  std::int64_t merged_s_token;
  std::int64_t merged_s_head;
  const char* mask;
  int mask_bytes;
  int num_states;
  int rows;            // num_tokens * num_heads
  int rows_of_block;   // rows that a block merges,
  FastDivisor chunks;  // of so many times 16 bytes, each a thread's
  FastDivisor heads;
};

__device__ bool is_masked_out(const MergeKernelParams& p, std::int64_t token) {
  if (p.mask == nullptr) return false;
  const char* at = p.mask + token * p.mask_bytes;
  switch (p.mask_bytes) {
    case 1:
      return *at == 0;
    case 2:
      return *reinterpret_cast<const std::int16_t*>(at) == 0;
    case 4:
      return *reinterpret_cast<const std::int32_t*>(at) == 0;
    default:
      return *reinterpret_cast<const std::int64_t*>(at) == 0;
  }
}

// kPair: two states, each with an address and strides of its own. Else at most kAhead states, or any number of them if
// that is kMostAhead.
template <class Element, int kAhead, bool kPair>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kAhead>)
    merge_states_kernel(const __grid_constant__ MergeKernelParams p) {
  const int row_of_block = int(p.chunks.divide(threadIdx.x));
  const int chunk = int(threadIdx.x) - row_of_block * int(p.chunks.divisor);
  const unsigned row = blockIdx.x * unsigned(p.rows_of_block) + unsigned(row_of_block);
  const bool is_row = row_of_block < p.rows_of_block && row < unsigned(p.rows);
  const std::int64_t token = is_row ? p.heads.divide(row) : 0;
  const std::int64_t head = is_row ? row - token * p.heads.divisor : 0;
  const bool is_wanted = is_row && !(kPair && is_masked_out(p, token));
  float s = 0.0f;
  if (is_wanted) {
    const int offset = chunk * kBytes;
    char* to = p.merged_v + token * p.merged_v_token + head * p.merged_v_head + offset;
    if constexpr (kPair) {
      s = merge_chunk<Element, kAhead>(
          2,
          [&](int i, Chunk<kBytes>& v, float& lse) {
            const State& state = p.states[i];
            lse = state.s[token * state.s_token + head * state.s_head];
            v = load_chunk(state.v + token * state.v_token + head * state.v_head + offset);
          },
          to);
    } else {
      const State& state = p.states[0];
      const char* v = state.v + token * state.v_token + head * state.v_head + offset;
      const float* first_s = state.s + token * state.s_token + head * state.s_head;
      s = merge_chunk<Element, kAhead>(
          p.num_states,
          [&](int i, Chunk<kBytes>& v_of_state, float& lse) {
            lse = first_s[i * p.s_state];
            v_of_state = load_chunk(v + i * p.v_state);
          },
          to);
    }
  }
  if constexpr (kPair) __syncthreads();  // in place, other threads of the row had to read this s
  if (is_wanted && chunk == 0) p.merged_s[token * p.merged_s_token + head * p.merged_s_head] = s;
}

using Kernel = void (*)(MergeKernelParams);

template <class Element>
Kernel kernel_for(bool pair, int num_states) {
  if (pair) return &merge_states_kernel<Element, 2, true>;
  if (num_states <= 2) return &merge_states_kernel<Element, 2, false>;
  if (num_states <= 4) return &merge_states_kernel<Element, 4, false>;
  return &merge_states_kernel<Element, kMostAhead, false>;
}

Kernel kernel_for(DType dtype, bool pair, int num_states) {
  switch (dtype) {
    case DType::kFloat16:
      return kernel_for<fp16>(pair, num_states);
    case DType::kBFloat16:
      return kernel_for<bf16>(pair, num_states);
    default:
      return kernel_for<fp32>(pair, num_states);
  }
}

std::string fault_in(const MergeSizes& sizes) {
  if (sizes.dtype != DType::kFloat16 && sizes.dtype != DType::kBFloat16 && sizes.dtype != DType::kFloat32) {
    return "dtype=" + std::string(to_string(sizes.dtype)) + " is no type of states: use float16, bfloat16 or float32.";
  }
  if (sizes.num_tokens < 0) {
    return "num_tokens=" + std::to_string(sizes.num_tokens) + " must not be negative.";
  }
  if (sizes.num_heads <= 0) {
    return "num_heads=" + std::to_string(sizes.num_heads) + " must be positive.";
  }
  if (sizes.head_dim <= 0 || sizes.head_dim % 8 != 0) {
    return "head_dim=" + std::to_string(sizes.head_dim) + " must be a positive multiple of 8.";
  }
  if (const int most = kThreads * kBytes / size_of(sizes.dtype); sizes.head_dim > most) {
    return "head_dim=" + std::to_string(sizes.head_dim) + " is more than the " + std::to_string(most) +
           " of a row of " + to_string(sizes.dtype) + ".";
  }
  return "";
}

std::string fault_in(const char* name, const void* v, std::int64_t strides, const void* s, DType dtype) {
  if (v == nullptr || s == nullptr) {
    return std::string(name) + " is null, or its LSE: both are needed.";
  }
  if ((std::int64_t(reinterpret_cast<std::uintptr_t>(v)) | strides * size_of(dtype)) % kBytes != 0) {
    return std::string(name) +
           " has an address or strides that are no multiples of 16 bytes: copy it into such a "
           "layout.";
  }
  return "";
}

State state_of(const ConstTensorView& v, const ConstLseView& s, int bytes) {
  return {static_cast<const char*>(v.data),
          s.data,
          v.stride_token * bytes,
          v.stride_head * bytes,
          s.stride_token,
          s.stride_head};
}

// Sets what depends on sizes and results alone, and launches.
Status launch(MergeKernelParams& p, const MergeSizes& sizes, bool pair, const TensorView& merged_v,
              const LseView& merged_s, cudaStream_t stream) {
  const int bytes = size_of(sizes.dtype);
  p.merged_v = static_cast<char*>(merged_v.data);
  p.merged_v_token = merged_v.stride_token * bytes;
  p.merged_v_head = merged_v.stride_head * bytes;
  p.merged_s = merged_s.data;
  p.merged_s_token = merged_s.stride_token;
  p.merged_s_head = merged_s.stride_head;
  const int chunks = sizes.head_dim * bytes / kBytes;
  p.chunks = FastDivisor(unsigned(chunks));
  p.heads = FastDivisor(unsigned(sizes.num_heads));
  p.rows_of_block = kThreads / chunks;
  const Kernel kernel = kernel_for(sizes.dtype, pair, p.num_states);

  // Rows are counted in 32 bits: 2^30 of them have 16 GB of values at least.
  const std::int64_t most_tokens = std::max<std::int64_t>((std::int64_t(1) << 30) / sizes.num_heads, 1);
  for (std::int64_t first = 0; first < sizes.num_tokens; first += most_tokens) {
    MergeKernelParams part = p;
    for (State& state : part.states) {
      state.v += first * state.v_token;
      state.s += first * state.s_token;
    }
    part.merged_v += first * p.merged_v_token;
    part.merged_s += first * p.merged_s_token;
    if (part.mask != nullptr) part.mask += first * p.mask_bytes;
    part.rows = int(std::min(most_tokens, sizes.num_tokens - first) * sizes.num_heads);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned((part.rows + p.rows_of_block - 1) / p.rows_of_block));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, part);
    if (error != cudaSuccess) return cuda_failure("Launching the merging kernel", error);
  }
  return Status::success();
}

}  // namespace

Status merge_states(const MergeStatesParams& params, cudaStream_t stream) {
  const MergeSizes& sizes = params.sizes;
  std::string fault = fault_in(sizes);
  constexpr std::int64_t kMostStates = 1 << 30;
  if (fault.empty() && (params.num_states < 0 || params.num_states > kMostStates)) {
    fault = "num_states=" + std::to_string(params.num_states) + " must lie between 0 and " +
            std::to_string(kMostStates) + ".";
  }
  if (fault.empty() && sizes.num_tokens > 0) {
    if (params.num_states > 0) {
      fault = fault_in("v", params.v.data, params.v.stride_token | params.v.stride_head | params.v_stride_state,
                       params.s.data, sizes.dtype);
    }
    if (fault.empty()) {
      fault = fault_in("merged_v", params.merged_v.data, params.merged_v.stride_token | params.merged_v.stride_head,
                       params.merged_s.data, sizes.dtype);
    }
  }
  if (!fault.empty()) return Status::invalid(std::move(fault));
  MergeKernelParams p{};
  p.states[0] = state_of(params.v, params.s, size_of(sizes.dtype));
  p.v_state = params.v_stride_state * size_of(sizes.dtype);
  p.s_state = params.s_stride_state;
  p.num_states = int(params.num_states);
  return launch(p, sizes, /*pair=*/false, params.merged_v, params.merged_s, stream);
}

Status merge_state(const MergeStateParams& params, cudaStream_t stream) {
  const MergeSizes& sizes = params.sizes;
  std::string fault = fault_in(sizes);
  if (fault.empty() && params.mask != nullptr && params.mask_bytes != 1 && params.mask_bytes != 2 &&
      params.mask_bytes != 4 && params.mask_bytes != 8) {
    fault = "mask_bytes=" + std::to_string(params.mask_bytes) + " is no size of integers: 1, 2, 4, 8.";
  }
  if (fault.empty() && params.mask != nullptr &&
      reinterpret_cast<std::uintptr_t>(params.mask) % unsigned(params.mask_bytes) != 0) {
    fault = "mask starts at an address that is not a multiple of mask_bytes=" + std::to_string(params.mask_bytes) + ".";
  }
  if (fault.empty() && sizes.num_tokens > 0) {
    fault = fault_in("v_a", params.v_a.data, params.v_a.stride_token | params.v_a.stride_head, params.s_a.data,
                     sizes.dtype);
    if (fault.empty()) {
      fault = fault_in("v_b", params.v_b.data, params.v_b.stride_token | params.v_b.stride_head, params.s_b.data,
                       sizes.dtype);
    }
    if (fault.empty()) {
      fault = fault_in("merged_v", params.merged_v.data, params.merged_v.stride_token | params.merged_v.stride_head,
                       params.merged_s.data, sizes.dtype);
    }
  }
  if (!fault.empty()) return Status::invalid(std::move(fault));
  MergeKernelParams p{};
  p.states[0] = state_of(params.v_a, params.s_a, size_of(sizes.dtype));
  p.states[1] = state_of(params.v_b, params.s_b, size_of(sizes.dtype));
  p.num_states = 2;
  p.mask = static_cast<const char*>(params.mask);
  p.mask_bytes = params.mask_bytes;
  return launch(p, sizes, /*pair=*/true, params.merged_v, params.merged_s, stream);
}

}  // namespace cutlass_kernels
