// The tile table of the fa3 backend, read by host (launch) and device (kernel).
#pragma once

#include <algorithm>

#include "merge/merge_pieces.h"

namespace cutlass_kernels::fa3 {

// Rows of a consumer warpgroup: the M of wgmma.
constexpr int kWarpgroupRows = 64;

// What the pipeline needs from shared memory (227 KB per SM) and registers (65536 per SM) is in conflict with larger blocks,
// which need fewer instructions per product. The entries below are the fastest measured (benchmarks/RESULTS.md).
template <int HeadDimQk, int HeadDimVo, int Consumers, int BlockN, int KStages, int VStages,
          int QBuffers, int OPanels, bool PingPong, bool LazyMax, bool QInRegisters,
          int BlocksPerSm = 1, bool Gather = false, bool Packed = false, int Producers = 1>
struct Tile {
  static_assert(HeadDimQk % 16 == 0,
                "fa3: Q K^T takes 16 columns per wgmma; those beyond the last 16 would not count.");
  static_assert(HeadDimVo % 64 == 0,
                "fa3: O is stored in panels of 64 columns; those beyond the last whole panel would "
                "never be written.");
  static_assert(HeadDimVo <= 256, "fa3: one wgmma makes all columns of O, at most 256.");
  static_assert(!Packed || HeadDimVo <= kMostMergedColumns,
                "fa3: partial results of split keys have more columns than the merge kernels.");
  static_assert(BlockN % 32 == 0,
                "fa3: producers look at 32 keys at a time, a bit or a lane each.");
  static constexpr int kHeadDimQk = HeadDimQk;
  static constexpr int kHeadDimVo = HeadDimVo;
  static constexpr int kConsumers = Consumers;  // warpgroups, of 64 query rows each
  static constexpr int kBlockM = kWarpgroupRows * Consumers;
  static constexpr int kBlockN = BlockN;  // keys per step
  static constexpr int kKStages = KStages;
  static constexpr int kVStages = VStages;
  static constexpr int kQBuffers = QBuffers;  // of 64 query rows, dealt to the warpgroups in turn
  // O is staged in shared memory of its own, this many panels of 64 columns per warpgroup at a time.
  static constexpr int kOPanels = OPanels;
  static constexpr bool kPingPong = PingPong;  // warpgroups take turns in issuing their products
  static constexpr bool kLazyMax = LazyMax;    // maxima only where they must be taken, see mma.h
  static constexpr bool kQInRegisters =
      QInRegisters;  // spares the products a third of their shared memory reads
  static constexpr int kBlocksPerSm = BlocksPerSm;
  static constexpr bool kGather = Gather;  // keys come row by row, from pages too small for TMA
  // Rows are those of several heads that share their keys (packed_rows.h), and keys may be split.
  static constexpr bool kPacked = Packed;
  static constexpr int kElementBytes = 2;  // of q, k and v
  static constexpr int kTransposers = 0;   // warps that transpose V
  static constexpr int kStagedStages = 0;  // blocks of V that wait for them
  // A warpgroup without rows lets the keys pass, out of step with the others: there are no turns to take.
  static_assert(!(Packed && PingPong));
  // Warpgroups of producers. A second one, in kernels that gather, is as many warps more that copy.
  static constexpr int kProducers = Producers;
  static constexpr int kCopyWarps = Producers;  // that share the rows of a block of K, and of V
  static_assert(Producers == 1 || (Gather && Producers == 2));
  static constexpr int kThreads = 128 * (Producers + Consumers);

