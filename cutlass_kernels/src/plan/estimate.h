// Which tile computes a problem: of all candidates, the one whose estimated time is the least.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/launch_params.h"
#include "plan/tile_shape.h"

namespace cutlass_kernels {

struct Device;
struct KernelEntry;

/// A tile, where its indices come from, and what is to be expected if all requests are as long.
struct Choice {
  Candidate candidate{};
  TileSource source = TileSource::kSingleRequest;
  std::int64_t splits = 1;  ///< of a tile
  bool combines = false;    ///< whether a kernel looks for splits to combine
  double compute = 0;       ///< us of all thread blocks
  double traffic = 0;       ///< us of memory, at the same time
  double time = 0;          ///< us of the call
};

/// Of all candidates, with and without a list where both may be, the fastest. `all` receives what was compared; without
/// it, nothing is estimated where there is no choice. `params` have rows.
CK_API Choice fastest(const KernelEntry& kernel, const AttentionParams& params, const Device& device,
                      std::vector<Choice>* all = nullptr);

/// From now on, the tile of this name is taken wherever it is a candidate, in all threads; "": the fastest. For
/// measurements and tests. Unknown names change nothing.
CK_API void prefer_tile(const std::string& name);

/// Whether CUTLASS_KERNELS_LOG is "plan": then each plan says on stderr what was compared and what was taken.
bool logs_plans();
void log_choice(const KernelEntry& kernel, const AttentionParams& params, const std::vector<Choice>& compared,
                const Choice& taken);

}  // namespace cutlass_kernels
