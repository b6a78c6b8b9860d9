// torch, as the compiled module uses it: reads its tensors, makes new ones, asks for its current stream.
//
// Tensors are read through DLPack's exchange API, which torch has since 2.10: shape, strides, dtype, device and address
// of a tensor take 20 ns, where its attributes take 250 ns in Python. For an older torch a Python function reads them.
#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "arguments.h"

namespace cutlass_kernels {

using Shape = std::array<std::int64_t, 5>;  // of a tensor, or its strides: no kernel reads more dimensions

/// What a call reads of a tensor.
struct Tensor {
  Address data = 0;
  DLDevice device{};
  DLDataType dtype{};
  int ndim = 0;
  Shape shape{};
  Shape strides{};  // in elements

  bool is_on_gpu(int index) const { return device.device_type == kDLCUDA && device.device_id == index; }
  int item_bytes() const { return dtype.bits / 8; }
};

/// Device memory for one call. The caching allocator gets it back when this is destroyed, in the order of the stream.
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(DLManagedTensorVersioned* managed)
      : managed_(managed), data_(reinterpret_cast<Address>(managed->dl_tensor.data) + managed->dl_tensor.byte_offset) {}
  Scratch(py::object tensor, Address data) : tensor_(std::move(tensor)), data_(data) {}
  Scratch(Scratch&& other) noexcept : managed_(other.managed_), tensor_(std::move(other.tensor_)), data_(other.data_) {
    other.managed_ = nullptr;
  }
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch() {
    if (managed_ != nullptr) managed_->deleter(managed_);
  }
  Address data() const { return data_; }

 private:
  DLManagedTensorVersioned* managed_ = nullptr;
  py::object tensor_;
  Address data_ = 0;
};

class Torch {
 public:
  /// The one that Python has described with _C.use_torch().
  static const Torch& get();

  /// False for what is no plain tensor, or one that a kernel cannot read: of a subclass, which may stand for others,
  /// without memory, or of more than five dimensions.
  bool read(PyObject* object, Tensor* tensor) const;

  py::object empty_like(PyObject* tensor) const;
  py::object empty(const Shape& shape, int ndim, DType dtype, int device) const;
  py::object zeros(const Shape& shape, int ndim, DType dtype, int device) const;
  /// Uninitialised device memory; none for 0 bytes.
  Scratch scratch(std::size_t bytes, int device) const;
  /// The call counters of a device and a stream (kCallCounters, all zero between calls, as int32). A captured call has
  /// its own, in the memory pool of its graph: the graph may be replayed beside others captured on the same stream.
  py::object counters(int device, Address stream) const;
  /// int32 zeros that may outlive the call: outside of private memory pools. Takes 0.1 ms.
  py::object kept_words(std::int64_t count, int device) const;

  Address stream(int device) const;

  /// One of torch's dtypes; false for what no kernel reads, or is no dtype.
  bool find_dtype(PyObject* object, DType* dtype) const;
  /// The same, or an error.
  DType dtype(const py::object& object) const;

  Torch(const py::object& exchange_api, const py::dict& functions);

 private:
  py::object make(const py::object& function, const Shape& shape, int ndim, const py::object& dtype, int device) const;
  py::object device(int index) const;
  bool read_attributes(PyObject* object, Tensor* tensor) const;

  const DLPackExchangeAPI* api_ = nullptr;  // null before torch 2.10
  py::object tensor_type_, parameter_type_, facts_, empty_like_, empty_, zeros_, device_type_, stream_of_;
  py::object names_;  // of keywords: (dtype, device)
  py::object uint8_, int32_;
  std::array<py::object, 5> dtypes_;  // by DType
  mutable std::vector<py::object> devices_;
};

/// Whether a tensor has elements of this type.
bool has_dtype(const Tensor& tensor, DType dtype);
/// The type of a tensor's elements; false if it is none of DType.
bool dtype_of(const Tensor& tensor, DType* dtype);
inline bool is_int32(const Tensor& tensor) {
  return tensor.dtype.code == kDLInt && tensor.dtype.bits == 32 && tensor.dtype.lanes == 1;
}

}  // namespace cutlass_kernels
