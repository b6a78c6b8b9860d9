// The tiles of latent attention by mma.sync, read by the host (launch.h) and by the device.
//
// A tile is 16 kRowTiles rows, of tokens and heads, which eight warps share (of 8-bit keys eight for S, eight for O).
// For S = Q K^T a warp has 16 of the rows, and two warps split the 576 columns: each keeps its half of Q in 72
// registers, and they add up what they have found. For O += P V a warp has one or two row tiles and a share of the 512
// columns.
//
//                            S: rows x keys x columns of a warp   O: rows x columns of a warp
//   Few, FewFp8              16 x 16 x 288                        16 x 64
//   Some, SomeFp8Small       16 x 16 x 288                        32 x 64
//   SomeFp8                  16 x 32 x 288                        32 x 64
//   Many                     16 x 32 x 288                        32 x 128
//
// Two row tiles of O feed two products with each fragment of V that is read from shared memory. Of 64 rows and 32 keys,
// shared memory is then busy for 2500 cycles, at 128 bytes each; if all of Q were read from there, and keys instead of
// columns were split, for 3250.
#pragma once

#include "latent/dims.h"
#include "merge/combine_splits.h"

namespace cutlass_kernels::mla::mma_sync {

template <int RowTiles, int BlockN, int Stages, int QPanels, int KeyBytes = 2>
struct Tile {
  static constexpr int kKeyBytes = KeyBytes;  // of an element of the keys
  static constexpr int kRowTiles = RowTiles;  // of S, 16 rows each: the M of mma.sync
  static constexpr int kBlockM = 16 * RowTiles;
  static constexpr int kBlockN = BlockN;  // keys of a KV block, one stage
  static constexpr int kStages = Stages;
  // Of 8-bit keys, one half of the warps computes S and P, and the other half O; otherwise all do both.
  static constexpr bool kSplitsRoles = kKeyBytes == 1;
  static constexpr int kRoleWarps = 8;
  static constexpr int kWarps = kSplitsRoles ? 2 * kRoleWarps : kRoleWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kPacked = true;  // fa2/tile_work.h
  static constexpr bool kBySlots = false;

  // S. Warps w and w ^ kRowTiles compute the same keys, from the two halves of every 64 columns. Each has half of these
  // keys once they have added up their sums.
  static constexpr int kGroups = kRoleWarps / kRowTiles;  // warps that split the keys of a row tile
  static constexpr int kTilesN = kBlockN / kGroups / 8;   // of 8 keys, of a warp
  static constexpr int kPartTiles = 2 * kTilesN;          // the same before that
  // Of the nine panels of 64 columns of Q, a warp keeps its half of the first kQPanels in registers, 8 for each. It
  // reads the others anew for each KV block. (Without spare registers, ptxas reads no fragment of K ahead of its
  // product.)
  static constexpr int kQPanels = QPanels;
  // Sums of each: a product waits 33 cycles for the one before it, and a sum has 18.
  static constexpr int kChains = 4 / kPartTiles;

  // Of 16-bit keys: whether the copies of a KV block are issued among the products of S. In a burst before them they
  // hold up the ldmatrix behind; where memory is what takes time, earlier is better.
  static constexpr bool kSpreadsCopies = kRowTiles == 4;

  // O.
  static constexpr int kOutRowTiles = kRowTiles == 1 ? 1 : 2;
  static constexpr int kOutParts = kRoleWarps / (kRowTiles / kOutRowTiles);  // of the columns
  static constexpr int kColumns = kLatentDim / kOutParts;                    // of a warp
  static constexpr int kTilesD = kColumns / 8;

