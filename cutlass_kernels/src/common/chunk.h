// Elements that a thread loads and stores together: 4, 8 or 16 bytes in memory, fp32 in registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/element_types.h"

namespace cutlass_kernels {

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
