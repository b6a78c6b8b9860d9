// What all bindings share: addresses and names from Python, errors to Python.
#pragma once

#include <pybind11/pybind11.h>

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
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3,
                      DType::kFloat8E5M2}) {
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
  throw pybind11::value_error("backend '" + name + "' is not compiled code: use 'auto' or one of " +
                              names + ".");
}

void bind_append(pybind11::module_& m);   // append.cpp
void bind_batch(pybind11::module_& m);    // batch.cpp
void bind_fused(pybind11::module_& m);    // fused.cpp
void bind_indices(pybind11::module_& m);  // indices.cpp
void bind_merge(pybind11::module_& m);    // merge.cpp
void bind_prepare(pybind11::module_& m);  // prepare.cpp
void bind_run(pybind11::module_& m);      // run.cpp
void bind_single(pybind11::module_& m);   // single.cpp
void bind_torch(pybind11::module_& m);    // torch.cpp

}  // namespace cutlass_kernels
