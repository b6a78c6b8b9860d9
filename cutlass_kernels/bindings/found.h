// What tables of calls that may be made again have in common: how a call is read and found, and how the functions of a
// table become functions of Python.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "arguments.h"
#include "dlpack.h"

namespace cutlass_kernels {

namespace py = pybind11;

/// What a call is found by: all that it depends on but addresses of tensors.
class CallWords {
 public:
  bool add(std::int64_t word) {
    if (count_ == kMost) return false;
    words_[std::size_t(count_++)] = word;
    return true;
  }

  // False of an empty tensor, whose address may be any.
  bool add_tensor(const dlpack::Tensor& tensor) {
    const auto& [code, bits, lanes] = tensor.dtype;
    bool fits = add(std::int64_t(lanes) << 32 | bits << 16 | code << 8 | 1) &&
                add(std::int64_t(tensor.device.type) << 32 | tensor.device.id) && add(tensor.ndim);
    for (int d = 0; d < tensor.ndim; ++d) {
      if (tensor.shape[d] == 0) return false;
      fits = fits && add(tensor.shape[d]) && add(tensor.strides[d]);
    }
    return fits;
  }

  // Numbers by their value, and by their type: whole floats may be refused. All else by its address, while it is kept:
  // equal strings have one, interned, and options change by being replaced.
  bool add_plain(PyObject* object, std::vector<py::object>* kept) {
    std::int64_t kind = 0, value = 0;
    if (object == Py_True || object == Py_False) {
      kind = 1;
      value = object == Py_True;
    } else if (PyFloat_CheckExact(object)) {
      kind = 2;
      const double number = PyFloat_AS_DOUBLE(object);
      std::memcpy(&value, &number, sizeof(value));
    } else if (PyLong_CheckExact(object)) {
      kind = 3;
      int overflow = 0;
      value = PyLong_AsLongLongAndOverflow(object, &overflow);
      if (overflow != 0) return false;
    } else if (object != Py_None) {
      kind = 4;
      Py_INCREF(object);
      if (PyUnicode_CheckExact(object)) PyUnicode_InternInPlace(&object);
      auto own = py::reinterpret_steal<py::object>(object);
      value = std::int64_t(reinterpret_cast<std::intptr_t>(object));
      if (kept != nullptr) kept->push_back(std::move(own));
    }
    return add(kind) && add(value);
  }

  bool is_same(const std::vector<std::int64_t>& others) const {
    return std::size_t(count_) == others.size() &&
           std::memcmp(words_.data(), others.data(), sizeof(words_[0]) * others.size()) == 0;
  }
  std::vector<std::int64_t> copy() const { return {words_.begin(), words_.begin() + count_}; }

 private:
  // 8 tensors of 5 dimensions take 104 words, other arguments 2 each.
  static constexpr int kMost = 192;
  std::array<std::int64_t, kMost> words_;
  int count_ = 0;
};

inline py::object checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

/// What all tables use of Python.
struct TableFunctions {
  const dlpack::ExchangeApi* api;
  py::object tensor_type, current_device, stream_of;
  std::size_t most;  // calls of a table

  // Null where tensors are described in a way that is not known.
  static std::unique_ptr<TableFunctions> make(const py::capsule& api, py::object tensor_type,
                                              py::object current_device, py::object stream_of,
                                              std::size_t most) {
    const auto* exchange = api.get_pointer<const dlpack::ExchangeApi>();
    if (exchange->version.major != 1 || exchange->tensor_from_py_object == nullptr) return nullptr;
    return std::make_unique<TableFunctions>(TableFunctions{
        exchange, std::move(tensor_type), std::move(current_device), std::move(stream_of), most});
  }

  bool read_tensor(PyObject* object, dlpack::Tensor* tensor) const {
    // Subclasses may stand for other tensors.
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != tensor_type.ptr()) return false;
    if (api->tensor_from_py_object(object, tensor) == 0) return true;
    PyErr_Clear();  // it has no memory, or none that DLPack knows
    return false;
  }

  // Whether the device of this index is the current one.
  bool is_current(const py::object& index) const {
    const py::object current = checked(PyObject_CallNoArgs(current_device.ptr()));
    if (PyObject_RichCompareBool(current.ptr(), index.ptr(), Py_EQ) == 1) return true;
    PyErr_Clear();
    return false;
  }
};

/// A table of calls that may be made again. `Entry` has the `words` that it is found by.
template <class Entry>
class FoundCalls {
 public:
  // Null: not known. A pointer of its own, as Python may forget the entry while it is used.
  std::shared_ptr<Entry> find(const CallWords& words) const {
    for (const std::shared_ptr<Entry>& entry : entries_) {
      if (words.is_same(entry->words)) return entry;
    }
    return nullptr;
  }

  // In the place of an entry of the same words, or where there are `most`, of all.
  void remember(const CallWords& words, std::shared_ptr<Entry> entry, std::size_t most) {
    entry->words = words.copy();
    for (std::shared_ptr<Entry>& other : entries_) {
      if (words.is_same(other->words)) {
        other.swap(entry);  // freed last, as that may run Python
        return;
      }
    }
    std::vector<std::shared_ptr<Entry>> forgotten;  // so are these
    if (entries_.size() >= most) forgotten.swap(entries_);
    entries_.push_back(std::move(entry));
  }

 private:
  std::vector<std::shared_ptr<Entry>> entries_;
};

// --- functions of Python: methods of a pybind11 class would take 0.5 us for their arguments ---

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

template <class T>
T* held_by(PyObject* capsule) {
  return static_cast<T*>(PyCapsule_GetPointer(capsule, nullptr));
}

template <class T>
py::object capsule_of(std::unique_ptr<T> object) {
  PyObject* capsule =
      PyCapsule_New(object.get(), nullptr, [](PyObject* holder) { delete held_by<T>(holder); });
  if (capsule == nullptr) throw py::error_already_set();
  object.release();
  return py::reinterpret_steal<py::object>(capsule);
}

/// A function of Python whose first argument is what `capsule` holds.
inline py::object bound(PyMethodDef* def, const py::object& capsule) {
  PyObject* function = PyCFunction_New(def, capsule.ptr());
  if (function == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyMethodDef fast(const char* name, FastFunction function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, nullptr};
}

}  // namespace cutlass_kernels
