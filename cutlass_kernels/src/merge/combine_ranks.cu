// Combines or gathers what the ranks of a node hold, in one kernel, over memory that they map.
//
//   rank 0   send its items to rank 1, packet by packet | poll the packets of rank 1 | merge
//   rank 1   send its items to rank 0, packet by packet | poll the packets of rank 0 | merge
//
// A packet carries the number of the call beside every 4 bytes of data, and both are stored at once: the receiver polls
// the data itself. Twice the bytes cross NVLink, but no fence and no flag, which each take a crossing of their own: 7
// us for 64 x 32 x 128 became 4 (the protocol that NCCL calls LL).
//
// Two halves of the memory take turns. A rank writes into a half again two calls later: by then it has the packets of
// the call between, which the reader sent after it had finished. The number of the call is kept on the device, so that
// a captured call can be replayed.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "common/dependent_launch.h"
#include "cuda_failure.h"
#include "cutlass_kernels/ranks.h"
#include "device.h"
#include "merge/merge_chunk.h"

namespace cutlass_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 2;

// The beginning of the memory.
struct Header {
  std::uint32_t calls;    // number of the last call that all blocks have begun
  std::uint32_t arrived;  // blocks that have read it, the order in which they share out the rows
  std::uint32_t unused[30];
};

// 8 bytes of data, in each half with the number of the call. Of each half, stores and loads are atomic.
struct alignas(16) Packet {
  std::uint64_t halves[2];
};
constexpr int kPacketsOfChunk = kBytes / 8;

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
  int heads;           // that a rank sends to another
  int first_head;      // of a rank's share, per rank: 0 or heads
  int rows;            // tokens * heads
  int rows_of_block;   // slice
  int chunks;          // of a row, each a thread's
  int packets_of_row;  // those of its chunks, then of its LSE
};

__device__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ void store_packet(Packet* at, std::uint32_t a, std::uint32_t b, std::uint32_t call) {
  const std::uint64_t tag = std::uint64_t(call) << 32;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(tag | a), "l"(tag | b) : "memory");
}

__device__ Packet load_packet(const Packet* at) {
  Packet packet;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(packet.halves[0]), "=l"(packet.halves[1])
               : "l"(at)
               : "memory");
  return packet;
}

__device__ bool is_of(const Packet& packet, std::uint32_t call) {
  return std::uint32_t(packet.halves[0] >> 32) == call && std::uint32_t(packet.halves[1] >> 32) == call;
}

// Calls poll() until it returns true. A rank that does not come ends the context with an error.
template <class Poll>
__device__ void wait_until(const Poll& poll, std::uint64_t timeout_ns) {
  if (poll()) return;
  const std::uint64_t begin = nanoseconds();
  while (!poll()) {
    if (timeout_ns > 0 && nanoseconds() - begin > timeout_ns) __trap();
  }
}

// Where rank `sender` puts a row, in the memory of a rank.
__device__ Packet* packets_of(const ExchangeParams& p, int receiver, int sender, int row, std::uint32_t call) {
  char* half = p.memory[receiver] + sizeof(Header) + (call & 1) * p.half_bytes;
  return reinterpret_cast<Packet*>(half) + (std::int64_t(sender) * p.rows + row) * p.packets_of_row;
}

struct Begun {
  std::uint32_t call;   // the number of this call, the same on all ranks
  std::uint32_t block;  // of this call, in the order of arrival
};

// The block that reads the number last stores it for the next call; no block waits for another of its rank.
//
// Rows are dealt out in the order in which blocks start, and a block sends all of its own before it waits for the same
// ones of other ranks. So blocks before the first row that some rank has yet to send wait for nothing: they end, and
// make room for the block that sends it. However few blocks a rank runs at once (beside other kernels, in a green
// context), the exchange goes on.
__device__ Begun begin_call(const ExchangeParams& p) {
  __shared__ Begun begun;
  if (threadIdx.x == 0) {
    auto* own = reinterpret_cast<Header*>(p.memory[p.rank]);
    std::uint32_t call = *reinterpret_cast<volatile std::uint32_t*>(&own->calls) + 1;
    if (call == 0) call = 2;  // memory begins with zeros; halves go on taking turns
    __threadfence();
    const std::uint32_t block = atomicAdd(&own->arrived, 1);
    if (block == gridDim.x - 1) {
      own->arrived = 0;
      own->calls = call;
    }
    begun = {call, block};
  }
  __syncthreads();
  return begun;
}

