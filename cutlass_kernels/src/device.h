// What launches need to know of the current device. A device is asked once: its answers never change.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "cuda_failure.h"

namespace cutlass_kernels {

struct Device {
  int index = 0;
  int compute_capability = 0;  // 10 * major + minor
  int multiprocessors = 0;
};

constexpr int kRememberedDevices = 64;  // one of a higher index is asked every time

inline Status current_device(Device* device) {
  // compute_capability << 16 | multiprocessors; 0: not asked yet. Threads that ask at once store the same.
  static std::atomic<std::uint32_t> remembered[kRememberedDevices];

  cudaError_t error = cudaGetDevice(&device->index);
  if (error != cudaSuccess) return cuda_failure("Asking for the current GPU", error);
  const bool remember = device->index < kRememberedDevices;
  std::uint32_t facts = remember ? remembered[device->index].load(std::memory_order_relaxed) : 0;
  if (facts == 0) {
    int major = 0, minor = 0, multiprocessors = 0;
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device->index);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device->index);
    }
    if (error == cudaSuccess) {
      error =
          cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device->index);
    }
    if (error != cudaSuccess) return cuda_failure("Asking what the GPU is", error);
    facts = std::uint32_t(10 * major + minor) << 16 | std::uint32_t(multiprocessors);
    if (remember) remembered[device->index].store(facts, std::memory_order_relaxed);
  }
  device->compute_capability = int(facts >> 16);
  device->multiprocessors = int(facts & 0xffff);
  return Status::success();
}

/// The devices on which something has been done that needs doing once.
class DoneOnDevices {
 public:
  bool contains(int device) const {
    return (done_.load(std::memory_order_relaxed) & bit(device)) != 0;
  }
  void add(int device) { done_.fetch_or(bit(device), std::memory_order_relaxed); }

 private:
  static std::uint64_t bit(int device) {
    return device < kRememberedDevices ? std::uint64_t(1) << device : 0;
  }
  std::atomic<std::uint64_t> done_{0};
};

/// Launches a kernel that needs more shared memory than it may have by default. `allowed` is the kernel's own; asking each time
/// would cost as much as a fifth of the launch.
template <class Params>
cudaError_t launch_with_shared_memory(cudaLaunchConfig_t config, void (*kernel)(Params),
                                      const Params& params, int device, DoneOnDevices* allowed) {
  cudaError_t error = cudaErrorInvalidValue;
  const bool known = allowed->contains(device);
  if (known) error = cudaLaunchKernelEx(&config, kernel, params);
  if (error == cudaErrorInvalidValue) {  // not allowed yet, or forgotten in a cudaDeviceReset()
    if (known) cudaGetLastError();
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 int(config.dynamicSmemBytes));
    if (error == cudaSuccess) {
      allowed->add(device);
      error = cudaLaunchKernelEx(&config, kernel, params);
    }
  }
  return error;
}

}  // namespace cutlass_kernels
