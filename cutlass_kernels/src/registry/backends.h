// The backends, in the order in which kAuto asks them (but for decoding: is_decode.h). Generated from ck_backends() in
// instances.cmake.
#pragma once

#include <vector>

#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

struct BackendName {
  Backend backend;
  const char* name;
};

/// Those that were not compiled, too: they have reasons.
CK_API const std::vector<BackendName>& backends();

}  // namespace cutlass_kernels
