// Problems that fa3 does not serve although the contract allows them: TMA addresses tensors through tensor maps,
// whose strides and sizes have limits.
#pragma once

#include <string>

#include "cutlass_kernels/params.h"

namespace cutlass_kernels::fa3 {

/// Why no tensor map can describe a tensor of `params`; empty if maps can. A tensor that is not known yet (null,
/// strides of 0) is not judged.
std::string refusal(const AttentionParams& params);

/// The same, calling params.q and params.k by other names.
std::string refusal(const AttentionParams& params, const char* q_name, const char* k_name);

/// The same for e4m3 tensors, whose kernels read pages through maps alone.
std::string fp8_refusal(const AttentionParams& params);

}  // namespace cutlass_kernels::fa3
