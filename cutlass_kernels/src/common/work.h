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

// Tiles without a work list, by number (tile_numbers() in schedule.h). Those of the longest request come, the last rows first,
// once for every part of the keys: for every piece of a single request's, or for every request of a batch, or more where the
// keys of a batch are split (KeyParts). Or tiles of a batch come in the order of rows, the last request first: a request whose
// rows begin at q has the numbers from q / tile_rows + (how many requests come before it) on, up to one more than it needs.
struct RowTiles {
  FastDivisor parts;      // of the keys
  FastDivisor tile_rows;  // where tiles come in the order of rows
  int tiles;              // of the longest request; 0: in the order of rows

  static RowTiles make(const AttentionParams& p) {
    const Schedule& schedule = p.schedule;
    const int rows = std::max(schedule.tile_rows, 1);
    const int parts = std::max(schedule.pieces, is_batch(p) ? p.batch_size : 1);
    const bool in_order = is_batch(p) && schedule.capacity != parts * tiles_of_longest(p, rows);
    return {FastDivisor(std::uint32_t(parts)), FastDivisor(std::uint32_t(rows)),
            in_order ? 0 : schedule.capacity / parts};
  }
};

// A request's parts of all keys of a batch: `count` from `first` on.
struct RequestParts {
  int batch;
  int first;
  int count;
};

// Which parts of all keys of a batch are a request's, where these are split without a list: one, and of the others, `extra` at
// most, a share like that of its keys. So a part has about as many keys as another, and a block finds its own by a search in
// the offsets, which takes a fifth of the time of a list. Rounding is spelled out: the kernel that merges finds the same
// parts, whatever it is compiled with.
class KeyParts {
 public:
  CUTE_DEVICE KeyParts(const AttentionParams& p, int extra)
      : kv_indptr_(p.kv_indptr), requests_(p.batch_size), first_(float(p.kv_indptr[0])) {
    const bool in_pages = p.pages.page_size > 0 && p.pages.table_stride == 0;
    const float keys = __fsub_rn(float(p.kv_indptr[requests_]), first_);
    const float unit = in_pages ? float(p.pages.page_size) : 1.0f;
    const float most = __fdividef(__fmul_rn(keys, unit), float(p.schedule.least_piece));
    extra_ = fmaxf(fminf(float(extra), floorf(most)), 0.0f);
    per_key_ = keys > 0.0f ? __fdividef(extra_, keys) : 0.0f;
  }

  // A request's first part, in [batch, batch + extra]. Never less than that of one before it, if the offsets do not decrease:
  // every step rounds monotonically. The quotient of what divides evenly may be a little less than whole.
  CUTE_DEVICE int begin(int batch) const {
    constexpr float kLittle = 1.0f / 512;
    const float before = __fmul_rn(__fsub_rn(float(kv_indptr_[batch]), first_), per_key_);
    return batch + int(fminf(fmaxf(__fadd_rn(before, kLittle), 0.0f), extra_));
  }

  // The request that a part belongs to; a count of 0 where there is none. All parts that lead to a request take the same way,
  // on which offsets must agree that they are its own: where some decrease, all of a request's parts find it, or none.
  CUTE_DEVICE RequestParts find(int part) const {
    int batch = 0, end = requests_;
    int first = 0, next = requests_ + int(extra_);
    int at_least = first, below = next;
    CUTE_NO_UNROLL
    while (end - batch > 1) {
      const int middle = batch + (end - batch) / 2;
      const int value = begin(middle);
      if (value <= part) {
        batch = middle;
        first = value;
        at_least = max(at_least, value);
      } else {
        end = middle;
        next = value;
        below = min(below, value);
      }
    }
    const bool agree = at_least <= first && next <= below && part < next;
    return {batch, first, agree ? next - first : 0};
  }

 private:
  const std::int32_t* kv_indptr_;
  int requests_;
  float first_, extra_, per_key_;
};

// Rows of the partial results that a piece has room for.
CUTE_DEVICE int rows_of_piece(const AttentionParams& p) {
  return min(p.schedule.tile_rows, int(p.total_q));
}

