// The tiles of latent attention by mma.sync, read by the host (mma_launch.h) and by the device (mma_kernel.h).
//
// A tile is 16 kRowTiles rows, of tokens and heads, which all 8 warps share. For S = Q K^T a warp has 16 of the rows and
// a share of a KV block's keys, for O += P V one or two row tiles and a share of the 512 columns:
//
//                 S: rows x keys of a warp   O: rows x columns of a warp
//   Few           16 x 8                     16 x 64
//   Some          16 x 8                     32 x 64
//   Many          16 x 16                    32 x 128
//
// Two row tiles of O feed two products with each fragment of V that is read from shared memory.
#pragma once

#include "merge/combine_splits.h"
#include "mla/dims.h"

namespace cutlass_kernels::mla::mma_sync {

template <int RowTiles, int BlockN, int Stages, int QSteps>
struct Tile {
  static constexpr int kRowTiles = RowTiles;  // of S, 16 rows each: the M of mma.sync
  static constexpr int kBlockM = 16 * RowTiles;
  static constexpr int kBlockN = BlockN;  // keys of a KV block, one stage
  static constexpr int kStages = Stages;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kPacked = true;  // fa2/tile_work.h
  // Of the 36 steps of 16 columns of Q, a warp keeps the first kQSteps in registers, 4 each. It reads the others anew for
  // each KV block: those of the rope columns, or all.
  static constexpr int kQSteps = QSteps;
  static constexpr bool kQInRegisters = kQSteps > 0;

  // S.
  static constexpr int kGroups = kWarps / kRowTiles;     // warps that split the keys of a row tile
  static constexpr int kTilesN = kBlockN / kGroups / 8;  // of 8 keys, of a warp
  // Sums of each: products that wait for one another take 33 cycles, and there are 36. (Some: registers.)
  static constexpr int kChains = kQSteps == 32 ? 2 : 4 / kTilesN;

  // O.
  static constexpr int kOutRowTiles = kRowTiles == 1 ? 1 : 2;
  static constexpr int kOutParts = kWarps / (kRowTiles / kOutRowTiles);  // of the columns
  static constexpr int kColumns = kLatentDim / kOutParts;                // of a warp
  static constexpr int kTilesD = kColumns / 8;

  // Shared memory: rows of keys in panels of 64 columns, the span of the swizzle.
  static constexpr int kRowBytes = (kLatentDim + kRopeDim) * 2;
  static constexpr int kStageBytes = kBlockN * kRowBytes;
  static constexpr int kQ =
      kStages * kStageBytes;  // (BLK_M, 576) or (BLK_M, 64): what is read anew
  static constexpr int kQRowBytes = kQSteps == 0 ? kRowBytes : kQSteps == 32 ? kRopeDim * 2 : 0;
  static constexpr int kP = kQ + kBlockM * kQRowBytes;                // (row tile, 16 keys, lane)
  static constexpr int kRowMax = kP + kBlockM * kBlockN * 2;          // floats (group, row)
  static constexpr int kRowSum = kRowMax + kGroups * kBlockM * 4;     // floats (group, row)
  static constexpr int kRowFactor = kRowSum + kGroups * kBlockM * 4;  // floats (row)
  static constexpr int kWork = kRowFactor + kBlockM * 4;              // the thread block's TileWork
  static constexpr int kBytes = kWork + 192;

  static_assert(kTilesN == 1 || kTilesN == 2);
  static_assert(kQSteps == 0 || kQSteps == 32 || kQSteps == 36);
  static_assert(kStages >= 2 && (!kQInRegisters || kBlockM * kRowBytes <= kStageBytes));
  static_assert(kLatentDim <= kMostCombinedColumns);
};

//   Few     up to 16 rows of a request: reading the keys is what takes time, and 147 KB of them are in flight
//   Some    up to 32 rows, and all problems of devices that lack the shared memory of the others
//   Many    more rows
using Few = Tile<1, 64, 3, 36>;        // 219 KB of shared memory: compute capability 9.0
using Some = Tile<2, 32, 4, 32>;       // 152 KB: 8.0
using SomeSmall = Tile<2, 32, 2, 32>;  // 80 KB: 8.6, 8.9, 12.x
using Many = Tile<4, 32, 2, 0>;        // 149 KB

// LaunchPlan::tile_kind.
enum TileKind { kFew = 0, kSome = 1, kMany = 2 };

}  // namespace cutlass_kernels::mla::mma_sync
