// setmaxnreg: registers per thread that a warpgroup returns to the SM, or takes from it. By all of its threads.
#pragma once

#include <cute/config.hpp>

namespace cutlass_kernels {

template <int kRegisters>
CUTE_DEVICE void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
CUTE_DEVICE void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace cutlass_kernels
