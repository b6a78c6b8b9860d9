// The backends, fastest first: where two serve a request, kAuto takes the first. A new architecture is an entry here.
#pragma once

#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

struct BackendName {
  Backend backend;
  const char* name;
};

constexpr BackendName kBackends[] = {
    {Backend::kFa3, "fa3"},
    {Backend::kFa2, "fa2"},
};

}  // namespace cutlass_kernels