__device__ void send_item(const ExchangeParams& p, int row, int chunk, std::uint32_t call) {
  const std::int64_t token = row / p.heads;
  for (int step = 1; step < p.world; ++step) {
    const int receiver = (p.rank + step) % p.world;
    const std::int64_t head = row % p.heads + receiver * p.first_head;
    Packet* to = packets_of(p, receiver, p.rank, row, call);
    const Chunk<kBytes> v = load_chunk(p.v + token * p.v_token + head * p.v_head + chunk * kBytes);
#pragma unroll
    for (int i = 0; i < kPacketsOfChunk; ++i) {
      store_packet(to + chunk * kPacketsOfChunk + i, v.words[2 * i], v.words[2 * i + 1], call);
    }
    if (p.s != nullptr && chunk == 0) {
      const float s = p.s[token * p.s_token + head * p.s_head];
      store_packet(to + p.packets_of_row - 1, __float_as_uint(s), 0, call);
    }
  }
}

// What another rank has sent of an item. s: of its row, if ranks send LSEs.
__device__ void receive_item(const ExchangeParams& p, int sender, int row, int chunk, std::uint32_t call,
                             Chunk<kBytes>& v, float& s) {
  const Packet* from = packets_of(p, p.rank, sender, row, call);
  wait_until(
      [&] {
        Packet lse{};
        if (p.s != nullptr) lse = load_packet(from + p.packets_of_row - 1);
        bool has_come = p.s == nullptr || is_of(lse, call);
#pragma unroll
        for (int i = 0; i < kPacketsOfChunk; ++i) {
          const Packet packet = load_packet(from + chunk * kPacketsOfChunk + i);
          has_come &= is_of(packet, call);
          v.words[2 * i] = std::uint32_t(packet.halves[0]);
          v.words[2 * i + 1] = std::uint32_t(packet.halves[1]);
        }
        s = __uint_as_float(std::uint32_t(lse.halves[0]));
        return has_come;
      },
      p.timeout_ns);
}

// kMerges: states; else each rank's rows stand one after another in the heads of the result.
template <class Element, bool kMerges>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) exchange_kernel(const __grid_constant__ ExchangeParams p) {
  await_previous_kernel();
  allow_next_kernel();
  const Begun begun = begin_call(p);
  const std::uint32_t call = begun.call;
  const int first = int(begun.block) * p.rows_of_block;
  const int items = (min(first + p.rows_of_block, p.rows) - first) * p.chunks;
  for (int item = threadIdx.x; item < items; item += kThreads) {
    send_item(p, first + item / p.chunks, item % p.chunks, call);
  }
  const std::int64_t own_head = std::int64_t(p.rank) * p.first_head;
  for (int item = threadIdx.x; item < items; item += kThreads) {
    const int row = first + item / p.chunks, chunk = item % p.chunks;
    const std::int64_t token = row / p.heads, head = row % p.heads;
    const auto load_state = [&](int rank, Chunk<kBytes>& v, float& s) {
      if (rank != p.rank) return receive_item(p, rank, row, chunk, call, v, s);
      v = load_chunk(p.v + token * p.v_token + (head + own_head) * p.v_head + chunk * kBytes);
      if constexpr (kMerges) s = p.s[token * p.s_token + (head + own_head) * p.s_head];
    };
    char* to = p.merged_v + token * p.merged_v_token + head * p.merged_v_head + chunk * kBytes;
    if constexpr (kMerges) {
      const float s = merge_chunk<Element, kMostAhead>(p.world, load_state, to);
      if (p.merged_s != nullptr && chunk == 0) {
        p.merged_s[token * p.merged_s_token + head * p.merged_s_head] = s;
      }
    } else {
      for (int rank = 0; rank < p.world; ++rank) {
        Chunk<kBytes> v;
        float none;
        load_state(rank, v, none);
        v.store(to + std::int64_t(rank) * p.heads * p.merged_v_head);
      }
    }
  }
}

/// With one for the LSE.
std::int64_t packets_of_row(const MergeSizes& sizes) {
  return sizes.head_dim * size_of(sizes.dtype) / kBytes * kPacketsOfChunk + 1;
}

std::int64_t half_bytes(const MergeSizes& sizes, int world, int heads) {
  return world * sizes.num_tokens * heads * packets_of_row(sizes) * std::int64_t(sizeof(Packet));
}

