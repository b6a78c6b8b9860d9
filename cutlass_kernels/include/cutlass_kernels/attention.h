// Entry points of the library. Nothing here allocates, synchronises or keeps state (but the facts of each device):
// every call can be made from several threads and captured into a CUDA graph.
//
//   attention(params, workspace, ...)                        one call
//   make_plan -> make_schedule -> attention(plan, ...) ...   one plan, many calls
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
CK_API std::vector<std::string> not_supported_reasons(Backend backend, const AttentionParams& params,
                                                      int compute_capability);

/// Workspace size for full speed: tile list, partial results, counters. A batch that needs a tile list (attention()
/// says so) fails without it. A single request without indptrs needs no workspace: if the size is not 0, passing one
/// makes the kernel faster. Tensors may be null as yet, but what is optional (indptrs of a single request, mask, ALiBi,
/// scales) counts if it is not null: set it to any address that is a multiple of 16. The answer is for the current
/// device (without a GPU, the larger of an H200's and an A100's) and for every kernel of `backend`.
CK_API std::size_t workspace_size(const AttentionParams& params, Backend backend = Backend::kAuto);

/// Computes attention on `stream`. The workspace (device memory, 16-byte aligned) belongs to this call until the stream
/// has passed it. `backend` kAuto takes the fastest that serves the request (kFa2 for decoding, else the newest); any
/// other serves it or fails. Runs on the calling thread's current device, which the tensors and the stream belong to.
CK_API Status attention(const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                        cudaStream_t stream, Backend backend = Backend::kAuto);

/// How a problem is computed: which kernel, in which tiles, how keys are split, where in the workspace everything lies.
/// Made once for many calls: the layers of a model, or the replays of a graph. Holds no address and may be copied.
class Plan {
 public:
  CK_API Plan();
  /// Bytes of workspace that calls with this plan need.
  CK_API std::size_t workspace_size() const;
  /// Whether make_schedule() has to be called before attention().
  CK_API bool needs_schedule() const;
  /// The kernel's name, as in list_kernels(); empty if there is nothing to compute.
  CK_API const char* kernel() const;

 private:
  friend struct PlanAccess;
  alignas(8) unsigned char state_[512];
};

/// Plans for the current device. Mask, scales, lengths and tensors may change before attention(): a mask given here,
/// and total_kv, only decide the tiles, and strides that fa3 cannot read (0, or 16 GiB from token to token) lead kAuto
/// to fa2. Give bit masks, ALiBi, scales in device memory and statistics here where calls have them: attention() may
/// refuse a plan made without. Types, sizes, max_qo_len, the rule for splitting keys, and whether there are indptrs
/// must not change: attention() then refuses the plan. total_q may where the plan has a tile list; make_schedule()
/// refuses more rows than were planned. Leaves `plan` as it was where it fails.
CK_API Status make_plan(const AttentionParams& params, Plan* plan, Backend backend = Backend::kAuto);

/// Writes the tile list of a batch, longest tiles first, into the workspace: once, and again when lengths change. Reads
/// qo_indptr and kv_indptr on the device. Does nothing for a plan without a list.
///
/// A captured attention() goes on reading the list. Between replays, make plans with the same mask, totals, page size
/// and rule for splitting keys (fixed_split_size, disable_split_kv, max_kv_len), and without qo_indptr_host: they then
/// lay out the workspace alike.
CK_API Status make_schedule(const Plan& plan, const AttentionParams& params, void* workspace,
                            std::size_t workspace_bytes, cudaStream_t stream);

/// Computes attention as planned, in the workspace in which make_schedule() left its list. Calls with one workspace
/// must follow one another, as on one stream they do: running kernels share counters in it.
CK_API Status attention(const Plan& plan, const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                        cudaStream_t stream);

/// The library's version, e.g. "0.3.0", or "0.3.0.dev0" of sources before that.
CK_API const char* version();

}  // namespace cutlass_kernels
