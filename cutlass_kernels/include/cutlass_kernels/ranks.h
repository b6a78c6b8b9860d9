// GPUs that reach one another's memory (peer access, NVLink): each holds some of the keys of every request, or some of
// the heads. One kernel sends to the other ranks, waits for them, and merges or copies what has come: no other
// communication. How ranks map each other's memory is the caller's affair (torch's symmetric memory, CUDA IPC, ...).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cutlass_kernels/merge.h"

namespace cutlass_kernels {

constexpr std::int32_t kMostRanks = 16;

/// Memory of every rank, as this rank maps it: zeroed before the first call, and used by these functions alone. All
/// ranks make the same calls in the same order, on one stream each; they can be captured into CUDA graphs.
struct RankMemory {
  std::int32_t rank = 0;
  std::int32_t world = 1;
  void* memory[kMostRanks] = {};  ///< 128-byte aligned
  std::size_t bytes = 0;          ///< of each: at least exchange_bytes()
  /// A kernel that has waited so long for another rank ends with an error of the context. 0: it waits forever.
  std::uint64_t timeout_ns = 0;
};

/// States over the keys of each rank become the state over all keys. Heads are those of all ranks.
struct CombineRanksParams {
  MergeSizes sizes;
  ConstTensorView v;  ///< this rank's output, [num_tokens, num_heads, head_dim], of 16-byte aligned rows
  ConstLseView s;     ///< its base-2 LSE
  /// Whether this rank gets heads [rank * num_heads / world, (rank + 1) * num_heads / world) only.
  bool scatter_heads = true;
  TensorView merged_v;  ///< [num_tokens, num_heads / world or num_heads, head_dim]
  LseView merged_s;     ///< data may be null: the LSE is not asked for
  RankMemory ranks;
};

/// Every rank's [num_tokens, num_heads, head_dim] becomes [num_tokens, world * num_heads, head_dim] on all of them.
struct GatherHeadsParams {
  MergeSizes sizes;   ///< num_heads of one rank; any dtype of 16 bits or fp32
  ConstTensorView x;  ///< this rank's, of 16-byte aligned rows
  TensorView whole;
  RankMemory ranks;
};

CK_API std::size_t exchange_bytes(const MergeSizes& sizes, std::int32_t world, bool scatter_heads);
CK_API Status combine_ranks(const CombineRanksParams& params, cudaStream_t stream);
CK_API Status gather_heads(const GatherHeadsParams& params, cudaStream_t stream);

}  // namespace cutlass_kernels
