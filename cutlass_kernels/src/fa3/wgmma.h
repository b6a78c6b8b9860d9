// wgmma: asynchronous 64 x N x 16 (e4m3: 64 x N x 32) products of a warpgroup, fp32 accumulators.
//
// Thread t of the warpgroup holds rows r and r + 8, r = 16 (t / 32) + t % 32 / 4, of the 64 x N accumulator: d[4 j +
// {0, 1}] = (r, 8 j + 2 (t % 4) + {0, 1}), d[4 j + {2, 3}] the same of r + 8. As an A operand, 16 columns of such a
// matrix are four registers of packed pairs in the same order, so P needs no exchange between threads. For e4m3 see
// load_fp8.h.
#pragma once

#include <cute/config.hpp>

#include <cstdint>
#include <type_traits>

#include "common/element_types.h"

namespace cutlass_kernels::fa3 {

// Orders writes of registers and (with fence_proxy_async) shared memory before the products that follow.
CUTE_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CUTE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
CUTE_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Pins values to this point of the program: the compiler knows nothing of what is still being computed.
template <int kSize>
CUTE_DEVICE void pin(float (&values)[kSize]) {
  CUTE_UNROLL
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int kSize>
CUTE_DEVICE void pin(std::uint32_t (&values)[kSize]) {
  CUTE_UNROLL
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// Descriptor of a matrix of 128-byte rows with the 128-byte swizzle (PTX ISA, "Shared Memory Matrix Layout"): address
// / 16 in bits 0-13, leading byte offset / 16 in 16-29, stride byte offset / 16 in 32-45, swizzle in 62-63. Eight
// rows are 1024 bytes apart from the next eight.
CUTE_DEVICE std::uint64_t descriptor(std::uint32_t address, std::uint32_t leading_bytes) {
  return std::uint64_t((address & 0x3ffff) >> 4) | std::uint64_t(leading_bytes >> 4) << 16 |
         std::uint64_t(1024 >> 4) << 32 | std::uint64_t(1) << 62;
}
// K-major (Q, K of Q K^T): the leading offset is not used, 16 columns are 32 bytes.
CUTE_DEVICE std::uint64_t descriptor_k_major(std::uint32_t address) { return descriptor(address, 16); }
// MN-major (V of P V): the leading offset leads to the next panel of 64 columns, 16 rows are 2048 bytes.
CUTE_DEVICE std::uint64_t descriptor_mn_major(std::uint32_t address, std::uint32_t panel_bytes) {
  return descriptor(address, panel_bytes);
}

// How B lies in shared memory: k or n contiguous.
enum class BOrder : int { kKMajor = 0, kMnMajor = 1 };

// d (+)= A B. ss(): both in shared memory, K-major; rs(): A in registers, B in shared memory.
template <class Element, int kN>
struct Wgmma;

#define CK_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CK_D1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define CK_D2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define CK_D3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define CK_D4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define CK_D5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define CK_D6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define CK_D7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define CK_D8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define CK_D9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define CK_D10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define CK_D11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define CK_D12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define CK_D13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define CK_D14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define CK_D15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define CK_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CK_F8(i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// One shape: PLACES and REGISTERS list the accumulators, A0.. number the operands after them.
#define CK_WGMMA(N, TYPE, ELEMENT, PLACES, REGISTERS, A0, A1, A2, A3, A4, A5, A6)                                    \
  template <>                                                                                                        \
  struct Wgmma<ELEMENT, N> {                                                                                         \
    static CUTE_DEVICE void ss(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, int accumulate) {                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A2                                                          \
                   ", 0;\n"                                                                                          \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PLACES "}, %" #A0 ", %" #A1  \
                   ", p, 1, 1, 0, 0;\n}"                                                                             \
                   : REGISTERS                                                                                       \
                   : "l"(a), "l"(b), "r"(accumulate));                                                               \
    }                                                                                                                \
    template <BOrder kB>                                                                                             \
    static CUTE_DEVICE void rs(float (&d)[N / 2], const std::uint32_t* a, std::uint64_t b, int accumulate) {         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A5                                                          \
                   ", 0;\n"                                                                                          \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PLACES "}, {%" #A0 ", %" #A1 \
                   ", %" #A2 ", %" #A3 "}, %" #A4 ", p, 1, 1, %" #A6 ";\n}"                                          \
                   : REGISTERS                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(int(kB)));             \
    }                                                                                                                \
  };
// The same of e4m3, 32 columns, whose B cannot be but K-major.
#define CK_WGMMA_E4M3(N, PLACES, REGISTERS, A0, A1, A2, A3, A4, A5, A6)                                                \
  template <>                                                                                                          \
  struct Wgmma<e4m3, N> {                                                                                              \
    static CUTE_DEVICE void ss(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, int accumulate) {                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A2                                                            \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" PLACES "}, %" #A0 ", %" #A1            \
                   ", p, 1, 1;\n}"                                                                                     \
                   : REGISTERS                                                                                         \
                   : "l"(a), "l"(b), "r"(accumulate));                                                                 \
    }                                                                                                                  \
    template <BOrder kB>                                                                                               \
    static CUTE_DEVICE void rs(float (&d)[N / 2], const std::uint32_t* a, std::uint64_t b, int accumulate) {           \
      static_assert(kB == BOrder::kKMajor);                                                                            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A5                                                            \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" PLACES "}, {%" #A0 ", %" #A1 ", %" #A2 \
                   ", %" #A3 "}, %" #A4 ", p, 1, 1;\n}"                                                                \
                   : REGISTERS                                                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                             \
    }                                                                                                                  \
  };
