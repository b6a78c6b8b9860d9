// Which problems of 16-bit keys kAuto gives to fa2 first. (Of 8-bit keys: registry.cpp.)
#pragma once

#include "cutlass_kernels/params.h"

namespace cutlass_kernels {

/// Whether a problem of 16-bit keys has at most 16 query rows per key head and request, on average. fa2 then has a tile
/// that waits for memory only, and is 4 to 40 % faster than fa3 (1 to 128 requests). Not where the results of a request
/// must not depend on the others of its batch, nor for head dimensions 192/128, which fa2 pads. Latent attention
/// (576/512) of so few rows waits for memory on fa2, too: 64 requests over 4k keys, 16 heads: 82 us, fa3 89 (32 heads:
/// 96, 91). Keys by slots are left to fa3, where the two have not been compared.
CK_API bool is_decode(const AttentionParams& params);

}  // namespace cutlass_kernels
