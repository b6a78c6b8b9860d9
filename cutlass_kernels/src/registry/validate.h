// What is wrong with a request whatever the kernel: sizes, strides, missing arrays.
#pragma once

#include <string>

#include "cutlass_kernels/params.h"

namespace cutlass_kernels {

/// A sentence with the value and the remedy; empty if nothing is wrong. Pointers are looked at only if `with_tensors`.
CK_API std::string contradiction(const AttentionParams& params, bool with_tensors);

/// The same of what tells the rows and keys of requests: indptrs, lengths and page tables.
std::string unknown_lengths(const AttentionParams& params);

}  // namespace cutlass_kernels
