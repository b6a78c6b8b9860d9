// What the consumer checks of ranks.h, and of keys that are spread over ranks: on one GPU, which is every rank. Ranks
// are memories and streams of it, and their kernels run beside one another.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "cutlass_kernels/attention.h"
#include "cutlass_kernels/ranks.h"
#include "support.h"

constexpr ck::MergeSizes kExchanged = {ck::DType::kFloat16, 2, 4, 64};

inline void check_ranks_without_gpu() {
  require(ck::exchange_bytes(kExchanged, 2, true) >= 2 * 2 * 4 * 64 * sizeof(std::uint16_t) / 2,
          "states of two ranks fit");
  ck::CombineRanksParams combine;
  combine.sizes = kExchanged;
  combine.ranks.world = 17;
  require_refusal(ck::combine_ranks(combine, nullptr), "world=17");
  combine.ranks.world = 2;
  require_refusal(ck::combine_ranks(combine, nullptr), "ranks.bytes=0 must be at least");
  ck::GatherHeadsParams gather;
  gather.sizes = kExchanged;
  gather.ranks.rank = -1;
  require_refusal(ck::gather_heads(gather, nullptr), "rank=-1");
}

#ifdef CONSUMER_HAS_CUDA_RUNTIME

/// One new token of two requests, of 37 and 50 tokens: over all keys, and over two ranks with blocks of four.
class Spread {
 public:
  explicit Spread(const ck::KernelInfo& kernel) : kernel_(kernel), kv_heads_(is_latent(kernel) ? 1 : 2) {
    const std::int32_t lengths[2] = {37, 50};
    lengths_.copy_from(lengths, sizeof lengths);
    fill(q_, random_bits(2 * kHeads * kernel.head_dim_qk, kernel.q_dtype, 4));
    keys_ = random_bits(2 * kCapacity * kv_heads_ * kernel.head_dim_qk, kernel.kv_dtype, 5);
    values_ = random_bits(2 * kCapacity * kv_heads_ * kernel.head_dim_vo, kernel.kv_dtype, 6);
  }

