#include "direct.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "common/element_bytes.h"
#include "cutlass_kernels/attention.h"
#include "device.h"
#include "enqueue.h"
#include "plan/call.h"
#include "registry/backends.h"

namespace cutlass_kernels {
namespace {

constexpr std::int64_t kOrdinary = std::int64_t(1) << 30;  // request_facts.ORDINARY

}  // namespace

std::int32_t limited(std::int64_t value) {
  constexpr std::int64_t kAll = std::numeric_limits<std::int32_t>::max() - 1023;
  return std::int32_t(std::min(value, kAll));
}

// --- Python's numbers ---

bool read_flag(PyObject* object, bool* flag) {
  if (object == nullptr) return true;
  *flag = object == Py_True;
  return object == Py_True || object == Py_False;
}

bool read_number(PyObject* object, double* number) {
  if (object == nullptr || object == Py_None) return true;
  if (PyFloat_CheckExact(object)) {
    *number = PyFloat_AS_DOUBLE(object);
  } else if (PyLong_CheckExact(object)) {
    *number = PyLong_AsDouble(object);
    if (*number == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
  } else {
    return false;
  }
  return std::isfinite(*number);
}

bool read_integer(PyObject* object, std::int64_t* number) {
  if (object == nullptr || object == Py_None) return true;
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  *number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

bool is_text(PyObject* object, const char* text) {
  return PyUnicode_CheckExact(object) && PyUnicode_CompareWithASCIIString(object, text) == 0;
}

bool read_layout(PyObject* object, bool* hnd) {
  *hnd = is_text(object, "HND");
  return *hnd || is_text(object, "NHD");
}

bool read_backend(PyObject* object, Backend* backend) {
  *backend = Backend::kAuto;
  if (is_text(object, to_string(Backend::kAuto))) return true;
  for (const BackendName& entry : backends()) {
    *backend = entry.backend;
    if (is_text(object, entry.name)) return true;
  }
  return false;
}

bool read_kv_format(PyObject* object, DType* dtype) {
  constexpr std::pair<const char*, DType> kNames[] = {{"v3.2", DType::kLatentV32},
                                                      {"v3.2_nope", DType::kLatentV32Nope},
                                                      {"v4", DType::kLatentV4},
                                                      {"v4.1_pages", DType::kLatentV41ByPage},
                                                      {"v4.1_tokens", DType::kLatentV41ByToken}};
  for (const auto& [name, type] : kNames) {
    if (PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, name) == 0) {
      *dtype = type;
      return true;
    }
  }
  return false;
}

// --- tensors ---

bool is_ordinary(std::int64_t stride, int item_bytes) {
  return stride > 0 && stride <= kOrdinary && stride * item_bytes % 16 == 0;
}

bool is_readable(const Tensor& tensor) {
  return tensor.strides[std::size_t(tensor.ndim - 1)] == 1 && tensor.data % 16 == 0;
}

bool read_matrix(const Tensor& tensor, int first, bool hnd, Matrix* matrix) {
  const auto token = std::size_t(first + hnd), head = std::size_t(first + !hnd);
  matrix->data = tensor.data;
  matrix->tokens = tensor.shape[token];
  matrix->heads = tensor.shape[head];
  matrix->dim = tensor.shape[std::size_t(first + 2)];
  matrix->stride_token = tensor.strides[token];
  matrix->stride_head = tensor.strides[head];
  return matrix->tokens <= kOrdinary && is_readable(tensor) && is_ordinary(matrix->stride_token, tensor.item_bytes()) &&
         is_ordinary(matrix->stride_head, tensor.item_bytes());
}

bool read_lengths(const Torch& torch, PyObject* object, std::int64_t count, int device, const std::int32_t** lengths) {
  Tensor tensor;
  if (!torch.read(object, &tensor) || tensor.ndim != 1 || tensor.shape[0] != count ||
      (tensor.strides[0] != 1 && count != 1) || !is_int32(tensor) || !tensor.is_on_gpu(device)) {
    return false;
  }
  *lengths = pointer<const std::int32_t>(tensor.data);
  return true;
}

bool read_tables(const Tensor& tables, bool separate, std::int64_t batch, PageTable* pages) {
  const int last = separate ? 2 : 1;
  if (tables.ndim != last + 1 || tables.shape[0] != batch || (separate && tables.shape[1] != 2) || !is_int32(tables)) {
    return false;
  }
  const std::int64_t width = tables.shape[std::size_t(last)];
  if (width > 1 && tables.strides[std::size_t(last)] != 1) return false;
  if (tables.strides[0] < width && batch != 1) return false;
  pages->indices = pointer<const std::int32_t>(tables.data);
  if (separate) {
    if (tables.strides[1] < 0) return false;
    pages->v_indices = pages->indices + tables.strides[1];
  }
  // Of a single row the stride may be anything.
  pages->table_stride = std::max({tables.strides[0], width, std::int64_t(1)});
  pages->table_width = std::int32_t(std::min<std::int64_t>(width, std::numeric_limits<std::int32_t>::max()));
  return true;
}

bool read_heads(const Torch& torch, PyObject* object, std::int64_t heads, int device, const float** numbers) {
  if (object == nullptr) return true;
  *numbers = nullptr;
  if (object == Py_None) return true;
  Tensor tensor;
  if (!torch.read(object, &tensor) || tensor.ndim != 1 || tensor.shape[0] != heads || tensor.strides[0] != 1 ||
      !has_dtype(tensor, DType::kFloat32) || !tensor.is_on_gpu(device)) {
    return false;
  }
  *numbers = pointer<const float>(tensor.data);
  return true;
}

bool read_factors(const Torch& torch, PyObject* object, int device, std::int64_t requests, std::int64_t kv_heads,
                  std::int64_t qo_heads, DeviceScale* scale) {
  Tensor tensor;
  if (!torch.read(object, &tensor) || !has_dtype(tensor, DType::kFloat32) || !tensor.is_on_gpu(device) ||
      tensor.ndim > 1 + (requests > 0)) {
    return false;
  }
  scale->data = pointer<const float>(tensor.data);
  if (tensor.ndim == 2) {
    if (tensor.shape[0] != requests && tensor.shape[0] != 1) return false;
    scale->stride_request = tensor.shape[0] == 1 ? 0 : tensor.strides[0];
  }
  const auto last = std::size_t(std::max(tensor.ndim - 1, 0));
  const std::int64_t heads = tensor.ndim == 0 ? 1 : tensor.shape[last], stride = tensor.strides[last];
  if (heads > 0 && (heads == kv_heads || heads == qo_heads)) {
    scale->heads_per_entry = int(qo_heads / heads);
    scale->stride = std::int32_t(stride);
    return stride <= kOrdinary;
  }
  return heads == 1;
}

// --- launching ---

CurrentDevice::CurrentDevice(int index) {
  const int present = current_device_index();
  if (present == index) return;
  before_ = present;
  raise_unless_ok(set_current_device(index));
}

CurrentDevice::~CurrentDevice() {
  if (before_ >= 0) static_cast<void>(set_current_device(before_));
}

bool is_launched(const Status& status) {
  if (status.code == StatusCode::kInvalidArgument || status.code == StatusCode::kUnsupported) {
    return false;
  }
  raise_unless_ok(status);
  return true;
}

namespace {

/// The place of a shared schedule for a call, and what is there; for other sizes than these, an error.
SharedSchedule::Made& place_of(const Torch& torch, const CallPlan& plan, int device, Address stream,
                               SharedSchedule& schedule) {
  const std::thread::id thread = thread_of(stream);
  const std::uint64_t capture = capture_of(pointer<CUstream_st>(stream));
  SharedSchedule::Made* place = nullptr;
  for (auto& one : schedule.made) {
    if (schedule.is_strict && one->is_written && !share_schedule(one->plan, plan)) {
      throw py::value_error(
          "schedule was made by a call of other sizes or options: calls that share one differ in "
          "their tensors alone. Pass a new Schedule().");
    }
    if (one->device == device && one->stream == stream && one->thread == thread && one->capture == capture) {
      place = one.get();
    }
  }
  if (place == nullptr) {
    schedule.made.push_back(std::make_unique<SharedSchedule::Made>());
    place = schedule.made.back().get();
    place->device = device;
    place->stream = stream;
    place->thread = thread;
    place->capture = capture;
  }
  place->is_written &= share_schedule(place->plan, plan);
  place->plan = plan;
  if (plan.schedule_bytes() > place->bytes) {
    const auto words = std::int64_t(plan.schedule_bytes() / sizeof(std::int32_t));
    place->memory = schedule.is_strict || capture != 0 ? torch.empty({words}, 1, DType::kFloat32, device)
                                                       : torch.kept_words(words, device);
    place->bytes = plan.schedule_bytes();
    place->is_written = false;
  }
  return *place;
}

}  // namespace

Status launch_once(const Torch& torch, const AttentionParams& params, Backend backend, int device_index,
                   SharedSchedule* schedule) {
  const CurrentDevice current(device_index);
  PlanOptions options;
  options.call_counters = true;
  options.schedule_is_kept = schedule != nullptr;
  CallPlan plan;
  if (Status status = plan_once(params, backend, options, &plan); !status.ok()) return status;
  if (plan.is_empty()) return Status::success();

  const Address stream = torch.stream(device_index);
  const Scratch workspace = torch.scratch(plan.workspace_bytes(), device_index);
  KeptSchedule kept;
  SharedSchedule::Made* place = nullptr;
  if (schedule != nullptr && plan.schedule_bytes() > 0) {
    place = &place_of(torch, plan, device_index, stream, *schedule);
    Tensor memory;
    if (!torch.read(place->memory.ptr(), &memory)) {
      throw std::runtime_error("torch made no schedule.");
    }
    kept = {pointer<void>(memory.data), place->is_written};
  }
  py::object counters;  // of a captured call, they belong to nobody else
  Tensor counter_tensor;
  if (plan.needs_counters()) {
    counters = torch.counters(device_index, stream);
    if (!torch.read(counters.ptr(), &counter_tensor)) {
      throw std::runtime_error("torch made no counters.");
    }
  }
  const auto work = [&] {
    return launch_call(plan, pointer<void>(workspace.data()), pointer<std::uint64_t>(counter_tensor.data),
                       pointer<CUstream_st>(stream), kept);
  };
  if (place == nullptr) return without_gil(work);
  Status status = without_gil_in_turn(stream, work);
  place->is_written = status.ok();
  return status;
}

}  // namespace cutlass_kernels
