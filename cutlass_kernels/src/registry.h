// The compiled kernels and the choice among them. Their table is generated from instances.cmake.
#pragma once

#include <string>
#include <vector>

#include "cutlass_kernels/attention.h"

namespace cutlass_kernels {

/// What a block of a kernel computes.
struct TileShape {
  int rows = 0;           ///< query rows
  int kind = 0;           ///< Schedule::tile_kind
  int packed_heads = 0;   ///< Schedule::packed_heads
  int blocks_per_sm = 1;  ///< that run at once
  int most_waves = 2;     ///< of blocks, into which keys are split so that the last one is full
  /// Of split keys: fewer cost more to start and to merge than they take.
  int least_piece = 256;
  bool merges = false;               ///< whether it uses Schedule::merge_counters
  bool splits_without_list = false;  ///< keys of a batch; see parts_of_batch()
  /// Whether blocks take one tile after the other, so that numbers without a tile cost: KernelEntry::counts_tiles.
  bool persistent = false;
};

/// What a kernel unit provides. The registry fills `info` from the unit's row in instances.cmake.
struct KernelEntry {
  KernelInfo info;
  /// The tile this kernel uses for the problem on such a device (10 * major + minor; 0 for an unknown one gives the
  /// smallest): a pure function of the problem's sizes.
  TileShape (*tile)(const AttentionParams& params, int compute_capability) = nullptr;
  /// Enqueues the kernel; params are validated and params.schedule is complete.
  Status (*launch)(const AttentionParams& params, cudaStream_t stream) = nullptr;
  /// Why this kernel cannot take tensors of such strides and sizes, which fit its KernelInfo; empty if it can. Null where
  /// the contract's rules are the only ones.
  std::string (*refusal)(const AttentionParams& params) = nullptr;
  bool counts_tiles = false;  ///< whether it uses Schedule::next_tile
  bool uses_extents = false;  ///< whether it uses Schedule::mask_extents
};

/// One row of the generated table: the facts of instances.cmake, and the unit's own function.
struct RegistryRow {
  KernelInfo info;
  KernelEntry (*entry)();
};
const std::vector<RegistryRow>& registry_rows();

const std::vector<KernelEntry>& registry();

/// The fastest kernel of `backend` that serves `params` on a device of this compute capability, or
/// null and the reasons. The caller has validated params.
const KernelEntry* choose(Backend backend, const AttentionParams& params, int compute_capability,
                          std::vector<std::string>* reasons);

/// Whether a kernel serves the sizes and types of `params`, whatever the device and the features.
bool fits(const KernelInfo& info, Backend backend, const AttentionParams& params);

/// Bytes of an element.
int size_of(DType dtype);

/// What is wrong with `params` whatever the kernel: sizes, strides, missing arrays. Else empty.
/// Pointers are looked at only if `with_tensors`.
std::string contradiction(const AttentionParams& params, bool with_tensors);

}  // namespace cutlass_kernels
