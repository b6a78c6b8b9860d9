#include "torch.h"

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "device.h"
#include "enqueue.h"
#include "functions.h"
#include "plan/plan.h"

namespace cutlass_kernels {
namespace {

std::unique_ptr<Torch>& instance() {
  // Never destroyed: Python may be gone by then.
  static auto& torch = *new std::unique_ptr<Torch>;
  return torch;
}

py::object checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

py::object tuple_of(const Shape& shape, int ndim) {
  py::object tuple = checked(PyTuple_New(ndim));
  for (int i = 0; i < ndim; ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), i, checked(PyLong_FromLongLong(shape[std::size_t(i)])).release().ptr());
  }
  return tuple;
}

constexpr std::pair<int, int> kCodes[] = {{kDLFloat, 16},
                                          {kDLBfloat, 16},
                                          {kDLFloat, 32},
                                          {kDLFloat8_e4m3fn, 8},
                                          {kDLFloat8_e5m2, 8}};  // code and bits, by DType

}  // namespace

bool dtype_of(const Tensor& tensor, DType* dtype) {
  for (int i = 0; i < int(std::size(kCodes)); ++i) {
    const auto& [code, bits] = kCodes[i];
    if (tensor.dtype.code == code && tensor.dtype.bits == bits && tensor.dtype.lanes == 1) {
      *dtype = DType(i);
      return true;
    }
  }
  return false;
}

bool has_dtype(const Tensor& tensor, DType dtype) {
  const auto& [code, bits] = kCodes[int(dtype)];
  return tensor.dtype.code == code && tensor.dtype.bits == bits && tensor.dtype.lanes == 1;
}

const Torch& Torch::get() {
  if (instance() == nullptr) throw std::runtime_error("use_torch() has not been called.");
  return *instance();
}

Torch::Torch(const py::object& exchange_api, const py::dict& functions) {
  if (!exchange_api.is_none()) {
    api_ = py::reinterpret_borrow<py::capsule>(exchange_api).get_pointer<const DLPackExchangeAPI>();
    if (api_->header.version.major != DLPACK_MAJOR_VERSION) api_ = nullptr;
  }
  tensor_type_ = functions["Tensor"];
  parameter_type_ = functions["Parameter"];
  facts_ = functions["facts"];
  empty_like_ = functions["empty_like"];
  empty_ = functions["empty"];
  zeros_ = functions["zeros"];
  device_type_ = functions["device"];
  stream_of_ = functions["stream_of"];
  uint8_ = functions["uint8"];
  int32_ = functions["int32"];
  for (int i = 0; i < int(dtypes_.size()); ++i) {
    dtypes_[std::size_t(i)] = functions[to_string(DType(i))];
  }
  names_ = py::make_tuple("dtype", "device");
}

bool Torch::read(PyObject* object, Tensor* tensor) const {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != tensor_type_.ptr() && type != parameter_type_.ptr()) return false;
  if (api_ == nullptr) return read_attributes(object, tensor);
  DLTensor read;
  if (api_->dltensor_from_py_object_no_sync(object, &read) != 0) {
    PyErr_Clear();  // it has no memory, or none that DLPack knows
    return false;
  }
  if (read.ndim > int(Shape().size()) || read.strides == nullptr) return false;
  tensor->data = reinterpret_cast<Address>(read.data) + read.byte_offset;
  tensor->device = read.device;
  tensor->dtype = read.dtype;
  tensor->ndim = read.ndim;
  for (int d = 0; d < read.ndim; ++d) {
    tensor->shape[std::size_t(d)] = read.shape[d];
    tensor->strides[std::size_t(d)] = read.strides[d];
  }
  return true;
}

bool Torch::read_attributes(PyObject* object, Tensor* tensor) const {
  const py::object read = checked(PyObject_CallOneArg(facts_.ptr(), object));
  if (read.is_none()) return false;
  const auto [data, device_type, device, code, bits, shape, strides] =
      read.cast<std::tuple<Address, int, int, int, int, py::tuple, py::tuple>>();
  if (shape.size() > Shape().size()) return false;
  tensor->data = data;
  tensor->device = {DLDeviceType(device_type), device};
  tensor->dtype = {std::uint8_t(code), std::uint8_t(bits), 1};
  tensor->ndim = int(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) {
    tensor->shape[d] = shape[d].cast<std::int64_t>();
    tensor->strides[d] = strides[d].cast<std::int64_t>();
  }
  return true;
}