#define CK_WGMMA_BOTH(N, PLACES, REGISTERS, ...)                    \
  CK_WGMMA(N, "f16", fp16, PLACES, CK_LIST REGISTERS, __VA_ARGS__)  \
  CK_WGMMA(N, "bf16", bf16, PLACES, CK_LIST REGISTERS, __VA_ARGS__) \
  CK_WGMMA_E4M3(N, PLACES, CK_LIST REGISTERS, __VA_ARGS__)
#define CK_LIST(...) __VA_ARGS__

CK_WGMMA_BOTH(64, CK_D0 ", " CK_D1 ", " CK_D2 ", " CK_D3, (CK_F8(0), CK_F8(8), CK_F8(16), CK_F8(24)), 32, 33, 34, 35,
              36, 37, 38)
CK_WGMMA_BOTH(80, CK_D0 ", " CK_D1 ", " CK_D2 ", " CK_D3 ", " CK_D4,
              (CK_F8(0), CK_F8(8), CK_F8(16), CK_F8(24), CK_F8(32)), 40, 41, 42, 43, 44, 45, 46)
CK_WGMMA_BOTH(96, CK_D0 ", " CK_D1 ", " CK_D2 ", " CK_D3 ", " CK_D4 ", " CK_D5,
              (CK_F8(0), CK_F8(8), CK_F8(16), CK_F8(24), CK_F8(32), CK_F8(40)), 48, 49, 50, 51, 52, 53, 54)
CK_WGMMA_BOTH(112, CK_D0 ", " CK_D1 ", " CK_D2 ", " CK_D3 ", " CK_D4 ", " CK_D5 ", " CK_D6,
              (CK_F8(0), CK_F8(8), CK_F8(16), CK_F8(24), CK_F8(32), CK_F8(40), CK_F8(48)), 56, 57, 58, 59, 60, 61, 62)
CK_WGMMA_BOTH(128, CK_D0 ", " CK_D1 ", " CK_D2 ", " CK_D3 ", " CK_D4 ", " CK_D5 ", " CK_D6 ", " CK_D7,
              (CK_F8(0), CK_F8(8), CK_F8(16), CK_F8(24), CK_F8(32), CK_F8(40), CK_F8(48), CK_F8(56)), 64, 65, 66, 67,
              68, 69, 70)
