// The list of a batch: which tile and KV split of which request a thread block computes. Written by one thread block,
// so that no length travels to the host; by cost, longest first (a counting sort), or in even shares (write_shares.h).
//
// A tile's cost is the number of keys its last row sees under a causal mask. That order is right for causal and for
// windowed masks and harmless for full ones: a plan need not know the mask.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_vectors.h"
#include "cutlass_kernels/status.h"
#include "plan/launch_params.h"
#include "plan/split.h"

namespace cutlass_kernels {

/// Enqueues the kernel that writes the header, the list, the split tiles and their counters. `fills`: entries up to
/// `capacity` say that there is no tile, for kernels with a thread block for each.
/// `uploads`, from pageable host memory, are made first, as parameters of that kernel as far as they fit: a plan of 128
/// requests is one launch.
Status launch_schedule(const AttentionParams& params, std::int32_t tile_rows, const SplitRule& rule,
                       std::int32_t splits_of_warp, std::int32_t capacity, bool fills, TileListHeader* header,
                       WorkItem* list, SplitTile* split_tiles, std::uint64_t* combine_counters,
                       const VectorCopies& uploads, cudaStream_t stream);

/// The same list computed on the host from host lengths (for tests and for reading).
CK_API std::vector<WorkItem> schedule_on_host(const std::vector<std::int32_t>& qo_indptr,
                                              const std::vector<std::int32_t>& kv_indptr, std::int32_t tile_rows);

}  // namespace cutlass_kernels
