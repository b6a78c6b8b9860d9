// The tile of multi-head latent attention: 64 rows, of tokens and heads, against KV blocks of 64 keys.
#pragma once

#include "common/token_format.h"
#include "fa3/config.h"
#include "fa3/shared_memory.h"
#include "fa3/tma.h"
#include "latent/dims.h"
#include "merge/combine_splits.h"
#include "schedule/batch_splits.h"
#include "schedule/even_shares.h"
#include "schedule/find_work.h"

#include <type_traits>

namespace cutlass_kernels::mla {

// What fa3 asks of a tile (fa3/config.h).
struct Tile {
  static constexpr int kHeadDimQk = kLatentDim + kRopeDim;
  static constexpr int kHeadDimVo = kLatentDim;
  static constexpr int kConsumers = 1;  // of rows: two warpgroups have half of the columns of O each
  static constexpr int kBlockM = fa3::kWarpgroupRows;
  static constexpr int kBlockN = 64;
  static constexpr int kStages = 2;
  static constexpr int kCtasPerSm = 1;
  static constexpr int kCtasPerTile = 1;
  static constexpr int kProducerWarps = 4;
  static constexpr int kThreads = (kProducerWarps + 8) * 32;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr bool kBySlots = false;
  static constexpr bool kQuantized = false;
  static constexpr bool kFewHeads = false;  // few_heads.h
  static constexpr int kQRows = 64;
  static constexpr int kScales = 0;            // of a token
  static constexpr int kListedWords = 2;       // Shared::listed
  static constexpr bool kHasPositions = true;  // keys have columns behind the latent ones
  static constexpr int kStagePanels = kHeadDimQk / 64;
  static constexpr bool kPacked = true;
  static constexpr bool kSharesKeys = true;  // with the tiles of other heads, and of other tokens
  static constexpr bool kShares = true;
  static_assert(kBlockN == EvenShares::kBlockKeys);
  static_assert(kHeadDimVo <= kMostCombinedColumns);
};

// Of requests that name their keys by slots (PageTable::slots_per_page).
struct SlotsTile : Tile {
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static constexpr bool kBySlots = true;
};

// The same without columns of the position: keys are values (DeepSeek V4), or have no position (GLM-5.3-Flash).
struct NarrowSlotsTile : SlotsTile {
  static constexpr int kHeadDimQk = kLatentDim;
  static constexpr bool kHasPositions = false;
};

// Whose tokens are numbers of e4m3 with scales. Columns of the position are behind the latent ones, or among the values
// (448 and 64), or there are none.
template <DType kTokens>
struct QuantizedTile : SlotsTile {
  static constexpr int kProducerRegisters = 88;
  static constexpr int kConsumerRegisters = 208;
  static constexpr bool kQuantized = true;
  static constexpr TokenFormat kFormat = token_format(kTokens);
  // One kernel reads all formats of 528 bytes, by kv_dtype: 4 scales become 16.
  static constexpr bool kAnyOf528 = kFormat.bytes == 528;
  static constexpr bool kHasPositions = kFormat.positions > 0 && kFormat.columns == kLatentDim;
  static constexpr int kHeadDimQk = kLatentDim + (kHasPositions ? kRopeDim : 0);
  static constexpr int kScales = kFormat.has_exponents ? kLatentDim / kFormat.group : kFormat.scale_bytes / 4;
  static_assert(kFormat.columns == kLatentDim || kFormat.columns + kFormat.positions == kLatentDim);
};

// A pair of CTAs (fa3/pair.h) with tiles of the same tokens and other heads: each has the keys of both, of which it
// widens half.
template <DType kTokens>
struct QuantizedPairTile : QuantizedTile<kTokens> {
  static constexpr int kCtasPerTile = 2;
  static constexpr int kListedWords = 8;  // the rows of a warp each
};

// Of up to 16 heads, which leave registers for four times as many producers: 80 per thread at launch.
template <DType kTokens>
struct FewHeadsTile : QuantizedTile<kTokens> {
  static constexpr bool kFewHeads = true;
  static constexpr int kQRows = 16;
  static constexpr int kProducerWarps = 16;
  static constexpr int kProducerRegisters = 56;  // with 64, and 112 for consumers, it takes 5 % longer
  static constexpr int kConsumerRegisters = 128;
  static constexpr int kThreads = (kProducerWarps + 8) * 32;
  static constexpr int kListedWords = 16;                                       // the rows of a warp each
  static constexpr int kStagePanels = QuantizedTile<kTokens>::kHeadDimQk / 64;  // P has memory of its own
};

// ---- Shared memory of a CTA: Q, two stages of keys, and the barriers between warps.
//
// Matrices are stored as panels of 64 columns, the span of the swizzle: panels 0 to 7 are the latent columns, panel 8
// those of the position. Shapes below are (row, column, panel).

using fa3::Barrier;
using fa3::Job;
using fa3::kJobBuffers;

constexpr int kPanelBytes = 64 * 128;
constexpr int kPanels = (kLatentDim + kRopeDim) / 64;
constexpr int kRopePanel = kLatentDim / 64;
constexpr int kHalfPanels = kRopePanel / 2;

// Softmax state of a row after a KV block of a warpgroup: -m, and the factor of earlier weights.
struct alignas(8) RowState {
  float minus_m;
  float factor;
};

using fa3::Nothing;

// The tile that a CTA has claimed last, from which the next claim goes on.
struct ClaimedTile {
  int index, head;
  WorkItem work;
};

// Of CTA 1 of a pair: the jobs that CTA 0 has sent it.
struct SentJobs {
  Job jobs[kJobBuffers];
  Barrier sent[kJobBuffers];  // CTA 0, with their bytes
};

// Where a token is, or one of zeros.
struct TokenAt {
  const char* record;
};
struct alignas(16) TokenAndScalesAt : TokenAt {
  const char* scales;
};

// Pointers to tokens. Each lane of a producer warp looks up one slot, those of several KV blocks at once.
template <class Tile>
struct alignas(16) TokensToRead {
  using At = std::conditional_t<Tile::kFormat.by_page, TokenAndScalesAt, TokenAt>;
  using Scales = float[Tile::kStages][Tile::kBlockN][Tile::kScales];

