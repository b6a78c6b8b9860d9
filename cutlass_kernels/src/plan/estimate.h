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
struct PlanState;

/// A tile, where its indices come from, and what is to be expected of requests of equal lengths.
struct Choice {
  Candidate candidate{};
  TileSource source = TileSource::kSingleRequest;
  std::int64_t splits = 1;  ///< of a tile
  bool combines = false;    ///< whether a kernel looks for splits to combine
  double compute = 0;       ///< us of all thread blocks
  double traffic = 0;       ///< us of memory, at the same time
  double time = 0;          ///< us of the call; 0: there was nothing to compare
};

/// Of all candidates, with and without a list where both may be, the fastest. `schedule_is_kept`: many calls share the
/// list. `all` receives what was compared; without it, nothing is estimated where there is no choice. `params` have
/// rows.
CK_API Choice fastest(const KernelEntry& kernel, const AttentionParams& params, const Device& device,
                      bool schedule_is_kept = false, std::vector<Choice>* all = nullptr);

/// From now on, the tile of this name is taken wherever it is a candidate, in all threads; "": the fastest. For
/// measurements and tests, which have to check that it is one: other names change nothing.
CK_API void prefer_tile(const std::string& name);

/// Whether CUTLASS_KERNELS_LOG is "plan": log_plan() then says on stderr which tiles were compared, and the outcome.
bool logs_plans();
void log_plan(const AttentionParams& params, const Device& device, const PlanState& plan, bool schedule_is_kept);

}  // namespace cutlass_kernels
