// mma.sync: one warp multiplies 16 x 16 by 16 x 8 elements.
#pragma once

#include <cute/arch/mma_sm80.hpp>
#include <cute/config.hpp>

#include <cstdint>

#include "common/element_types.h"

namespace cutlass_kernels {

// CuTe's instruction of an element type, with fp32 accumulators.
template <class Element>
struct MmaAtom;
template <>
struct MmaAtom<fp16> : cute::SM80_16x8x16_F32F16F16F32_TN {};
template <>
struct MmaAtom<bf16> : cute::SM80_16x8x16_F32BF16BF16F32_TN {};

// c += a b, one m16n8k16 tile.
template <class Element>
CUTE_DEVICE void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                     std::uint32_t b1) {
  MmaAtom<Element>::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                        c[3]);
}

}  // namespace cutlass_kernels
