// Entry points of the library. Nothing here allocates, synchronises or keeps state: every call can be
// made from several threads and captured into a CUDA graph.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"
#include "cutlass_kernels/types.h"

namespace cutlass_kernels {

/// One row of the table of compiled kernels.
struct KernelInfo {
  std::string name;  ///< e.g. "fa2_bfloat16_hd128"
  Backend backend = Backend::kAuto;
  DType q_dtype = DType::kFloat16;
  DType kv_dtype = DType::kFloat16;
  int head_dim_qk = 0;  ///< largest dimension served; smaller multiples of 8 are zero-padded on load
  int head_dim_vo = 0;
  std::uint32_t features = 0;  ///< bits of Feature
  int min_compute_capability = 0;  ///< 10 * major + minor
  int max_compute_capability = 0;
};

/// The compiled kernels, in the order of instances.cmake.
const std::vector<KernelInfo>& list_kernels();

/// Why `backend` cannot compute `params` on a device of this compute capability (10 * major + minor);
/// empty if it can. Looks at types, sizes, strides and features, never at device memory.
std::vector<std::string> not_supported_reasons(Backend backend, const AttentionParams& params,
                                               int compute_capability);

/// Bytes that make_schedule() writes for this problem, and that attention() needs when
/// params.schedule is empty. 0 for a single request.
std::size_t workspace_size(const AttentionParams& params);

/// Writes the work list of a batch into `workspace` (device memory, 16-byte aligned) on `stream` and
/// fills `schedule`. Depends on the lengths only: mask, scale and tensors may change before attention().
/// total_q is an upper bound of the rows the list must cover.
Status make_schedule(const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                     cudaStream_t stream, Schedule* schedule);

/// Computes attention on `stream`. With an empty params.schedule a batch is scheduled first, in
/// `workspace`. `backend` kAuto takes the fastest that serves the request; any other serves it or fails.
Status attention(const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                 cudaStream_t stream, Backend backend = Backend::kAuto);

/// The library's version, e.g. "0.1.0".
const char* version();

}  // namespace cutlass_kernels
