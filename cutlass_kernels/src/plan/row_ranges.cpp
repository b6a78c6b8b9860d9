#include "plan/row_ranges.h"

#include <limits>
#include <string>
#include <vector>

#include "plan/launch_params.h"
#include "plan/packing.h"
#include "registry/registry.h"

namespace cutlass_kernels {
namespace {

constexpr std::int32_t kAnyRows = std::numeric_limits<std::int32_t>::max();

/// The kernel and the tile of a part; the same for two parts: one kernel computes both.
struct PartTile {
  const KernelEntry* kernel = nullptr;
  TileShape tile;

  PartTile(const AttentionParams& part, Backend backend, const Device& device) {
    std::vector<std::string> reasons;
    kernel = choose(backend, part, device.compute_capability, &reasons);
    if (kernel != nullptr) tile = kernel->tile(part, device);
  }
  // `combines` and `splits_without_list` decide the splits of a request, which must not depend on the parts of its batch.
  bool operator==(const PartTile& other) const {
    return kernel == other.kernel && tile.kind == other.tile.kind && tile.rows == other.tile.rows &&
           tile.combines == other.tile.combines &&
           tile.splits_without_list == other.tile.splits_without_list;
  }
};

}  // namespace

RowRanges row_ranges(const AttentionParams& params, Backend backend, const Device& device) {
  RowRanges ranges;
  ranges.parts[0] = params;
  ranges.count = 1;
  const bool chosen = params.least_rows > 0 || params.most_rows != kAnyRows;  // by the caller
  if (!params.batch_invariant || chosen) return ranges;
  // Of the rows of a request only a bound may be known.
  const bool exact = params.qo_indptr == nullptr && params.seqused_q == nullptr;
  const std::int64_t most =
      is_batch(params) && params.max_qo_len > 0 ? params.max_qo_len : params.total_q;
  const std::int32_t decode_rows = kDecodeRows / (params.num_qo_heads / params.num_kv_heads);
  ranges.count = 0;
  std::int32_t least = 0;
  for (const std::int32_t end : {decode_rows, std::int32_t(kPackedUpToRows), kAnyRows}) {
    if (end < least || least > most) continue;
    AttentionParams part = params;
    part.least_rows = least;
    part.most_rows = end;
    least = end == kAnyRows ? end : end + 1;
    if (ranges.count > 0) {
      AttentionParams& before = ranges.parts[std::size_t(ranges.count - 1)];
      if (PartTile(before, backend, device) == PartTile(part, backend, device)) {
        before.most_rows = end;
        continue;
      }
    }
    ranges.parts[std::size_t(ranges.count++)] = part;
  }
  if (exact) {
    for (int i = 0; i < ranges.count; ++i) {
      if (most <= ranges.parts[std::size_t(i)].most_rows) {
        ranges.parts[0] = ranges.parts[std::size_t(i)];
        break;
      }
    }
    ranges.count = 1;
  }
  return ranges;
}

}  // namespace cutlass_kernels
