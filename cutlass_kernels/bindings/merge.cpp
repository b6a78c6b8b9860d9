// _C.merge_state and _C.merge_states: the kernels of merge.h, for tensors that Python allocates; and those of ranks.h
// and local_slots.h.
#include "cutlass_kernels/merge.h"

#include <algorithm>

#include "arguments.h"
#include "cutlass_kernels/local_slots.h"
#include "cutlass_kernels/ranks.h"
#include "enqueue.h"
#include "functions.h"

namespace cutlass_kernels {
namespace {

py::object merge_all(PyObject* const* given, Py_ssize_t count) {
  MergeStatesParams p;
  MergeSizes& sizes = p.sizes;
  cudaStream_t stream = nullptr;
  Positional(given, count)
      .read(sizes.dtype, sizes.num_tokens, p.num_states, sizes.num_heads, sizes.head_dim)
      .read(p.v.data, p.v.stride_token, p.v_stride_state, p.v.stride_head)
      .read(p.s.data, p.s.stride_token, p.s_stride_state, p.s.stride_head, p.merged_v.data, p.merged_s.data, stream)
      .end();
  p.merged_v = {p.merged_v.data, std::int64_t(sizes.num_heads) * sizes.head_dim, sizes.head_dim};
  p.merged_s = {p.merged_s.data, sizes.num_heads, 1};
  return enqueue([&] { return merge_states(p, stream); });
}

py::object merge_two(PyObject* const* given, Py_ssize_t count) {
  MergeStateParams p;
  cudaStream_t stream = nullptr;
  Positional(given, count)
      .read(p.sizes.dtype, p.sizes.num_tokens, p.sizes.num_heads, p.sizes.head_dim)
      .read(p.v_a, p.s_a, p.v_b, p.s_b, p.merged_v, p.merged_s, p.mask, p.mask_bytes, stream)
      .end();
  return enqueue([&] { return merge_state(p, stream); });
}

void read_ranks(Positional& arguments, RankMemory* ranks, cudaStream_t* stream) {
  py::sequence memory;
  arguments.read(ranks->rank, memory, ranks->bytes, ranks->timeout_ns, *stream).end();
  ranks->world = int(memory.size());  // checked with the rest
  for (std::size_t i = 0; i < memory.size() && i < std::size_t(kMostRanks); ++i) {
    ranks->memory[i] = pointer<void>(memory[i].cast<Address>());
  }
}

py::object combine(PyObject* const* given, Py_ssize_t count) {
  CombineRanksParams p;
  MergeSizes& sizes = p.sizes;
  cudaStream_t stream = nullptr;
  Positional arguments(given, count);
  arguments.read(sizes.dtype, sizes.num_tokens, sizes.num_heads, sizes.head_dim, p.v, p.s, p.scatter_heads)
      .read(p.merged_v.data, p.merged_s.data);
  read_ranks(arguments, &p.ranks, &stream);
  const int own = p.scatter_heads ? sizes.num_heads / std::max(p.ranks.world, 1) : sizes.num_heads;
  p.merged_v = {p.merged_v.data, std::int64_t(own) * sizes.head_dim, sizes.head_dim};
  p.merged_s = {p.merged_s.data, own, 1};
  return enqueue([&] { return combine_ranks(p, stream); });
}

py::object gather(PyObject* const* given, Py_ssize_t count) {
  GatherHeadsParams p;
  MergeSizes& sizes = p.sizes;
  cudaStream_t stream = nullptr;
  Positional arguments(given, count);
  arguments.read(sizes.dtype, sizes.num_tokens, sizes.num_heads, sizes.head_dim, p.x, p.whole.data);
  read_ranks(arguments, &p.ranks, &stream);
  p.whole = {p.whole.data, std::int64_t(sizes.num_heads) * p.ranks.world * sizes.head_dim, sizes.head_dim};
  return enqueue([&] { return gather_heads(p, stream); });
}

py::object bytes_of_exchange(PyObject* const* given, Py_ssize_t count) {
  MergeSizes sizes;
  int world = 0;
  bool scatter_heads = false;
  Positional(given, count)
      .read(sizes.dtype, sizes.num_tokens, sizes.num_heads, sizes.head_dim, world, scatter_heads)
      .end();
  return py::int_(exchange_bytes(sizes, world, scatter_heads));
}

py::object local_slots(PyObject* const* given, Py_ssize_t count) {
  LocalSlotsParams p;
  cudaStream_t stream = nullptr;
  Positional(given, count)
      .read(p.num_rows, p.lists_per_row, p.width, p.shard.rank, p.shard.world, p.shard.block, p.table_width)
      .read(p.table_stride, p.num_requests, p.page_size, p.positions, p.lengths, p.page_table, p.batch_indices)
      .read(p.slots, p.counts, stream)
      .end();
  return enqueue([&] { return find_local_slots(p, stream); });
}

}  // namespace

void add_merge(const py::object& module) {
  static PyMethodDef functions[] = {function<merge_all>("merge_states"),
                                    function<merge_two>("merge_state"),
                                    function<combine>("combine_ranks"),
                                    function<gather>("gather_heads"),
                                    function<bytes_of_exchange>("exchange_bytes"),
                                    function<local_slots>("find_local_slots")};
  add_functions(module, functions);
}

}  // namespace cutlass_kernels
