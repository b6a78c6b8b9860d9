// _C.read_offsets, _C.read_pages, _C.ascend: a plan's index vectors, as far as they are on the host.
// _C.sizes_on_device, _C.copy_vectors: as far as they are on the device, where they are not read.
//
// One pass over each vector checks it and finds what plans need to know; then all are packed into one buffer, which the
// caller may not change any more. 128 requests take 0.5 us here, and 50 in torch, where every look at a vector costs 2
// to 5.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "arguments.h"
#include "copies.h"
#include "direct.h"
#include "enqueue.h"
#include "functions.h"

namespace cutlass_kernels {
namespace {

struct Vector {
  const std::int32_t* data = nullptr;
  std::int64_t count = 0;

  std::int32_t last() const { return data[count - 1]; }
};

/// A contiguous vector of int32 on the host, or, with `device`, on that of this tensor, a GPU.
bool read_vector(const Torch& torch, PyObject* object, const Tensor* device, Vector* vector) {
  Tensor tensor;
  if (!torch.read(object, &tensor) || tensor.ndim != 1 || !is_int32(tensor)) return false;
  if (tensor.strides[0] != 1 && tensor.shape[0] > 1) return false;
  if (device != nullptr ? !tensor.is_on_gpu(device->device.device_id) : tensor.device.device_type != kDLCPU) {
    return false;
  }
  *vector = {pointer<const std::int32_t>(tensor.data), tensor.shape[0]};
  return true;
}

bool read_like(const Torch& torch, PyObject* object, Tensor* like, bool* on_gpu) {
  if (!torch.read(object, like)) return false;
  *on_gpu = like->device.device_type == kDLCUDA;
  return *on_gpu || like->device.device_type == kDLCPU;
}

constexpr std::int64_t kAlign = 4;  // a vector starts at a multiple of 16 bytes; batches._ALIGN

/// The vectors one behind the other: a bytearray, and its address, which stays the same.
py::tuple pack(std::initializer_list<Vector> vectors) {
  std::int64_t total = 0;
  for (const Vector& x : vectors) total += (x.count + kAlign - 1) / kAlign * kAlign;
  const auto packed = py::reinterpret_steal<py::object>(PyByteArray_FromStringAndSize(nullptr, Py_ssize_t(4 * total)));
  if (!packed) throw py::error_already_set();
  char* to = PyByteArray_AS_STRING(packed.ptr());
  for (const Vector& x : vectors) {
    const std::int64_t used = 4 * x.count;
    const std::int64_t padded = (used + 4 * kAlign - 1) / (4 * kAlign) * (4 * kAlign);
    if (used > 0) std::memcpy(to, x.data, std::size_t(used));
    std::memset(to + used, 0, std::size_t(padded - used));
    to += padded;
  }
  return py::make_tuple(packed, reinterpret_cast<Address>(PyByteArray_AS_STRING(packed.ptr())));
}

// Whether offsets never decrease, from a first that is not negative.
bool ascend(const Vector& x) {
  bool fine = x.data[0] >= 0;
  for (std::int64_t i = 1; i < x.count; ++i) fine &= x.data[i] >= x.data[i - 1];
  return fine;
}

bool are_offsets(const Vector& qo, const Vector& kv) {
  return qo.count > 0 && kv.count == qo.count && qo.data[0] == 0 && ascend(qo) && ascend(kv);
}

// (batch_size, qo_indptr[-1], kv_indptr[-1], most keys of a request, what pack() returns), from qo_indptr and
// kv_indptr. None where a vector is not one of int32 on the host, or the offsets are not what
// they should be: why not is for Python to say.
py::object read_offsets(PyObject* const* given, Py_ssize_t count) {
  expect(count == 2);
  const Torch& torch = Torch::get();
  Vector qo, kv;
  if (!read_vector(torch, given[0], nullptr, &qo) || !read_vector(torch, given[1], nullptr, &kv) ||
      !are_offsets(qo, kv)) {
    return py::none();
  }
  std::int64_t longest = 0;
  for (std::int64_t b = 0; b + 1 < kv.count; ++b) {
    longest = std::max<std::int64_t>(longest, kv.data[b + 1] - kv.data[b]);
  }
  return py::make_tuple(qo.count - 1, qo.last(), kv.last(), longest, pack({qo, kv}));
}

// The same for pages, from qo_indptr, kv_indptr, last_page_len, page numbers, page_size, whether to keep page numbers
// beyond kv_indptr[-1], and a tensor on the plan's device. The page numbers may be there, too. The result has one more
// than the highest page number, and how many of them are packed (-1: they are on the device) and given, before what
// pack() returns.
py::object read_pages(PyObject* const* given, Py_ssize_t count) {
  expect(count == 7);
  const Torch& torch = Torch::get();
  Vector qo, kv, last, indices;
  Tensor like;
  bool on_gpu = false, whole = false;
  std::int64_t page_size = 0;
  if (!read_vector(torch, given[0], nullptr, &qo) || !read_vector(torch, given[1], nullptr, &kv) ||
      !read_vector(torch, given[2], nullptr, &last) || given[4] == Py_None || !read_integer(given[4], &page_size) ||
      page_size <= 0 || !read_flag(given[5], &whole) || !read_like(torch, given[6], &like, &on_gpu)) {
    return py::none();
  }
  const bool readable = read_vector(torch, given[3], nullptr, &indices);
  if (!readable && !(on_gpu && read_vector(torch, given[3], &like, &indices))) return py::none();
  if (!are_offsets(qo, kv) || last.count != qo.count - 1) return py::none();
  const std::int64_t begin = kv.data[0], end = kv.last();
  if (end > indices.count) return py::none();
  std::int64_t longest = 0;
  bool fine = true;
  for (std::int64_t b = 0; b < last.count; ++b) {
    const std::int64_t pages = kv.data[b + 1] - kv.data[b];
    if (pages == 0) continue;
    fine &= last.data[b] >= 1 && last.data[b] <= page_size;
    longest = std::max(longest, (pages - 1) * page_size + last.data[b]);
  }
  std::int32_t lowest = 0, highest = -1;
  for (std::int64_t i = begin; readable && i < end; ++i) {
    lowest = std::min(lowest, indices.data[i]);
    highest = std::max(highest, indices.data[i]);
  }
  if (!fine || lowest < 0) return py::none();
  const std::int64_t given_pages = indices.count;
  indices.count = readable ? (whole ? given_pages : end) : 0;
  return py::make_tuple(qo.count - 1, qo.last(), end, longest, std::int64_t(highest) + 1,
                        readable ? indices.count : std::int64_t(-1), given_pages, pack({qo, kv, last, indices}));
}

// The sizes of int32 vectors that are on the same GPU as the first tensor; None where one is not, or is no such vector.
py::object sizes_on_device(PyObject* const* given, Py_ssize_t count) {
  expect(count >= 1);
  const Torch& torch = Torch::get();
  Tensor like;
  bool on_gpu = false;
  if (!read_like(torch, given[0], &like, &on_gpu) || !on_gpu) return py::none();
  py::tuple sizes(std::size_t(count - 1));
  for (Py_ssize_t i = 1; i < count; ++i) {
    Vector vector;
    if (!read_vector(torch, given[i], &like, &vector)) return py::none();
    sizes[std::size_t(i - 1)] = py::int_(vector.count);
  }
  return sizes;
}

bool are_ascending(const std::int32_t* offsets, std::int64_t count) { return ascend({offsets, count}); }

/// (to, from, elements) each: from the host, and from the device.
py::object copy_index_vectors(PyObject* const* given, Py_ssize_t count) {
  py::sequence from_host, from_device;
  cudaStream_t stream = nullptr;
  Positional(given, count).read(from_host, from_device, stream).end();
  const VectorCopies on_host = copies_of(from_host), on_device = copies_of(from_device);
  return enqueue([&] {
    Status status = copy_vectors(on_device, stream);
    return status.ok() ? upload(on_host, stream) : status;
  });
}

}  // namespace

void add_indices(const py::object& module) {
  static PyMethodDef functions[] = {function<read_offsets>("read_offsets"), function<read_pages>("read_pages"),
                                    function<sizes_on_device>("sizes_on_device"), function<are_ascending>("ascend"),
                                    function<copy_index_vectors>("copy_vectors")};
  add_functions(module, functions);
}

}  // namespace cutlass_kernels
