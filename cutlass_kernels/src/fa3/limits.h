// What the fa3 kernels cannot read or write although it is within the contract: TMA sees tensors through maps, and these
// have limits.
#pragma once

#include <string>

#include "cutlass_kernels/params.h"

namespace cutlass_kernels::fa3 {

/// Why no tensor map can describe a tensor of `params`; empty if maps can. Says nothing of a tensor that is not known yet
/// (null, strides of 0).
std::string refusal(const AttentionParams& params);

/// The same for e4m3 tensors, whose kernels also read pages through maps alone.
std::string fp8_refusal(const AttentionParams& params);

}  // namespace cutlass_kernels::fa3