  void check() {
    std::vector<std::uint16_t> whole(2 * kHeads * dim()), merged(whole.size());
    attend({}, keys_, values_, kCapacity, nullptr);
    o_[0].copy_to(whole.data(), whole.size() * 2);
    ck::RankMemory ranks = memory();
    cudaStream_t streams[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) {
      require(cudaStreamCreate(&streams[rank]) == cudaSuccess, "a stream");
      const ck::KvShard shard = {kRanks, rank, kBlock};
      const auto keys = held(keys_, kv_heads_ * kernel_.head_dim_qk, rank);
      const auto values = held(values_, kv_heads_ * dim(), rank);
      attend(shard, keys, values, kCapacity / kRanks, streams[rank]);
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.rank = rank;
      const ck::Status status = ck::combine_ranks(combined(ranks), streams[rank]);
      require(status.ok(), status.message);
    }
    require(cudaDeviceSynchronize() == cudaSuccess, "ranks wait for one another");
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
    merged_.copy_to(merged.data(), merged.size() * 2);
    const double tolerance = kernel_.q_dtype == ck::DType::kFloat16 ? 1.0 / 512 : 1.0 / 64;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const double want = from_bits(whole[i], kernel_.q_dtype);
      require(std::fabs(want - from_bits(merged[i], kernel_.q_dtype)) <= tolerance, "ranks together see all keys");
    }
  }

 private:
  static constexpr int kHeads = 4, kCapacity = 64, kRanks = 2, kBlock = 4;

  int dim() const { return kernel_.head_dim_vo; }

  static void fill(const Buffer& buffer, const std::vector<std::uint16_t>& bits) {
    buffer.copy_from(bits.data(), bits.size() * 2);
  }

  /// Of a cache [2, kCapacity, width], the tokens of a rank, in order.
  static std::vector<std::uint16_t> held(const std::vector<std::uint16_t>& cache, int width, int rank) {
    std::vector<std::uint16_t> part;
    for (int token = 0; token < 2 * kCapacity; ++token) {
      if (token % kCapacity / kBlock % kRanks != rank) continue;
      part.insert(part.end(), cache.begin() + token * width, cache.begin() + (token + 1) * width);
    }
    return part;
  }

  void attend(const ck::KvShard& shard, const std::vector<std::uint16_t>& keys,
              const std::vector<std::uint16_t>& values, int capacity, cudaStream_t stream) {
    fill(k_[shard.rank], keys);
    fill(v_[shard.rank], values);
    ck::AttentionParams params;
    params.q_dtype = params.o_dtype = kernel_.q_dtype;
    params.kv_dtype = kernel_.kv_dtype;
    params.num_qo_heads = kHeads;
    params.num_kv_heads = kv_heads_;
    params.head_dim_qk = kernel_.head_dim_qk;
    params.head_dim_vo = dim();
    params.batch_size = params.total_q = 2;
    params.max_qo_len = 1;
    params.total_kv = 2 * capacity;
    params.max_kv_len = params.kv_stride_request = capacity;
    params.seqused_k = static_cast<const std::int32_t*>(lengths_.data);
    params.kv_shard = shard;
    params.causal = true;
    params.sm_scale = 1.0f / std::sqrt(float(params.head_dim_qk));
    params.q = {q_.data, kHeads * params.head_dim_qk, params.head_dim_qk};
    params.k = {k_[shard.rank].data, kv_heads_ * params.head_dim_qk, params.head_dim_qk};
    params.v = {v_[shard.rank].data, kv_heads_ * dim(), dim()};
    if (is_latent(kernel_)) params.v = params.k;
    params.o = {o_[shard.rank].data, kHeads * dim(), dim()};
    params.lse = static_cast<float*>(lse_[shard.rank].data);
    params.lse_stride_token = kHeads;
    params.lse_stride_head = 1;
    const Buffer workspace(ck::workspace_size(params, kernel_.backend) + 16);
    const ck::Status status =
        ck::attention(params, workspace.data, ck::workspace_size(params, kernel_.backend), stream, kernel_.backend);
    require(status.ok(), status.message);
    require(cudaDeviceSynchronize() == cudaSuccess, "the kernel ran");
  }

  ck::RankMemory memory() {
    ck::RankMemory ranks;
    ranks.world = kRanks;
    ranks.bytes = kBytes;
    ranks.timeout_ns = 5000000000;
    for (int rank = 0; rank < kRanks; ++rank) {
      require(cudaMemset(memory_[rank].data, 0, kBytes) == cudaSuccess, "memory of zeros");
      ranks.memory[rank] = memory_[rank].data;
    }
    return ranks;
  }

  /// Each rank writes its heads of the same result.
  ck::CombineRanksParams combined(const ck::RankMemory& ranks) {
    ck::CombineRanksParams combine;
    combine.sizes = {kernel_.q_dtype, 2, kHeads, dim()};
    combine.v = {o_[ranks.rank].data, kHeads * dim(), dim()};
    combine.s = {static_cast<float*>(lse_[ranks.rank].data), kHeads, 1};
    auto* heads = static_cast<std::uint16_t*>(merged_.data) + ranks.rank * kHeads / kRanks * dim();
    combine.merged_v = {heads, kHeads * dim(), dim()};
    combine.ranks = ranks;
    return combine;
  }

  static constexpr std::size_t kElements = 2 * kCapacity * 2 * 512, kBytes = 1 << 18;
  ck::KernelInfo kernel_;
  int kv_heads_;
  std::vector<std::uint16_t> keys_, values_;
  Buffer lengths_{8}, q_{kElements}, merged_{kElements};
  Buffer k_[kRanks] = {Buffer(2 * kElements), Buffer(2 * kElements)};
  Buffer v_[kRanks] = {Buffer(2 * kElements), Buffer(2 * kElements)};
  Buffer o_[kRanks] = {Buffer(kElements), Buffer(kElements)};
  Buffer lse_[kRanks] = {Buffer(64), Buffer(64)};
  Buffer memory_[kRanks] = {Buffer(kBytes), Buffer(kBytes)};
};

inline void check_spread_on_gpu(const ck::KernelInfo& kernel) { Spread(kernel).check(); }

#endif
