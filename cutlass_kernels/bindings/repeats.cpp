// _C.repeats: finds the earlier call that a call repeats, and makes it again, without a key made in Python.
//
// An entry is found by all that _repeat.py makes its keys from: shapes, strides, dtypes and devices of the tensors, and
// the values of the other arguments. What Python has found once by its key is put here: so the two never disagree, and
// what is not served here (subclasses of tensors, other numbers) stays with Python. A run takes 2.5 us less.
#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "arguments.h"
#include "dlpack.h"
#include "found.h"
#include "launch.h"

namespace py = pybind11;

namespace cutlass_kernels {
namespace {

// Of a call, in this order; then other arguments in any number.
enum { kQ, kK, kV, kOut, kLse, kSinks, kTensors };
constexpr Py_ssize_t kReturnLse = kTensors, kFirstPlain = kTensors + 1;

/// What a call is found by, and the addresses of its tensors.
struct Call {
  CallWords words;
  std::array<PyObject*, kTensors> tensors;  // None: not given
  std::array<Address, kTensors> addresses{};
  bool return_lse = false;
};

/// A call that may be made again: by `launch`, or, where that is null, by `repeat`, which does all else that may be
/// needed.
struct Entry {
  std::vector<std::int64_t> words;
  std::vector<py::object> kept;  // arguments that are known by their address
  py::object repeat;             // _repeat.Repeat
  const Launch* launch = nullptr;
  py::object owner;     // of `launch`
  py::object partials;  // memory for the results of split keys: a tensor, or None
  std::size_t partial_bytes = 0;
  py::object device;           // the index of the tensors' device
  bool out_is_like_q = false;  // strides and type of a new output, all of which is written
  Address v_offset = 0;        // from keys to values where one tensor holds both
};

class Repeats {
 public:
  Repeats(const TableFunctions& functions, py::object empty_like)
      : functions_(functions), empty_like_(std::move(empty_like)) {}

  // again(q, k, v, out, lse, sinks, return_lse, *others): the results, or None where no such call is known. `k` may be
  // a tuple of k and v.
  py::object again(PyObject* const* arguments, Py_ssize_t count) const {
    Call call;
    const std::shared_ptr<Entry> entry = entry_of(arguments, count, &call);
    return entry == nullptr ? py::none() : run(*entry, call);
  }

  // find(*arguments of again): the `repeat` that was given for such a call, or None.
  py::object find(PyObject* const* arguments, Py_ssize_t count) const {
    Call call;
    const std::shared_ptr<Entry> entry = entry_of(arguments, count, &call);
    return entry == nullptr ? py::none() : entry->repeat;
  }

  // remember(repeat, direct, *arguments of again): `direct` is None, or (launch, partials, their bytes, index of the
  // device, out_is_like_q, v_offset).
  void remember(PyObject* const* arguments, Py_ssize_t count) {
    Call call;
    auto entry = std::make_shared<Entry>();
    if (count < 2 || !read(arguments + 2, count - 2, &call, &entry->kept)) return;
    entry->repeat = py::reinterpret_borrow<py::object>(arguments[0]);
    if (arguments[1] != Py_None) {
      const auto direct = py::reinterpret_borrow<py::tuple>(arguments[1]);
      entry->owner = direct[0];
      entry->launch = entry->owner.cast<const Launch*>();
      entry->partials = direct[1];
      entry->partial_bytes = direct[2].cast<std::size_t>();
      entry->device = direct[3];
      entry->out_is_like_q = direct[4].cast<bool>();
      entry->v_offset = Address(direct[5].cast<std::int64_t>());
    }
    calls_.remember(call.words, std::move(entry), functions_.most);
  }

 private:
  std::shared_ptr<Entry> entry_of(PyObject* const* arguments, Py_ssize_t count, Call* call) const {
    return read(arguments, count, call) ? calls_.find(call->words) : nullptr;
  }

  bool read(PyObject* const* arguments, Py_ssize_t count, Call* call,
            std::vector<py::object>* kept = nullptr) const {
    if (count < kFirstPlain) return false;
    for (int i = 0; i < kTensors; ++i) call->tensors[std::size_t(i)] = arguments[i];
    PyObject* const cache = arguments[kK];
    if (PyTuple_CheckExact(cache) && PyTuple_GET_SIZE(cache) == 2 && arguments[kV] == Py_None) {
      call->tensors[kK] = PyTuple_GET_ITEM(cache, 0);
      call->tensors[kV] = PyTuple_GET_ITEM(cache, 1);
      if (call->tensors[kV] == Py_None) return false;  // not what a cache without a pair is
    }
    for (std::size_t i = 0; i < kTensors; ++i) {
      if (call->tensors[i] == Py_None && i > kK) {
        if (!call->words.add(0)) return false;
        continue;
      }
      dlpack::Tensor tensor;
      if (!functions_.read_tensor(call->tensors[i], &tensor)) return false;
      if (!call->words.add_tensor(tensor)) return false;
      call->addresses[i] = dlpack::address_of(tensor);
    }
    call->return_lse = arguments[kReturnLse] == Py_True;
    if (!call->return_lse && arguments[kReturnLse] != Py_False) return false;
    if (!call->words.add(call->return_lse)) return false;
    for (Py_ssize_t i = kFirstPlain; i < count; ++i) {
      if (!call->words.add_plain(arguments[i], kept)) return false;
    }
    return true;
  }

