// Direct calls: the compiled module reads the arguments of a public function itself, checks them, allocates the results
// and launches. It makes the call only if every argument is exactly what a kernel takes. If one is not, it does nothing
// and returns None: Python then says in a sentence what is wrong, converts, or computes. So each condition here has its
// counterpart in Python, and a call has the same results and errors either way.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "cutlass_kernels/params.h"
#include "plan/call.h"
#include "torch.h"

namespace cutlass_kernels {

// --- Python's numbers: only the exact types, as others may not mean what they are converted to ---

bool read_flag(PyObject* object, bool* flag);
/// A finite number; None is `*number` as it was.
bool read_number(PyObject* object, double* number);
/// An integer; None is `*number` as it was.
bool read_integer(PyObject* object, std::int64_t* number);
bool is_text(PyObject* object, const char* text);
/// kv_layout: "NHD" or "HND".
bool read_layout(PyObject* object, bool* hnd);
/// "auto" or a backend's name.
bool read_backend(PyObject* object, Backend* backend);

/// Options of every attention without a position encoding.
struct DirectOptions {
  bool causal = false;
  std::int64_t window_left = -1;
  double soft_cap = 0.0;
  double sm_scale = 0.0;  // its default, before it is read

  /// window_left, logits_soft_cap and sm_scale as users give them.
  bool read(PyObject* window, PyObject* cap, PyObject* scale);
  void fill(AttentionParams* params) const;
};

// --- tensors ---

/// A [tokens, heads, dim] matrix of each head, as a kernel reads it: 16-byte aligned, contiguous in its last dimension,
/// no stride of 0, and none of 2^30 elements or more, which not every kernel addresses.
struct Matrix {
  Address data = 0;
  std::int64_t tokens = 0, heads = 0, dim = 0;
  std::int64_t stride_token = 0, stride_head = 0;

  ConstTensorView view() const { return {pointer<const void>(data), stride_token, stride_head}; }
};
/// `hnd`: the tensor is [heads, tokens, dim].
bool read_matrix(const Tensor& tensor, bool hnd, Matrix* matrix);
/// The same from [dims before, tokens, heads, dim] of a tensor, from dimension `first` on.
bool read_matrix_at(const Tensor& tensor, int first, bool hnd, Matrix* matrix);

/// fp8 queries read pages of a multiple of so many tokens; request_facts.FP8_PAGE.
constexpr int kPagesOfFp8 = 8;

/// Keys and values in pages: [pages, page_size, heads, dim].
struct PagedCache {
  std::int64_t pages = 0, page_size = 0, heads = 0, dim_qk = 0, dim_vo = 0;
  std::int64_t k_stride_page = 0, v_stride_page = 0;
  ConstTensorView k, v;
  DType dtype{};
  int device = 0;
};
/// One tensor with keys and values, or two in a tuple or (for `with_lists`) a list.
bool read_paged_cache(const Torch& torch, PyObject* object, bool hnd, PagedCache* cache);

/// The same of two tensors.
bool read_paged_cache(const Tensor& k, const Tensor& v, bool hnd, PagedCache* cache);

/// Indptrs or lengths, int32 [count] on a device.
bool read_lengths(const Torch& torch, PyObject* object, std::int64_t count, int device, const std::int32_t** lengths);

/// A page table [batch, width], or [batch, 2, width] of separate caches. Rows do not overlap, their entries lie side by
/// side.
bool read_tables(const Tensor& tables, bool separate, std::int64_t batch, PageTable* pages);

constexpr std::int64_t kMostKeys = std::int64_t(1) << 30;  // in pages: an estimate, which needs to go no further
/// A bound of lengths: more than there can be is no limit.
std::int32_t limited(std::int64_t value);

/// Sinks, fp32 [heads] on a device; none where they are None.
bool read_sinks(const Torch& torch, PyObject* object, std::int64_t heads, int device, const float** sinks);

// --- results ---

/// Output and LSE of `rows` query rows. `squeezed`: the results have no dimension of rows, as there is one.
struct Results {
  py::object out, lse;
  bool return_lse = false;

  py::object returned() const { return return_lse ? py::object(py::make_tuple(out, lse)) : out; }
};

/// What results must be, or are made like.
struct ResultShape {
  std::int64_t rows = 0, heads = 0, dim = 0;
  DType dtype{};
  int device = 0;
  bool squeezed = false;
  bool zero = false;  // new outputs have rows that no kernel writes
};
/// Reads the places that the caller gave (None: a new tensor is made), and fills params.o and params.lse.
/// `like`: a tensor whose empty_like() is a new output; null where none is. Call this last: it allocates.
bool prepare_results(const Torch& torch, const ResultShape& shape, PyObject* out, PyObject* lse, PyObject* return_lse,
                     PyObject* like, Results* results, AttentionParams* params);

/// A schedule that calls of the same sizes and lengths share. The first of them makes it: on each stream, and in each
/// capture of a CUDA graph, whose replays then follow new lengths.
struct SharedSchedule {
  struct Made {
    int device;
    Address stream;
    std::thread::id thread;  // of a stream that each thread has
    std::uint64_t capture;   // 0: none
    CallPlan plan;
    py::object memory;
    std::size_t bytes = 0;
    bool is_written = false;
  };
  /// Calls of other sizes are refused. Else they make it anew, and its memory outlives them: a wrapper's.
  const bool is_strict;
  std::vector<std::unique_ptr<Made>> made;

  explicit SharedSchedule(bool strict) : is_strict(strict) {}
  /// The next call has other lengths, perhaps other sizes.
  void renew() {
    for (auto& one : made) one->is_written = false;
  }
};

/// Plans and enqueues a problem without a plan of its own, on a device's current stream.
Status launch_once(const Torch& torch, const AttentionParams& params, Backend backend, int device,
                   SharedSchedule* schedule = nullptr);

/// False where it was refused; any other failure raises.
bool is_launched(const Status& status);

/// Makes a device the current one for as long as this lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = -1;  // negative: it was this one
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

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyMethodDef fast(const char* name, FastFunction function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

inline void add_function(const py::object& module, PyMethodDef* def) {
  PyObject* function = PyCFunction_New(def, nullptr);
  if (function == nullptr) throw py::error_already_set();
  module.attr(def->ml_name) = py::reinterpret_steal<py::object>(function);
}

}  // namespace cutlass_kernels