py::object Torch::device(int index) const {
  const auto i = std::size_t(index);
  while (devices_.size() <= i) devices_.push_back(device_type_("cuda", devices_.size()));
  return devices_[i];
}

py::object Torch::make(const py::object& function, const Shape& shape, int ndim, const py::object& dtype,
                       int index) const {
  const py::object sizes = tuple_of(shape, ndim), on = device(index);
  PyObject* arguments[] = {sizes.ptr(), dtype.ptr(), on.ptr()};
  return checked(PyObject_Vectorcall(function.ptr(), arguments, 1, names_.ptr()));
}

py::object Torch::empty_like(PyObject* tensor) const { return checked(PyObject_CallOneArg(empty_like_.ptr(), tensor)); }

py::object Torch::empty(const Shape& shape, int ndim, DType dtype, int device) const {
  return make(empty_, shape, ndim, dtypes_[std::size_t(dtype)], device);
}

py::object Torch::zeros(const Shape& shape, int ndim, DType dtype, int device) const {
  return make(zeros_, shape, ndim, dtypes_[std::size_t(dtype)], device);
}

Scratch Torch::scratch(std::size_t bytes, int device) const {
  if (bytes == 0) return {};
  if (api_ != nullptr) {  // 1 us less than torch.empty()
    auto size = std::int64_t(bytes);
    DLTensor like{};
    like.device = {kDLCUDA, device};
    like.dtype = {kDLUInt, 8, 1};
    like.ndim = 1;
    like.shape = &size;
    DLManagedTensorVersioned* made = nullptr;
    const auto ignore = [](void*, const char*, const char*) {};
    if (api_->managed_tensor_allocator(&like, &made, nullptr, ignore) == 0) return Scratch(made);
    PyErr_Clear();  // torch.empty() raises what torch raises
  }
  py::object tensor = make(empty_, {std::int64_t(bytes)}, 1, uint8_, device);
  Tensor read;
  if (!this->read(tensor.ptr(), &read)) throw std::runtime_error("torch.empty() made no tensor.");
  return Scratch(std::move(tensor), read.data);
}

py::object Torch::counters(int device, Address stream) const {
  if (is_capturing(pointer<CUstream_st>(stream))) return make(empty_, {kCallCounterWords}, 1, int32_, device);
  using Key = std::tuple<int, Address, std::thread::id>;
  static auto& kept = *new std::map<Key, py::object>;
  const Key key{device, stream, thread_of(stream)};
  if (const auto found = kept.find(key); found != kept.end()) return found->second;
  py::object made = make(zeros_, {kCallCounterWords}, 1, int32_, device);
  return kept.emplace(key, std::move(made)).first->second;  // another thread's, if it was faster
}

py::object Torch::kept_words(std::int64_t count, int device) const { return make(zeros_, {count}, 1, int32_, device); }

Address Torch::stream(int device) const {
  if (api_ != nullptr) {
    void* stream = nullptr;
    if (api_->current_work_stream(kDLCUDA, device, &stream) != 0) throw py::error_already_set();
    return reinterpret_cast<Address>(stream);
  }
  return stream_of_(device).cast<Address>();
}

bool Torch::find_dtype(PyObject* object, DType* dtype) const {
  for (std::size_t i = 0; i < dtypes_.size(); ++i) {
    if (dtypes_[i].ptr() != object) continue;
    *dtype = DType(i);
    return true;
  }
  return false;
}

DType Torch::dtype(const py::object& object) const {
  DType dtype{};
  if (!find_dtype(object.ptr(), &dtype)) {
    throw py::value_error(py::str(object).cast<std::string>() + " is not a type that kernels read.");
  }
  return dtype;
}

namespace {

/// exchange_api: DLPack's capsule of torch.Tensor, or None, and then functions["facts"] reads a tensor.
void use_torch(py::object exchange_api, py::object functions) {
  instance() = std::make_unique<Torch>(exchange_api, py::reinterpret_borrow<py::dict>(functions));
}

py::object counters_of(int device, Address stream) { return Torch::get().counters(device, stream); }

}  // namespace

void add_torch(const py::object& module) {
  static PyMethodDef functions[] = {function<use_torch>("use_torch"), function<counters_of>("counters")};
  add_functions(module, functions);
}

}  // namespace cutlass_kernels
