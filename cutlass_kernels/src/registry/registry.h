// The compiled kernels and the choice among them. Their table is generated from instances.cmake.
#pragma once

#include <string>
#include <vector>

#include "cutlass_kernels/attention.h"
#include "plan/launch_params.h"
#include "plan/tile_shape.h"

namespace cutlass_kernels {

struct Device;

/// What a kernel unit provides. The registry fills `info` from the unit's row in instances.cmake.
struct KernelEntry {
  KernelInfo info;
  /// The tiles that this kernel may use for the problem on a device: a pure function of sizes, options and facts.
  Candidates (*candidates)(const AttentionParams& params, const Device& device) = nullptr;
  /// Enqueues the kernel; params are validated and params.plan is complete.
  Status (*launch)(const LaunchParams& params, cudaStream_t stream) = nullptr;
  /// Why this kernel cannot take tensors of such strides and sizes, which fit its KernelInfo; empty if it can. Null
  /// where the contract's rules are the only ones.
  std::string (*refusal)(const AttentionParams& params) = nullptr;
  /// Whether thread blocks compute one tile after the other, fetched with LaunchPlan::tile_counter.
  bool is_persistent = false;
  bool uses_mask_extents = false;
  /// Whether it reads AttentionParams::q_rope and k_rope.
  bool reads_rope = false;
  /// Of latent kernels: reads keys by slots (PageTable::slots_per_page), writes max_logits and a flash_mla_lse.
  bool reads_slots = false;
};

/// One row of the generated table: the facts of instances.cmake, and the unit's own function.
struct RegistryRow {
  KernelInfo info;
  KernelEntry (*entry)();
};
const std::vector<RegistryRow>& registry_rows();

const std::vector<KernelEntry>& registry();

/// Whether a kernel computes valid `params` on a device of this compute capability.
bool serves(const KernelEntry& entry, const AttentionParams& params, int compute_capability);

/// The fastest kernel of `backend` that serves `params`, or null and the reasons.
CK_API const KernelEntry* choose(Backend backend, const AttentionParams& params, int compute_capability,
                                 std::vector<std::string>* reasons);

}  // namespace cutlass_kernels
