// What all bindings share: addresses and names from Python, errors to Python.
#pragma once

#include <pybind11/pytypes.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cutlass_kernels/attention.h"
#include "cutlass_kernels/status.h"
#include "cutlass_kernels/types.h"
#include "registry/backends.h"

namespace cutlass_kernels {

using Address = std::uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

inline void raise_unless_ok(const Status& status) {
  if (status.ok()) return;
  if (status.code == StatusCode::kInvalidArgument) throw pybind11::value_error(status.message);
  throw std::runtime_error(status.message);
}

inline DType dtype_of(const std::string& name) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw pybind11::value_error("dtype '" + name + "' is not known to the compiled kernels.");
}

inline Backend backend_of(const std::string& name) {
  if (name == to_string(Backend::kAuto)) return Backend::kAuto;
  std::string names;
  for (const BackendName& entry : backends()) {
    if (name == entry.name) return entry.backend;
    names += std::string(names.empty() ? "'" : ", '") + entry.name + "'";
  }
  throw pybind11::value_error("backend '" + name + "' is not compiled code: use 'auto' or one of " + names + ".");
}

}  // namespace cutlass_kernels
