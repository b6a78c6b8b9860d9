// atom.add, atom.cas on a word of 64 bits in global memory, by a thread that calls alone.
//
// atomicAdd() is slower there: the compiler adds up what the lanes of a warp add first, by a vote and two shuffles. And
// to order other memory by it takes a fence on either side.
#pragma once

#include <cute/config.hpp>

namespace cutlass_kernels {

// Order nothing but themselves.
struct RelaxedAtomics {
  static CUTE_DEVICE unsigned long long add(unsigned long long* at, unsigned long long value) {
    unsigned long long held;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(held) : "l"(at), "l"(value) : "memory");
    return held;
  }
  static CUTE_DEVICE unsigned long long compare_and_swap(unsigned long long* at, unsigned long long expected,
                                                         unsigned long long value) {
    unsigned long long held;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(held)
                 : "l"(at), "l"(expected), "l"(value)
                 : "memory");
    return held;
  }
};

// What this thread has seen written is there for whoever finds the new value, and what was there for whoever wrote the
// old one is there for this thread.
struct OrderingAtomics {
  static CUTE_DEVICE unsigned long long add(unsigned long long* at, unsigned long long value) {
    unsigned long long held;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(held) : "l"(at), "l"(value) : "memory");
    return held;
  }
  static CUTE_DEVICE unsigned long long compare_and_swap(unsigned long long* at, unsigned long long expected,
                                                         unsigned long long value) {
    unsigned long long held;
    asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(held)
                 : "l"(at), "l"(expected), "l"(value)
                 : "memory");
    return held;
  }
};

}  // namespace cutlass_kernels
