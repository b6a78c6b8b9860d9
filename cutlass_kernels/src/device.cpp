#include "device.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "cuda_failure.h"

namespace cutlass_kernels {
namespace {

constexpr int kRememberedDevices = 64;  // one of a higher index is asked every time

std::string cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Status ask(int index, Device* device) {
  int major = 0, minor = 0;
  const std::pair<cudaDeviceAttr, int*> questions[] = {
      {cudaDevAttrComputeCapabilityMajor, &major},
      {cudaDevAttrComputeCapabilityMinor, &minor},
      {cudaDevAttrMultiProcessorCount, &device->multiprocessors},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &device->shared_memory_per_block},
      {cudaDevAttrL2CacheSize, &device->l2_bytes}};
  for (const auto& [attribute, value] : questions) {
    const cudaError_t error = cudaDeviceGetAttribute(value, attribute, index);
    if (error != cudaSuccess) return cuda_failure("Asking what the GPU is", error);
  }
  device->index = index;
  device->compute_capability = 10 * major + minor;
  return Status::success();
}

}  // namespace

std::string driver_problem() {
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0 || cudaRuntimeGetVersion(&runtime) != cudaSuccess ||
      driver / 1000 >= runtime / 1000) {
    return "";
  }
  return "The NVIDIA driver supports CUDA " + cuda_version(driver) + ", but cutlass_kernels was built with CUDA " +
         cuda_version(runtime) +
         ": install a newer driver, or build cutlass_kernels with a CUDA toolkit as old as the "
         "driver (12.4 or newer).";
}

Status cuda_failure(const char* what, cudaError_t error) {
  std::string problem = error == cudaErrorInsufficientDriver ? driver_problem() : "";
  cudaGetLastError();  // not left behind for the caller's own error check
  if (problem.empty()) {
    problem = std::string(what) + " failed: " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ").";
  }
  return {StatusCode::kCudaError, std::move(problem)};
}

Status current_device(Device* device) {
  static Device remembered[kRememberedDevices];
  static std::atomic<bool> is_known[kRememberedDevices];
  static std::mutex asking;

  int index = 0;
  const cudaError_t error = cudaGetDevice(&index);
  if (error != cudaSuccess) return cuda_failure("Asking for the current GPU", error);
  if (index >= kRememberedDevices) return ask(index, device);
  if (!is_known[index].load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(asking);
    if (is_known[index].load(std::memory_order_relaxed)) {
      *device = remembered[index];
      return Status::success();
    }
    if (Status status = ask(index, &remembered[index]); !status.ok()) return status;
    is_known[index].store(true, std::memory_order_release);
  }
  *device = remembered[index];
  return Status::success();
}

int current_device_index() {
  int index = 0;
  return cudaGetDevice(&index) == cudaSuccess ? index : 0;
}

Status set_current_device(int index) {
  const cudaError_t error = cudaSetDevice(index);
  return error == cudaSuccess ? Status::success() : cuda_failure("Selecting the tensors' GPU", error);
}

bool is_capturing(cudaStream_t stream) { return capture_of(stream) != 0; }

std::uint64_t capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &id);
  if (error == cudaSuccess && status == cudaStreamCaptureStatusNone) return 0;
  return error == cudaSuccess && id != 0 ? id : ~std::uint64_t(0);
}

}  // namespace cutlass_kernels
