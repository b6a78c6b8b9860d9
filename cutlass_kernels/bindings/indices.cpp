// _C.read_pages, _C.read_offsets, _C.ascend and _C.upload: a plan's index vectors, as far as they are on the host.
// _C.copy_vectors: as far as they are copied on the device.
//
// One pass over each vector checks it and finds what plans need to know; then all are packed into one buffer, which
// goes to the device in one copy. 128 requests take 1 us here, and 50 in torch, where every look at a vector costs 2 to
// 5.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "arguments.h"
#include "copies.h"
#include "cuda_failure.h"
#include "enqueue.h"

namespace py = pybind11;

namespace cutlass_kernels {
namespace {

struct Vector {
  Vector(Address address, std::int64_t count)
      : data(pointer<const std::int32_t>(address)), count(count) {}
  const std::int32_t* data;
  std::int64_t count;
};

constexpr std::int64_t kAlign = 4;  // a vector starts at a multiple of 16 bytes; _batch._ALIGN

// The vectors one behind the other, in a bytearray: its memory stays where it is.
py::object pack(std::initializer_list<Vector> vectors) {
  std::int64_t total = 0;
  for (const Vector& x : vectors) total += (x.count + kAlign - 1) / kAlign * kAlign;
  PyObject* packed = PyByteArray_FromStringAndSize(nullptr, Py_ssize_t(4 * total));
  if (packed == nullptr) throw py::error_already_set();
  char* to = PyByteArray_AS_STRING(packed);
  for (const Vector& x : vectors) {
    const std::int64_t bytes = 4 * x.count;
    const std::int64_t padded = (bytes + 4 * kAlign - 1) / (4 * kAlign) * (4 * kAlign);
    if (bytes > 0) std::memcpy(to, x.data, std::size_t(bytes));
    std::memset(to + bytes, 0, std::size_t(padded - bytes));
    to += padded;
  }
  return py::reinterpret_steal<py::object>(packed);
}

Address address_of(const py::object& packed) {
  return reinterpret_cast<Address>(PyByteArray_AS_STRING(packed.ptr()));
}

// Whether offsets never decrease, from a first that is not negative.
bool ascend(const Vector& x) {
  bool fine = x.data[0] >= 0;
  for (std::int64_t i = 1; i < x.count; ++i) fine &= x.data[i] >= x.data[i - 1];
  return fine;
}

// (qo_indptr[-1], kv_indptr[-1], most keys of a request, the vectors packed, address of these); None where the offsets
// are not what they should be: why not is for torch to find.
py::object read_offsets(Address qo_indptr, Address kv_indptr, std::int64_t batch_size) {
  const Vector qo(qo_indptr, batch_size + 1), kv(kv_indptr, batch_size + 1);
  if (qo.data[0] != 0 || !ascend(qo) || !ascend(kv)) return py::none();
  std::int64_t longest = 0;
  for (std::int64_t b = 0; b < batch_size; ++b) {
    longest = std::max<std::int64_t>(longest, kv.data[b + 1] - kv.data[b]);
  }
  py::object packed = pack({qo, kv});
  const Address address = address_of(packed);
  return py::make_tuple(qo.data[batch_size], kv.data[batch_size], longest, std::move(packed),
                        address);
}

// The same for pages, and before the packed vectors one more than the highest page number. Packed are the page numbers
// up to kv_indptr[-1], or all; none where their address is 0, as they are on the device.
py::object read_pages(Address qo_indptr, Address kv_indptr, Address last_page_len, Address indices,
                      std::int64_t batch_size, std::int64_t num_indices, std::int64_t page_size,
                      bool all) {
  const Vector qo(qo_indptr, batch_size + 1), kv(kv_indptr, batch_size + 1);
  const Vector last(last_page_len, batch_size);
  if (qo.data[0] != 0 || !ascend(qo) || !ascend(kv)) return py::none();
  const std::int64_t begin = kv.data[0], end = kv.data[batch_size];
  if (end > num_indices) return py::none();
  std::int64_t longest = 0;
  bool fine = true;
  for (std::int64_t b = 0; b < batch_size; ++b) {
    const std::int64_t pages = kv.data[b + 1] - kv.data[b];
    if (pages == 0) continue;
    fine &= last.data[b] >= 1 && last.data[b] <= page_size;
    longest = std::max(longest, (pages - 1) * page_size + last.data[b]);
  }
  const std::int32_t* pages = pointer<const std::int32_t>(indices);
  std::int32_t lowest = 0, highest = -1;
  const bool readable = pages != nullptr;
  for (std::int64_t i = begin; readable && i < end; ++i) {
    lowest = std::min(lowest, pages[i]);
    highest = std::max(highest, pages[i]);
  }
  if (!fine || lowest < 0) return py::none();
  const std::int64_t packed_pages = readable ? (all ? num_indices : end) : 0;
  py::object packed = pack({qo, kv, last, Vector(indices, packed_pages)});
  const Address address = address_of(packed);
  return py::make_tuple(qo.data[batch_size], end, longest, std::int64_t(highest) + 1,
                        std::move(packed), address);
}

// `bytes`: a multiple of 4.
void upload_vectors(Address from, std::size_t bytes, Address to, Address stream) {
  enqueue([&] {
    return upload(pointer<const std::int32_t>(from), std::int64_t(bytes / 4),
                  pointer<std::int32_t>(to), pointer<CUstream_st>(stream));
  });
}

}  // namespace

void bind_indices(py::module_& m) {
  // Positional: keywords would take 7 us, positions take 0.4.
  m.def(
      "ascend", [](Address offsets, std::int64_t count) { return ascend({offsets, count}); },
      "Whether int32 offsets (address, count) never decrease, from a first that is not negative.");
  m.def(
      "read_offsets", &read_offsets,
      "What the host needs to know of a ragged batch: addresses of int32 qo_indptr and kv_indptr, "
      "batch_size.");
  m.def("read_pages", &read_pages,
        "The same for pages: addresses of qo_indptr, kv_indptr, last_page_len and page numbers (0: "
        "on the device), batch_size, how many page numbers, page_size, whether to pack all of "
        "them.");
  m.def("upload", &upload_vectors, "Copies to the device: address, bytes, address there, stream.");
  m.def(
      "copy_vectors",
      [](const Copies& copies, Address stream) {
        const VectorCopies vectors = vector_copies(copies);
        enqueue([&] { return copy_vectors(vectors, pointer<CUstream_st>(stream)); });
      },
      "Copies int32 vectors on the device: (to, from, elements) each, stream.");
}

}  // namespace cutlass_kernels
