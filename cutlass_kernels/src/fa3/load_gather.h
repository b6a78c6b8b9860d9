// Rows of K and V that are gathered one by one, and converted where they are e4m3.
#pragma once

#include <type_traits>

#include "common/element_types.h"
#include "common/ptx/cp_async.h"
#include "common/ptx/shared_address.h"
#include "fa3/load.h"
#include "fa3/pair.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"

namespace cutlass_kernels::fa3 {

// ---- The K and V producers of a paged cache whose page size is no multiple of 8, which TMA boxes need: every row
// through cp.async, by warps whose threads have more registers, or by two warps for each matrix (Tile::kCopyWarps). And
// those of a cache of e4m3 below 16-bit queries, with pages of any size.

// Arrives once all copies of this thread have landed. They write through the generic proxy and wgmma reads through the
// async one, between which PTX asks for a fence. There is none, as in CUTLASS and FlashAttention-3: on compute
// capability 9.0, the only one of these kernels, what has landed is in shared memory for every reader. The fence would
// have to be in the consumers, where it costs 1 % (benchmarks/results/pages-and-masks.md).
CUTE_DEVICE void arrive_when_landed(Barrier& full) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&full)) : "memory");
}

constexpr std::uint32_t kNoRow = 0xffffffff;  // in the place of a row's offset: write zeros

// The pages of the rows that a lane looks up for its warp: 32 i + lane, of kRows rows.
template <int kRows, bool kIsK>
struct PageEntries {
  static constexpr int kCount = kRows / 32;
  int page[kCount];  // (rows of the warp / 32)

  // Reads those of the visible rows, of the rows from `key` on.
  CUTE_DEVICE void read(const KernelParams& params, const std::int32_t* table, int key, const StageRows& visible) {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int row = 32 * i + int(threadIdx.x % 32);
      page[i] = kNoPage;
      if (visible.contains(row)) {
        page[i] = __ldg(table + params.page_size.divide(key + row));
        if constexpr (!kIsK) page[i] = page_of_entry(params.v_pages, page[i]);
      }
    }
  }

  // Offset of row i, in units (PageUnits); kNoRow if its page lies outside the cache.
  CUTE_DEVICE std::uint32_t offset(const KernelParams& params, int key, int i) const {
    const PageUnits& units = kIsK ? params.k_units : params.v_units;
    std::uint32_t offset = page[i] * units.page;
    if (params.page_size.divisor > 1) {
      offset += params.page_size.modulo(key + 32 * i + threadIdx.x % 32) * units.slot;
    }
    return std::uint32_t(page[i]) < params.num_pages ? offset : kNoRow;
  }
};

// Copies a warp's kRows rows, eight lanes per row of a panel, four rows at a time. offsets[i] belongs to the lane's
// row in the i-th four, and `to` is the lane's 16 bytes of the first. kComplete: no row and no column of kColumns is to
// be zeros.
template <bool kComplete, int kRows, int kColumns, int kPanelBytes>
CUTE_DEVICE void gather_rows(const std::uint32_t* offsets, const char* data, std::uint32_t unit, int head_dim,
                             std::uint32_t to) {
  const int column = threadIdx.x % 8 * 8;
  constexpr int kUnroll = kComplete ? kRows / 16 : 1;
#pragma unroll kUnroll
  for (int i = 0; i < kRows / 16; ++i) {
    const uint4 of_rows = reinterpret_cast<const uint4*>(offsets)[i];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      const std::uint32_t row_offset = j == 0 ? of_rows.x : j == 1 ? of_rows.y : j == 2 ? of_rows.z : of_rows.w;
      // The sum of this product and `data` is one instruction, unlike that of mad or of a product in C++.
      std::uint64_t bytes;
      asm("mul.wide.u32 %0, %1, %2;" : "=l"(bytes) : "r"(row_offset), "r"(unit));
      const char* from = data + bytes;
      // Rows four apart differ in the bit of 64 bytes of their swizzle.
      const std::uint32_t to_row = (to ^ (j % 2 * 64)) + (4 * i + j) * (4 * 128);
      CUTE_UNROLL
      for (int panel = 0; panel < (kColumns + 63) / 64; ++panel) {
        // Nobody reads the other columns of a panel of which not all are used.
        if (panel * 64 + 64 > kColumns && panel * 64 + column >= kColumns) break;
        if constexpr (kComplete) {
          cp_async_16(to_row + panel * kPanelBytes, from + panel * 128);
        } else {
          cp_async_16(to_row + panel * kPanelBytes, from + panel * 128,
                      row_offset != kNoRow && panel * 64 + column < head_dim);
        }
      }
    }
  }
}

