// Shared memory of an fa3 block.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fa3/barrier.h"
#include "fa3/config.h"

namespace cutlass_kernels::fa3 {

// A tile to be computed; found by one warp, read by all others.
struct alignas(16) Job {
  int valid;  // 0: no more tiles
  int head;   // of queries; the first one of a pack
  int kv_head;
  int row_begin;  // of the tile, in its request
  int q_end;      // first row after the request, in the tensor
  int qo_len;
  int kv_begin;  // first key of the request, in the tensor; or first entry of its page table
  int kv_len;
  int hides;       // whether some of these keys may be seen by no row of the tile
  int mask_begin;  // byte of a bit mask where the request's bits begin
  int all_begin;   // keys that all rows of the tile see, by a bit mask
  int all_end;
  int first_key;  // keys that some row of the tile sees
  int key_end;
  int key_begin;  // where the blocks begin: first_key, or where the box begins that holds it
  int blocks;     // of keys, from key_begin on; at least 1: rows without keys have one, all masked
  int partial_row;  // where the results of a piece of the keys go; -1: the tile is not split
};
constexpr int kJobSlots = 4;

// Where rows are that a warp gathers (load_pages.h): row r at [r % 4][r / 4]. Four words that a lane reads at once are those of
// its rows of four times four; the gap puts them in different banks.
template <int kRows>
struct RowPlaces {
  alignas(16) std::uint32_t of[4][kRows / 4 + 8];
};
struct Nothing {};

// Where a box of a block comes from: a page, and the first of its keys there (load_pages.h).
struct alignas(8) BoxSource {
  int page;
  int slot;
};
constexpr int kBoxBatch = 32;  // that are looked up together, a lane each

// Where V of e4m3 lies until it is transposed.
template <class Tile, bool kStaged = (Tile::kStagedStages > 0)>
struct StagedValues {};
template <class Tile>
struct alignas(1024) StagedValues<Tile, true> {
  static constexpr int kStagedBytes = Tile::kBlockN * ((Tile::kHeadDimVo + 127) / 128 * 128);

  char staged[Tile::kStagedStages][kStagedBytes];
  //                                             arrives                       waits
  Barrier staged_full[Tile::kStagedStages];   // loading warp, with the bytes  transposing warps
  Barrier staged_empty[Tile::kStagedStages];  // transposing warps             loading warp
};

// Matrices are stored as panels of 128 bytes, the span of the TMA and wgmma swizzle, which are C = 64 columns (e4m3: 128):
//   Q buffer (64, C, Dqk / C), K stage (N, C, Dqk / C), V stage (N, C, Dvo / C), as (row, column, panel);
//   V stage of e4m3, transposed: (Dvo, 128, N / 128), as (column of V, key, panel).
// Each warp stages its 16 rows of O, panels of 64 columns of 16 bits, in its own part of `o`.
template <class Tile>
struct Shared : StagedValues<Tile> {
  static constexpr bool kTransposed = Tile::kTransposers > 0;
  static constexpr int kColumns = 128 / Tile::kElementBytes;
  static constexpr int kPanelBytesQ = kWarpgroupRows * 128;
  static constexpr int kPanelBytesKv = Tile::kBlockN * 128;
  static constexpr int kPanelsQk = (Tile::kHeadDimQk + kColumns - 1) / kColumns;
  static constexpr int kPanelsVo = (Tile::kHeadDimVo + kColumns - 1) / kColumns;
  static constexpr int kPanelsO = Tile::kHeadDimVo / 64;
  static constexpr int kPanelBytesVt = Tile::kHeadDimVo * 128;
  static constexpr int kQBytes = kPanelBytesQ * kPanelsQk;
  static constexpr int kKBytes = kPanelBytesKv * kPanelsQk;
  static constexpr int kVBytes =
      kTransposed ? kPanelBytesVt * ((Tile::kBlockN + 127) / 128) : kPanelBytesKv * kPanelsVo;
  static constexpr int kOBytes = kPanelBytesQ * Tile::kOPanels;
  static_assert(kPanelsO % Tile::kOPanels == 0, "O leaves in whole passes of kOPanels panels.");
  static_assert(Tile::kBlockN <= 8 * kBoxBatch);
  static_assert(Tile::kBlockN % (32 / Tile::kElementBytes) == 0,
                "P V takes 16 keys per instruction, of e4m3 32");

  // Said aloud, because members of a derived struct may lie in what alignment adds to its base.
  alignas(kTransposed ? 1024 : 16) char q[Tile::kQBuffers][kQBytes];
  char k[Tile::kKStages][kKBytes];
  char v[Tile::kVStages][kVBytes];
  char o[Tile::kConsumers][kOBytes];
  Job jobs[kJobSlots];
  // Of e4m3 one warp loads Q, K and V, and the transposing warps stand for the V warp. Where rows are gathered from pages, every
  // lane that copies arrives.
  //                                   arrives                        waits
  Barrier job_wanted;                // K warp, close to its tile's end job warp
  Barrier job_full[kJobSlots];       // job warp                       Q, K, V warps, consumers
  Barrier job_empty[kJobSlots];      // Q warp, K and V lanes, consumer threads job warp
  Barrier q_full[Tile::kQBuffers];   // Q warp, with the TMA's bytes   its consumer warpgroup
  Barrier q_empty[Tile::kQBuffers];  // the 4 warps of that            Q warp
  Barrier k_full[Tile::kKStages];    // K warp, with the bytes         all consumers
  Barrier k_empty[Tile::kKStages];   // all consumer warps             K warp
  Barrier v_full[Tile::kVStages];    // V warp, with the bytes         all consumers
  Barrier v_empty[Tile::kVStages];   // all consumer warps             V warp
  Barrier v_landed;                  // V warp, with the bytes         V warp, to clear some of them
  BoxSource boxes[2][kBoxBatch];     // of K and of V
  // Of K's warps and of V's.
  std::conditional_t<Tile::kGather,
                     RowPlaces<Tile::kBlockN / Tile::kCopyWarps>[2][Tile::kCopyWarps], Nothing>
      places;
};

// A position in a ring of buffers, and the parity of the pass over it.
template <int kSize>
struct Ring {
  int index = 0;
  std::uint32_t phase = 0;

  CUTE_DEVICE void advance() {
    if (++index == kSize) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Named barriers (0 is __syncthreads()): kBarrierTurn + warpgroup is its turn to issue products, granted by the previous
// warpgroup.
constexpr int kBarrierTurn = 1;
// kBarrierVote + warpgroup: its threads agree on skipping a block of keys.
constexpr int kBarrierVote = 4;

}  // namespace cutlass_kernels::fa3