  py::object run(const Entry& entry, const Call& call) const {
    if (entry.launch != nullptr) {
      if (py::object result = launch(entry, call)) return result;
    }
    py::object function = entry.repeat.attr("run");
    PyObject* arguments[kTensors + 1];
    for (std::size_t i = 0; i < kTensors; ++i) arguments[i] = call.tensors[i];
    arguments[kReturnLse] = call.return_lse ? Py_True : Py_False;
    return checked(PyObject_Vectorcall(function.ptr(), arguments, kTensors + 1, nullptr));
  }

  // Null where the call is one for Python.
  py::object launch(const Entry& entry, const Call& call) const {
    const auto& at = call.addresses;
    const Address v = call.tensors[kV] == Py_None ? at[kK] + entry.v_offset : at[kV];
    const bool has_out = call.tensors[kOut] != Py_None;
    if (!has_out && !entry.out_is_like_q) return {};
    if ((at[kQ] | at[kK] | v | at[kOut]) & 15) return {};
    if (!functions_.is_current(entry.device)) return {};
    py::object out;
    Address out_at = at[kOut];
    dlpack::Tensor tensor;
    if (has_out) {
      out = py::reinterpret_borrow<py::object>(call.tensors[kOut]);
    } else {
      out = checked(PyObject_CallOneArg(empty_like_.ptr(), call.tensors[kQ]));
      if (!functions_.read_tensor(out.ptr(), &tensor)) return {};
      out_at = dlpack::address_of(tensor);
    }
    Address partials = 0;
    if (!entry.partials.is_none()) {
      if (!functions_.read_tensor(entry.partials.ptr(), &tensor)) return {};
      partials = dlpack::address_of(tensor);
    }
    const py::object stream =
        checked(PyObject_CallOneArg(functions_.stream_of.ptr(), entry.device.ptr()));
    entry.launch->run(at[kQ], at[kK], v, out_at, at[kLse], at[kSinks], /*counters=*/0,
                      stream.cast<Address>(), partials, entry.partial_bytes);
    if (!call.return_lse) return out;
    return py::make_tuple(out, py::handle(call.tensors[kLse]));
  }

  const TableFunctions functions_;
  const py::object empty_like_;
  FoundCalls<Entry> calls_;
};

// --- as functions of Python ---

PyObject* again(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] { return held_by<Repeats>(capsule)->again(arguments, count); });
}

PyObject* find(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] { return held_by<Repeats>(capsule)->find(arguments, count); });
}

PyObject* remember(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    held_by<Repeats>(capsule)->remember(arguments, count);
    return py::object(py::none());
  });
}

/// What makes tables.
struct Maker {
  TableFunctions functions;
  py::object empty_like;
};

PyObject* make(PyObject* capsule, PyObject* const*, Py_ssize_t) {
  return guarded([&]() -> py::object {
    static PyMethodDef again_def = fast("again", &again);
    static PyMethodDef find_def = fast("find", &find);
    static PyMethodDef remember_def = fast("remember", &remember);
    const auto& [functions, empty_like] = *held_by<const Maker>(capsule);
    const py::object table = capsule_of(std::make_unique<Repeats>(functions, empty_like));
    return py::make_tuple(bound(&again_def, table), bound(&find_def, table),
                          bound(&remember_def, table));
  });
}

py::object maker(const py::capsule& api, py::object tensor_type, py::object empty_like,
                 py::object current_device, py::object stream_of, std::size_t most) {
  const auto functions = TableFunctions::make(
      api, std::move(tensor_type), std::move(current_device), std::move(stream_of), most);
  if (functions == nullptr) return py::none();
  static PyMethodDef make_def = fast("make", &make);
  return bound(&make_def,
               capsule_of(std::make_unique<Maker>(Maker{*functions, std::move(empty_like)})));
}

}  // namespace

void bind_repeats(py::module_& m) {
  m.def("repeats", &maker,
        "A function that makes the functions (again, find, remember) of a new table of calls; None "
        "where tensors are described in a way that is not known. From: DLPack's exchange API of a "
        "type of tensors, that type, empty_like, the current device's index, the stream of a "
        "device, how many calls a table has.");
}

}  // namespace cutlass_kernels