// Keeps the compiler from adding up the address anew for every use.
template <class T>
CUTE_DEVICE const T* kept(const T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// The K or V producer, by all lanes of kCopyWarps warps, of which this one has index copy_warp: each copies its rows
// of every KV block, having read the page table one block ahead. Every lane arrives at `full`.
template <class Tile, int kPanels, int kStages, bool kIsK, bool kCustomMask>
CUTE_DEVICE void gather_keys(const KernelParams& params, Shared<Tile>& shared, Barrier* full, Barrier* empty,
                             char* stages, int copy_warp) {
  constexpr int kRows = Tile::kBlockN;
  constexpr int kOwnRows = kRows / Tile::kCopyWarps;
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  static_assert(kOwnRows % 32 == 0);
  const int lane = threadIdx.x % 32;
  const int first_row = Tile::kCopyWarps == 1 ? 0 : copy_warp * kOwnRows;
  // Columns of 16 bits: of e4m3, pairs of columns. Its K and V take turns in one ring of stages.
  constexpr int kPerColumn = Tile::kConverts ? 2 : 1;
  constexpr int kElementBytes = 2 / kPerColumn;
  constexpr int kColumns = (kIsK ? Tile::kHeadDimQk : Tile::kHeadDimVo) / kPerColumn;
  const int column = first_column<Tile>(kColumns);
  const int head_dim =  // from the CTA's first column on
      (kIsK ? params.attention.head_dim_qk : params.attention.head_dim_vo) / kPerColumn - column;
  const std::uint32_t to = shared_address(stages) + (first_row + lane / 8) * 128 + ((lane % 8 ^ lane / 8) << 4);
  RowOffsets<kOwnRows>& offsets = shared.row_offsets[kIsK ? 0 : 1][copy_warp];
  JobReader jobs(shared);
  Ring<kStages> ring;
  if (Tile::kConverts && !kIsK) ring.advance();
  if (kIsK && copy_warp == 0 && lane == 0) shared.job_wanted.arrive();
  for (; jobs.next(); jobs.release()) {
    const Job& job = jobs.job();
    const ConstTensorView& view = kIsK ? params.attention.k : params.attention.v;
    const char* data = kept(static_cast<const char*>(view.data) + kElementBytes * job.kv_head * view.stride_head +
                            2 * column + lane % 8 * 16);
    const std::int32_t* table = kept((kIsK ? params.k_pages : params.v_pages).indices + job.kv_begin);
    int key = job.key_begin + (job.kv_blocks - 1) * kRows + first_row;  // of the warp's first row
    PageEntries<kOwnRows, kIsK> entries;
    entries.read(params, table, key, visible_rows<kOwnRows>(job, key));
    CUTE_NO_UNROLL
    for (int kv_block = job.kv_blocks - 1; kv_block >= 0; --kv_block) {
      [[maybe_unused]] FullyMaskedKeys<kRows> masked;
      if constexpr (kCustomMask) {
        if (params.attention.mask.words != nullptr && job.has_hidden_keys != 0)
          masked.template find<Tile>(params, job, kv_block);
      }
      bool complete = head_dim >= kColumns;
      CUTE_UNROLL
      for (int i = 0; i < kOwnRows / 32; ++i) {
        std::uint32_t offset = entries.offset(params, key, i);
        if constexpr (kCustomMask) {
          if (masked.words[first_row / 32 + i] >> lane & 1) offset = kNoRow;
        }
        complete = complete && offset != kNoRow;
        offsets.of[lane % 4][8 * i + lane / 4] = offset;
      }
      key -= kRows;
      if (kv_block > 0) entries.read(params, table, key, visible_rows<kOwnRows>(job, key));
      complete = __all_sync(0xffffffffu, complete);
      __syncwarp();
      empty[ring.index].wait(ring.phase ^ 1);
      if (kIsK && copy_warp == 0 && kv_block == min(1, job.kv_blocks - 1) && lane == 0) {
        shared.job_wanted.arrive();
      }
      const std::uint32_t to_stage = to + ring.index * (kPanels * kPanelBytes);
      std::uint32_t unit = (kIsK ? params.k_units : params.v_units).bytes;
      if (complete) {
        gather_rows<true, kOwnRows, kColumns, kPanelBytes>(offsets.of[lane / 8], data, unit, head_dim, to_stage);
      } else {
        gather_rows<false, kOwnRows, kColumns, kPanelBytes>(offsets.of[lane / 8], data, unit, head_dim, to_stage);
      }
      arrive_when_landed(full[ring.index]);
      ring.advance();
      if (Tile::kConverts) ring.advance();
      __syncwarp();  // before the offsets are overwritten
    }
  }
}

// ---- The converting warps of e4m3 keys and values below 16-bit queries: from where gather_keys() leaves their bytes
// to the stages of 16 bits that consumers read, in the type of the queries.
//
// They are other warps than those that load: the fence between their stores and wgmma would wait for all loads of the
// warp that are in flight.

// Eight numbers of e4m3 as eight of Element, which holds them all.
template <class Element>
CUTE_DEVICE uint4 converted(std::uint32_t first, std::uint32_t second) {
  std::uint32_t numbers[4];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t pair = (i < 2 ? first : second) >> i % 2 * 16;
    std::uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(std::uint16_t(pair)));
    if constexpr (std::is_same_v<Element, fp16>) {
      numbers[i] = halves;
    } else {
      const float2 floats = fp16::decode(reinterpret_cast<const __half2&>(halves));
      numbers[i] = Element::pack(floats.x, floats.y);
    }
  }
  return {numbers[0], numbers[1], numbers[2], numbers[3]};
}

