// Elements in memory and in registers: 8, 16 or 32 bits there, fp32 here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace cutlass_kernels {

__host__ __device__ inline float as_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Exponent and mantissa of an 8-bit number in the places of a float give a float whose exponent is off by the difference of
// the biases; the product that sets it right is exact for every finite number, subnormal ones too.

struct E4M3 {  // no infinity; NaN is all ones
  static constexpr int kBytes = 1;
  __host__ __device__ static float decode(std::uint32_t bits) {
    const std::uint32_t magnitude = bits & 0x7f;
    const float value = as_float((bits & 0x80) << 24 | magnitude << 20) * 0x1p120f;
    return magnitude == 0x7f ? as_float(0x7fc00000) : value;
  }
};

struct E5M2 {
  static constexpr int kBytes = 1;
  __host__ __device__ static float decode(std::uint32_t bits) {
    const std::uint32_t magnitude = bits & 0x7f;
    const std::uint32_t placed = (bits & 0x80) << 24 | magnitude << 21;
    return magnitude >= 0x7c ? as_float(placed | 0x7f800000) : as_float(placed) * 0x1p112f;
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  using Pair = __half2;
  __device__ static float2 decode(Pair pair) { return __half22float2(pair); }
  __device__ static Pair encode(float low, float high) { return __floats2half2_rn(low, high); }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  using Pair = __nv_bfloat162;
  __device__ static float2 decode(Pair pair) { return __bfloat1622float2(pair); }
  __device__ static Pair encode(float low, float high) { return __floats2bfloat162_rn(low, high); }
};

struct Float32 {
  static constexpr int kBytes = 4;
};

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
