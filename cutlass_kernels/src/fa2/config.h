// The tile table of the fa2 backend, read by host (launch) and device (kernel).
//
// A warp owns kRowTiles * 16 query rows. Two row tiles halve the shared-memory traffic per product: a
// K or V fragment read by ldmatrix feeds two mma.sync. One row tile reads 128 B of shared memory per clock
// and SM at full tensor rate, all there is. Three row tiles (or two at head dim 256) do not fit 255 registers;
// at head dim 256 two warps share 32 rows instead, each with half of the output's columns (shared_rows.h).
//
// The entries are the fastest of some sixty measured on an H200 (benchmarks/RESULTS.md).
#pragma once

#include "merge/merge_pieces.h"

namespace cutlass_kernels::fa2 {

template <int HeadDim, int RowTiles, int Warps, int BlockN, int StepN, int Stages, int Ahead,
          int BlocksPerSm, int Sharers = 1, bool Packed = false, int KvBytes = 2,
          int SharedRows = KvBytes == 1 ? 64 : 0>
struct Tile {
  static_assert(HeadDim % 64 == 0,
                "fa2: the swizzle exchanges the eight chunks of 64 columns; a row that ends within "
                "them would be written beyond its end.");
  static_assert(32 % (HeadDim / 8) == 0,
                "fa2: the 32 lanes of a warp copy whole rows, 8 columns each: head dimensions are "
                "64, 128 and 256.");
  static_assert(!Packed || HeadDim <= kMostMergedColumns,
                "fa2: partial results of split keys have more columns than the merge kernels.");
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kRowTiles = RowTiles;
  static constexpr int kWarps = Warps;
  static constexpr int kThreads = 32 * Warps;
  // Warps of a tile with few rows share these, each with a part of the keys (shared_keys.h): of so many rows, at any number
  // of row tiles; 0: each has rows of its own.
  static constexpr bool kSharesKeys = SharedRows > 0;
  static constexpr int kBlockM = kSharesKeys ? SharedRows : 16 * RowTiles * Warps / Sharers;
  static constexpr int kBlockN = BlockN;            // keys per stage of the load pipeline
  static constexpr int kStepN = StepN;              // keys per softmax step
  static constexpr int kStages = Stages;            // of K and V in shared memory
  static constexpr int kAhead = Ahead;              // ldmatrix issued before their products
  static constexpr int kBlocksPerSm = BlocksPerSm;  // what registers are budgeted for
  static constexpr int kSharers = Sharers;          // warps that share rows: 1 or 2
  static constexpr bool kPacked = Packed;           // rows of several heads (packed_rows.h)
  static constexpr int kKvBytes = KvBytes;          // of an element of K and V
  // Whether all rows are one warp's. Then the block that is last of those that share a tile's keys merges their results,
  // and the kernel starts before the previous one has ended.
  static constexpr bool kDecodes = SharedRows == 16;
  static_assert(Sharers == 1 || (Sharers == 2 && Stages == 1 && StepN == BlockN && !Packed));
  static_assert(KvBytes == 2 || (KvBytes == 1 && kSharesKeys));
  static_assert(!kSharesKeys || (RowTiles <= 2 && Warps == 4 && Packed));
};

// Schedule::tile_kind. fa3 has the same numbers for the first two.
enum TileKind { kRows = 0, kPacked = 3, kDecode = 4 };

// Large: long queries and keys. Medium: as many rows, for fewer keys; three blocks per SM hide more of a
// tile's start and end. Capped: as many rows, where a logits transform needs registers of its own. Small: few or
// short queries, where more and shorter tiles fill the machine, and devices without the shared memory of the
// others. Packed: for queries so short that reading the keys is what takes time: 64 KB of them or more are under way to
// each SM (of 164 KB of shared memory or more).
//
// kFewBlocks: with fewer blocks of the large tile than this, the small one is faster on 132 SMs; the causal
// value is higher because short tiles even out what a causal mask makes uneven. Where both have as many rows there is
// no such rule: the small one is for devices without the shared memory of the large one, and nothing else.
//
// Decode: packed rows, 16 at most. All four warps have work where one of Packed would, and loads of up to 128 KB per SM are
// under way. DecodeSmall: the same rows, for devices without its shared memory.
//
// Fp8: for keys and values of 8 bits, whatever the queries; DecodeFp8 is to it what Decode is to Packed. In steps of 16 keys all four warps have work where there are
// 16 rows or fewer. Fp8Wide: for more than 32 rows. There conversion is what takes time: each warp converts the keys it
// computes with, of 64 rows all four warps all keys. Two row tiles per warp halve that: two warps share 32 rows, each
// with every second step of the keys. (At head dim 256 they do not fit 255 registers.)
template <int HeadDim>
struct TileTable;

template <>
struct TileTable<64> {
  using Large = Tile<64, 2, 4, 64, 64, 2, 2, 2>;
  using Medium = Tile<64, 2, 4, 64, 32, 2, 2, 3>;
  using Capped = Medium;
  using Small = Tile<64, 1, 4, 64, 64, 2, 2, 3>;
  using Packed = Tile<64, 1, 4, 64, 32, 3, 2, 3, 1, true>;
  using Decode = Tile<64, 1, 4, 64, 16, 4, 2, 3, 1, true, 2, 16>;
  using DecodeSmall = Decode;
  using Fp8 = Tile<64, 1, 4, 64, 16, 4, 1, 4, 1, true, 1>;
  using DecodeFp8 = Tile<64, 1, 4, 64, 16, 4, 1, 4, 1, true, 1, 16>;
  using Fp8Wide = Tile<64, 2, 4, 64, 32, 4, 1, 3, 1, true, 1>;
  static constexpr int kFewBlocks = 200;
  static constexpr int kFewBlocksCausal = 320;
};

template <>
struct TileTable<128> {
  using Large = Tile<128, 2, 4, 32, 32, 3, 4, 2>;
  using Medium = Large;
  using Capped = Large;
  using Small = Tile<128, 1, 4, 64, 64, 2, 2, 2>;
  using Packed = Tile<128, 1, 4, 32, 32, 3, 2, 3, 1, true>;
  using Decode = Tile<128, 1, 4, 64, 16, 3, 2, 2, 1, true, 2, 16>;  // 101 KB of shared memory
  using DecodeSmall = Tile<128, 1, 4, 64, 16, 2, 2, 3, 1, true, 2, 16>;
  using Fp8 = Tile<128, 1, 4, 64, 16, 3, 2, 3, 1, true, 1>;
  using DecodeFp8 = Tile<128, 1, 4, 64, 16, 4, 2, 3, 1, true, 1, 16>;
  using Fp8Wide = Tile<128, 2, 4, 64, 32, 3, 1, 2, 1, true, 1>;
  static constexpr int kFewBlocks = 80;
  static constexpr int kFewBlocksCausal = 320;
};

template <>
struct TileTable<256> {
  using Large = Tile<256, 2, 4, 64, 64, 1, 4, 2, 2>;  // 104.5 KB of shared memory
  using Medium = Large;
  using Capped = Large;
  using Small = Tile<256, 1, 4, 32, 32, 2, 4, 2>;  // 96 KB: compute capabilities 8.6, 8.9, 12.x
  using Packed = Tile<256, 1, 4, 32, 32, 2, 4, 2, 1, true>;
  using Decode = Tile<256, 1, 4, 32, 16, 2, 2, 2, 1, true, 2, 16>;
  using DecodeSmall = Decode;
  using Fp8 = Tile<256, 1, 4, 64, 16, 2, 2, 2, 1, true, 1>;  // 97 KB
  using DecodeFp8 = Tile<256, 1, 4, 32, 16, 4, 2, 2, 1, true, 1, 16>;
  using Fp8Wide = Fp8;
};

}  // namespace cutlass_kernels::fa2
