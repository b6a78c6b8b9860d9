// From the index of a thread block's next tile to its head and its rank: its place in the order of the tile source.
#pragma once

#include <cute/config.hpp>

#include <algorithm>
#include <cstdint>

#include "common/fast_divisor.h"
#include "device.h"
#include "plan/launch_params.h"

namespace cutlass_kernels {

// A tile belongs to a head, or to packed_heads of them: "heads" below are these.
//
// Tile indices go by section of heads, in a section by rank (mostly longest tiles first), heads innermost. All sections
// have section_heads heads but the last, which has last_heads. Divisors are prepared on the host: otherwise a thread
// block spends half a microsecond on the divisions before its first load.
struct TileOrder {
  int tiles;  // tile indices per head
  int sections;
  FastDivisor section_heads;
  FastDivisor last_heads;
  FastDivisor per_section;  // tiles

  struct Position {
    int rank;  // in the order of the tile source
    int head;
  };

  CUTE_HOST_DEVICE Position operator()(int index) const {
    return at(index, int(per_section.divide(index)), int(per_section.divisor));
  }

  // The same where only the device knows how many tiles there are, no more than `tiles`.
  CUTE_DEVICE Position among(int actual_tiles, int index) const {
    if (sections == 1) return at(index, 0, 0);  // whatever their number
    const int each = max(actual_tiles, 1) * int(section_heads.divisor);
    return at(index, int(unsigned(index) / unsigned(each)), each);
  }

  // In a section of `each` tiles.
  CUTE_HOST_DEVICE Position at(int index, int section, int each) const {
    if (section > sections - 1) section = sections - 1;
    const int in_section = index - section * each;
    const FastDivisor heads = section == sections - 1 ? last_heads : section_heads;
    const int rank = int(heads.divide(in_section));
    return {rank, section * int(section_heads.divisor) + in_section - rank * int(heads.divisor)};
  }

  // K and V of the heads being worked on should stay in L2 (60 MB on an H200, 40 on an A100, each half of it caching
  // for its own SMs) beside the queries and outputs that stream through: 8 MB on an H200.
  static std::int64_t section_bytes(const Device& device) { return device.l2_bytes / 15 * 2; }

  // The last section takes `tail_tiles` tiles or more, so that its long tiles, which come first, and its short ones
  // even out: a last section of one head costs fa2 12 % at 4k causal. It may be larger than others, but not too large
  // for L2: on an H200 32 MB, where 48 MB cost fa3 10 % (hd256, 32 x 512 tokens).
  static std::int64_t tail_bytes_in_l2(const Device& device) { return device.l2_bytes / 15 * 8; }

  static TileOrder make(const LaunchParams& p, int tiles, std::int64_t tail_tiles, const Device& device,
                        std::int64_t tail_bytes) {
    const int all_heads = p.num_qo_heads / std::max(p.plan.packed_heads, 1);
    const int group_size = all_heads / p.num_kv_heads;
    const std::int64_t head_bytes = 2 * keys_in_memory(p) * (p.head_dim_qk + p.head_dim_vo);
    const std::int64_t fit = section_bytes(device) / std::max<std::int64_t>(head_bytes, 1);
    const int heads = int(std::clamp<std::int64_t>(fit, 1, p.num_kv_heads));
    const std::int64_t head_tiles = std::int64_t(tiles) * group_size;
    const std::int64_t for_tail =
        std::min((tail_tiles + head_tiles - 1) / head_tiles, tail_bytes / std::max<std::int64_t>(head_bytes, 1));
    const int tail = int(std::clamp<std::int64_t>(for_tail, heads, p.num_kv_heads));
    const int early_sections = (p.num_kv_heads - tail) / heads;
    TileOrder order;
    order.tiles = tiles;
    order.sections = early_sections + 1;
    const int section_heads = heads * group_size;
    order.section_heads = FastDivisor(std::uint32_t(section_heads));
    order.last_heads = FastDivisor(std::uint32_t(all_heads - early_sections * section_heads));
    // An index is below 2^31, and so it makes no difference where a larger product is cut off.
    order.per_section = FastDivisor(
        std::uint32_t(std::min<std::int64_t>(std::int64_t(tiles) * section_heads, (std::int64_t(1) << 31) - 1)));
    return order;
  }
};

}  // namespace cutlass_kernels
