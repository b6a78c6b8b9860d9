// _C.merge_state and _C.merge_states: the kernels of merge.h, for tensors that Python allocates; and those of ranks.h.
#include "cutlass_kernels/merge.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "cutlass_kernels/ranks.h"
#include "enqueue.h"

namespace cutlass_kernels {
namespace {

MergeSizes sizes_of(const std::string& dtype, std::int64_t tokens, int heads, int head_dim) {
  return {dtype_of(dtype), tokens, heads, head_dim};
}

void run_merge_states(const std::string& dtype, std::int64_t tokens, std::int64_t states, int heads, int head_dim,
                      Address v, std::int64_t v_st, std::int64_t v_ss, std::int64_t v_sh, Address s, std::int64_t s_st,
                      std::int64_t s_ss, std::int64_t s_sh, Address merged_v, Address merged_s, Address stream) {
  MergeStatesParams params;
  params.sizes = sizes_of(dtype, tokens, heads, head_dim);
  params.num_states = states;
  params.v = {pointer<void>(v), v_st, v_sh};
  params.v_stride_state = v_ss;
  params.s = {pointer<float>(s), s_st, s_sh};
  params.s_stride_state = s_ss;
  params.merged_v = {pointer<void>(merged_v), std::int64_t(heads) * head_dim, head_dim};
  params.merged_s = {pointer<float>(merged_s), heads, 1};
  enqueue([&] { return merge_states(params, pointer<CUstream_st>(stream)); });
}

void run_merge_state(const std::string& dtype, std::int64_t tokens, int heads, int head_dim, Address v_a,
                     std::int64_t v_a_st, std::int64_t v_a_sh, Address s_a, std::int64_t s_a_st, std::int64_t s_a_sh,
                     Address v_b, std::int64_t v_b_st, std::int64_t v_b_sh, Address s_b, std::int64_t s_b_st,
                     std::int64_t s_b_sh, Address merged_v, std::int64_t merged_v_st, std::int64_t merged_v_sh,
                     Address merged_s, std::int64_t merged_s_st, std::int64_t merged_s_sh, Address mask, int mask_bytes,
                     Address stream) {
  MergeStateParams params;
  params.sizes = sizes_of(dtype, tokens, heads, head_dim);
  params.v_a = {pointer<void>(v_a), v_a_st, v_a_sh};
  params.s_a = {pointer<float>(s_a), s_a_st, s_a_sh};
  params.v_b = {pointer<void>(v_b), v_b_st, v_b_sh};
  params.s_b = {pointer<float>(s_b), s_b_st, s_b_sh};
  params.merged_v = {pointer<void>(merged_v), merged_v_st, merged_v_sh};
  params.merged_s = {pointer<float>(merged_s), merged_s_st, merged_s_sh};
  params.mask = pointer<void>(mask);
  params.mask_bytes = mask_bytes;
  enqueue([&] { return merge_state(params, pointer<CUstream_st>(stream)); });
}

RankMemory ranks_of(int rank, const std::vector<Address>& memory, std::size_t bytes, std::uint64_t timeout_ns) {
  RankMemory ranks;
  ranks.rank = rank;
  ranks.world = int(memory.size());  // checked with the rest
  for (std::size_t i = 0; i < memory.size() && i < std::size_t(kMostRanks); ++i) {
    ranks.memory[i] = pointer<void>(memory[i]);
  }
  ranks.bytes = bytes;
  ranks.timeout_ns = timeout_ns;
  return ranks;
}

void run_combine_ranks(const std::string& dtype, std::int64_t tokens, int heads, int head_dim, Address v,
                       std::int64_t v_st, std::int64_t v_sh, Address s, std::int64_t s_st, std::int64_t s_sh,
                       bool scatter_heads, Address merged_v, Address merged_s, int rank,
                       const std::vector<Address>& memory, std::size_t bytes, std::uint64_t timeout_ns,
                       Address stream) {
  CombineRanksParams params;
  params.sizes = sizes_of(dtype, tokens, heads, head_dim);
  params.v = {pointer<void>(v), v_st, v_sh};
  params.s = {pointer<float>(s), s_st, s_sh};
  params.scatter_heads = scatter_heads;
  params.ranks = ranks_of(rank, memory, bytes, timeout_ns);
  const int own = scatter_heads ? heads / std::max(params.ranks.world, 1) : heads;
  params.merged_v = {pointer<void>(merged_v), std::int64_t(own) * head_dim, head_dim};
  params.merged_s = {pointer<float>(merged_s), own, 1};
  enqueue([&] { return combine_ranks(params, pointer<CUstream_st>(stream)); });
}

void run_gather_heads(const std::string& dtype, std::int64_t tokens, int heads, int head_dim, Address x,
                      std::int64_t x_st, std::int64_t x_sh, Address whole, int rank, const std::vector<Address>& memory,
                      std::size_t bytes, std::uint64_t timeout_ns, Address stream) {
  GatherHeadsParams params;
  params.sizes = sizes_of(dtype, tokens, heads, head_dim);
  params.x = {pointer<void>(x), x_st, x_sh};
  params.ranks = ranks_of(rank, memory, bytes, timeout_ns);
  params.whole = {pointer<void>(whole), std::int64_t(heads) * params.ranks.world * head_dim, head_dim};
  enqueue([&] { return gather_heads(params, pointer<CUstream_st>(stream)); });
}

std::size_t run_exchange_bytes(const std::string& dtype, std::int64_t tokens, int heads, int head_dim, int world,
                               bool scatter_heads) {
  return exchange_bytes(sizes_of(dtype, tokens, heads, head_dim), world, scatter_heads);
}

}  // namespace

void bind_merge(pybind11::module_& m) {
  // Positional: keywords would take 7 us, positions take 0.4.
  m.def("merge_states", &run_merge_states, "Merges the states of one tensor into contiguous results; see merge.h.");
  m.def("merge_state", &run_merge_state, "Merges two states, also in place; see merge.h.");
  m.def("combine_ranks", &run_combine_ranks, "Merges the states of all ranks; see ranks.h.");
  m.def("gather_heads", &run_gather_heads, "The heads of all ranks; see ranks.h.");
  m.def("exchange_bytes", &run_exchange_bytes, "Of the memory of each rank; see ranks.h.");
}

}  // namespace cutlass_kernels