std::string fault_in(const MergeSizes& sizes, const RankMemory& ranks, int heads) {
  if (ranks.world < 1 || ranks.world > kMostRanks || ranks.rank < 0 || ranks.rank >= ranks.world) {
    return "rank=" + std::to_string(ranks.rank) + " of world=" + std::to_string(ranks.world) +
           ": rank must lie between 0 and world - 1, and world between 1 and " + std::to_string(kMostRanks) + ".";
  }
  if (sizes.dtype != DType::kFloat16 && sizes.dtype != DType::kBFloat16 && sizes.dtype != DType::kFloat32) {
    return "dtype=" + std::string(to_string(sizes.dtype)) +
           " is not exchanged between ranks: use float16, bfloat16 or float32.";
  }
  if (sizes.num_tokens < 0 || sizes.num_heads <= 0 || sizes.head_dim <= 0 ||
      sizes.head_dim * size_of(sizes.dtype) % kBytes != 0) {
    return "num_tokens=" + std::to_string(sizes.num_tokens) + ", num_heads=" + std::to_string(sizes.num_heads) +
           ", head_dim=" + std::to_string(sizes.head_dim) +
           " must be positive, and rows of a head a multiple of 16 bytes.";
  }
  constexpr std::int64_t kMost = std::int64_t(1) << 31;
  const std::int64_t rows = sizes.num_tokens < kMost ? sizes.num_tokens * heads : kMost;
  if (rows >= kMost || rows * (sizes.head_dim * size_of(sizes.dtype) / kBytes) >= kMost) {
    return "num_tokens=" + std::to_string(sizes.num_tokens) + " are too many for one call.";
  }
  const std::int64_t needed = std::int64_t(sizeof(Header)) + 2 * half_bytes(sizes, ranks.world, heads);
  if (std::int64_t(ranks.bytes) < needed) {
    return "ranks.bytes=" + std::to_string(ranks.bytes) + " must be at least " + std::to_string(needed) +
           ": see exchange_bytes().";
  }
  for (int rank = 0; rank < ranks.world; ++rank) {
    if (ranks.memory[rank] == nullptr || reinterpret_cast<std::uintptr_t>(ranks.memory[rank]) % 128 != 0) {
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

Status launch(ExchangeParams& p, const MergeSizes& sizes, const RankMemory& ranks, int heads, bool merges,
              cudaStream_t stream) {
  std::copy(ranks.memory, ranks.memory + ranks.world, reinterpret_cast<void**>(p.memory));
  // The whole memory, so that calls of other sizes have the same halves.
  constexpr std::int64_t kPacket = sizeof(Packet);
  p.half_bytes = (std::int64_t(ranks.bytes) - std::int64_t(sizeof(Header))) / (2 * kPacket) * kPacket;
  p.timeout_ns = ranks.timeout_ns;
  p.rank = ranks.rank;
  p.world = ranks.world;
  p.heads = heads;
  p.rows = int(sizes.num_tokens * heads);
  p.chunks = sizes.head_dim * size_of(sizes.dtype) / kBytes;
  p.packets_of_row = int(packets_of_row(sizes));
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  const int wanted = int((std::int64_t(p.rows) * p.chunks + kThreads - 1) / kThreads);
  const int blocks = std::clamp(wanted, 1, kBlocksPerSm * device.multiprocessors);
  p.rows_of_block = (p.rows + blocks - 1) / blocks;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  // Blocks start while the kernel before runs its last ones: 1 us less between the two.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = has_dependent_launch(device.compute_capability) ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel_for(sizes.dtype, merges), p);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the exchange between ranks", error);
}

std::string misaligned(const char* name, const void* data, std::int64_t strides, DType dtype) {
  if (data != nullptr &&
      (std::int64_t(reinterpret_cast<std::uintptr_t>(data)) | strides * size_of(dtype)) % kBytes == 0) {
    return "";
  }
  return std::string(name) + " is null, or has an address or strides that are no multiples of 16 bytes.";
}

}  // namespace

std::size_t exchange_bytes(const MergeSizes& sizes, std::int32_t world, bool scatter_heads) {
  const int heads = scatter_heads ? sizes.num_heads / std::max(world, 1) : sizes.num_heads;
  return sizeof(Header) + 2 * std::size_t(half_bytes(sizes, world, heads));
}

Status combine_ranks(const CombineRanksParams& params, cudaStream_t stream) {
  const MergeSizes& sizes = params.sizes;
  const int world = std::max(params.ranks.world, 1);
  const int heads = params.scatter_heads ? sizes.num_heads / world : sizes.num_heads;
  std::string fault = fault_in(sizes, params.ranks, heads);
  if (fault.empty() && params.scatter_heads && sizes.num_heads % world != 0) {
    fault = "num_heads=" + std::to_string(sizes.num_heads) + " is no multiple of world=" + std::to_string(world) +
            ": set scatter_heads to false.";
  }
  if (fault.empty() && sizes.num_tokens > 0) {
    fault = misaligned("v", params.v.data, params.v.stride_token | params.v.stride_head, sizes.dtype);
    if (fault.empty()) {
      fault = misaligned("merged_v", params.merged_v.data, params.merged_v.stride_token | params.merged_v.stride_head,
                         sizes.dtype);
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
    fault = misaligned("x", params.x.data, params.x.stride_token | params.x.stride_head, sizes.dtype);
    if (fault.empty()) {
      fault = misaligned("whole", params.whole.data, params.whole.stride_token | params.whole.stride_head, sizes.dtype);
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
