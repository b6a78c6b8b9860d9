// The tile table of the fa3 backend, read by host (launch) and device (kernel).
//
// A tile is what one CTA computes at a time: 64 query rows for each consumer warpgroup, against KV blocks of kBlockN
// keys. A larger tile needs fewer instructions and less traffic per product, but its stages must fit the shared
// memory (227 KB per SM), and its fragments the registers (65536 per SM). The tiles below are the fastest measured
// (benchmarks/results/prefill-fa3.md).
#pragma once

#include <algorithm>

#include "merge/combine_splits.h"
#include "plan/tile_shape.h"

namespace cutlass_kernels::fa3 {

// Rows of a consumer warpgroup: the M of wgmma.
constexpr int kWarpgroupRows = 64;

// LaunchPlan::tile_kind.
enum TileKind { kRows, kGeneral, kGather, kPacked };

// ---- What a tile chooses. A tile of the table overrides the defaults in which it differs.

template <int HeadDimQk, int HeadDimVo = HeadDimQk>
struct TileDefaults {
  static constexpr int kHeadDimQk = HeadDimQk;
  static constexpr int kHeadDimVo = HeadDimVo;
  static constexpr int kElementBytes = 2;  // of q, k and v

  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kBlockN = 128;   // keys of a KV block
  static constexpr int kKStages = 2;
  static constexpr int kVStages = 2;
  // Buffers of 64 query rows, of which warpgroup w uses every kConsumers-th. With two per warpgroup, Q of the next
  // tile arrives during this one (hd128, 512 keys, full: 224 -> 210 kcycles).
  static constexpr int kQBuffers = 4;
  static constexpr int kOPanels = 1;  // of 64 columns of O, staged by a warpgroup at a time
  static constexpr int kCtasPerSm = 1;
  // Two: the head dimensions above are those of each CTA of a pair, which has half of the columns (pair.h).
  static constexpr int kCtasPerTile = 1;

  // Warpgroups take turns in issuing their products.
  static constexpr bool kPingPong = true;
  // Maxima only where they must be taken, see consumer.h.
  static constexpr bool kLazyMax = true;
  // Q as register operand: products read a third less shared memory.
  static constexpr bool kQInRegisters = false;

  // Rows of K and V are gathered: the page size is no multiple of 8, or they are to be converted (load_gather.h).
  static constexpr bool kGather = false;
  static constexpr bool kBySlots = false;  // keys by slots: a row is a request, which sees all of its keys
  // Rows are those of several query heads that share a KV head, and keys may be split.
  static constexpr bool kPacked = false;
  static constexpr bool kSharesKeys = false;  // whether tiles with the same keys follow one another
  static constexpr bool kShares = false;      // whether it computes even shares (schedule/even_shares.h)
  // Warpgroups. A second one, in kernels that gather, adds warps that copy.
  static constexpr int kProducers = 1;

  // Of e4m3.
  static constexpr int kTransposers = 0;   // warps that transpose V (load_fp8.h)
  static constexpr int kStagedStages = 0;  // KV blocks of V that wait for them
  static constexpr int kOutputParts = 1;   // of the columns of P V, computed one after the other
  // Whether P V begins before it is known that P fits e4m3: up to 11 % faster. With more columns than 64 it takes more
  // registers than there are.
  static constexpr bool kChecksLate = false;

