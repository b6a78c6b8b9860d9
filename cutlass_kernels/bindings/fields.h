// Reads Python objects by the names of their fields: the dataclasses of problems.py and request_facts.Request.
#pragma once

#include <pybind11/cast.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>

#include "torch.h"

namespace cutlass_kernels {

/// The interned string of a literal, made once: looking up an attribute by it takes a third of the time.
inline PyObject* interned(const char* literal) {
  static auto& strings = *new std::unordered_map<const char*,
                                                 PyObject*>;  // never destroyed: Python may be gone by then
  PyObject*& string = strings[literal];
  if (string == nullptr) string = PyUnicode_InternFromString(literal);
  return string;
}

struct IndexVector {
  const std::int32_t* data = nullptr;
  std::int64_t count = 0;
};

/// The tensor that an object is; an error where it is none.
inline Tensor tensor_of(const py::object& object, const char* name) {
  Tensor tensor;
  if (!Torch::get().read(object.ptr(), &tensor)) {
    throw py::type_error(std::string(name) + " is not a tensor that kernels can read.");
  }
  return tensor;
}
/// Address of a tensor, or 0 for None.
inline Address address_of(const py::object& object, const char* name) {
  return object.is_none() ? 0 : tensor_of(object, name).data;
}

/// All names are literals.
class Fields {
 public:
  explicit Fields(py::object object) : object_(std::move(object)) {}

  Fields at(const char* name) const { return Fields(object(name)); }
  py::object object(const char* name) const {
    PyObject* field = PyObject_GetAttr(object_.ptr(), interned(name));
    if (field == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(field);
  }
  bool is_none() const { return object_.is_none(); }
  PyObject* ptr() const { return object_.ptr(); }

  template <class T>
  T as(const char* name) const {
    return object(name).cast<T>();
  }
  DType dtype(const char* name) const { return Torch::get().dtype(object(name)); }

  Tensor tensor(const char* name) const { return tensor_of(object(name), name); }
  Address address(const char* name) const { return address_of(object(name), name); }
  /// An index vector: a tensor, of a subclass too, or a batches.Index; nothing for None.
  IndexVector vector(const char* name) const {
    const py::object field = object(name);
    if (field.is_none()) return {};
    Tensor tensor;
    if (Torch::get().read(field.ptr(), &tensor) && tensor.ndim == 1) {
      return {pointer<const std::int32_t>(tensor.data), tensor.shape[0]};
    }
    const Fields index(field);
    return {pointer<const std::int32_t>(index.call("data_ptr").cast<Address>()),
            index.call("numel").cast<std::int64_t>()};
  }

  /// Calls a method without arguments.
  py::object call(const char* name) const {
    PyObject* result = PyObject_CallMethodNoArgs(object_.ptr(), interned(name));
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  }

 private:
  py::object object_;
};

/// `params` of a run, from a Problem (batch.cpp), on top of those that were planned, if any.
void read_problem(const Fields& problem, AttentionParams* params);

}  // namespace cutlass_kernels
