// Enumerations shared by the C++ API, the registry and the Python binding.
#pragma once

#include <cstdint>

// The CUDA runtime's stream handle, declared here so that a consumer needs no CUDA header.
typedef struct CUstream_st* cudaStream_t;

// Functions that the shared library exports: the API, and what the Python extension calls beside it.
#define CK_API __attribute__((visibility("default")))

namespace cutlass_kernels {

/// Element type of a tensor.
enum class DType : std::int32_t {
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat8E4M3,
  kFloat8E5M2,
  // Tokens of quantized latent caches: columns of e4m3, which stand for their products with a scale per group (in fp32,
  // rounded to bfloat16), and columns of the position in bfloat16. Of keys alone, with strides in bytes, k and v being
  // the same memory. "By page": the data of all tokens of a page, then all their scales.
  kLatentV32,         ///< 656 bytes: 512 columns, 4 fp32 scales, 64 columns of the position (vLLM's fp8_ds_mla)
  kLatentV32Nope,     ///< 528: 512 columns, 4 fp32 scales; the first bytes of kLatentV32
  kLatentV4,          ///< 584, by page: 448 columns, 64 of the position; 7 ue8m0 scales and a byte
  kLatentV41ByPage,   ///< 528, by page: 512 columns; 16 ue8m0 scales
  kLatentV41ByToken,  ///< the same bytes token by token
};

/// A family of kernels. kAuto lets the library choose from the device and the request.
enum class Backend : std::int32_t { kAuto, kFa2, kFa3 };

/// Bits of KernelInfo::features and of what a request needs.
enum Feature : std::uint32_t {
  kFeatureIntervalMask = 1u << 0,  ///< full, causal, sliding window, chunked causal
  kFeatureSoftCap = 1u << 1,
  kFeatureSinks = 1u << 2,
  kFeatureRaggedKv = 1u << 3,  ///< keys and values as packed [tokens, heads, dim]
  kFeatureBitMask = 1u << 4,   ///< custom (packed) masks
  kFeaturePagedKv = 1u << 5,
  kFeatureAlibi = 1u << 6,
  kFeatureDeviceScales = 1u << 7,  ///< factors of logits and output in device memory, also per head
  kFeatureStats = 1u << 8,         ///< AttentionParams::stats
  kFeatureGeneralMask = 1u << 9,   ///< windows to the right, chunks without causality, masks over spread keys
};

CK_API const char* to_string(DType dtype);
CK_API const char* to_string(Backend backend);

}  // namespace cutlass_kernels
