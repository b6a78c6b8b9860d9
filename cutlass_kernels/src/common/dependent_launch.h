// Programmatic dependent launch (compute capability 9.0 and up): a kernel that was launched with the attribute
// programmaticStreamSerialization may start before the one in front of it in the stream has ended.
#pragma once

#include <cute/config.hpp>

#include <initializer_list>

namespace cutlass_kernels {

// Whether kernels of this unit, on a device of this compute capability (10 * major + minor), are compiled with the
// instructions below: the code for others, and PTX that a newer device translates, lacks them.
constexpr bool has_dependent_launch(int compute_capability) {
  for (const int arch : {__CUDA_ARCH_LIST__}) {
    if (arch == 900) return compute_capability == 90;
  }
  return false;
}

// From here on, once all blocks have come here or ended, the next kernel may start.
CUTE_DEVICE void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Returns when the previous kernel has ended and what it wrote can be read.
CUTE_DEVICE void await_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace cutlass_kernels
