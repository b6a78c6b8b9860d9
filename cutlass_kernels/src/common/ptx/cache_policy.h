// L2 cache policies of loads and copies.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace cutlass_kernels {

// For data that is read once: it leaves the L2 cache before anything else does.
CUTE_DEVICE std::uint64_t evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace cutlass_kernels
