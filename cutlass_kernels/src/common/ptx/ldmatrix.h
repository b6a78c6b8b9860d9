// ldmatrix: matrices of 8 x 8 elements of 16 bits, from shared memory to the fragments of mma.sync. Addresses are
// 32-bit shared-memory addresses, so that the compiler keeps one base register and immediate offsets.
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

}  // namespace cutlass_kernels