// Converts a warp's share of a KV block, kRows rows, from (BLK_N, 128, D / 128) to (BLK_N, 64, D / 64), both swizzled.
// Of each load a lane has 16 bytes of a row: two chunks of 16 bits.
template <class Element, class Tile>
CUTE_DEVICE void convert_rows(const char* from, char* to) {
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  constexpr int kColumns = Tile::kHeadDimQk;
  constexpr int kRowLanes = kColumns / 16;
  constexpr int kRowsAtOnce = 32 / kRowLanes;
  constexpr int kLoads = Tile::kBlockN / Tile::kConverters / kRowsAtOnce;
  // Loads that are done before the first store: for all the compiler knows, a store changes what is yet to be read.
  constexpr int kBatch = 4;
  static_assert(Tile::kHeadDimVo == kColumns && kLoads % kBatch == 0 && (kBatch * kRowsAtOnce) % 8 == 0);
  const int lane = threadIdx.x % 32;
  // Eight lanes at a time use different banks. They read the eight chunks of a row; of 64 columns, which have four,
  // those of a row and of that four rows on. They write every other chunk of 16 bits, four of them the even ones and
  // four the odd ones first.
  const int row = kRowLanes == 4 ? lane / 8 + lane / 4 % 2 * 4 : lane / kRowLanes;
  const int group = lane % kRowLanes;
  const int first = lane / 4 % 2;
  from += group / 8 * kPanelBytes + row * 128;
  to += group / 4 * kPanelBytes + row * 128;
  const int chunk = group % 8 ^ (row & 7);
  const int first_chunk = (group % 4 * 2 + first) ^ (row & 7);
  CUTE_UNROLL
  for (int i = 0; i < kLoads; i += kBatch) {
    uint4 bytes[kBatch];
    CUTE_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      const int row_bits = j * kRowsAtOnce & 7;
      bytes[j] = *reinterpret_cast<const uint4*>(from + (i + j) * (kRowsAtOnce * 128) + ((chunk ^ row_bits) << 4));
    }
    CUTE_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      const uint4& x = bytes[j];
      char* of_row = to + (i + j) * (kRowsAtOnce * 128);
      const int place = (first_chunk ^ (j * kRowsAtOnce & 7)) << 4;
      *reinterpret_cast<uint4*>(of_row + place) = converted<Element>(first ? x.z : x.x, first ? x.w : x.y);
      *reinterpret_cast<uint4*>(of_row + (place ^ 16)) = converted<Element>(first ? x.x : x.z, first ? x.y : x.w);
    }
  }
}

// A converting warp, by all its lanes: index `warp` of kConverters, each of which has a share of every KV block.
template <class Element, class Tile>
CUTE_DEVICE void convert_keys(Shared<Tile>& shared, int warp) {
  constexpr int kShareBytes = Tile::kBlockN / Tile::kConverters * 128;
  const int lane = threadIdx.x % 32;
  JobReader jobs(shared);
  Ring<Tile::kStagedStages> from;
  Ring<Tile::kKStages> k_ring;
  Ring<Tile::kVStages> v_ring;
  const auto convert = [&](auto& ring, Barrier* full, Barrier* empty, char* stage) {
    shared.staged_full[from.index].wait(from.phase);
    empty[ring.index].wait(ring.phase ^ 1);
    convert_rows<Element, Tile>(shared.staged[from.index] + warp * kShareBytes, stage + warp * kShareBytes);
    fence_proxy_async();  // wgmma reads it
    __syncwarp();
    if (lane == 0) {
      shared.staged_empty[from.index].arrive();
      full[ring.index].arrive();
    }
    from.advance();
    ring.advance();
  };
  for (; jobs.next(); jobs.release()) {
    CUTE_NO_UNROLL
    for (int kv_block = jobs.job().kv_blocks; kv_block > 0; --kv_block) {
      convert(k_ring, shared.k_full, shared.k_empty, shared.k[k_ring.index]);
      convert(v_ring, shared.v_full, shared.v_empty, shared.v[v_ring.index]);
    }
  }
}

}  // namespace cutlass_kernels::fa3
