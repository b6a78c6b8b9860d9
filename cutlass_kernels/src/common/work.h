// Which tile of which head comes next, and what it needs to know of its request.
#pragma once

#include <cute/config.hpp>

#include <algorithm>
#include <cstdint>

#include "common/mask.h"
#include "cutlass_kernels/params.h"
#include "schedule.h"

namespace cutlass_kernels {

// A tile belongs to a head, or to packed_heads of them: "heads" below are these.
//
// Tiles are numbered by section of heads, in a section longest tiles first, heads innermost. All sections have
// section_heads heads but the last, which has last_heads. Divisions by numbers that are known beforehand: by others, a block
// spent half a microsecond on them before its first load.
struct TileOrder {
  int tiles;  // per head: entries of the work list
  int sections;
  FastDivisor section_heads;
  FastDivisor last_heads;
  FastDivisor per_section;  // tiles

  struct Position {
    int rank;  // in the order of lengths
    int head;
  };

  CUTE_HOST_DEVICE Position operator()(int index) const {
    int section = int(per_section.divide(index));
    if (section > sections - 1) section = sections - 1;
    const int in_section = index - section * int(per_section.divisor);
    const FastDivisor heads = section == sections - 1 ? last_heads : section_heads;
    const int rank = int(heads.divide(in_section));
    return {rank, section * int(section_heads.divisor) + in_section - rank * int(heads.divisor)};
  }

  // K and V of the heads being worked on should stay in L2 (50 MB on Hopper, 40 on A100, each half of it caching for
  // its own SMs) beside the queries and outputs that stream through.
  static constexpr std::int64_t kSectionBytes = 8 << 20;

  // The last section takes `tail_tiles` tiles or more, so that its long tiles, which come first, and its short ones
  // even out: a last section of one head costs fa2 12 % at 4k causal. It may be larger than others, but not too large for
  // L2: 48 MB cost fa3 10 % (hd256, 32 x 512 tokens).
  static constexpr std::int64_t kTailBytes = 32 << 20;
  static TileOrder make(const AttentionParams& p, int tiles, std::int64_t tail_tiles,
                        std::int64_t tail_bytes = kTailBytes) {
    const int all_heads = p.num_qo_heads / std::max(p.schedule.packed_heads, 1);
    const int group_size = all_heads / p.num_kv_heads;
    const std::int64_t head_bytes = 2 * p.total_kv * (p.head_dim_qk + p.head_dim_vo);
    const std::int64_t fit = kSectionBytes / std::max<std::int64_t>(head_bytes, 1);
    const int heads = int(std::clamp<std::int64_t>(fit, 1, p.num_kv_heads));
    const std::int64_t head_tiles = std::int64_t(tiles) * group_size;
    const std::int64_t for_tail = std::min((tail_tiles + head_tiles - 1) / head_tiles,
                                           tail_bytes / std::max<std::int64_t>(head_bytes, 1));
    const int tail = int(std::clamp<std::int64_t>(for_tail, heads, p.num_kv_heads));
    const int early_sections = (p.num_kv_heads - tail) / heads;
    TileOrder order;
    order.tiles = tiles;
    order.sections = early_sections + 1;
    const int section_heads = heads * group_size;
    order.section_heads = FastDivisor(std::uint32_t(section_heads));
    order.last_heads = FastDivisor(std::uint32_t(all_heads - early_sections * section_heads));
    // An index is below 2^31, and so it makes no difference where a larger product is cut off.
    order.per_section = FastDivisor(std::uint32_t(
        std::min<std::int64_t>(std::int64_t(tiles) * section_heads, (std::int64_t(1) << 31) - 1)));
    return order;
  }
};

// The tiles of a single request, without a work list: each comes in so many pieces, the last rows first.
struct RowTiles {
  FastDivisor pieces;
  int tiles;

  static RowTiles make(const Schedule& schedule) {
    const int pieces = std::max(schedule.pieces, 1);
    return {FastDivisor(std::uint32_t(pieces)), schedule.capacity / pieces};
  }
};

// The tile of a rank. False if there is none: past the end of the list, or a request that does not lie inside the
// tensors (offsets on the device were never checked), which is not computed.
CUTE_DEVICE bool find_work(const AttentionParams& p, const RowTiles& rows, int rank,
                           WorkItem& work) {
  if (p.schedule.work_list != nullptr) {
    work = static_cast<const WorkItem*>(p.schedule.work_list)[rank];
    if (work.batch < 0) return false;
  } else {
    work.batch = 0;
    work.q_begin = 0;
    work.kv_begin = 0;
    work.qo_len = int(p.total_q);
    work.kv_len = int(p.total_kv);
    const int pieces = int(rows.pieces.divisor);
    const int tile = int(rows.pieces.divide(rank));
    work.piece = std::int16_t(rank - tile * pieces);
    work.pieces = std::int16_t(pieces);
    work.tile = rows.tiles - 1 - tile;
    work.partial_row = work.tile * p.schedule.tile_rows * pieces;
  }
  if (min(work.q_begin, work.kv_begin) < 0 || work.kv_len < 0 ||
      std::int64_t(work.q_begin) + work.qo_len > p.total_q) {
    return false;
  }
  // The scheduler has checked entries of a page table.
  return p.pages.page_size > 0 || std::int64_t(work.kv_begin) + work.kv_len <= p.total_kv;
}

// Blocks of keys [begin, end) of a tile's `blocks` that are a piece's: none where there are fewer of them than pieces.
struct PieceBlocks {
  int begin;
  int end;
};

CUTE_DEVICE PieceBlocks blocks_of_piece(const WorkItem& work, int blocks) {
  const int each = int(unsigned(blocks) / unsigned(work.pieces));
  const int longer = blocks - each * work.pieces;  // the first pieces, by one
  const int begin = work.piece * each + min(int(work.piece), longer);
  return {begin, begin + each + (work.piece < longer ? 1 : 0)};
}

}  // namespace cutlass_kernels