  // Of e4m3 below 16-bit queries: warps that convert K and V (load_gather.h), blocks of which wait in staged stages.
  static constexpr int kConverters = 0;
};

// The tile with rows of packed heads. A warpgroup without rows drains its stages out of step with the others: there
// are no turns.
template <class Base>
struct Packing : Base {
  static constexpr TileTime kTime = Base::kTime.plus(1.5, 1.09);
  static constexpr bool kPacked = true;
  static constexpr bool kPingPong = false;
};

// The tile with gathered keys. Two: by a second producer warpgroup, with which two warps copy K, and two V.
template <class Base>
struct Gathering : Base {
  static constexpr TileTime kTime = Base::kTime.plus(0, Base::kPacked ? 1.15 : 1.3);
  static constexpr bool kGather = true;
};
template <class Base>
struct GatheringByTwo : Gathering<Base> {
  static constexpr TileTime kTime = Base::kTime.plus(0.5, 1.1);
  static constexpr int kProducers = 2;
};

// The packed tile with gathered keys and values of e4m3, which the second producer warpgroup converts.
template <class Base>
struct Converting : Gathering<Packing<Base>> {
  static constexpr int kProducers = 2;
  static constexpr int kConverters = 4;
  static constexpr int kStagedStages = 3;
  static constexpr int kOPanels = 1;
};

// ---- What follows from it.

template <class Choices>
struct Tile : Choices {
  using Choices::kConsumers, Choices::kProducers, Choices::kCtasPerSm, Choices::kTransposers;
  static_assert(Choices::kHeadDimQk % 16 == 0,
                "fa3: Q K^T takes 16 columns per wgmma; those beyond the last 16 would not count.");
  static_assert(Choices::kHeadDimVo % (Choices::kElementBytes == 2 ? 16 : 64) == 0,
                "fa3: O is stored 16 columns at a time, O of e4m3 in panels of 64 columns; those "
                "beyond the last whole ones would never be written.");
  static_assert(Choices::kHeadDimVo <= 256, "fa3: one wgmma makes all columns of O, at most 256.");
  static_assert(!Choices::kPacked || Choices::kHeadDimVo <= kMostCombinedColumns,
                "fa3: partial results have more columns than the kernels that combine them.");
  static_assert(Choices::kBlockN % 32 == 0, "fa3: producers look at 32 keys at a time, a bit or a lane each.");
  static_assert(kProducers == 1 || (kProducers == 2 && Choices::kGather));
  static_assert(!(Choices::kPacked && Choices::kPingPong), "see Packing");

  static constexpr int kBlockM = kWarpgroupRows * kConsumers;
  static constexpr int kThreads = 128 * (kProducers + kConsumers);
  static constexpr bool kConverts = Choices::kConverters > 0;
  // Warps that share the rows of a KV block of K, and as many for V.
  static constexpr int kCopyWarps = kConverts ? 1 : kProducers;

