// The bindings of attention as a Python module of its own, on a stand-in for the CUDA runtime (tests/cpp/host) and with
// kernels that record what they are given. So a test sees, on any machine, which calls are accepted and with which
// parameters a kernel is launched. tests/recorded_calls.py builds and loads it.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "../host/stand_in_cuda.h"
#include "arguments.h"
#include "copy_vectors.h"
#include "cutlass_kernels/append.h"
#include "cutlass_kernels/rope.h"
#include "functions.h"
#include "latent/dims.h"
#include "mask_extents.h"
#include "merge/combine_splits.h"
#include "registry/registry.h"
#include "schedule/write_list.h"

namespace py = pybind11;

namespace cutlass_kernels {
namespace {

struct Recorded {
  Backend backend;
  LaunchParams params;
  int device;
  Address stream;
};
std::vector<Recorded> recorded;

template <Backend backend>
Status record(const LaunchParams& params, cudaStream_t stream) {
  recorded.push_back({backend, params, stand_in::current_device, reinterpret_cast<Address>(stream)});
  return Status::success();
}

template <Backend backend>
KernelEntry entry() {
  KernelEntry made;
  made.candidates = [](const AttentionParams&, const Device&) {
    TileShape tile;
    tile.rows = 16;
    tile.packed_heads = 1;  // so that keys are split
    tile.combines = true;
    return Candidates{{"recorded", tile, {}}};
  };
  made.launch = &record<backend>;
  made.is_persistent = backend == Backend::kFa3;
  return made;
}

/// Latent attention: fp16 without tensors of their own for the last columns, bf16 with them.
template <Backend backend, bool kReadsRope>
KernelEntry latent() {
  KernelEntry made = entry<backend>();
  made.reads_rope = kReadsRope;
  made.reads_slots = true;
  made.refusal = &mla::common_refusal;
  return made;
}

/// Latent attention over quantized caches.
KernelEntry quantized() {
  KernelEntry made = entry<Backend::kFa3>();
  made.reads_slots = true;
  return made;
}

/// Two head dimensions of every pair of types that is compiled, with every feature.
std::vector<RegistryRow> all_rows() {
  constexpr std::uint32_t kAllFeatures = (1u << 9) - 1;
  std::vector<RegistryRow> rows;
  const auto add = [&](Backend backend, DType q, DType kv, KernelEntry (*made)()) {
    for (const int dim : {64, 256}) {
      rows.push_back({{"recording", backend, q, kv, dim, dim, kAllFeatures, 80, 0}, made});
    }
  };
  for (const DType q : {DType::kFloat16, DType::kBFloat16}) {
    for (const DType kv : {q, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
      add(Backend::kFa2, q, kv, &entry<Backend::kFa2>);
    }
    add(Backend::kFa3, q, q, &entry<Backend::kFa3>);
  }
  add(Backend::kFa3, DType::kFloat8E4M3, DType::kFloat8E4M3, &entry<Backend::kFa3>);
  const auto add_latent = [&](Backend backend, DType q, DType kv, KernelEntry (*made)()) {
    rows.push_back({{"recording", backend, q, kv, 576, 512, kAllFeatures, 80, 0}, made});
  };
  add_latent(Backend::kFa3, DType::kFloat16, DType::kFloat16, &latent<Backend::kFa3, false>);
  add_latent(Backend::kFa3, DType::kBFloat16, DType::kBFloat16, &latent<Backend::kFa3, true>);
  add_latent(Backend::kFa2, DType::kFloat16, DType::kFloat16, &latent<Backend::kFa2, false>);
  add_latent(Backend::kFa2, DType::kBFloat16, DType::kBFloat16, &latent<Backend::kFa2, true>);
  add_latent(Backend::kFa2, DType::kBFloat16, DType::kFloat8E4M3, &latent<Backend::kFa2, true>);
  for (const DType tokens : {DType::kLatentV32, DType::kLatentV32Nope, DType::kLatentV4, DType::kLatentV41ByPage,
                             DType::kLatentV41ByToken}) {
    const int dim = tokens == DType::kLatentV32 ? 576 : 512;
    rows.push_back({{"recording", Backend::kFa3, DType::kBFloat16, tokens, dim, 512, kAllFeatures, 80, 0}, &quantized});
  }
  return rows;
}

}  // namespace

const std::vector<BackendName>& backends() {
  static const std::vector<BackendName> in_order = {{Backend::kFa3, "fa3"}, {Backend::kFa2, "fa2"}};
  return in_order;
}

const std::vector<RegistryRow>& registry_rows() {
  static const std::vector<RegistryRow> rows = all_rows();
  return rows;
}

// What is enqueued beside attention kernels does nothing.
Status launch_write_list(const ListArgs&, const VectorCopies&, cudaStream_t) { return Status::success(); }
Status copy_vectors(const VectorCopies&, cudaStream_t) { return Status::success(); }
Status upload(const VectorCopies&, cudaStream_t) { return Status::success(); }
Status launch_mask_extents(const LaunchParams&, MaskExtent*, cudaStream_t) { return Status::success(); }
Status launch_combine_splits(const LaunchParams&, cudaStream_t) { return Status::success(); }

namespace {

/// A call of a kernel that writes to caches, or rotates. Where it does not append, `append` has no slots.
struct Written {
  RopeParams rope;
  AppendBySlotParams append;
  Address stream;
};
std::vector<Written> written;

Status record_write(const RopeParams& rope, const AppendBySlotParams& append, cudaStream_t stream) {
  // Two of what the kernel refuses.
  if (rope.rotary_dim % 2 != 0) return Status::invalid("rotary_dim must be even.");
  if (rope.cos_sin_dtype != DType::kFloat32 && rope.cos_sin_dtype != rope.dtype) {
    return Status::invalid("cos_sin_dtype must be float32, or that of queries and keys.");
  }
  written.push_back({rope, append, reinterpret_cast<Address>(stream)});
  return Status::success();
}

}  // namespace

Status apply_rope(const RopeParams& rope, cudaStream_t stream) { return record_write(rope, {}, stream); }
Status apply_rope_and_append_by_slot(const RopeParams& rope, const AppendBySlotParams& append, cudaStream_t stream) {
  return record_write(rope, append, stream);
}
Status append_paged_kv_cache_by_slot(const AppendBySlotParams& append, cudaStream_t stream) {
  return record_write({}, append, stream);
}

// Not recorded: what it writes is compared on a GPU.
Status append_quantized_by_slot(const AppendQuantizedParams&, cudaStream_t) { return Status::success(); }
Status apply_rope_and_append_quantized_by_slot(const RopeParams&, const AppendQuantizedParams&, cudaStream_t) {
  return Status::success();
}

namespace {

Address address(const void* data) { return reinterpret_cast<Address>(data); }

template <class View>
py::tuple tuple_of(const View& view) {
  return py::make_tuple(address(view.data), view.stride_token, view.stride_head);
}

py::dict facts(const Recorded& call) {
  const LaunchParams& p = call.params;
  const PageTable& pages = p.pages;
  using namespace pybind11::literals;
  py::dict of_pages("indices"_a = address(pages.indices), "v_indices"_a = address(pages.v_indices),
                    "last_page_len"_a = address(pages.last_page_len), "page_size"_a = pages.page_size,
                    "num_indices"_a = pages.num_indices, "table_stride"_a = pages.table_stride,
                    "table_width"_a = pages.table_width, "slots_per_page"_a = pages.slots_per_page,
                    "v_offset"_a = pages.v_offset, "num_pages"_a = pages.num_pages,
                    "k_stride_page"_a = pages.k_stride_page, "v_stride_page"_a = pages.v_stride_page);
  py::dict of_call("backend"_a = to_string(call.backend), "device"_a = call.device, "stream"_a = call.stream,
                   "dtypes"_a = py::make_tuple(to_string(p.q_dtype), to_string(p.kv_dtype), to_string(p.o_dtype)),
                   "heads"_a = py::make_tuple(p.num_qo_heads, p.num_kv_heads),
                   "head_dims"_a = py::make_tuple(p.head_dim_qk, p.head_dim_vo), "batch_size"_a = p.batch_size,
                   "totals"_a = py::make_tuple(p.total_q, p.total_kv),
                   "most"_a = py::make_tuple(p.max_qo_len, p.max_kv_len),
                   "indptrs"_a = py::make_tuple(address(p.qo_indptr), address(p.kv_indptr)),
                   "seqused"_a = py::make_tuple(address(p.seqused_q), address(p.seqused_k)), "q"_a = tuple_of(p.q),
                   "k"_a = tuple_of(p.k), "v"_a = tuple_of(p.v), "o"_a = tuple_of(p.o),
                   "lse"_a = py::make_tuple(address(p.lse), p.lse_stride_token, p.lse_stride_head),
                   "stats"_a = address(p.stats), "sinks"_a = address(p.sinks));
  of_call["max_logits"] = address(p.max_logits);
  of_call["flash_mla_lse"] = p.flash_mla_lse;
  of_call["rows_per_length"] = p.rows_per_length;
  of_call["causal"] = p.causal;
  of_call["window_left"] = p.window_left;
  of_call["chunk_size"] = p.chunk_size;
  of_call["mask"] = py::make_tuple(address(p.mask.words), address(p.mask.indptr), p.mask.num_words);
  of_call["scales"] = py::make_tuple(p.sm_scale, p.logits_soft_cap, p.v_scale);
  of_call["skip_softmax_factor"] = p.skip_softmax_factor;
  of_call["alibi"] = address(p.alibi.slopes);
  of_call["device_scales"] = py::make_tuple(address(p.logits_scale.data), address(p.output_scale.data));
  of_call["pages"] = of_pages;
  of_call["ropes"] = py::make_tuple(tuple_of(p.q_rope), tuple_of(p.k_rope), pages.k_rope_stride_page);
  of_call["splits"] = p.plan.split_tile_capacity;
  of_call["partial_o"] = address(p.plan.partial_o);
  of_call["combine_counters"] = py::make_tuple(address(p.plan.combine_counters), p.plan.num_combine_counters);
  of_call["tile_counter"] = address(p.plan.tile_counter);
  of_call["tile_list"] = address(p.plan.tile_list);
  return of_call;
}

py::dict facts(const Written& call) {
  const RopeParams& r = call.rope;
  const AppendBySlotParams& a = call.append;
  using namespace pybind11::literals;
  const auto scale = [](float number, const DeviceScale& factors) {
    return py::make_tuple(number, address(factors.data), factors.stride);
  };
  return py::dict(
      "stream"_a = call.stream,
      "rope"_a = py::make_tuple(to_string(r.dtype), r.num_qo_heads, r.num_kv_heads, r.head_dim, r.rotary_dim,
                                r.interleaved, r.num_tokens),
      "positions"_a = py::make_tuple(address(r.positions), r.positions_are_64_bit),
      "cos_sin"_a = py::make_tuple(address(r.cos_sin), to_string(r.cos_sin_dtype), r.stride_position, r.num_positions),
      "q"_a = tuple_of(r.q), "q_out"_a = tuple_of(r.q_out), "k"_a = tuple_of(r.k), "k_out"_a = tuple_of(r.k_out),
      "append"_a = py::make_tuple(to_string(a.dtype), to_string(a.cache_dtype), a.num_kv_heads, a.head_dim_qk,
                                  a.head_dim_vo, a.num_tokens),
      "slots"_a = py::make_tuple(address(a.slots), a.slots_are_64_bit, a.page_size, a.num_pages),
      "new_k"_a = tuple_of(a.k), "v"_a = tuple_of(a.v), "k_cache"_a = tuple_of(a.k_cache),
      "v_cache"_a = tuple_of(a.v_cache), "strides_page"_a = py::make_tuple(a.k_stride_page, a.v_stride_page),
      "scales"_a = py::make_tuple(scale(a.k_scale, a.k_scales), scale(a.v_scale, a.v_scales)));
}

template <class Call>
py::list take(std::vector<Call>* calls) {
  py::list taken;
  for (const Call& call : *calls) taken.append(facts(call));
  calls->clear();
  return taken;
}

}  // namespace
}  // namespace cutlass_kernels

PYBIND11_MODULE(recorded_calls, m) {
  using namespace cutlass_kernels;
  add_attention(m);
  add_quantized(m);
  add_rope(m);
  add_slots(m);
  m.def("current_device", [] { return stand_in::current_device; });
  m.def("set_capturing", [](bool value) { stand_in::is_capturing = value; });
  m.def(
      "take_launches", [] { return take(&recorded); }, "What kernels were given since the last call of this function.");
  m.def("take_writes", [] { return take(&written); }, "The same of kernels that write to caches, or rotate.");
  m.def("set_compute_capability", [](int value) { stand_in::device.compute_capability = value; });
}
