// The tiles of the fa2 backend, read by the host (launch.h) and by the device (kernel.h).
//
// A tile is what one thread block computes at a time: kBlockM query rows, of one head or of several that share their
// keys. The entries are the fastest of some sixty measured on an H200 (benchmarks/results/prefill-fa2.md). Numbers:
//
//   kBlockM       query rows of the tile
//   kRowTiles     row tiles of a warp, of 16 rows each: the M of mma.sync
//   kBlockN       keys of a KV block, one stage of the load pipeline
//   kStepN        keys of a softmax step
//   kStages       stages of K and of V in shared memory
//   kAhead        how many ldmatrix are issued before the product that needs the first
//   kBlocksPerSm  thread blocks per SM that registers are budgeted for
//
// Two row tiles halve the shared-memory traffic per product: a K or V fragment read by ldmatrix feeds two mma.sync.
// One row tile reads 128 bytes of shared memory per clock and SM at full tensor rate, which is all there is. Three
// row tiles (or two at head dimension 256) do not fit 255 registers. At head dimension 256 two warps share 32 rows
// instead, each with half of the output's columns, at 512 four (sharing.h).
#pragma once

#include "merge/combine_splits.h"
#include "plan/tile_shape.h"

namespace cutlass_kernels::fa2 {

// ---- Kinds of tiles. ----

// Query rows of one head. Each warp has rows of its own.
template <int HeadDim>
struct OneHeadTile {
  static constexpr TileTime kTime{};        // of tiles that are no candidates, or the only one
  static constexpr int kHeadDim = HeadDim;  // columns of a row in shared memory
  static constexpr int kColumns = HeadDim;  // that are computed, from the first on
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSharers = 1;          // warps that share rows: 1, 2 or 4
  static constexpr int kColumnParts = 1;      // of O, by warps that compute the same keys
  static constexpr bool kPacked = false;      // whether rows are those of several heads (packed_rows.h)
  static constexpr bool kSharesKeys = false;  // whether warps share rows and split the keys (sharing.h)
  static constexpr bool kDecodes = false;     // whether all rows are one warp's (store.h)
  static constexpr int kKvBytes = 2;          // of an element of K and V
  static constexpr bool kTakesTurns = false;  // whether two groups of warps do (loops.h)
};

// Query rows of several heads that share their keys, and possibly one KV split of them.
template <int HeadDim>
struct PackedTile : OneHeadTile<HeadDim> {
  static constexpr bool kPacked = true;
};

// 256 rows of either kind, by two groups of warps that take turns with the tensor cores: 161 KB of shared memory, which
// an A100 has.
template <class Kind>
struct TurnsTile : Kind {
  static constexpr bool kTakesTurns = true;
  static constexpr int kWarps = 8, kThreads = 256;
  static constexpr int kBlockM = 256, kRowTiles = 2;
  static constexpr int kBlockN = 64, kStepN = 64, kStages = 3;
  static constexpr int kAhead = 3, kBlocksPerSm = 1;
};

// As many rows by eight warps that do not take turns: a plan of such tiles may be run with a logits transform or a mask
// of any form, for which a TurnsTile has no registers.
template <class Kind>
struct EightWarpsTile : Kind {
  static constexpr int kWarps = 8, kThreads = 256;
  static constexpr int kBlockM = 256, kRowTiles = 2;
  static constexpr int kBlockN = 32, kStepN = 32, kStages = 3;
  static constexpr int kAhead = 4, kBlocksPerSm = 1;
};

// 16 such rows. All four warps have work where one of a PackedTile would. With counters, the last thread block of a
// split tile combines the partial results. And the kernel starts before the previous one has ended.
template <int HeadDim>
struct DecodeTile : PackedTile<HeadDim> {
  static constexpr int kBlockM = 16, kRowTiles = 1;
  static constexpr bool kSharesKeys = true;
  static constexpr bool kDecodes = true;
};

// Packed rows over keys and values of 8 bits (products.h), whatever the type of the queries. In steps of 16 keys all
// four warps have work even if there are 16 rows or fewer.
template <int HeadDim>
struct Fp8Tile : PackedTile<HeadDim> {
  static constexpr int kBlockM = 64, kRowTiles = 1;
  static constexpr bool kSharesKeys = true;
  static constexpr int kKvBytes = 1;
};

// The same for 16 rows or fewer.
template <int HeadDim>
struct DecodeFp8Tile : DecodeTile<HeadDim> {
  static constexpr int kKvBytes = 1;
};

// The same tile for fewer columns. Rows take as much shared memory, and zeros fill them, but products are as many as
// columns.
template <class Base, int Columns>
struct Narrow : Base {
  static constexpr TileTime kTime = Base::kTime.plus(-0.5, 0.87);
  static constexpr int kColumns = Columns;
};

// What the kernel takes for granted.
template <class Tile>
constexpr bool is_consistent() {
  static_assert(Tile::kHeadDim % 64 == 0,
                "fa2: the swizzle exchanges the eight chunks of 64 columns; a row that ends within "
                "them would be written beyond its end.");
  static_assert(32 % (Tile::kHeadDim / 8) == 0 || Tile::kHeadDim / 8 % 32 == 0,
                "fa2: the 32 lanes of a warp copy whole rows, or whole warps a row, 8 columns each: "
                "rows are of 64, 128, 256 or 512 columns, of which Narrow computes fewer.");
  static_assert(
      Tile::kColumns % 16 == 0 && Tile::kColumns <= Tile::kHeadDim &&
          (Tile::kColumns == Tile::kHeadDim || (Tile::kSharers == 1 && Tile::kColumnParts == 1 && Tile::kKvBytes == 2)),
      "fa2: products take 16 columns; warps that share columns, and keys of 8 bits, take "
      "all of a row.");
  static_assert(!Tile::kPacked || Tile::kHeadDim <= kMostCombinedColumns,
                "fa2: partial results have more columns than the kernels that combine them.");
  constexpr int kWarpRows = 16 * Tile::kRowTiles;
  return (Tile::kSharesKeys ? Tile::kRowTiles <= 2 && Tile::kWarps == 4 && Tile::kPacked
                            : Tile::kBlockM == kWarpRows * Tile::kWarps / Tile::kSharers) &&
         (Tile::kSharers == 1 ||
          ((Tile::kSharers == 2 || Tile::kSharers == 4) && Tile::kStages == 1 && Tile::kStepN == Tile::kBlockN)) &&
         (!Tile::kTakesTurns || (Tile::kWarps == 8 && Tile::kStages == 3 && Tile::kSharers == 1 &&
                                 Tile::kStepN == Tile::kBlockN && Tile::kKvBytes == 2)) &&
         (Tile::kColumnParts == 1 || (Tile::kDecodes && Tile::kWarps % Tile::kColumnParts == 0)) &&
         (Tile::kKvBytes == 2 || (Tile::kKvBytes == 1 && Tile::kSharesKeys)) &&
         (!Tile::kDecodes || (Tile::kBlockM == 16 && Tile::kSharesKeys));
}

// LaunchPlan::tile_kind. fa3 has the same numbers for the first two.
enum TileKind { kRows = 0, kPacked = 3, kDecode = 4, kPackedWide = 5, kPackedTurns = 6 };

// ---- The tiles of each head dimension. ----
//
//   Large        long queries and keys
//   FewKeys      as many rows, for fewer keys: three thread blocks per SM hide more of a tile's start and end
//   SoftCap      as many rows, where a logits transform needs registers of its own
//   Small        few or short queries, where more and shorter tiles fill the device; and devices that lack the shared
//                memory of the others
//   Packed       queries so short that reading the keys is what takes time: 64 KB of them or more are in flight per SM
//                (of 164 KB of shared memory or more)
//   PackedWide   more packed rows than Packed has: it reads the keys half as often, and two row tiles take half the
//                shared-memory traffic
//   Turns        twice as many rows as Large, for long keys: a tenth faster, but nothing hides a tile's start and end
//   PackedTurns  the same for twice as many packed rows as PackedWide
//   Decode       16 packed rows at most; 128 KB and more of keys and values are in flight per SM
//   DecodeSmall  the same rows, for devices that lack the shared memory of Decode
//   Fp8          keys and values of 8 bits
//   DecodeFp8    the same for 16 rows at most
//   Fp8Wide      the same for more than 32 rows, where conversion is what takes time: each warp converts the keys it
//                computes with, so at one row tile per warp and 64 rows all four warps convert all keys. With two row
//                tiles, two warps share 32 rows, each with every second step of the keys, which halves that.
//
// Where Large and Small have as many rows, Small is for devices that lack the shared memory of Large, and nothing else.
template <int HeadDim>
struct TileTable;

template <>
struct TileTable<64> {
  struct Large : OneHeadTile<64> {
    static constexpr TileTime kTime{3.1, 23.9};
    static constexpr int kBlockM = 128, kRowTiles = 2;
    static constexpr int kBlockN = 64, kStepN = 64, kStages = 2;
    static constexpr int kAhead = 2, kBlocksPerSm = 2;
  };
  struct FewKeys : OneHeadTile<64> {
    static constexpr int kBlockM = 128, kRowTiles = 2;
    static constexpr int kBlockN = 64, kStepN = 32, kStages = 2;
    static constexpr int kAhead = 2, kBlocksPerSm = 3;
  };
  using SoftCap = FewKeys;
  struct Small : OneHeadTile<64> {
    static constexpr TileTime kTime{3.0, 24.9};
    static constexpr int kBlockM = 64, kRowTiles = 1;
    static constexpr int kBlockN = 64, kStepN = 64, kStages = 2;
    static constexpr int kAhead = 2, kBlocksPerSm = 3;
  };
  struct Packed : PackedTile<64> {
    static constexpr TileTime kTime{1.9, 22.4};
    static constexpr int kBlockM = 64, kRowTiles = 1;
    static constexpr int kBlockN = 64, kStepN = 32, kStages = 3;
    static constexpr int kAhead = 2, kBlocksPerSm = 3;
  };
  struct PackedWide : PackedTile<64> {
    static constexpr TileTime kTime{3.2, 27.2};
    static constexpr int kBlockM = 128, kRowTiles = 2;
    static constexpr int kBlockN = 64, kStepN = 32, kStages = 2;
    static constexpr int kAhead = 2, kBlocksPerSm = 2;
  };
  struct Decode : DecodeTile<64> {
    static constexpr int kBlockN = 64, kStepN = 16, kStages = 4;
    static constexpr int kAhead = 2, kBlocksPerSm = 3;
  };
  using DecodeSmall = Decode;
  struct Fp8 : Fp8Tile<64> {
    static constexpr int kBlockN = 64, kStepN = 16, kStages = 4;
    static constexpr int kAhead = 1, kBlocksPerSm = 4;
  };
  struct DecodeFp8 : DecodeFp8Tile<64> {  // a fourth thread block per SM would spill
    static constexpr int kBlockN = 64, kStepN = 16, kStages = 5;
    static constexpr int kAhead = 1, kBlocksPerSm = 3;
  };
  struct Fp8Wide : Fp8Tile<64> {
    static constexpr int kRowTiles = 2;
    static constexpr int kBlockN = 64, kStepN = 32, kStages = 4;
    static constexpr int kAhead = 1, kBlocksPerSm = 3;
  };
};

template <>
struct TileTable<128> {
  struct Large : OneHeadTile<128> {
    static constexpr TileTime kTime{4.7, 40.6};
    static constexpr int kBlockM = 128, kRowTiles = 2;
    static constexpr int kBlockN = 32, kStepN = 32, kStages = 3;
    static constexpr int kAhead = 4, kBlocksPerSm = 2;
  };
  using FewKeys = Large;
  using SoftCap = Large;
  struct Small : OneHeadTile<128> {
    static constexpr TileTime kTime{5.6, 35.2};
    static constexpr int kBlockM = 64, kRowTiles = 1;
    static constexpr int kBlockN = 64, kStepN = 64, kStages = 2;
    static constexpr int kAhead = 2, kBlocksPerSm = 2;
  };
  struct Packed : PackedTile<128> {
    static constexpr TileTime kTime{2.5, 36.4};
    static constexpr int kBlockM = 64, kRowTiles = 1;
    static constexpr int kBlockN = 32, kStepN = 32, kStages = 3;
    static constexpr int kAhead = 2, kBlocksPerSm = 3;
  };
  struct PackedWide : PackedTile<128> {
    static constexpr TileTime kTime{6.1, 41.1};
    static constexpr int kBlockM = 128, kRowTiles = 2;
    static constexpr int kBlockN = 32, kStepN = 32, kStages = 3;
    static constexpr int kAhead = 4, kBlocksPerSm = 2;
  };
  struct Turns : TurnsTile<OneHeadTile<128>> {
    static constexpr TileTime kTime{5.1, 37.5};
  };
  using TurnsGeneral = EightWarpsTile<OneHeadTile<128>>;
  struct PackedTurns : TurnsTile<PackedTile<128>> {
    static constexpr TileTime kTime{5.4, 41.0};
  };
  using PackedTurnsGeneral = EightWarpsTile<PackedTile<128>>;
  struct Decode : DecodeTile<128> {  // 101 KB of shared memory
    static constexpr int kBlockN = 64, kStepN = 16, kStages = 3;
    static constexpr int kAhead = 2, kBlocksPerSm = 2;
  };
  struct DecodeSmall : DecodeTile<128> {
    static constexpr int kBlockN = 64, kStepN = 16, kStages = 2;
    static constexpr int kAhead = 2, kBlocksPerSm = 3;
  };
  struct Fp8 : Fp8Tile<128> {
    static constexpr int kBlockN = 64, kStepN = 16, kStages = 3;
    static constexpr int kAhead = 2, kBlocksPerSm = 3;
  };
  struct DecodeFp8 : DecodeFp8Tile<128> {
    static constexpr int kBlockN = 64, kStepN = 16, kStages = 4;
    static constexpr int kAhead = 2, kBlocksPerSm = 3;
  };
  struct Fp8Wide : Fp8Tile<128> {
    static constexpr int kRowTiles = 2;
    static constexpr int kBlockN = 64, kStepN = 32, kStages = 3;
    static constexpr int kAhead = 1, kBlocksPerSm = 2;
  };
};

// The tiles of 128, three quarters of whose columns are computed. One for decode, which waits for memory: it fits every
// device.
template <>
struct TileTable<96> {
  using Wide = TileTable<128>;
  using Large = Narrow<Wide::Large, 96>;
  using FewKeys = Large;
  using SoftCap = Large;
  using Small = Narrow<Wide::Small, 96>;
  using Packed = Narrow<Wide::Packed, 96>;
  using PackedWide = Narrow<Wide::PackedWide, 96>;
  using Decode = Narrow<Wide::DecodeSmall, 96>;
  using DecodeSmall = Decode;
};

template <>
struct TileTable<256> {
  struct Large : OneHeadTile<256> {  // 104.5 KB of shared memory
    static constexpr TileTime kTime{6.5, 43.2};
    static constexpr int kSharers = 2;
    static constexpr int kBlockM = 64, kRowTiles = 2;
    static constexpr int kBlockN = 64, kStepN = 64, kStages = 1;
    static constexpr int kAhead = 4, kBlocksPerSm = 2;
  };
  using FewKeys = Large;
  using SoftCap = Large;
  struct Small : OneHeadTile<256> {  // 96 KB: compute capabilities 8.6, 8.9, 12.x
    static constexpr int kBlockM = 64, kRowTiles = 1;
    static constexpr int kBlockN = 32, kStepN = 32, kStages = 2;
    static constexpr int kAhead = 4, kBlocksPerSm = 2;
  };
  struct Packed : PackedTile<256> {
    static constexpr TileTime kTime{3.6, 60.8};
    static constexpr int kBlockM = 64, kRowTiles = 1;
    static constexpr int kBlockN = 32, kStepN = 32, kStages = 2;
    static constexpr int kAhead = 4, kBlocksPerSm = 2;
  };
  using PackedWide = Packed;
  struct Decode : DecodeTile<256> {
    static constexpr int kBlockN = 32, kStepN = 16, kStages = 2;
    static constexpr int kAhead = 2, kBlocksPerSm = 2;
  };
  using DecodeSmall = Decode;
  struct Fp8 : Fp8Tile<256> {  // 97 KB
    static constexpr int kBlockN = 64, kStepN = 16, kStages = 2;
    static constexpr int kAhead = 2, kBlocksPerSm = 2;
  };
  struct DecodeFp8 : DecodeFp8Tile<256> {
    static constexpr int kBlockN = 32, kStepN = 16, kStages = 4;
    static constexpr int kAhead = 2, kBlocksPerSm = 2;
  };
  using Fp8Wide = Fp8;  // two row tiles do not fit 255 registers
};

// Q of 64 rows takes 64 KB, and O of 16 rows 256 registers of a warp: warps share rows, or keys.
template <>
struct TileTable<512> {
  struct Large : OneHeadTile<512> {  // 202 KB of shared memory
    static constexpr TileTime kTime{6.2, 54.9};
    static constexpr int kWarps = 8, kThreads = 256, kSharers = 4;
    static constexpr int kBlockM = 64, kRowTiles = 2;
    static constexpr int kBlockN = 64, kStepN = 64, kStages = 1;
    static constexpr int kAhead = 4, kBlocksPerSm = 1;
  };
  using FewKeys = Large;
  using SoftCap = Large;
  struct Small : OneHeadTile<512> {  // 98.5 KB
    static constexpr TileTime kTime{5.4, 88.1};
    static constexpr int kSharers = 2;
    static constexpr int kBlockM = 32, kRowTiles = 1;
    static constexpr int kBlockN = 32, kStepN = 32, kStages = 1;
    static constexpr int kAhead = 4, kBlocksPerSm = 2;
  };
  struct Packed : PackedTile<512> {  // the same
    static constexpr TileTime kTime{6.9, 75.6};
    static constexpr int kSharers = 2;
    static constexpr int kBlockM = 32, kRowTiles = 1;
    static constexpr int kBlockN = 32, kStepN = 32, kStages = 1;
    static constexpr int kAhead = 4, kBlocksPerSm = 2;
  };
  using PackedWide = Packed;
  struct Decode : DecodeTile<512> {  // 112 KB
    static constexpr int kColumnParts = 2;
    static constexpr int kBlockN = 16, kStepN = 16, kStages = 3;
    static constexpr int kAhead = 3, kBlocksPerSm = 2;
  };
  struct DecodeSmall : DecodeTile<512> {  // 80 KB
    static constexpr int kColumnParts = 2;
    static constexpr int kBlockN = 16, kStepN = 16, kStages = 2;
    static constexpr int kAhead = 3, kBlocksPerSm = 2;
  };
};

}  // namespace cutlass_kernels::fa2
