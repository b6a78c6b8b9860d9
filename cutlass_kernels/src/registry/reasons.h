// Why no kernel serves a request, in sentences.
#pragma once

#include <string>
#include <vector>

#include "registry/registry.h"

namespace cutlass_kernels {

/// Why no kernel of one backend serves the request: sieves them by one property after the other.
void explain(Backend backend, const AttentionParams& params, int compute_capability, std::vector<std::string>* reasons);

std::string joined(const std::vector<std::string>& sentences);

}  // namespace cutlass_kernels
