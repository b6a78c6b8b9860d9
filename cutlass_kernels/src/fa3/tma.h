// mbarriers, and TMA.
#pragma once

#include <cuda.h>
#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/shared_address.h"

namespace cutlass_kernels::fa3 {

// ---- mbarriers, and positions in the rings of buffers that they guard.
//
// Threads and TMA transfers arrive at an mbarrier; other threads wait for the completion of its phase. CUTLASS's
// class of the same instructions does not tell the compiler that they order memory accesses, so that it may move
// ordinary loads and stores of shared memory across them. These do.

class Barrier {
 public:
  CUTE_DEVICE void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  CUTE_DEVICE void arrive() { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory"); }
  // Arrives at the barrier of another CTA of the cluster, whose address there is `address` (pair.h). Not with the
  // scope of the cluster, which would write back and invalidate the L1 cache (hd512, causal 4k: 386 instead of 472
  // TFLOP/s): what it orders are accesses of shared memory.
  static CUTE_DEVICE void arrive_in_peer(std::uint32_t address) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
  }
  // Arrives, and holds the phase open until `bytes` have been transferred.
  CUTE_DEVICE void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
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
  // Whether wait() would return at once.
  CUTE_DEVICE bool test(std::uint32_t parity) {
    std::uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(address()), "r"(parity)
        : "memory");
    return done != 0;
  }
  CUTE_DEVICE std::uint32_t address() const { return shared_address(&state_); }

 private:
  std::uint64_t state_;
};

// Makes this thread's writes of shared memory visible to the async proxy, through which TMA and wgmma read it.
CUTE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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

// ---- cp.async.bulk: consecutive bytes from global to shared memory, by one thread. Multiples of 16.
CUTE_DEVICE void bulk_load(std::uint32_t to, const char* from, int bytes, Barrier& full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(full.address())
               : "memory");
}

// ---- cp.async.bulk.tensor: boxes of a tensor map from global to shared memory and back, by one thread each. Loads
// complete on an mbarrier, stores in groups of the thread.

// L2 policies of TMA. Encoded as createpolicy would make them, for all bytes.
enum class CacheHint : std::uint64_t {
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

CUTE_DEVICE void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// c0, c1 ...: coordinates of the box, columns first.
CUTE_DEVICE void tma_load(const CUtensorMap* map, Barrier& barrier, CacheHint hint, void* shared, int c0, int c1,
                          int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(barrier.address()), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(hint)
      : "memory");
}
CUTE_DEVICE void tma_load(const CUtensorMap* map, Barrier& barrier, CacheHint hint, void* shared, int c0, int c1,
                          int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(shared)),
      "l"(map), "r"(barrier.address()), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(hint)
      : "memory");
}
// To L2 alone.
CUTE_DEVICE void tma_prefetch(const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

CUTE_DEVICE void tma_store(const CUtensorMap* map, std::uint32_t shared, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
// Makes this thread's writes of shared memory visible to its stores by TMA. Unlike fence_proxy_async() it orders
// nothing for the compiler: __syncwarp() follows, and ptxas keeps the order of the main loop.
CUTE_DEVICE void tma_store_fence() { asm volatile("fence.proxy.async.shared::cta;"); }
// Ends a group of stores.
CUTE_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;"); }
// Waits until the thread's stores have read shared memory.
CUTE_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace cutlass_kernels::fa3
