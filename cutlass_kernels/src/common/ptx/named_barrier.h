// bar.sync, bar.arrive: the 16 hardware barriers of a thread block. __syncthreads() is barrier 0.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace cutlass_kernels {

// `threads`: how many threads take part in barrier `id`, those that arrive and those that wait together.
CUTE_DEVICE void named_barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
CUTE_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cutlass_kernels
