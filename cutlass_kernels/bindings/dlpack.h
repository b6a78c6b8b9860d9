// What a tensor of Python is, without the headers of its library: DLPack's C exchange API (version 1 of dlpack.h, as
// far as it is needed here), which torch has since 2.10. 20 ns for all that takes 250 as attributes: shape, strides,
// dtype, device and address.
#pragma once

#include <cstdint>

namespace cutlass_kernels::dlpack {

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

/// Shape and strides (in elements) belong to the tensor, and stay until it changes.
struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

inline std::uint64_t address_of(const Tensor& tensor) {
  return reinterpret_cast<std::uint64_t>(tensor.data) + tensor.byte_offset;
}

/// The functions that are not used have no types here.
struct ExchangeApi {
  Version version;
  void* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  /// Describes a tensor (a PyObject of the type that has the API); -1 with a Python error set where it cannot be.
  int (*tensor_from_py_object)(void* object, Tensor* tensor);
  void* current_work_stream;
};

}  // namespace cutlass_kernels::dlpack
