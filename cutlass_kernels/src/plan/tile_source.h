// Where tiles come from, and how many tile indices a head has.
#pragma once

#include "plan/launch_params.h"
#include "plan/tile_shape.h"

namespace cutlass_kernels {

struct Device;
struct KernelEntry;

/// The source of tiles for `tile` of `kernel`, and whether a list is needed. Of a batch without a list, a list may
/// still be faster: list_use().
TileSource tile_source(const AttentionParams& params, const KernelEntry& kernel, const TileShape& tile);

/// Tile indices per head where keys are not split. Some may map to no tile.
std::int64_t tile_index_count(TileSource source, const AttentionParams& params, int tile_rows);

/// Whether most tile indices of a batch without a tile list, in order of length, map to no tile.
bool wastes_tile_indices(const AttentionParams& params, int tile_rows);

/// Without a tile list, each thread block of a batch whose keys may be split searches the requests for its split. With
/// 40,000 requests the search takes ten times as long as the attention; beyond this many, keys are split with a list
/// alone.
constexpr int kMostSearchedRequests = 1024;

/// Whether a batch that needs no list gets one.
enum class ListUse {
  kNever,
  kIfFaster,  ///< where it lets keys be split (estimate.h)
  kAlways,    ///< most tile indices would map to no tile, each a thread block; requests get even shares; or keys may be
              ///< split, of more requests than thread blocks search
};
ListUse list_use(const AttentionParams& params, const KernelEntry& kernel, const TileShape& tile, const Device& device);

}  // namespace cutlass_kernels
