// Combines or gathers what the ranks of a node hold, in one kernel, over memory that they map.
//
//   rank 0, block b   write items of slice b to rank 1 | flag to rank 1 | wait for rank 1's flag | merge slice b
//   rank 1, block b   write items of slice b to rank 0 | flag to rank 0 | wait for rank 0's flag | merge slice b
//
// Block b of a rank waits for block b of the others only, so nothing waits for a whole kernel. Two halves of the memory
// take turns: a rank writes into a half again two calls later, and by then has seen the flags of the call between, which
// the reader set after it had finished. The call's number is kept on the device, so that a captured call can be replayed.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda_failure.h"
#include "cutlass_kernels/ranks.h"
#include "merge/merge_chunk.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 128;  // all resident at once, on any GPU that the kernels serve

// The beginning of the memory.
struct Header {
  std::uint32_t calls;     // that have ended
  std::uint32_t finished;  // blocks of the call that runs
  std::uint32_t unused[30];
  std::uint32_t flags[kMostRanks]
                     [kMostBlocks];  // by sender: the number of the last call whose slice has come
};

struct ExchangeParams {
  const char* v;  // of this rank
  const float* s;
  char* merged_v;
  float* merged_s;
  std::int64_t v_token, v_head;  // in bytes
  std::int64_t s_token, s_head;
  std::int64_t merged_v_token, merged_v_head;
  std::int64_t merged_s_token, merged_s_head;
  char* memory[kMostRanks];
  std::int64_t half_bytes;
  std::uint64_t timeout_ns;
  int rank;
  int world;
  int heads;          // that a rank sends to another
  int first_head;     // of a rank's share, per rank: 0 or heads
  int rows;           // tokens * heads
  int rows_of_block;  // slice
  int chunks;         // of a row, each a thread's
};