  // Of few heads, records come whole, with scales that lie in them.
  std::conditional_t<Tile::kFewHeads && !Tile::kFormat.by_page, Nothing, Scales> scales;
  At at[32 * Tile::kProducerWarps];  // (block, row that the CTA reads)
};

// Of few heads: tokens as they are stored, before they are widened, and P.
template <class Tile>
struct StagedTokens {
  static constexpr int kRecordBytes = Tile::kFormat.data_bytes();
  static constexpr int kUnitRows = 2;                        // of a warp, widened together
  static constexpr int kUnits = kRecordBytes > 600 ? 2 : 3;  // of a warp

  alignas(1024) char p[2][Tile::kQRows * 128];  // (warpgroup, (head, 64 keys))
  alignas(16) char records[Tile::kProducerWarps][kUnits][kUnitRows][kRecordBytes];
  Barrier full[Tile::kProducerWarps][kUnits];  // the warp, with the bytes of bulk copies
};

// Panels that are given back together.
enum PanelGroup { kLeft, kRight, kRope, kPanelGroups };

template <class Tile>
struct Shared {
  char q[Tile::kHeadDimQk / 64 * Tile::kQRows * 128];       // (rows, 64, panels)
  char k[Tile::kStages][Tile::kStagePanels * kPanelBytes];  // (BLK_N, 64, panels)
  RowState states[2][64];                                   // (warpgroup, row)
  float sums[2][2][64];                                     // (parity of the tile, warpgroup, row)
  // Of keys by slots: (stage, part of the keys), a bit per key: whether there is such a slot.
  alignas(16) std::uint32_t listed[Tile::kStages][Tile::kListedWords];
  float largest[2][2][64];  // (parity of the tile, warpgroup, row): the largest s

  Job jobs[kJobBuffers];

  //             arrives                                          waits
  // Of quantized caches, the first lane of the first producer warp is the scheduler and the Q warp.
  // job_wanted  the first K warp, near the end of its tile, and  scheduler warp
  //             at the start of the kernel, once
  // job_full    scheduler warp                                   Q warp, lanes of the K warps, all consumer threads
  // job_empty   those                                            scheduler warp
  // q_full      Q warp, with the bytes of TMA                    both warpgroups
  // q_empty     all 8 consumer warps                             Q warp
  // k_full      K warp of the block, with the bytes of TMA, or   the warpgroup that computes S of the block
  //             every lane that has gathered rows; of keys by
  //             slots at the first panel of a group alone, and at
  //             that of the positions once more: `listed` is there;
  //             of quantized caches a lane of each producer warp,
  //             with the bytes that the other CTA of a pair sends
  // k_empty     the 4 warps of the warpgroup whose half of V the K warp
  //             panels are; of a pair, those of both CTAs. Of few
  //             heads, those of the warpgroup that has the block. Of
  //             the rope panel, those that read P; of quantized
  //             caches nobody, as halves of V are free after P
  // m_full      a warp of warpgroup 0, its rows' states          the warp of warpgroup 1 with the same rows
  // p_full      a warp, P of its rows                            the warp of the other warpgroup with the same rows
  // landed      a K warp, with the bytes of TMA                  the same, to clear rows before it arrives at k_full
  Barrier job_wanted;
  Barrier job_full[kJobBuffers];
  Barrier job_empty[kJobBuffers];
  Barrier q_full;
  Barrier q_empty;
  Barrier k_full[Tile::kStages][kPanels];
  Barrier k_empty[Tile::kStages][kPanelGroups];
  Barrier m_full[4];
  Barrier p_full[2][4];
  Barrier landed[2];

  // Of keys by pages: (K warp, 32), and (K warp, of the latent columns and the others).
  std::conditional_t<Tile::kBySlots, Nothing, fa3::BoxSource[2][fa3::kBoxBatch]> boxes;
  std::conditional_t<Tile::kBySlots, Nothing, fa3::RowOffsets<Tile::kBlockN>[2][2]> row_offsets;
  std::conditional_t<Tile::kBySlots, Nothing, SplitTable> splits;
  std::conditional_t<Tile::kFewHeads, StagedTokens<Tile>, Nothing> staged;
  std::conditional_t<Tile::kCtasPerTile == 2, SentJobs, Nothing> from_peer;
  // Of quantized caches.
  std::conditional_t<Tile::kQuantized, ClaimedTile, Nothing> claimed;
  std::conditional_t<Tile::kQuantized, TokensToRead<Tile>, Nothing> tokens;
};

// Named barriers (bar.sync), by ID; 0 is __syncthreads().
enum NamedBarrier : int {
  //                      arrives and waits
  kBarrierScores = 1,   // the threads of a warpgroup, S being computed: P may replace the panel of the positions
  kBarrierTurn = 4,     // warpgroup 0 has issued S of its block: warpgroup 1 waits, to issue its own
  kBarrierTileEnd = 3,  // all consumers, their sums being written
};

}  // namespace cutlass_kernels::mla