  // Registers per thread: at the launch, and after setmaxnreg has moved what the producer warpgroup does not need to
  // the consumers. Producers that copy row by row (from pages whose size is no multiple of 8, or V
  // under a custom mask) or transpose need more.
  static constexpr int kLaunchRegisters = std::min(65536 / kCtasPerSm / kThreads / 8 * 8, 240);
  static constexpr int producer_registers(bool copies_rows) {
    if (kTransposers > 0) return 56;
    if (kConverts) return 64;
    if (kConsumers > 2 || kCtasPerSm > 1) return copies_rows ? 56 : 32;
    return kProducers == 1 && (copies_rows || Choices::kGather) ? 56 : 40;
  }
  static constexpr int consumer_registers(bool copies_rows) {
    return std::min(
        (kLaunchRegisters * kThreads - producer_registers(copies_rows) * 128 * kProducers) / (128 * kConsumers) / 8 * 8,
        240);
  }
};

// ---- The tiles. In front of each: query rows x keys of a KV block, shared memory, registers of producer and consumer
// threads. A row of S and of O takes kBlockN / 2 and head_dim_vo / 2 registers of each consumer thread, and P half of
// S's (16 bits).

// 192 x 128, 137 KB, 32 / 160. Three warpgroups fit, as O takes only 32 registers. Bound by instructions and
// exponentials: ping-pong 1867 -> 1778, lazy maxima 1778 -> 1615 kcycles (4k, full).
struct Hd64Large : TileDefaults<64> {
  static constexpr TileTime kTime{3.3, 9.2};
  static constexpr int kConsumers = 3;
  static constexpr int kQBuffers = 6;
};
// 64 x 64, 57 KB, 32 / 128, three independent CTAs per SM cover the starts and ends of short tiles. Under a causal
// mask of 512 (1k) keys 16 % (10 %) faster than Large, at 2k keys 7 % slower; without a mask 5 % and 7 %, at 2k 15 %
// slower.
struct Hd64Small : TileDefaults<64> {
  static constexpr TileTime kTime{2.1, 12.5};
  static constexpr int kConsumers = 1;
  static constexpr int kBlockN = 64;
  static constexpr int kKStages = 3;
  static constexpr int kQBuffers = 1;
  static constexpr int kCtasPerSm = 3;
  static constexpr bool kPingPong = false;
};
// 128 x 128, 113 KB, 56 / 224: bits and biases take the registers of the third warpgroup.
struct Hd64General : TileDefaults<64> {
  static constexpr TileTime kTime{3.0, 7.3};
};
// 128 x 128, 177 KB, 40 / 232. Decoding is bound by memory: more stages keep more loads in flight.
struct Hd64Packed : Packing<Hd64General> {
  static constexpr TileTime kTime{3.8, 9.7};
  static constexpr int kKStages = 4;
  static constexpr int kVStages = 4;
};

// 128 x 128, 225 KB, 40 / 232: S 64, P 32 and O 64 registers, in Hd128Large Q 32: full 1289 -> 1272, with lazy maxima
// 1240 kcycles (4k). Three K stages instead of two make no difference; KV blocks of 160 or 176 keys are 2 to 4
// % slower.
struct Hd128FewKeys : TileDefaults<128> {
  static constexpr TileTime kTime{2.9, 10.6};
  static constexpr int kOPanels = 2;
};
struct Hd128Large : Hd128FewKeys {
  static constexpr bool kQInRegisters = true;
};
// 64 x 128, 177 KB, 40 / 240: one warpgroup, twice as many tiles. 8 heads of 1k tokens: 16.2 -> 13.8 us.
struct Hd128Small : Hd128FewKeys {
  static constexpr TileTime kTime{2.5, 8.4};
  static constexpr int kConsumers = 1;
  static constexpr int kQBuffers = 2;
  static constexpr bool kPingPong = false;
};

// 192 x 96, 217 KB, 32 / 160: S 48, P 24 and O 48 registers. Panels are of 64 columns: of the second one, half is used.
// 4k keys: 597 TFLOP/s, causal 551; 128 x 128 with Q in registers 544 and 510, padded to 128 columns 491 and 468.
struct Hd96Large : TileDefaults<96> {
  static constexpr TileTime kTime{3.4, 12.0};
  static constexpr int kConsumers = 3;
  static constexpr int kBlockN = 96;
  static constexpr int kQBuffers = 6;
};
// 128 x 128, 209 KB, 40 / 232: S 64, P 32, O 48, in Hd96Small Q 24 registers. A causal mask of 1k keys leaves less of
// the larger tile's work useful: 390 TFLOP/s, padded to 128 columns, in 128 rows, 399.
struct Hd96General : TileDefaults<96> {
  static constexpr TileTime kTime{2.6, 10.3};
};
struct Hd96Small : Hd96General {
  static constexpr TileTime kTime{2.6, 9.3};
  static constexpr bool kQInRegisters = true;
};

// 128 x 128, 225 KB, 40 / 232. No second Q buffer fits: Q of a tile arrives after the last product with the previous
// one's.
struct Hd192Large : TileDefaults<192, 128> {
  static constexpr TileTime kTime{4.2, 11.5};
  static constexpr int kQBuffers = 2;
};

// 128 x 96, 209 KB, 40 / 232: S 48, P 24 and O 96 registers. Of 128 keys, two stages of K and V are 192 KB.
struct Hd192Square : TileDefaults<192> {
  static constexpr TileTime kTime{4.5, 14.2};
  static constexpr int kBlockN = 96;
  static constexpr int kQBuffers = 2;
};

// 128 x 64, 225 KB, 40 / 232: O takes 128 registers, S of 64 keys 32. 192 KB are K, V and one Q.
struct Hd256Large : TileDefaults<256> {
  static constexpr TileTime kTime{4.6, 18.4};
  static constexpr int kBlockN = 64;
  static constexpr int kQBuffers = 2;
  static constexpr int kOPanels = 2;
  static constexpr bool kLazyMax = false;
};

// A pair of CTAs, each with the tile of 256 columns. 128 x 64, 225 KB, 40 / 232: partial sums of S are received in the
// memory through which O leaves.
struct Hd512Large : Hd256Large {
  static constexpr TileTime kTime{5.0, 31.4};
  static constexpr int kCtasPerTile = 2;
};

// e4m3: a KV block costs half the bytes and half the tensor core time. Two warps of the producer warpgroup transpose V.
template <int HeadDim>
struct Fp8Defaults : TileDefaults<HeadDim> {
  static constexpr int kElementBytes = 1;
  static constexpr int kTransposers = 2;
  static constexpr int kStagedStages = 2;
  static constexpr int kKStages = 3;
  static constexpr int kVStages = 3;
};
// 192 x 128, 181 KB, 56 / 152. Turns cost 5 to 8 %: without them, warpgroups fall out of step by themselves.
struct Hd64Fp8Large : Fp8Defaults<64> {
  static constexpr TileTime kTime{2.8, 10.2};
  static constexpr bool kChecksLate = true;
  static constexpr int kConsumers = 3;
  static constexpr bool kPingPong = false;
  static constexpr int kQBuffers = 6;
};
// 128 x 128, 189 KB, 56 / 224.
struct Hd64Fp8Packed : Packing<Fp8Defaults<64>> {
  static constexpr TileTime kTime{4.4, 8.8};
  static constexpr bool kChecksLate = true;
  static constexpr int kKStages = 4;
  static constexpr int kStagedStages = 3;
};
// 192 x 128, 188 KB, 56 / 152: O 64, S 64 or P 32 and half of P V 36.
struct Hd128Fp8Large : Fp8Defaults<128> {
  static constexpr TileTime kTime{3.4, 12.6};
  static constexpr int kConsumers = 3;
  static constexpr int kQBuffers = 6;
  static constexpr int kVStages = 2;
  static constexpr int kOutputParts = 2;
};
// 128 x 128, 181 KB, 56 / 224.
struct Hd128Fp8Packed : Packing<Fp8Defaults<128>> {
  static constexpr TileTime kTime{4.8, 10.4};
};
// 128 x 128, 212 KB, 56 / 224: O 128, S 64 or P 32 and a quarter of P V 36. KV blocks of 96 keys, with two staged ones,
// are 7 to 15 % slower.
struct Hd256Fp8Large : Fp8Defaults<256> {
  static constexpr TileTime kTime{4.6, 14.9};
  static constexpr int kStagedStages = 1;
  static constexpr int kOutputParts = 4;
  static constexpr int kKStages = 2;
  static constexpr int kVStages = 2;
  static constexpr int kQBuffers = 2;
};
// 128 x 64, 196 KB, 56 / 224.
struct Hd256Fp8Packed : Packing<Fp8Defaults<256>> {
  static constexpr TileTime kTime{4.3, 18.8};
  static constexpr bool kLazyMax = false;  // S computed again would spill 70 bytes
  static constexpr int kBlockN = 64;
  static constexpr int kOutputParts = 4;
  static constexpr int kKStages = 2;
  static constexpr int kVStages = 2;
  static constexpr int kQBuffers = 2;
  static constexpr int kOPanels = 2;
};

// Keys and values of e4m3 below 16-bit queries: what waits to be converted takes the place of a Q buffer.
// 128 x 128, 227 KB to the last byte, 64 / 192.
struct Hd64Converted : Converting<Hd64General> {
  static constexpr int kKStages = 4;
  static constexpr int kVStages = 4;
};
// 128 x 128, 227 KB, the same.
struct Hd128Converted : Converting<Hd128FewKeys> {
  static constexpr int kQBuffers = 2;
};
// 64 x 64, 219 KB, 64 / 240: of 128 rows, Q would take the memory of the bytes.
struct Hd256Converted : Converting<Hd256Large> {
  static constexpr int kConsumers = 1;
  static constexpr int kQBuffers = 1;
};

// ---- Which tile serves which problem (choose_tile.h).
//
// Large         long queries and keys.
// FewKeys       as many rows, for rows that see few keys: the cost of a tile beside its KV blocks counts more.
// Small         fewer rows, for queries that are few or short; Large itself where there is no smaller tile.
// General       custom masks, ALiBi, statistics, and factors that only the device knows.
// Gather...     in place of Large and Small for pages of a size that is no multiple of 8; Packed in place of General.
// Packed...     short queries: the rows of several heads share a tile, and keys may be split.
//
// kHasSoftCap         soft caps have kernels of their own, beside the general ones.
// kSkips          negligible KV blocks may be skipped.
template <int HeadDimQk, int HeadDimVo>
struct TileTable;

template <>
struct TileTable<64, 64> {
  using Large = Tile<Hd64Large>;
  using FewKeys = Large;
  using Small = Tile<Hd64Small>;
  using General = Tile<Hd64General>;
  using Gather = Tile<Gathering<Hd64Large>>;
  using GatherSmall = Tile<Gathering<Hd64Small>>;
  using Packed = Tile<Hd64Packed>;
  using PackedGather = Tile<Gathering<Hd64Packed>>;
  static constexpr bool kHasSoftCap = true, kSkips = false;
};

template <>
struct TileTable<96, 96> {
  using Large = Tile<Hd96Large>;
  using FewKeys = Large;
  using Small = Tile<Hd96Small>;
  using General = Tile<Hd96General>;
  using Gather = Tile<GatheringByTwo<Hd96General>>;
  using GatherSmall = Gather;
  using Packed = Tile<Packing<Hd96General>>;
  using PackedGather = Tile<Gathering<Packing<Hd96General>>>;
  static constexpr bool kHasSoftCap = true, kSkips = false;
};

template <>
struct TileTable<128, 128> {
  using Large = Tile<Hd128Large>;
  using FewKeys = Tile<Hd128FewKeys>;
  using Small = Tile<Hd128Small>;
  using General = FewKeys;  // the registers that could hold Q hold bits
  using Gather = Tile<GatheringByTwo<Hd128FewKeys>>;
  using GatherSmall = Gather;
  using Packed = Tile<Packing<Hd128FewKeys>>;
  using PackedGather = Tile<Gathering<Packing<Hd128FewKeys>>>;
  static constexpr bool kHasSoftCap = true, kSkips = true;
};

template <>
struct TileTable<192, 128> {
  using Large = Tile<Hd192Large>;
  using FewKeys = Large;
  using Small = Large;
  using General = Large;
  using Gather = Tile<GatheringByTwo<Hd192Large>>;
  using GatherSmall = Gather;
  using Packed = Tile<Packing<Hd192Large>>;
  using PackedGather = Tile<Gathering<Packing<Hd192Large>>>;
  static constexpr bool kHasSoftCap = false, kSkips = false;
};

// One tile for all kinds, with one producer warpgroup where rows are gathered.
template <class Choices, bool kHasSoftCap_>
struct OneTile {
  using Large = Tile<Choices>;
  using FewKeys = Large;
  using Small = Large;
  using General = Large;
  using Gather = Tile<Gathering<Choices>>;
  using GatherSmall = Gather;
  using Packed = Tile<Packing<Choices>>;
  using PackedGather = Tile<Gathering<Packing<Choices>>>;
  static constexpr bool kHasSoftCap = kHasSoftCap_, kSkips = false;
};

// Each of two producer warpgroups would have 48 rows, and rows are looked up 32 at a time.
template <>
struct TileTable<192, 192> : OneTile<Hd192Square, false> {};

// A product of 256 columns needs more registers than 512 threads are launched with.
template <>
struct TileTable<256, 256> : OneTile<Hd256Large, true> {};
template <>
struct TileTable<512, 512> : OneTile<Hd512Large, false> {};

// The tiles of e4m3. Problems that need another tile are computed from copies of 16 bits.
template <int HeadDim>
struct Fp8TileTable;

template <>
struct Fp8TileTable<64> {
  using Large = Tile<Hd64Fp8Large>;
  using Packed = Tile<Hd64Fp8Packed>;
};

template <>
struct Fp8TileTable<128> {
  using Large = Tile<Hd128Fp8Large>;
  using Packed = Tile<Hd128Fp8Packed>;
};

template <>
struct Fp8TileTable<256> {
  using Large = Tile<Hd256Fp8Large>;
  using Packed = Tile<Hd256Fp8Packed>;
};

// The tiles of e4m3 keys and values below 16-bit queries, all packed.
template <int HeadDim>
struct ConvertedTileTable;

template <>
struct ConvertedTileTable<64> {
  using Packed = Tile<Hd64Converted>;
};
template <>
struct ConvertedTileTable<128> {
  using Packed = Tile<Hd128Converted>;
};
template <>
struct ConvertedTileTable<256> {
  using Packed = Tile<Hd256Converted>;
};

}  // namespace cutlass_kernels::fa3
