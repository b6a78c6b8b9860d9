// What fmha_v2() is told about a batch, in the words of the engine: layouts are strides, block tables page tables,
// masks intervals.
#pragma once

#include "cutlass_kernels/fmha_v2.h"
#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"

namespace cutlass_kernels {

/// Fills `attention`, all but its schedule; or says what contradicts the layout.
Status describe(const FmhaV2Params& params, AttentionParams* attention);

}  // namespace cutlass_kernels
