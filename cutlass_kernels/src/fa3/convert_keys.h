// The converting warps of e4m3 keys and values below 16-bit queries: from where gather_keys() leaves their bytes to the
// stages of 16 bits that consumers read, in the type of the queries.
//
// They are other warps than those that load: the fence between their stores and wgmma would wait for all loads of the
// warp that are in flight.
#pragma once

#include <type_traits>

#include "common/element_types.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"

namespace cutlass_kernels::fa3 {

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
  static_assert(Tile::kHeadDimVo == kColumns && kLoads % kBatch == 0 &&
                (kBatch * kRowsAtOnce) % 8 == 0);
  const int lane = threadIdx.x % 32;
  // Eight lanes at a time use different banks. They read the eight chunks of a row; of 64 columns, which have four, those
  // of a row and of that four rows on. They write every other chunk of 16 bits, four of them the even ones and four the
  // odd ones first.
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
      bytes[j] = *reinterpret_cast<const uint4*>(from + (i + j) * (kRowsAtOnce * 128) +
                                                 ((chunk ^ row_bits) << 4));
    }
    CUTE_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      const uint4& x = bytes[j];
      char* of_row = to + (i + j) * (kRowsAtOnce * 128);
      const int place = (first_chunk ^ (j * kRowsAtOnce & 7)) << 4;
      *reinterpret_cast<uint4*>(of_row + place) =
          converted<Element>(first ? x.z : x.x, first ? x.w : x.y);
      *reinterpret_cast<uint4*>(of_row + (place ^ 16)) =
          converted<Element>(first ? x.x : x.z, first ? x.y : x.w);
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
    convert_rows<Element, Tile>(shared.staged[from.index] + warp * kShareBytes,
                                stage + warp * kShareBytes);
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
