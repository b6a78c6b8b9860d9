// Where everything lies in a workspace of attention(), and so how large it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"

namespace cutlass_kernels {

/// A part of the workspace. Empty: it is not there.
struct Region {
  std::size_t offset = 0;
  std::size_t bytes = 0;

  /// Its address in memory that begins at `base`; null if it is empty.
  template <class T>
  T* in(void* base) const {
    return bytes == 0 ? nullptr : reinterpret_cast<T*>(static_cast<char*>(base) + offset);
  }
};

/// Memory in which regions follow one another, each 16-byte aligned.
class RegionStack {
 public:
  Region add(std::size_t bytes) {
    const Region region{bytes_, bytes};
    bytes_ += (bytes + 15) / 16 * 16;
    return region;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

/// Two parts, which callers may keep apart: the schedule, which make_schedule() writes and every call reads, and
/// scratch, which belongs to one call at a time.
struct WorkspaceLayout {
  // The schedule.
  Region header;            ///< TileListHeader
  Region tile_list;         ///< WorkItem[tile_indices]
  Region split_tiles;       ///< SplitTile[split_tile_capacity]; without a list, of scratch
  Region combine_counters;  ///< uint64
  std::size_t schedule_bytes = 0;

  // Scratch.
  Region tile_counter;     ///< uint64, cleared by the call
  Region partial_o;        ///< [partial rows, num_qo_heads, head_dim_vo], fp32
  Region partial_max_sum;  ///< [partial rows, num_qo_heads, 2], fp32
  Region mask_extents;     ///< MaskExtent[tile_indices]
  std::size_t scratch_bytes = 0;

  std::size_t bytes() const { return schedule_bytes + scratch_bytes; }
};

/// Refuses memory that is not 16-byte aligned. `what` begins the sentence.
inline Status check_aligned(const char* what, const void* memory) {
  const auto beyond = reinterpret_cast<std::uintptr_t>(memory) % 16;
  if (beyond == 0) return Status::success();
  return Status::invalid(std::string(what) + " starts " + std::to_string(beyond) +
                         " bytes after a multiple of 16: it must be 16-byte aligned.");
}

/// Bytes of a row of partial results, of all heads.
inline std::size_t partial_row_bytes(const AttentionParams& params) {
  return std::size_t(params.num_qo_heads) * (params.head_dim_vo + 2) * sizeof(float);
}

}  // namespace cutlass_kernels
