// What all bindings share: functions of Python, arguments by position, errors to Python.
#pragma once

#include <pybind11/cast.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "cutlass_kernels/attention.h"
#include "cutlass_kernels/status.h"
#include "cutlass_kernels/types.h"
#include "registry/backends.h"

namespace cutlass_kernels {

namespace py = pybind11;

using Address = std::uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

inline void raise_unless_ok(const Status& status) {
  if (status.ok()) return;
  if (status.code == StatusCode::kInvalidArgument) throw py::value_error(status.message);
  throw std::runtime_error(status.message);
}

inline DType dtype_of(const std::string& name) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw py::value_error("dtype '" + name + "' is not known to the compiled kernels.");
}

inline Backend backend_of(const std::string& name) {
  if (name == to_string(Backend::kAuto)) return Backend::kAuto;
  std::string names;
  for (const BackendName& entry : backends()) {
    if (name == entry.name) return entry.backend;
    names += std::string(names.empty() ? "'" : ", '") + entry.name + "'";
  }
  throw py::value_error("backend '" + name + "' is not compiled code: use 'auto' or one of " + names + ".");
}

inline void expect(bool right_number) {
  if (!right_number) throw py::type_error("Wrong number of arguments.");
}

/// Arguments that Python has checked, by position: numbers, objects, addresses (0: nothing is there), names of types
/// and of backends, and views (an address, and the strides of a token and of a head).
class Positional {
 public:
  Positional(PyObject* const* given, Py_ssize_t count) : given_(given), left_(count) {}

  template <class... T>
  Positional& read(T&... values) {
    (one(values), ...);
    return *this;
  }
  /// The last ones, which a caller may leave out.
  template <class... T>
  Positional& maybe(T&... values) {
    ((left_ > 0 ? one(values) : void()), ...);
    return *this;
  }
  void end() const { expect(left_ == 0); }

 private:
  template <class T, class = void>
  struct IsView : std::false_type {};
  template <class T>
  struct IsView<T, std::void_t<decltype(T::stride_head)>> : std::true_type {};

  template <class T>
  T next() {
    expect(left_-- > 0);
    return py::handle(*given_++).cast<T>();
  }
  template <class T>
  void one(T& value) {
    if constexpr (std::is_pointer_v<T>) {
      value = reinterpret_cast<T>(next<Address>());
    } else if constexpr (std::is_same_v<T, DType>) {
      value = dtype_of(next<std::string>());
    } else if constexpr (std::is_same_v<T, Backend>) {
      value = backend_of(next<std::string>());
    } else if constexpr (std::is_same_v<T, py::sequence>) {
      value = py::reinterpret_borrow<py::sequence>(next<py::object>());
    } else if constexpr (IsView<T>::value) {
      read(value.data, value.stride_token, value.stride_head);
    } else {
      value = next<T>();
    }
  }

  PyObject* const* given_;
  Py_ssize_t left_;
};

// --- functions of Python: those of pybind11 take 0.3 us more for their arguments ---

template <class Function>
PyObject* guarded(Function function) {
  try {
    return function().release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyMethodDef fast(const char* name, FastFunction function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

using Function = py::object(PyObject* const* given, Py_ssize_t count);

/// Calls a function that knows nothing of Python.
template <class Result, class... T>
py::object call(Result (*function)(T...), PyObject* const* given, Py_ssize_t count) {
  std::tuple<std::decay_t<T>...> arguments;
  std::apply([&](auto&... each) { Positional(given, count).read(each...).end(); }, arguments);
  if constexpr (std::is_void_v<Result>) {
    std::apply(function, arguments);
    return py::none();
  } else if constexpr (std::is_base_of_v<py::object, Result>) {
    return std::apply(function, arguments);
  } else {
    return py::cast(std::apply(function, arguments));
  }
}

template <auto* kFunction>
PyObject* called(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    if constexpr (std::is_same_v<decltype(kFunction), Function*>) {
      return kFunction(given, count);
    } else {
      return call(kFunction, given, count);
    }
  });
}

template <auto* kFunction>
PyMethodDef function(const char* name) {
  return fast(name, &called<kFunction>);
}

template <std::size_t kCount>
void add_functions(const py::object& module, PyMethodDef (&functions)[kCount]) {
  for (PyMethodDef& def : functions) {
    PyObject* made = PyCFunction_New(&def, nullptr);
    if (made == nullptr) throw py::error_already_set();
    module.attr(def.ml_name) = py::reinterpret_steal<py::object>(made);
  }
}

}  // namespace cutlass_kernels
