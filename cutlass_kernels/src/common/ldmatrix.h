// Warp-level data movement of the mma.sync kernels, on 32-bit shared-memory addresses so that the
// compiler keeps one base register and immediate offsets.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace cutlass_kernels {

CUTE_DEVICE void ldmatrix_x4(std::uint32_t (&d)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

CUTE_DEVICE void ldmatrix_x4_trans(std::uint32_t (&d)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// The first `bytes` (0, 8 or 16) of 16 bytes from global to shared memory, past L1, and zeros; of 0 bytes nothing is read.
CUTE_DEVICE void cp_async_first(std::uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// All 16 bytes.
CUTE_DEVICE void cp_async_16(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global)
               : "memory");
}

// All of them; zeros if not `valid`.
CUTE_DEVICE void cp_async_16(std::uint32_t shared, const void* global, bool valid) {
  cp_async_first(shared, global, valid ? 16 : 0);
}

// All of them; zeros, and nothing is read, if `ignored`.
CUTE_DEVICE void cp_async_16_unless(std::uint32_t shared, const void* global, bool ignored) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p;\n}" ::"r"(shared),
      "l"(global), "r"(std::uint32_t(ignored))
      : "memory");
}

// What is read once should leave the L2 cache before anything else does.
CUTE_DEVICE std::uint64_t evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The same copies of data that is read once: all 16 bytes, and zeros if not `valid`,
CUTE_DEVICE void cp_async_16_once(std::uint32_t shared, const void* global, bool valid) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared),
      "l"(global), "r"(valid ? 16 : 0), "l"(evict_first())
      : "memory");
}

// or if `ignored`.
CUTE_DEVICE void cp_async_16_once_unless(std::uint32_t shared, const void* global, bool ignored) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, p, %3;\n}" ::"r"(shared),
      "l"(global), "r"(std::uint32_t(ignored)), "l"(evict_first())
      : "memory");
}

// Hardware barrier `id` among `threads` threads, those that arrive and those that wait.
CUTE_DEVICE void named_barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
CUTE_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// c += a b, one m16n8k16 tile.
template <class Mma>
CUTE_DEVICE void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                     std::uint32_t b1) {
  Mma::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
}

}  // namespace cutlass_kernels
