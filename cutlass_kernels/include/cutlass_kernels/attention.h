// Entry points of the library. Nothing here allocates, synchronises or keeps state (but what a device has answered about
// itself): every call can be made from several threads and captured into a CUDA graph.
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
  int head_dim_qk = 0;  ///< largest served; smaller multiples of 8 are zero-padded on load
  int head_dim_vo = 0;
  std::uint32_t features = 0;      ///< bits of Feature
  int min_compute_capability = 0;  ///< 10 * major + minor
  int max_compute_capability = 0;  ///< 0: no limit
};

/// The compiled kernels, in the order of instances.cmake.
CK_API const std::vector<KernelInfo>& list_kernels();

/// Why `backend` cannot compute `params` on a device of this compute capability (10 * major + minor);
/// empty if it can. Looks at types, sizes, strides and features, never at device memory.
CK_API std::vector<std::string> not_supported_reasons(Backend backend,
                                                      const AttentionParams& params,
                                                      int compute_capability);

/// Bytes of workspace that make_schedule() needs for this problem, and attention() when params.schedule
/// is empty. A single request without offsets needs none: where the answer is not 0, a kernel is faster with it (set
/// qo_indptr, or batch_size, before asking about a batch). Asks no device: the answer holds for every kernel of `backend`.
CK_API std::size_t workspace_size(const AttentionParams& params, Backend backend = Backend::kAuto);

/// Writes the work list of a batch into `workspace` (device memory, 16-byte aligned) on `stream` and
/// fills `schedule`. Mask, scale and tensors may change before attention(); the mask given here, and total_kv, only decide
/// the size of tiles. A captured attention() goes on reading the list: plan for it with the same mask, totals,
/// page size and rule for splitting keys (fixed_split_size, disable_split_kv, max_kv_len) each time. total_q is an upper bound of the rows the list must cover. Strides count where they are set: with kAuto,
/// those that fa3 cannot read (0, or 16 GiB from token to token) make it a list for fa2.
///
/// The workspace also holds the counters with which running kernels share out tiles: calls of attention() with one
/// schedule must follow one another, as on one stream they do. For calls that may overlap, make a schedule each.
CK_API Status make_schedule(const AttentionParams& params, void* workspace,
                            std::size_t workspace_bytes, cudaStream_t stream, Schedule* schedule,
                            Backend backend = Backend::kAuto);

/// Computes attention on `stream`. With an empty params.schedule a batch is scheduled first, in `workspace`, which belongs to
/// this call until the stream has passed it; unless params.max_qo_len is set: then nothing is to be scheduled. `backend` kAuto
/// takes the fastest that serves the request; any other serves it or fails.
/// Runs on the calling thread's current device, which the tensors and the stream belong to.
CK_API Status attention(const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                        cudaStream_t stream, Backend backend = Backend::kAuto);

/// The library's version, e.g. "0.1.0".
CK_API const char* version();

}  // namespace cutlass_kernels
