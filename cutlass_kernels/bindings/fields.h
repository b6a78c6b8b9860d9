// Reads Python objects by the names of their fields: the dataclasses of _problem.py and _dispatch.Request.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "torch.h"

namespace cutlass_kernels {

class Fields {
 public:
  explicit Fields(py::object object) : object_(std::move(object)) {}

  Fields at(const char* name) const { return Fields(object_.attr(name)); }
  py::object object(const char* name) const { return object_.attr(name); }
  bool is_none() const { return object_.is_none(); }
  PyObject* ptr() const { return object_.ptr(); }

  template <class T>
  T as(const char* name) const {
    return object_.attr(name).cast<T>();
  }
  DType dtype(const char* name) const { return Torch::get().dtype(object_.attr(name)); }

  /// The tensor of a field; an error where it is none.
  Tensor tensor(const char* name) const { return tensor_of(object_.attr(name), name); }
  /// Address of a tensor, or 0 for None.
  Address address(const char* name) const {
    const py::object field = object_.attr(name);
    return field.is_none() ? 0 : tensor_of(field, name).data;
  }
  /// Address of an index vector, which may be no tensor, but has the method data_ptr(); 0 for None.
  Address vector(const char* name) const {
    const py::object field = object_.attr(name);
    return field.is_none() ? 0 : field.attr("data_ptr")().cast<Address>();
  }
  /// Elements of an index vector.
  std::int64_t length(const char* name) const {
    return object_.attr(name).attr("numel")().cast<std::int64_t>();
  }

 private:
  static Tensor tensor_of(const py::object& object, const char* name) {
    Tensor tensor;
    if (!Torch::get().read(object.ptr(), &tensor)) {
      throw py::type_error(std::string(name) + " is not a tensor that kernels can read.");
    }
    return tensor;
  }

  py::object object_;
};

/// `params` of a run, from a Problem (batch.cpp), on top of those that were planned, if any.
void read_problem(const Fields& problem, AttentionParams* params);

}  // namespace cutlass_kernels
