// What kernels that write to slots of a paged cache share: where an entry lies, and how elements are converted to its
// type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "common/element_bytes.h"
#include "common/element_types.h"
#include "common/fast_divisor.h"
#include "cutlass_kernels/append.h"

namespace cutlass_kernels {

// kCount elements of a head, as they come.
template <class In, int kCount>
struct Unit {
  Chunk<kCount * In::kBytes> chunk;

  __device__ void load(const char* from) { chunk = chunk.load(from); }
  // From memory that the kernel also writes to.
  __device__ void load_coherent(const char* from) {
    static_assert(sizeof(chunk) == 16);
    const uint4 loaded = *reinterpret_cast<const uint4*>(from);
    chunk.words[0] = loaded.x;
    chunk.words[1] = loaded.y;
    chunk.words[2] = loaded.z;
    chunk.words[3] = loaded.w;
  }
  __device__ void widen(float (&x)[kCount]) const { decode<In, kCount>(chunk, x); }
};
template <class In>
struct Unit<In, 1> {
  std::uint16_t bits;

  __device__ void load(const char* from) { bits = *reinterpret_cast<const std::uint16_t*>(from); }
  __device__ void load_coherent(const char* from) { load(from); }
  __device__ void widen(float (&x)[1]) const {
    if constexpr (In::kDType == DType::kFloat16) {
      x[0] = __half2float(__ushort_as_half(bits));
    } else {
      x[0] = __bfloat162float(__ushort_as_bfloat16(bits));
    }
  }
};

// What elements are divided by. A power of two, which a scale mostly is, is a factor of the same bits: divisions of
// other scales take longer than memory does.
struct Divisor {
  float scale;
  float factor;  // 1 / scale
  bool is_power_of_two;

  __device__ explicit Divisor(float divisor) : scale(divisor), factor(1.0f / divisor) {
    const std::uint32_t bits = __float_as_uint(divisor);
    const std::uint32_t exponent = bits >> 23 & 0xff;
    is_power_of_two = (bits & 0x7fffff) == 0 && 1 <= exponent && exponent <= 253;
  }
  __device__ float operator()(float x) const { return is_power_of_two ? x * factor : x / scale; }
};

// What a kernel knows of the type of a cache: that it is the one of keys and values, or one of 8 bits, or where a
// thread has one element, nothing. (To branch between the types of 8 bits takes 3 to 4 % longer: conversions are what
// takes time.)
enum class CacheType { kSame, kE4M3, kE5M2, kAny };

template <class In, int kCount>
__device__ void store_unit(const float (&x)[kCount], char* to) {
  if constexpr (kCount == 1) {
    const typename In::Pair pair = In::encode(x[0], x[0]);
    std::memcpy(to, &pair, 2);
  } else {
    store<In, kCount>(x, to);
  }
}

template <int kCount>
__device__ void store_narrow(const float (&x)[kCount], char* to, __nv_fp8_interpretation_t kind) {
  if constexpr (kCount == 1) {
    *reinterpret_cast<std::uint8_t*>(to) = __nv_cvt_float_to_fp8(x[0], __NV_SATFINITE, kind);
  } else {
    Chunk<kCount> packed{};
    CUTE_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      packed.words[i / 4] |= __nv_cvt_float2_to_fp8x2({x[i], x[i + 1]}, __NV_SATFINITE, kind) << i % 4 * 8;
    }
    packed.store(to);
  }
}

// A page, and an entry in it.
struct Place {
  std::int64_t page;
  std::int64_t entry;
};

// Which slots tokens go to.
struct SlotMap {
  const void* slots;
  bool are_64_bit;
  std::int64_t page_size;
  FastDivisor small_page_size;  // if slots are numbers of 31 bits, else 0
  std::int64_t num_slots;       // of the cache

  template <class Params>
  explicit SlotMap(const Params& params)
      : slots(params.slots),
        are_64_bit(params.slots_are_64_bit),
        page_size(params.page_size),
        num_slots(params.num_pages * params.page_size) {
    small_page_size.divisor = 0;
    if (num_slots <= std::numeric_limits<std::int32_t>::max()) {
      small_page_size = FastDivisor(std::uint32_t(page_size));
    }
  }
  SlotMap() = default;

  // -1 where the cache has no such slot.
  __device__ std::int64_t of_token(std::int64_t token) const {
    const std::int64_t slot = are_64_bit ? __ldg(static_cast<const long long*>(slots) + token)
                                         : __ldg(static_cast<const int*>(slots) + token);
    return slot < num_slots ? slot : -1;
  }
  __device__ Place place_of(std::int64_t slot) const {
    const std::int64_t page = small_page_size.divisor > 0 ? small_page_size.divide(unsigned(slot)) : slot / page_size;
    return {page, slot - page * page_size};
  }
};

// The keys or the values of a cache. Strides in elements.
struct CachePart {
  char* data;
  std::int64_t stride_page;
  std::int64_t stride_token;
  std::int64_t stride_head;
  float scale;
  const float* scales;  // by head, or null
  std::int32_t stride_scale;
  DType dtype;

  CachePart() = default;
  CachePart(const TensorView& cache, DType type, std::int64_t page, float factor, const DeviceScale& factors)
      : data(static_cast<char*>(cache.data)),
        stride_page(page),
        stride_token(cache.stride_token),
        stride_head(cache.stride_head),
        scale(factor),
        scales(factors.data),
        stride_scale(factors.stride),
        dtype(type) {}

  // Where the entry of a head begins, in elements.
  __device__ std::int64_t entry_at(const Place& place, std::int64_t head) const {
    return place.page * stride_page + place.entry * stride_token + head * stride_head;
  }
  __device__ Divisor divisor_of(std::int64_t head) const {
    return Divisor(scale * (scales == nullptr ? 1.0f : __ldg(scales + head * stride_scale)));
  }
  // Divides elements and stores them, from this one on.
  template <class In, CacheType kType, int kCount>
  __device__ void store_divided(float (&x)[kCount], std::int64_t element, const Divisor& divide) const {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) x[i] = divide(x[i]);
    const auto is = [&](CacheType type, DType of_type) {
      return kType == CacheType::kAny ? dtype == of_type : kType == type;
    };
    if (is(CacheType::kE4M3, DType::kFloat8E4M3)) {
      store_narrow(x, data + element, __NV_E4M3);
    } else if (is(CacheType::kE5M2, DType::kFloat8E5M2)) {
      store_narrow(x, data + element, __NV_E5M2);
    } else {
      store_unit<In>(x, data + element * In::kBytes);
    }
  }
  // Whether units of 8 elements lie at multiples of their size.
  bool is_aligned() const {
    return (stride_page | stride_token | stride_head) % 8 == 0 &&
           reinterpret_cast<std::uintptr_t>(data) % (8 * size_of(dtype)) == 0;
  }
};

// The first fault in what a caller asks for, or nothing.
std::string fault_in(const AppendBySlotParams& params);

}  // namespace cutlass_kernels
