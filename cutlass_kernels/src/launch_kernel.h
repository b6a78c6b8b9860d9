// Launches of kernels that need more shared memory than they may have by default.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace cutlass_kernels {

/// The devices on which something has been done that needs doing once.
class DoneOnDevices {
 public:
  bool contains(int device) const { return (done_.load(std::memory_order_relaxed) & bit(device)) != 0; }
  void add(int device) { done_.fetch_or(bit(device), std::memory_order_relaxed); }

 private:
  static std::uint64_t bit(int device) { return device < 64 ? std::uint64_t(1) << device : 0; }
  std::atomic<std::uint64_t> done_{0};
};

/// `allowed` is the kernel's own: asking for the shared memory each time would cost as much as a fifth of the launch.
template <class Params>
cudaError_t launch_with_shared_memory(cudaLaunchConfig_t config, void (*kernel)(Params), const Params& params,
                                      int device, DoneOnDevices* allowed) {
  cudaError_t error = cudaErrorInvalidValue;
  const bool known = allowed->contains(device);
  if (known) error = cudaLaunchKernelEx(&config, kernel, params);
  if (error == cudaErrorInvalidValue) {  // not allowed yet, or forgotten in a cudaDeviceReset()
    if (known) cudaGetLastError();
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(config.dynamicSmemBytes));
    if (error == cudaSuccess) {
      allowed->add(device);
      error = cudaLaunchKernelEx(&config, kernel, params);
    }
  }
  return error;
}

}  // namespace cutlass_kernels