  // Registers per thread: at the launch, and after setmaxnreg has moved what the warpgroup of producers does not need
  // to the consumers. Producers that copy row by row (from small pages, or where a mask may hide keys) need more.
  static constexpr int kLaunchRegisters = std::min(65536 / BlocksPerSm / kThreads / 8 * 8, 240);
  static constexpr int producer_registers(bool copies_rows) {
    if (Consumers > 2 || BlocksPerSm > 1) return copies_rows ? 56 : 32;
    return Producers == 1 && (copies_rows || Gather) ? 56 : 40;
  }
  static constexpr int consumer_registers(bool copies_rows) {
    return std::min(
        (kLaunchRegisters * kThreads - producer_registers(copies_rows) * 128 * Producers) /
            (128 * Consumers) / 8 * 8,
        240);
  }
};

// Warpgroups of producers that gather, where registers allow two: then two warps copy K, and two V.
constexpr int kGatherWarpgroups = 2;

// A tile of e4m3. Of the warpgroup of producers two warps transpose V (transpose_values.h).
template <int HeadDim, int Consumers, int BlockN, int KStages, int StagedStages, int VStages,
          int QBuffers, int OPanels, bool PingPong, bool LazyMax, bool QInRegisters, bool Packed>
struct Fp8Tile : Tile<HeadDim, HeadDim, Consumers, BlockN, KStages, VStages, QBuffers, OPanels,
                      PingPong, LazyMax, QInRegisters, 1, false, Packed> {
  using Base = Tile<HeadDim, HeadDim, Consumers, BlockN, KStages, VStages, QBuffers, OPanels,
                    PingPong, LazyMax, QInRegisters, 1, false, Packed>;
  static constexpr int kElementBytes = 1;
  static constexpr int kTransposers = 2;
  static constexpr int kStagedStages = StagedStages;

  static constexpr int producer_registers(bool) { return 56; }
  static constexpr int consumer_registers(bool) {
    return std::min((Base::kLaunchRegisters * Base::kThreads - producer_registers(false) * 128) /
                        (128 * Consumers) / 8 * 8,
                    240);
  }
};

// Schedule::tile_kind.
enum TileKind { kRows, kGeneral, kGather, kPacked };

// Large: long queries and keys. FewKeys: as many rows, where a row sees few keys: what a tile costs beside its blocks of keys
// counts more than the cost of a block. Small: fewer rows, for queries that are few or short; Large itself where there is
// no smaller tile.
//
// General: for custom masks, ALiBi and factors that only the device knows. Gather: for pages of a size that is no multiple of
// 8, in place of Large, and GatherSmall and GatherGeneral in place of Small and General. Packed: for short queries, and PackedGather for both.
//
// kFewTiles: with fewer tiles of the large kind than this, the small one is taken.
// kSmallUpToKeys: so it is where a mask is and rows see no more keys than this, on average.
template <int HeadDimQk, int HeadDimVo>
struct TileTable;

template <>
struct TileTable<64, 64> {
  using Large = Tile<64, 64, 3, 128, 2, 2, 6, 1, true, true, false>;
  using FewKeys = Large;
  // Three independent blocks per SM: under a causal mask of 512 (1k) keys 16 % (10 %) faster than Large, at 2k keys 7 %
  // slower; without a mask 5 % and 7 %, at 2k 15 % slower.
  using Small = Tile<64, 64, 1, 64, 3, 2, 1, 1, false, true, false, 3>;
  using General = Tile<64, 64, 2, 128, 2, 2, 4, 1, true, true, false>;
  using Gather = Tile<64, 64, 3, 128, 2, 2, 6, 1, true, true, false, 1, true>;
  using GatherSmall = Tile<64, 64, 1, 64, 3, 2, 1, 1, false, true, false, 3, true>;
  using GatherGeneral = Tile<64, 64, 2, 128, 2, 2, 4, 1, true, true, false, 1, true>;
  using Packed = Tile<64, 64, 2, 128, 4, 4, 4, 1, false, true, false, 1, false, true>;
  using PackedGather = Tile<64, 64, 2, 128, 4, 4, 4, 1, false, true, false, 1, true, true>;
  static constexpr int kFewTiles = 132;
  static constexpr int kSmallUpToKeys = 1024;
};

template <>
struct TileTable<128, 128> {
  using Large = Tile<128, 128, 2, 128, 2, 2, 4, 2, true, true, true>;
  using FewKeys = Tile<128, 128, 2, 128, 2, 2, 4, 2, true, true, false>;
  // Twice as many SMs for no more tiles than half of 132: 8 heads of 1k tokens 17 % faster.
  using Small = Tile<128, 128, 1, 128, 2, 2, 2, 2, false, true, false>;
  using General = FewKeys;  // the registers that could hold Q hold bits
  using Gather =
      Tile<128, 128, 2, 128, 2, 2, 4, 2, true, true, false, 1, true, false, kGatherWarpgroups>;
  using GatherSmall = Gather;
  using GatherGeneral = Tile<128, 128, 2, 128, 2, 2, 4, 2, true, true, false, 1, true>;
  using Packed = Tile<128, 128, 2, 128, 2, 2, 4, 2, false, true, false, 1, false, true>;
  using PackedGather = Tile<128, 128, 2, 128, 2, 2, 4, 2, false, true, false, 1, true, true>;
  static constexpr int kFewTiles = 67;
  static constexpr int kSmallUpToKeys = 0;
};

template <>
struct TileTable<192, 128> {
  using Large = Tile<192, 128, 2, 128, 2, 2, 2, 1, true, true, false>;
  using FewKeys = Large;
  using Small = Large;
  using General = Large;
  using Gather =
      Tile<192, 128, 2, 128, 2, 2, 2, 1, true, true, false, 1, true, false, kGatherWarpgroups>;
  using GatherSmall = Gather;
  using GatherGeneral = Tile<192, 128, 2, 128, 2, 2, 2, 1, true, true, false, 1, true>;
  using Packed = Tile<192, 128, 2, 128, 2, 2, 2, 1, false, true, false, 1, false, true>;
  using PackedGather = Tile<192, 128, 2, 128, 2, 2, 2, 1, false, true, false, 1, true, true>;
  static constexpr int kFewTiles = 0;
  static constexpr int kSmallUpToKeys = 0;
};

template <>
struct TileTable<256, 256> {
  using Large = Tile<256, 256, 2, 64, 2, 2, 2, 2, true, false, false>;
  using FewKeys = Large;
  using Small = Large;
  using General = Large;
  // One warpgroup of producers: a product of 256 columns needs more registers than 512 threads are launched with.
  using Gather = Tile<256, 256, 2, 64, 2, 2, 2, 2, true, false, false, 1, true>;
  using GatherSmall = Gather;
  using GatherGeneral = Gather;
  using Packed = Tile<256, 256, 2, 64, 2, 2, 2, 2, false, false, false, 1, false, true>;
  using PackedGather = Tile<256, 256, 2, 64, 2, 2, 2, 2, false, false, false, 1, true, true>;
  static constexpr int kFewTiles = 0;
  static constexpr int kSmallUpToKeys = 0;
};

// The tiles of e4m3. The rest of what 16-bit tensors have tiles for is computed from copies of 16 bits.
template <int HeadDim>
struct Fp8TileTable;

template <>
struct Fp8TileTable<64> {
  using Large = Fp8Tile<64, 3, 128, 3, 2, 3, 6, 1, true, true, false, false>;
  using Packed = Fp8Tile<64, 2, 128, 4, 3, 3, 4, 1, false, true, false, true>;
};

template <>
struct Fp8TileTable<128> {
  using Large = Fp8Tile<128, 3, 96, 3, 2, 2, 6, 1, true, true, false, false>;
  using Packed = Fp8Tile<128, 2, 128, 3, 2, 3, 4, 1, false, true, false, true>;
};

template <>
struct Fp8TileTable<256> {
  using Large = Fp8Tile<256, 2, 96, 2, 2, 2, 2, 1, true, true, false, false>;
  using Packed = Fp8Tile<256, 2, 64, 2, 2, 2, 2, 2, false, true, false, true>;
};

}  // namespace cutlass_kernels::fa3
