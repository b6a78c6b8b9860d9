// The facts of a device that heuristics are given. A device is asked once: its answers never change.
#pragma once

#include <string>

#include "cutlass_kernels/status.h"
#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

struct Device {
  int index = 0;
  int compute_capability = 0;  ///< 10 * major + minor
  int multiprocessors = 0;
  int shared_memory_per_block = 0;  ///< bytes, most that a kernel may ask for
  int l2_bytes = 0;
};

// Where there is no GPU, sizes are those on these.
inline constexpr Device kH200{0, 90, 132, 227 << 10, 60 << 20};
inline constexpr Device kA100{0, 80, 108, 163 << 10, 40 << 20};

CK_API Status current_device(Device* device);

/// A sentence where the driver is too old for the CUDA runtime that is linked; else empty. Within one major version,
/// older drivers serve newer runtimes.
CK_API std::string driver_problem();

/// Index of the current device, 0 where there is none.
CK_API int current_device_index();
CK_API Status set_current_device(int index);
/// Whether a stream is being captured, or cannot be asked.
CK_API bool is_capturing(cudaStream_t stream);

/// The number of the capture that a stream is in; 0: none.
CK_API std::uint64_t capture_of(cudaStream_t stream);

}  // namespace cutlass_kernels
