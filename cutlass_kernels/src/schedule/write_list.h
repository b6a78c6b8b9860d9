// The list of a batch: which tile and KV split of which request a thread block computes. Written by one thread block,
// so that no length travels to the host; by cost, longest first (a counting sort), or in even shares (write_shares.h).
//
// A tile's cost is the number of keys its last row sees under a causal mask. That order is right for causal and for
// windowed masks and harmless for full ones: a plan need not know the mask.
#pragma once

#include <cstdint>

#include "copy_vectors.h"
#include "cutlass_kernels/status.h"
#include "plan/launch_params.h"
#include "plan/split.h"

namespace cutlass_kernels {

/// What the kernel is given. It runs once per step or call, on one SM; its time is that of its instructions, which come
/// from memory, and of long chains of sums. So requests are read once, and each thing is written once.
struct ListArgs : RequestParams {
  std::int32_t num_qo_heads;
  std::int32_t splits_of_warp;
  std::int32_t tile_rows;
  SplitRule rule;
  std::int32_t capacity;
  bool fills;  ///< entries up to `capacity` say that there is no tile, for kernels with a thread block for each
  TileListHeader* header;
  WorkItem* list;
  SplitTile* split_tiles;
  std::uint64_t* combine_counters;
};

/// Enqueues the kernel that writes the header, the list, the split tiles and their counters. `uploads`, from pageable
/// host memory, are made first, as parameters of that kernel as far as they fit: a plan of 128 requests is one launch.
Status launch_write_list(const ListArgs& args, const VectorCopies& uploads, cudaStream_t stream);

}  // namespace cutlass_kernels
