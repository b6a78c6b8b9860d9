// _C.FmhaV2: a fused prefill that can be made again; _C.fmha_v2_calls: finds the earlier call that a call repeats, and
// makes it again, as _C.repeats does for the other functions. What Python has found once by its key is put there.
#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "dlpack.h"
#include "fmha_v2_launch.h"
#include "found.h"

namespace py = pybind11;

namespace cutlass_kernels {
namespace {

// Of a call, in this order, then other arguments in any number. Queries, keys and values are one tensor, or two or
// three in a tuple, the caches of pages in one of their own.
enum { kQkv, kQoIndptr, kKvIndptr, kTables, kOut, kSinks, kArguments };
constexpr std::size_t kParts = 3;

struct Call {
  CallWords words;
  std::array<py::object, kParts> parts;  // own references: a list may change while work is enqueued
  std::size_t num_parts = 0;
  std::array<Address, kParts> of_parts{};
  std::array<Address, kArguments> addresses{};
};

/// A call that may be made again.
struct Entry {
  std::vector<std::int64_t> words;
  std::vector<py::object> kept;  // arguments that are known by their address
  const FmhaV2Launch* launch = nullptr;
  py::object owner;        // of `launch`, and of what that holds addresses of
  py::object make_output;  // from the queries' tensor
  py::object device;       // the index of the tensors' device
  bool counted = false;
  py::object make_workspace;  // a tensor of new memory; None: there is none
  // From the tensors to the first key and the first value in them.
  Address k_offset = 0, v_offset = 0;
};

class FmhaV2Calls {
 public:
  FmhaV2Calls(const TableFunctions& functions, py::object counters_of)
      : functions_(functions), counters_of_(std::move(counters_of)) {}

  // again(qkv, cum_seq_lens_q, cum_seq_lens_kv, block_tables, out, sinks, *others): the output, or None where no such
  // call is known.
  py::object again(PyObject* const* arguments, Py_ssize_t count) const {
    Call call;
    if (!read(arguments, count, &call)) return py::none();
    const std::shared_ptr<Entry> entry = calls_.find(call.words);
    return entry == nullptr ? py::none() : run(*entry, call, arguments[kOut]);
  }

  // remember(owner, launch, make_output, index of the device, counted, k_offset, v_offset, make_workspace, *arguments
  // of again)
  void remember(PyObject* const* arguments, Py_ssize_t count) {
    constexpr Py_ssize_t kOwn = 8;
    Call call;
    auto entry = std::make_shared<Entry>();
    if (count < kOwn || !read(arguments + kOwn, count - kOwn, &call, &entry->kept)) return;
    entry->owner = py::reinterpret_borrow<py::object>(arguments[0]);
    entry->launch = py::handle(arguments[1]).cast<const FmhaV2Launch*>();
    entry->make_output = py::reinterpret_borrow<py::object>(arguments[2]);
    entry->device = py::reinterpret_borrow<py::object>(arguments[3]);
    entry->counted = arguments[4] == Py_True;
    entry->k_offset = Address(py::handle(arguments[5]).cast<std::int64_t>());
    entry->v_offset = Address(py::handle(arguments[6]).cast<std::int64_t>());
    entry->make_workspace = py::reinterpret_borrow<py::object>(arguments[7]);
    calls_.remember(call.words, std::move(entry), functions_.most);
  }

 private:
  bool add(PyObject* object, Call* call, Address* address) const {
    dlpack::Tensor tensor;
    if (!functions_.read_tensor(object, &tensor) || !call->words.add_tensor(tensor)) return false;
    *address = dlpack::address_of(tensor);
    return true;
  }

  bool add_part(PyObject* object, Call* call) const {
    const std::size_t i = call->num_parts++;
    if (i >= kParts) return false;
    call->parts[i] = py::reinterpret_borrow<py::object>(object);
    return add(object, call, &call->of_parts[i]);
  }

  static bool is_sequence(PyObject* object) {
    return PyTuple_CheckExact(object) || PyList_CheckExact(object);
  }

  // `depth`: of tuples within tuples.
  bool add_parts(PyObject* object, Call* call, int depth = 0) const {
    if (!is_sequence(object)) return add_part(object, call);
    if (depth > 1 || !call->words.add(-1 - PySequence_Fast_GET_SIZE(object))) return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      if (!add_parts(PySequence_Fast_GET_ITEM(object, i), call, depth + 1)) return false;
    }
    // Where the value cache begins is counted in blocks from the key cache on.
    return depth == 0 || call->num_parts != kParts ||
           call->words.add(std::int64_t(call->of_parts[2] - call->of_parts[1]));
  }

