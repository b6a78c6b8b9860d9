// The tile list of a batch: which query tile of which request a thread block computes, longest first.
//
// A tile's cost is the number of keys its last row sees under a causal mask. That order is right for
// causal and for windowed masks and harmless for full ones, so one list serves every mask and a plan
// need not know it. The list is a counting sort by cost, made by one thread block on the device; no length
// ever travels to the host.
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
