// Element types: what each needs to be read from memory, computed with and written. Names are those of PTX; the names
// of tensors' types are DType's.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cute/config.hpp>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

__host__ __device__ inline float as_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct fp16 {
  using Operand = fp16;  // what products take
  using Output = fp16;   // what is written
  static constexpr int kBytes = 2;
  static constexpr DType kDType = DType::kFloat16;
  using Pair = __half2;
  __device__ static float2 decode(Pair pair) { return __half22float2(pair); }
  __device__ static Pair encode(float low, float high) { return __floats2half2_rn(low, high); }
  // The low half of the register holds `lo`.
  static CUTE_DEVICE std::uint32_t pack(float lo, float hi) {
    std::uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
  }
};

struct bf16 {
  using Operand = bf16;
  using Output = bf16;
  static constexpr int kBytes = 2;
  static constexpr DType kDType = DType::kBFloat16;
  using Pair = __nv_bfloat162;
  __device__ static float2 decode(Pair pair) { return __bfloat1622float2(pair); }
  __device__ static Pair encode(float low, float high) { return __floats2bfloat162_rn(low, high); }
  static CUTE_DEVICE std::uint32_t pack(float lo, float hi) {
    std::uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
  }
};

// fp16 or bf16, whichever the parameters say: one kernel in place of two.
struct Any16Bit {};

// Two numbers as 16 bits each; the low half of the register holds `low`. For Any16Bit, `type` says which.
template <class Element>
CUTE_DEVICE std::uint32_t pack_pair([[maybe_unused]] DType type, float low, float high) {
  if constexpr (std::is_same_v<Element, Any16Bit>) {
    return type == DType::kFloat16 ? fp16::pack(low, high) : bf16::pack(low, high);
  } else {
    return Element::pack(low, high);
  }
}

struct fp32 {
  static constexpr int kBytes = 4;
  static constexpr DType kDType = DType::kFloat32;
};

// Exponent and mantissa of an 8-bit number in the places of a float give a float whose exponent is off by the
// difference of the biases; the product that sets it right is exact for every finite number, subnormal ones too.

struct e4m3 {  // no infinity; NaN is all ones
  static constexpr int kBytes = 1;
  static constexpr DType kDType = DType::kFloat8E4M3;
  __host__ __device__ static float decode(std::uint32_t bits) {
    const std::uint32_t magnitude = bits & 0x7f;
    const float value = as_float((bits & 0x80) << 24 | magnitude << 20) * 0x1p120f;
    return magnitude == 0x7f ? as_float(0x7fc00000) : value;
  }
  // Four numbers, the lowest byte of the register first; beyond 448 they become 448.
  static CUTE_DEVICE std::uint32_t pack(float x0, float x1, float x2, float x3) {
    std::uint32_t packed = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890  // fa3's alone, but merges are compiled for all
    asm("{\n.reg .b16 lo, hi;\n"
        "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
        "mov.b32 %0, {lo, hi};\n}"
        : "=r"(packed)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
#endif
    return packed;
  }
};

struct e5m2 {
  static constexpr int kBytes = 1;
  static constexpr DType kDType = DType::kFloat8E5M2;
  __host__ __device__ static float decode(std::uint32_t bits) {
    const std::uint32_t magnitude = bits & 0x7f;
    const std::uint32_t placed = (bits & 0x80) << 24 | magnitude << 21;
    return magnitude >= 0x7c ? as_float(placed | 0x7f800000) : as_float(placed) * 0x1p112f;
  }
};

// q, k and v of e4m3, o of another type or, where params.o_dtype says so, of theirs.
template <class Out>
struct Fp8To {
  using Operand = e4m3;
  using Output = Out;
  static constexpr int kBytes = e4m3::kBytes;
};

// ---- Elements that a thread loads and stores together: 4, 8 or 16 bytes in memory, fp32 in registers.

// 4, 8 or 16 bytes that are loaded and stored at once.
template <int kBytes>
struct Chunk {
  std::uint32_t words[kBytes / 4];

  __device__ static Chunk load(const char* from) {
    Chunk chunk;
    if constexpr (kBytes == 16) {
      const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(from));
      chunk = {{loaded.x, loaded.y, loaded.z, loaded.w}};
    } else if constexpr (kBytes == 8) {
      const uint2 loaded = __ldg(reinterpret_cast<const uint2*>(from));
      chunk = {{loaded.x, loaded.y}};
    } else {
      chunk = {{__ldg(reinterpret_cast<const std::uint32_t*>(from))}};
    }
    return chunk;
  }

  __device__ void store(char* to) const {
    if constexpr (kBytes == 16) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }
  }
};

template <class Element, int kCount>
__device__ void decode(const Chunk<kCount * Element::kBytes>& chunk, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (Element::kBytes == 4) {
      values[i] = as_float(chunk.words[i]);
    } else if constexpr (Element::kBytes == 1) {
      values[i] = Element::decode(chunk.words[i / 4] >> (i % 4 * 8));
    } else if (i % 2 == 0) {
      typename Element::Pair pair;
      std::memcpy(&pair, &chunk.words[i / 2], 4);
      const float2 both = Element::decode(pair);
      values[i] = both.x;
      values[i + 1] = both.y;
    }
  }
}

template <class Element, int kCount>
__device__ void store(const float (&values)[kCount], char* to) {
  Chunk<kCount * Element::kBytes> chunk;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (Element::kBytes == 4) {
      std::memcpy(&chunk.words[i], &values[i], 4);
    } else if (i % 2 == 0) {
      const typename Element::Pair pair = Element::encode(values[i], values[i + 1]);
      std::memcpy(&chunk.words[i / 2], &pair, 4);
    }
  }
  chunk.store(to);
}

}  // namespace cutlass_kernels
