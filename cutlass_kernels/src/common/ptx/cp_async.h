// cp.async: copies of 16 bytes from global to shared memory, past L1, by one thread each.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/cache_policy.h"

namespace cutlass_kernels {

// All 16 bytes.
CUTE_DEVICE void cp_async_16(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// If not `valid`, reads nothing and writes zeros.
CUTE_DEVICE void cp_async_16(std::uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// Of 8 bytes, through L1.
CUTE_DEVICE void cp_async_8(std::uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(valid ? 8 : 0)
               : "memory");
}

// If `ignored`, reads nothing and writes zeros. Takes a predicate in place of a number of bytes.
CUTE_DEVICE void cp_async_16_unless(std::uint32_t shared, const void* global, bool ignored) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p;\n}" ::"r"(shared),
      "l"(global), "r"(std::uint32_t(ignored))
      : "memory");
}

// The same two copies, of data that is read once.
CUTE_DEVICE void cp_async_16_once(std::uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0), "l"(evict_first())
               : "memory");
}
CUTE_DEVICE void cp_async_16_once_unless(std::uint32_t shared, const void* global, bool ignored) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, p, %3;\n}" ::"r"(shared),
      "l"(global), "r"(std::uint32_t(ignored)), "l"(evict_first())
      : "memory");
}

// Ends a group of copies.
CUTE_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
// Waits until at most kPending of the thread's groups have not landed.
template <int kPending>
CUTE_DEVICE void cp_async_wait() {
  if constexpr (kPending == 0) {
    asm volatile("cp.async.wait_all;");
  } else {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
  }
}

}  // namespace cutlass_kernels
