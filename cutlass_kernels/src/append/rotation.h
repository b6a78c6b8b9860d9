// What kernels of rotary embeddings share: tables of cosines and sines, and the arithmetic of a pair.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "append/slots.h"
#include "common/element_types.h"
#include "cutlass_kernels/rope.h"

namespace cutlass_kernels {

// kCount numbers of the table.
template <class Table, int kCount>
__device__ void load_table(const char* from, float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    if constexpr (Table::kBytes == 4) {
      x[0] = __ldg(reinterpret_cast<const float*>(from));
    } else {
      Unit<Table, 1> unit;
      unit.load(from);
      unit.widen(x);
    }
  } else if constexpr (Table::kBytes == 4) {
    CUTE_UNROLL
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(from) + i / 4);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  } else {
    Unit<Table, kCount> unit;
    unit.load(from);
    unit.widen(x);
  }
}

// x cos + y sin: the second of a pair (y, x), or with y = -b the first of a pair (x, b). The order of roundings is
// written out, so that all kernels compute the same bits.
__device__ inline float rotated(float x, float y, float cos, float sin) { return fmaf(x, cos, y * sin); }

// The first fault in what a caller asks for, or nothing.
std::string fault_in(const RopeParams& params);

}  // namespace cutlass_kernels
