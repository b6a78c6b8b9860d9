// mbarriers, and positions in the rings of buffers that they guard.
//
// Threads and TMA transfers arrive at an mbarrier; other threads wait for the completion of its phase. CUTLASS's
// class of the same instructions does not tell the compiler that they order memory accesses, so that it may move
// ordinary loads and stores of shared memory across them. These do.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/shared_address.h"

namespace cutlass_kernels::fa3 {

class Barrier {
 public:
  CUTE_DEVICE void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }
  CUTE_DEVICE void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  // Arrives at the barrier of another CTA of the cluster, whose address there is `address` (pair.h). Not with the
  // scope of the cluster, which would write back and invalidate the L1 cache (hd512, causal 4k: 386 instead of 472
  // TFLOP/s): what it orders are accesses of shared memory.
  static CUTE_DEVICE void arrive_in_peer(std::uint32_t address) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
  }
  // Arrives, and holds the phase open until `bytes` have been transferred.
  CUTE_DEVICE void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
  // Waits for the end of the phase of this parity. Returns at once while the barrier is in the phase after it: a
  // producer that waits with parity 1 finds every buffer of a new ring empty.
  CUTE_DEVICE void wait(std::uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
  CUTE_DEVICE std::uint32_t address() const { return shared_address(&state_); }

 private:
  std::uint64_t state_;
};

// Makes this thread's writes of shared memory visible to the async proxy, through which TMA and wgmma read it.
CUTE_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Makes initialised barriers visible to TMA.
CUTE_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_proxy_async();
}

// A position in a ring of buffers, and the parity of the pass over it.
template <int kSize>
struct Ring {
  int index = 0;
  std::uint32_t phase = 0;

  CUTE_DEVICE void advance() {
    if (++index == kSize) {
      index = 0;
      phase ^= 1;
    }
  }
};

}  // namespace cutlass_kernels::fa3
