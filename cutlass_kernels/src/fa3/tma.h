// cp.async.bulk.tensor: boxes of a tensor map from global to shared memory and back, by one thread each. Loads complete
// on an mbarrier, stores in groups of the thread.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/ptx/shared_address.h"
#include "fa3/mbarrier.h"

namespace cutlass_kernels::fa3 {

// L2 policies of TMA. Encoded as createpolicy would make them, for all bytes.
enum class CacheHint : std::uint64_t {
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

CUTE_DEVICE void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// c0, c1 ...: coordinates of the box, columns first.
CUTE_DEVICE void tma_load(const CUtensorMap* map, Barrier& barrier, CacheHint hint, void* shared,
                          int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(barrier.address()), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(hint)
      : "memory");
}
CUTE_DEVICE void tma_load(const CUtensorMap* map, Barrier& barrier, CacheHint hint, void* shared,
                          int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(shared)),
      "l"(map), "r"(barrier.address()), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(hint)
      : "memory");
}
// To L2 alone.
CUTE_DEVICE void tma_prefetch(const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

CUTE_DEVICE void tma_store(const CUtensorMap* map, std::uint32_t shared, int c0, int c1, int c2,
                           int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// Makes this thread's writes of shared memory visible to its stores by TMA. Unlike fence_proxy_async() it orders nothing
// for the compiler: __syncwarp() follows, and ptxas keeps the order of the main loop.
CUTE_DEVICE void tma_store_fence() { asm volatile("fence.proxy.async.shared::cta;"); }
// Ends a group of stores.
CUTE_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;"); }
// Waits until the thread's stores have read shared memory.
CUTE_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace cutlass_kernels::fa3
