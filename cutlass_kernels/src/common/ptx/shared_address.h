// Addresses of shared memory as instructions take them: 32 bits.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace cutlass_kernels {

CUTE_DEVICE std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace cutlass_kernels