__device__ std::uint32_t load_acquire(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ void store_release(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Where rank `sender` puts its values and LSEs, in the memory of a rank: [rows, chunks], then [rows].
__device__ char* slot_of(const ExchangeParams& p, int receiver, int sender, std::uint32_t call) {
  const std::int64_t each = std::int64_t(p.rows) * (p.chunks * kBytes + int(sizeof(float)));
  return p.memory[receiver] + sizeof(Header) + (call & 1) * p.half_bytes +
         sender * ((each + 15) / 16 * 16);
}

__device__ void send(const ExchangeParams& p, int first, int last, std::uint32_t call) {
  for (int item = threadIdx.x; item < (last - first) * p.chunks; item += kThreads) {
    const int row = first + item / p.chunks, chunk = item % p.chunks;
    const std::int64_t token = row / p.heads;
    for (int step = 1; step < p.world; ++step) {
      const int receiver = (p.rank + step) % p.world;
      const std::int64_t head = row % p.heads + receiver * p.first_head;
      char* slot = slot_of(p, receiver, p.rank, call);
      load_chunk(p.v + token * p.v_token + head * p.v_head + chunk * kBytes)
          .store(slot + (std::int64_t(row) * p.chunks + chunk) * kBytes);
      if (p.s != nullptr && chunk == 0) {
        reinterpret_cast<float*>(slot + std::int64_t(p.rows) * p.chunks * kBytes)[row] =
            p.s[token * p.s_token + head * p.s_head];
      }
    }
  }
}

// After this, what the other ranks have sent of the slice can be read.
__device__ void exchange_flags(const ExchangeParams& p, std::uint32_t call) {
  __syncthreads();
  const int other = threadIdx.x;
  if (other < p.world && other != p.rank) {
    __threadfence_system();
    auto* theirs = reinterpret_cast<Header*>(p.memory[other]);
    store_release(&theirs->flags[p.rank][blockIdx.x], call);
    auto* own = reinterpret_cast<Header*>(p.memory[p.rank]);
    const std::uint64_t begin = nanoseconds();
    // The other rank may be a call ahead.
    while (std::int32_t(load_acquire(&own->flags[other][blockIdx.x]) - call) < 0) {
      if (p.timeout_ns > 0 && nanoseconds() - begin > p.timeout_ns) __trap();
    }
  }
  __syncthreads();
}

__device__ void finish_call(const ExchangeParams& p, std::uint32_t call) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  auto* own = reinterpret_cast<Header*>(p.memory[p.rank]);
  if (atomicAdd(&own->finished, 1) == gridDim.x - 1) {
    own->finished = 0;
    own->calls = call;
  }
}

// kMerges: states; else each rank's rows stand one after another in the heads of the result.
template <class Element, bool kMerges>
__global__ void __launch_bounds__(kThreads)
    exchange_kernel(const __grid_constant__ ExchangeParams p) {
  const std::uint32_t call = *reinterpret_cast<const volatile std::uint32_t*>(p.memory[p.rank]) + 1;
  const int first = blockIdx.x * p.rows_of_block;
  const int last = min(first + p.rows_of_block, p.rows);
  send(p, first, last, call);
  exchange_flags(p, call);
  const std::int64_t own_head = std::int64_t(p.rank) * p.first_head;
  for (int item = threadIdx.x; item < (last - first) * p.chunks; item += kThreads) {
    const int row = first + item / p.chunks, chunk = item % p.chunks;
    const std::int64_t token = row / p.heads, head = row % p.heads;
    const char* own_v = p.v + token * p.v_token + (head + own_head) * p.v_head + chunk * kBytes;
    const auto v_of = [&](int rank) {
      if (rank == p.rank) return own_v;
      return static_cast<const char*>(slot_of(p, p.rank, rank, call)) +
             (std::int64_t(row) * p.chunks + chunk) * kBytes;
    };
    char* to = p.merged_v + token * p.merged_v_token + head * p.merged_v_head + chunk * kBytes;
    if constexpr (kMerges) {
      const float* own_s = p.s + token * p.s_token + (head + own_head) * p.s_head;
      const float s = merge_chunk<Element, kMostAhead>(
          p.world, v_of,
          [&](int rank) {
            if (rank == p.rank) return own_s;
            const char* slot = slot_of(p, p.rank, rank, call);
            return reinterpret_cast<const float*>(slot + std::int64_t(p.rows) * p.chunks * kBytes) +
                   row;
          },
          to);
      if (p.merged_s != nullptr && chunk == 0) {
        p.merged_s[token * p.merged_s_token + head * p.merged_s_head] = s;
      }
    } else {
      for (int rank = 0; rank < p.world; ++rank) {
        load_chunk(v_of(rank)).store(to + std::int64_t(rank) * p.heads * p.merged_v_head);
      }
    }
  }
  finish_call(p, call);
}

std::int64_t half_bytes(const MergeSizes& sizes, int world, int heads) {
  const std::int64_t rows = sizes.num_tokens * heads;
  const std::int64_t each = rows * (std::int64_t(sizes.head_dim) * size_of(sizes.dtype) + 4);
  return world * ((each + 15) / 16 * 16);
}

std::string fault_in(const MergeSizes& sizes, const RankMemory& ranks, int heads) {
  if (ranks.world < 1 || ranks.world > kMostRanks || ranks.rank < 0 || ranks.rank >= ranks.world) {
    return "rank=" + std::to_string(ranks.rank) + " of world=" + std::to_string(ranks.world) +
           " makes no sense: up to " + std::to_string(kMostRanks) + " ranks are served.";
  }
  if (sizes.dtype != DType::kFloat16 && sizes.dtype != DType::kBFloat16 &&
      sizes.dtype != DType::kFloat32) {
    return "dtype=" + std::string(to_string(sizes.dtype)) +
           " is not exchanged between ranks: use float16, bfloat16 or float32.";
  }
  if (sizes.num_tokens < 0 || sizes.num_heads <= 0 || sizes.head_dim <= 0 ||
      sizes.head_dim * size_of(sizes.dtype) % kBytes != 0) {
    return "num_tokens=" + std::to_string(sizes.num_tokens) +
           ", num_heads=" + std::to_string(sizes.num_heads) +
           ", head_dim=" + std::to_string(sizes.head_dim) +
           " must be positive, and rows of a head a multiple of 16 bytes.";
  }
  const std::int64_t rows = sizes.num_tokens * heads;
  if (rows * (sizes.head_dim * size_of(sizes.dtype) / kBytes) >= std::int64_t(1) << 31) {
    return "num_tokens=" + std::to_string(sizes.num_tokens) + " are too many for one call.";
  }
  const std::int64_t needed =
      std::int64_t(sizeof(Header)) + 2 * half_bytes(sizes, ranks.world, heads);
  if (std::int64_t(ranks.bytes) < needed) {
    return "ranks.bytes=" + std::to_string(ranks.bytes) + " must be at least " +
           std::to_string(needed) + ": see exchange_bytes().";
  }
  for (int rank = 0; rank < ranks.world; ++rank) {
    if (ranks.memory[rank] == nullptr ||
        reinterpret_cast<std::uintptr_t>(ranks.memory[rank]) % 128 != 0) {
      return "ranks.memory[" + std::to_string(rank) + "] is null, or not 128-byte aligned.";
    }
  }
  return "";
}

using Kernel = void (*)(ExchangeParams);

Kernel kernel_for(DType dtype, bool merges) {
  if (!merges) return &exchange_kernel<fp16, false>;
  switch (dtype) {
    case DType::kFloat16:
      return &exchange_kernel<fp16, true>;
    case DType::kBFloat16:
      return &exchange_kernel<bf16, true>;
    default:
      return &exchange_kernel<fp32, true>;
  }
}

Status launch(ExchangeParams& p, const MergeSizes& sizes, const RankMemory& ranks, int heads,
              bool merges, cudaStream_t stream) {
  std::copy(ranks.memory, ranks.memory + ranks.world, reinterpret_cast<void**>(p.memory));
  // The whole memory, so that calls of other sizes have the same halves.
  p.half_bytes = (std::int64_t(ranks.bytes) - std::int64_t(sizeof(Header))) / 256 * 128;
  p.timeout_ns = ranks.timeout_ns;
  p.rank = ranks.rank;
  p.world = ranks.world;
  p.heads = heads;
  p.rows = int(sizes.num_tokens * heads);
  p.chunks = sizes.head_dim * size_of(sizes.dtype) / kBytes;
  const int blocks =
      std::clamp(int((std::int64_t(p.rows) * p.chunks + kThreads - 1) / kThreads), 1, kMostBlocks);
  p.rows_of_block = (p.rows + blocks - 1) / blocks;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel_for(sizes.dtype, merges), p);
  return error == cudaSuccess ? Status::success()
                              : cuda_failure("Launching the exchange between ranks", error);
}

