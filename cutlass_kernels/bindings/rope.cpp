// _C.apply_rope: the kernel of rope.h.
#include "cutlass_kernels/rope.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "arguments.h"
#include "bind.h"
#include "enqueue.h"
#include "slots.h"

namespace cutlass_kernels {
namespace {

/// Query heads, KV heads, head_dim, rotary_dim.
using Sizes = std::tuple<int, int, int, int>;
/// Address, whether of 64 bits.
using PositionsOf = std::tuple<Address, bool>;
/// Address, dtype, stride of a position, positions.
using TableOf = std::tuple<Address, std::string, std::int64_t, std::int64_t>;

void run_rope(const std::string& dtype, const Sizes& sizes, bool interleaved,
              std::int64_t num_tokens, const PositionsOf& positions, const TableOf& table,
              const RowsOf& q, const RowsOf& q_out, const RowsOf& k, const RowsOf& k_out,
              const std::optional<SlotsOf>& slots, Address stream_address) {
  RopeParams params;
  params.dtype = dtype_of(dtype);
  std::tie(params.num_qo_heads, params.num_kv_heads, params.head_dim, params.rotary_dim) = sizes;
  params.interleaved = interleaved;
  params.num_tokens = num_tokens;
  params.positions = pointer<const void>(std::get<0>(positions));
  params.positions_are_64_bit = std::get<1>(positions);
  params.cos_sin = pointer<const void>(std::get<0>(table));
  params.cos_sin_dtype = dtype_of(std::get<1>(table));
  params.stride_position = std::get<2>(table);
  params.num_positions = std::get<3>(table);
  params.q = const_rows(q);
  params.q_out = rows(q_out);
  params.k = const_rows(k);
  params.k_out = rows(k_out);
  const auto stream = pointer<CUstream_st>(stream_address);
  enqueue([&] {
    return slots ? apply_rope_and_append_by_slot(params, append_params(*slots), stream)
                 : apply_rope(params, stream);
  });
}

}  // namespace

void bind_rope(pybind11::module_& m) {
  m.def("apply_rope", &run_rope,
        "Rotates queries and keys, and writes keys and values to slots of a cache; see rope.h.");
}

}  // namespace cutlass_kernels