  // Shared memory: rows of 16-bit elements in panels of 64 columns, the span of the swizzle. Of 8-bit keys, whose rows
  // are no multiple of 128 bytes, 16 bytes more than a row keep the eight rows of an ldmatrix phase in eight bank
  // groups.
  static constexpr bool kSwizzlesKeys = kKeyBytes == 2;
  static constexpr int kRowBytes = (kLatentDim + kRopeDim) * 2;  // of Q
  static constexpr int kKeyRowBytes = (kLatentDim + kRopeDim) * kKeyBytes + (kSwizzlesKeys ? 0 : 16);
  static constexpr int kKeyPanelBytes = 64 * kKeyBytes;
  static constexpr int kStageBytes = kBlockN * kKeyRowBytes;
  static constexpr int kQBytes = kBlockM * kRowBytes;
  static constexpr int kQStages = (kQBytes + kStageBytes - 1) / kStageBytes;  // that Q comes through
  static constexpr int kPanels = (kLatentDim + kRopeDim) / 64;
  static constexpr int kQ = kStages * kStageBytes;  // (BLK_M, 64 columns of each panel)
  static constexpr int kQRowBytes = (kPanels - kQPanels) * 128;
  static constexpr int kP = kQ + kBlockM * kQRowBytes;  // (row tile, 16 keys, lane)
  static constexpr int kPBytes = kBlockM * kBlockN * 2;
  static constexpr int kPBuffers = kSplitsRoles ? 2 : 1;
  static constexpr int kSums = kP + kPBuffers * kPBytes;              // float4 (warp, 8 keys, lane)
  static constexpr int kRowMax = kSums + kRoleWarps * kTilesN * 512;  // floats (group, row)
  static constexpr int kRowSum = kRowMax + kGroups * kBlockM * 4;     // floats (group, row)
  // floats (row): what O is multiplied by; at the end of a tile the row's maximum
  static constexpr int kRowFactor = kRowSum + kGroups * kBlockM * 4;
  static constexpr int kWork = kRowFactor + kBlockM * 4;  // the thread block's TileWork
  static constexpr int kBytes = kWork + 192;

  // Named barriers (bar.sync), by ID; 0 is __syncthreads(). From kPairBarrier on, one for each pair of warps that adds
  // up its halves of S; kScoresBarrier: all warps that compute S.
  static constexpr int kPairBarrier = 1;
  static constexpr int kScoresBarrier = kPairBarrier + kRoleWarps / 2;

  static_assert(kTilesN == 1 || kTilesN == 2);
  static_assert(kStages >= 2 && kStages >= kQStages);
  static_assert(kLatentDim <= kMostCombinedColumns);
};

//   Few     up to 16 rows of a request: reading the keys is what takes time, and 144 KB of them are in flight
//   Some    up to 32 rows, and all problems of devices that lack the shared memory of the others
//   Many    more rows
using Few = Tile<1, 64, 3, 9>;        // 223 KB of shared memory: compute capability 9.0
using Some = Tile<2, 32, 4, 9>;       // 151 KB: 8.0
using SomeSmall = Tile<2, 32, 2, 9>;  // 79 KB: 8.6, 8.9, 12.x
using Many = Tile<4, 32, 3, 4>;       // 161 KB

// Tiles of 8-bit keys. Of more rows there are none: each row tile of S converts the keys again.
using FewFp8 = Tile<1, 64, 5, 9, 1>;        // 194 KB of shared memory: compute capability 9.0
using FewFp8Small = Tile<1, 64, 4, 9, 1>;   // 157 KB: 8.0
using SomeFp8 = Tile<2, 64, 5, 9, 1>;       // 202 KB: 9.0
using SomeFp8Small = Tile<2, 32, 4, 9, 1>;  // 83 KB: all devices

// The same tile for requests that name their keys by slots (PageTable::slots_per_page): of 16-bit keys Some and
// SomeSmall, of 8-bit keys SomeFp8Small. With all tiles, a full build would have 26 such kernels instead of 10.
template <class Pages>
struct BySlots : Pages {
  static constexpr bool kBySlots = true;
  static constexpr int kListed = Pages::kWork;  // bytes (stage, key): whether there is such a slot
  static constexpr int kWork = kListed + Pages::kStages * Pages::kBlockN;
  static constexpr int kBytes = kWork + (Pages::kBytes - Pages::kWork);
};

// LaunchPlan::tile_kind.
enum TileKind { kFew = 0, kSome = 1, kMany = 2 };

}  // namespace cutlass_kernels::mla::mma_sync