CK_WGMMA_BOTH(160,
              CK_D0 ", " CK_D1 ", " CK_D2 ", " CK_D3 ", " CK_D4 ", " CK_D5 ", " CK_D6 ", " CK_D7 ", " CK_D8 ", " CK_D9,
              (CK_F8(0), CK_F8(8), CK_F8(16), CK_F8(24), CK_F8(32), CK_F8(40), CK_F8(48), CK_F8(56), CK_F8(64),
               CK_F8(72)),
              80, 81, 82, 83, 84, 85, 86)
CK_WGMMA_BOTH(176,
              CK_D0 ", " CK_D1 ", " CK_D2 ", " CK_D3 ", " CK_D4 ", " CK_D5 ", " CK_D6 ", " CK_D7 ", " CK_D8 ", " CK_D9
                    ", " CK_D10,
              (CK_F8(0), CK_F8(8), CK_F8(16), CK_F8(24), CK_F8(32), CK_F8(40), CK_F8(48), CK_F8(56), CK_F8(64),
               CK_F8(72), CK_F8(80)),
              88, 89, 90, 91, 92, 93, 94)
CK_WGMMA_BOTH(192,
              CK_D0 ", " CK_D1 ", " CK_D2 ", " CK_D3 ", " CK_D4 ", " CK_D5 ", " CK_D6 ", " CK_D7 ", " CK_D8 ", " CK_D9
                    ", " CK_D10 ", " CK_D11,
              (CK_F8(0), CK_F8(8), CK_F8(16), CK_F8(24), CK_F8(32), CK_F8(40), CK_F8(48), CK_F8(56), CK_F8(64),
               CK_F8(72), CK_F8(80), CK_F8(88)),
              96, 97, 98, 99, 100, 101, 102)
CK_WGMMA_BOTH(256,
              CK_D0 ", " CK_D1 ", " CK_D2 ", " CK_D3 ", " CK_D4 ", " CK_D5 ", " CK_D6 ", " CK_D7 ", " CK_D8 ", " CK_D9
                    ", " CK_D10 ", " CK_D11 ", " CK_D12 ", " CK_D13 ", " CK_D14 ", " CK_D15,
              (CK_F8(0), CK_F8(8), CK_F8(16), CK_F8(24), CK_F8(32), CK_F8(40), CK_F8(48), CK_F8(56), CK_F8(64),
               CK_F8(72), CK_F8(80), CK_F8(88), CK_F8(96), CK_F8(104), CK_F8(112), CK_F8(120)),
              128, 129, 130, 131, 132, 133, 134)

// With the eight columns of ones behind 64 or 128 columns of V (products.h).
CK_WGMMA_E4M3(72, CK_D0 ", " CK_D1 ", " CK_D2 ", " CK_D3 ", %32, %33, %34, %35",
              CK_LIST(CK_F8(0), CK_F8(8), CK_F8(16), CK_F8(24), CK_F4(32)), 36, 37, 38, 39, 40, 41, 42)
CK_WGMMA_E4M3(136,
              CK_D0 ", " CK_D1 ", " CK_D2 ", " CK_D3 ", " CK_D4 ", " CK_D5 ", " CK_D6 ", " CK_D7 ", %64, %65, %66, %67",
              CK_LIST(CK_F8(0), CK_F8(8), CK_F8(16), CK_F8(24), CK_F8(32), CK_F8(40), CK_F8(48), CK_F8(56), CK_F4(64)),
              68, 69, 70, 71, 72, 73, 74)

#undef CK_WGMMA_BOTH
#undef CK_WGMMA_E4M3
#undef CK_WGMMA
#undef CK_LIST
#undef CK_F8
#undef CK_F4
#undef CK_D0
#undef CK_D1
#undef CK_D2
#undef CK_D3
#undef CK_D4
#undef CK_D5
#undef CK_D6
#undef CK_D7
#undef CK_D8
#undef CK_D9
#undef CK_D10
#undef CK_D11
#undef CK_D12
#undef CK_D13
#undef CK_D14
#undef CK_D15

}  // namespace cutlass_kernels::fa3