  bool read(PyObject* const* arguments, Py_ssize_t count, Call* call,
            std::vector<py::object>* kept = nullptr) const {
    if (count < kArguments || !add_parts(arguments[kQkv], call)) return false;
    for (std::size_t i = kQoIndptr; i < kArguments; ++i) {
      const bool given = arguments[i] != Py_None;
      if (!given && i < kTables) return false;
      if (given ? !add(arguments[i], call, &call->addresses[i]) : !call->words.add(0)) return false;
    }
    for (Py_ssize_t i = kArguments; i < count; ++i) {
      if (!call->words.add_plain(arguments[i], kept)) return false;
    }
    return call->num_parts > 0;
  }

  // None where the call is one for Python.
  py::object run(const Entry& entry, const Call& call, PyObject* given) const {
    const auto& [q, second, third] = call.of_parts;
    const Address k = (call.num_parts > 1 ? second : q) + entry.k_offset;
    const Address v = (call.num_parts > 2 ? third : k) + entry.v_offset;
    if (((q | k | v | call.addresses[kOut]) & 15) || !functions_.is_current(entry.device)) {
      return py::none();
    }
    py::object out;
    Address out_at = call.addresses[kOut];
    if (given != Py_None) {
      out = py::reinterpret_borrow<py::object>(given);
    } else {
      dlpack::Tensor tensor;
      out = checked(PyObject_CallOneArg(entry.make_output.ptr(), call.parts[0].ptr()));
      if (!functions_.read_tensor(out.ptr(), &tensor)) return py::none();
      out_at = dlpack::address_of(tensor);
    }
    py::object workspace;  // lives until the kernels are enqueued, and in the order of the stream
    Address workspace_at = 0;
    std::size_t workspace_bytes = 0;
    if (!entry.make_workspace.is_none()) {
      dlpack::Tensor tensor;
      workspace = checked(PyObject_CallNoArgs(entry.make_workspace.ptr()));
      if (!functions_.read_tensor(workspace.ptr(), &tensor)) return py::none();
      workspace_at = dlpack::address_of(tensor);
      workspace_bytes = std::size_t(tensor.shape[0]);
    }
    const py::object stream =
        checked(PyObject_CallOneArg(functions_.stream_of.ptr(), entry.device.ptr()));
    py::object counters;  // of a captured call, they belong to nobody else
    Address counters_at = 0;
    if (entry.counted) {
      dlpack::Tensor tensor;
      PyObject* of[] = {entry.device.ptr(), stream.ptr()};
      counters = checked(PyObject_Vectorcall(counters_of_.ptr(), of, 2, nullptr));
      if (!functions_.read_tensor(counters.ptr(), &tensor)) return py::none();
      counters_at = dlpack::address_of(tensor);
    }
    entry.launch->run(q, k, v, out_at, call.addresses[kSinks],
                      /*stats=*/0, call.addresses[kQoIndptr], call.addresses[kKvIndptr],
                      call.addresses[kTables], counters_at, stream.cast<Address>(), workspace_at,
                      workspace_bytes);
    return out;
  }

  const TableFunctions functions_;
  const py::object counters_of_;  // a tensor, by the index of a device and a stream
  FoundCalls<Entry> calls_;
};

PyObject* again(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] { return held_by<FmhaV2Calls>(capsule)->again(arguments, count); });
}

PyObject* remember(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    held_by<FmhaV2Calls>(capsule)->remember(arguments, count);
    return py::object(py::none());
  });
}

py::object make_calls(const py::capsule& api, py::object tensor_type, py::object current_device,
                      py::object stream_of, py::object counters_of, std::size_t most) {
  const auto functions = TableFunctions::make(
      api, std::move(tensor_type), std::move(current_device), std::move(stream_of), most);
  if (functions == nullptr) return py::none();
  static PyMethodDef again_def = fast("again", &again);
  static PyMethodDef remember_def = fast("remember", &remember);
  const py::object table =
      capsule_of(std::make_unique<FmhaV2Calls>(*functions, std::move(counters_of)));
  return py::make_tuple(bound(&again_def, table), bound(&remember_def, table));
}

}  // namespace

void bind_fmha_v2(py::module_& m) {
  // Positional, as Plan.run is.
  py::class_<FmhaV2Launch>(
      m, "FmhaV2", "A fused prefill that reads offsets on the device; see max_qo_len in params.h.")
      .def(py::init<const std::string&, const std::string&, const std::string&, int, int, int, int,
                    int, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                    std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                    std::int64_t, std::int64_t>())
      .def("set_pages", &FmhaV2Launch::set_pages)
      .def("set_options", &FmhaV2Launch::set_options)
      .def("workspace_bytes", &FmhaV2Launch::workspace_bytes)
      .def("__call__", &FmhaV2Launch::run);
  m.def("fmha_v2_calls", &make_calls,
        "The functions (again, remember) of a new table of calls; None where tensors are described "
        "in a way that is not known. From: DLPack's exchange API of a type of tensors, that type, "
        "the current device's index, the stream of a device, the counters of a device "
        "and a stream, how many calls it has.");
}

}  // namespace cutlass_kernels
