// What direct calls (direct.h) of kernels share that write to slots of a paged cache.
#pragma once

#include <cstdint>

#include "cutlass_kernels/append.h"
#include "direct.h"
#include "enqueue.h"

namespace cutlass_kernels {

constexpr std::int64_t kMostOfRow = 1 << 30;  // heads, elements of a head, entries of a page

inline bool is_contiguous(const Tensor& tensor, int dimension) {
  const auto d = std::size_t(dimension);
  return tensor.strides[d] == 1 || tensor.shape[d] == 1;
}

/// [tokens, heads, dim] on a GPU. Elements of the last dimension lie side by side; other strides may be any.
struct Rows {
  Address data = 0;
  DType dtype{};
  int device = 0;
  std::int64_t tokens = 0;
  int heads = 0, dim = 0;
  std::int64_t stride_token = 0, stride_head = 0;

  ConstTensorView read_here() const { return {pointer<const void>(data), stride_token, stride_head}; }
  TensorView written_here() const { return {pointer<void>(data), stride_token, stride_head}; }
};
bool read_rows(const Tensor& tensor, Rows* rows);
bool read_rows(const Torch& torch, PyObject* object, Rows* rows);

/// Integers, of 32 or 64 bits, that lie side by side on a device.
struct Integers {
  const void* data = nullptr;
  bool are_64_bit = false;
  std::int64_t count = 0;
};
bool read_integers(const Torch& torch, PyObject* object, int device, Integers* integers);

// Arguments of a call that say where keys and values go, in this order.
enum { kValue, kKeyCache, kValueCache, kSlots, kKScale, kVScale, kCacheLayout, kSlotArguments };

/// Values, and all of `params` but the keys. Its num_tokens is the number of slots: there are no fewer values.
bool read_append(const Torch& torch, PyObject* const* given, const Rows& key, Rows* value, AppendBySlotParams* params);

/// Whether this module has kernels for the current device.
bool serves_current_device();

/// Enqueues `work(stream)` on a device's current stream: True. None, and nothing happens, where it is refused.
template <class Work>
py::object launch_on(const Torch& torch, int device, Work work) {
  const CurrentDevice current(device);
  if (!serves_current_device()) return py::none();
  const auto stream = pointer<CUstream_st>(torch.stream(device));
  if (!is_launched(without_gil([&] { return work(stream); }))) return py::none();
  return py::reinterpret_borrow<py::object>(Py_True);
}

}  // namespace cutlass_kernels