std::string misaligned(const char* name, const void* data, std::int64_t strides, DType dtype) {
  if (data != nullptr &&
      (std::int64_t(reinterpret_cast<std::uintptr_t>(data)) | strides * size_of(dtype)) % kBytes ==
          0) {
    return "";
  }
  return std::string(name) +
         " is null, or has an address or strides that are no multiples of 16 bytes.";
}

}  // namespace

std::size_t exchange_bytes(const MergeSizes& sizes, std::int32_t world, bool scatter_heads) {
  const int heads = scatter_heads ? sizes.num_heads / std::max(world, 1) : sizes.num_heads;
  return sizeof(Header) + 2 * std::size_t((half_bytes(sizes, world, heads) + 127) / 128 * 128);
}

Status combine_ranks(const CombineRanksParams& params, cudaStream_t stream) {
  const MergeSizes& sizes = params.sizes;
  const int world = std::max(params.ranks.world, 1);
  const int heads = params.scatter_heads ? sizes.num_heads / world : sizes.num_heads;
  std::string fault = fault_in(sizes, params.ranks, heads);
  if (fault.empty() && params.scatter_heads && sizes.num_heads % world != 0) {
    fault = "num_heads=" + std::to_string(sizes.num_heads) +
            " is no multiple of world=" + std::to_string(world) + ": set scatter_heads to false.";
  }
  if (fault.empty() && sizes.num_tokens > 0) {
    fault =
        misaligned("v", params.v.data, params.v.stride_token | params.v.stride_head, sizes.dtype);
    if (fault.empty()) {
      fault = misaligned("merged_v", params.merged_v.data,
                         params.merged_v.stride_token | params.merged_v.stride_head, sizes.dtype);
    }
    if (fault.empty() && params.s.data == nullptr) fault = "s is null: the LSE is needed.";
  }
  if (!fault.empty()) return Status::invalid(std::move(fault));
  if (sizes.num_tokens == 0) return Status::success();
  const int bytes = size_of(sizes.dtype);
  ExchangeParams p{};
  p.v = static_cast<const char*>(params.v.data);
  p.v_token = params.v.stride_token * bytes;
  p.v_head = params.v.stride_head * bytes;
  p.s = params.s.data;
  p.s_token = params.s.stride_token;
  p.s_head = params.s.stride_head;
  p.merged_v = static_cast<char*>(params.merged_v.data);
  p.merged_v_token = params.merged_v.stride_token * bytes;
  p.merged_v_head = params.merged_v.stride_head * bytes;
  p.merged_s = params.merged_s.data;
  p.merged_s_token = params.merged_s.stride_token;
  p.merged_s_head = params.merged_s.stride_head;
  p.first_head = params.scatter_heads ? heads : 0;
  return launch(p, sizes, params.ranks, heads, true, stream);
}

Status gather_heads(const GatherHeadsParams& params, cudaStream_t stream) {
  const MergeSizes& sizes = params.sizes;
  std::string fault = fault_in(sizes, params.ranks, sizes.num_heads);
  if (fault.empty() && sizes.num_tokens > 0) {
    fault =
        misaligned("x", params.x.data, params.x.stride_token | params.x.stride_head, sizes.dtype);
    if (fault.empty()) {
      fault = misaligned("whole", params.whole.data,
                         params.whole.stride_token | params.whole.stride_head, sizes.dtype);
    }
  }
  if (!fault.empty()) return Status::invalid(std::move(fault));
  if (sizes.num_tokens == 0) return Status::success();
  const int bytes = size_of(sizes.dtype);
  ExchangeParams p{};
  p.v = static_cast<const char*>(params.x.data);
  p.v_token = params.x.stride_token * bytes;
  p.v_head = params.x.stride_head * bytes;
  p.merged_v = static_cast<char*>(params.whole.data);
  p.merged_v_token = params.whole.stride_token * bytes;
  p.merged_v_head = params.whole.stride_head * bytes;
  return launch(p, sizes, params.ranks, sizes.num_heads, false, stream);
}

}  // namespace cutlass_kernels