// The tile with this number, counted from the last, in the order of rows.
CUTE_DEVICE void find_in_order(const AttentionParams& p, const RowTiles& rows, int number,
                               WorkItem& work) {
  const auto first_number = [&](int batch) {
    return int(rows.tile_rows.divide(__ldg(p.qo_indptr + batch))) + batch;
  };
  int end = p.batch_size;
  work.batch = 0;
  CUTE_NO_UNROLL
  while (end - work.batch > 1) {
    const int middle = work.batch + (end - work.batch) / 2;
    if (first_number(middle) <= number) {
      work.batch = middle;
    } else {
      end = middle;
    }
  }
  work.tile = number - first_number(work.batch);
}

// The tile of a rank. False if there is none: past the end of the list or of the request, or of a request that does not lie
// inside the tensors (offsets on the device were never checked), which is not computed.
//
// kPaged, kInOrder: whether there may be pages, and tiles in the order of rows. In a kernel of fa2, which has no warp of its own
// for this, a few instructions more here, or a call, make ptxas order the main loop anew.
// kSplits: whether keys of a batch may be split without a list.
// kBatches: whether a batch may come without a list (needs_list() in schedule.h).
template <bool kPaged, bool kInOrder, bool kSplits, bool kBatches = true>
CUTE_DEVICE bool find_work(const AttentionParams& p, const RowTiles& rows, int rank,
                           WorkItem& work) {
  if (p.schedule.work_list != nullptr) {
    work = static_cast<const WorkItem*>(p.schedule.work_list)[rank];
    if (work.batch < 0) return false;
  } else {
    const int parts = int(rows.parts.divisor);
    const int position = int(rows.parts.divide(rank));
    const int part = rank - position * parts;
    work.tile = rows.tiles - 1 - position;
    work.batch = 0;
    work.q_begin = 0;
    work.kv_begin = 0;
    work.qo_len = int(p.total_q);
    work.kv_len = int(p.total_kv);
    work.piece = std::int16_t(part);
    work.pieces = std::int16_t(parts);
    [[maybe_unused]] int first_part = -1;  // of a batch that is split
    if (kBatches && p.qo_indptr != nullptr) {
      work.batch = part;
      work.piece = 0;
      work.pieces = 1;
      if constexpr (kSplits) {
        if (parts > p.batch_size) {
          const RequestParts own = KeyParts(p, parts - p.batch_size).find(part);
          if (own.count == 0) return false;
          work.batch = own.batch;
          work.piece = std::int16_t(part - own.first);
          work.pieces = std::int16_t(own.count);
          first_part = own.first;
        }
      }
      if constexpr (kInOrder) {
        if (rows.tiles == 0) find_in_order(p, rows, p.schedule.capacity - 1 - rank, work);
      }
      work.q_begin = p.qo_indptr[work.batch];
      work.qo_len = p.qo_indptr[work.batch + 1] - work.q_begin;
      if constexpr (kPaged) {
        const KeysOfRequest keys = keys_of_request(p.kv_indptr, p.pages, work.batch);
        work.kv_begin = keys.begin;
        work.kv_len = keys.length;
      } else {
        work.kv_begin = p.kv_indptr[work.batch];
        work.kv_len = p.kv_indptr[work.batch + 1] - work.kv_begin;
      }
      // In 64 bits: the length was never checked.
      if (work.tile < 0 || std::int64_t(work.tile) * p.schedule.tile_rows >= work.qo_len) {
        return false;
      }
    }
    work.partial_row = work.tile * p.schedule.tile_rows * parts;
    if constexpr (kSplits) {
      if (first_part >= 0) {
        work.partial_row = (work.tile * parts + first_part) * rows_of_piece(p);
      }
    }
  }
  if (min(work.q_begin, work.kv_begin) < 0 || work.kv_len < 0 ||
      std::int64_t(work.q_begin) + work.qo_len > p.total_q) {
    return false;
  }
  // Entries of a page table have been checked: keys_of_request().
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
