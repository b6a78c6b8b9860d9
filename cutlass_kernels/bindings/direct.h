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

// --- Python's numbers ---

// Of the exact types alone: others may not mean what they are converted to. A null object leaves the value as it was.
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
/// kv_format: how the tokens of a quantized latent cache are stored, by a name of latent_formats.py.
bool read_kv_format(PyObject* object, DType* dtype);

constexpr std::int64_t kMostKeys = std::int64_t(1) << 30;  // an estimate, which needs to go no further
/// A bound of lengths: more than there can be is no limit.
std::int32_t limited(std::int64_t value);

// --- tensors ---

/// A [tokens, heads, dim] matrix of each head, as a kernel reads it: 16-byte aligned, contiguous in its last dimension,
/// no stride of 0, and none of 2^30 elements or more, which not every kernel addresses.
struct Matrix {
  Address data = 0;
  std::int64_t tokens = 0, heads = 0, dim = 0;
  std::int64_t stride_token = 0, stride_head = 0;

  ConstTensorView view() const { return {pointer<const void>(data), stride_token, stride_head}; }
};
/// From dimension `first` of a tensor on. `hnd`: it is [heads, tokens, dim].
bool read_matrix(const Tensor& tensor, int first, bool hnd, Matrix* matrix);
/// What a matrix must be but for its other strides.
bool is_readable(const Tensor& tensor);
bool is_ordinary(std::int64_t stride, int item_bytes);

/// Indptrs or lengths, int32 [count] on a device.
bool read_lengths(const Torch& torch, PyObject* object, std::int64_t count, int device, const std::int32_t** lengths);

/// A page table [batch, width] on a device, or [batch, 2, width] of separate caches. Rows do not overlap, their entries
/// lie side by side.
bool read_tables(const Tensor& tables, bool separate, std::int64_t batch, PageTable* pages);

/// Sinks or slopes, fp32 [heads] on a device; none where they are None.
bool read_heads(const Torch& torch, PyObject* object, std::int64_t heads, int device, const float** numbers);

/// Factors, fp32 on a device: of one element, [heads], or, where there are requests, [requests or 1, heads or 1].
bool read_factors(const Torch& torch, PyObject* object, int device, std::int64_t requests, std::int64_t kv_heads,
                  std::int64_t qo_heads, DeviceScale* scale);

// --- launching ---

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

}  // namespace cutlass_kernels
