// A job is one tile of one head, or of one pack of heads. The scheduler warp publishes the jobs of the CTA in a ring
// (find_tiles.h). All producers and consumers read every job.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fa3/config.h"
#include "fa3/tma.h"
#include "schedule/batch_splits.h"

namespace cutlass_kernels::fa3 {

struct alignas(16) Job {
  int valid;  // 0: no more tiles
  int head;   // query head; the first one of a pack
  int kv_head;
  int batch;
  int row_begin;  // first row of the tile, in its request
  int q_end;      // end of the request's rows, in the tensor
  int qo_len;
  int kv_begin;  // first key of the request, in the tensor; or first entry of its page table
  int kv_len;
  int has_hidden_keys;  // whether a custom mask may hide some of the visible keys below from every row of the tile
  int mask_begin;       // byte of the custom mask at which the request's bits begin
  int unmasked_begin;   // by the custom mask, every row of the tile sees the keys [unmasked_begin, unmasked_end)
  int unmasked_end;
  int visible_begin;  // keys outside [visible_begin, visible_end) are seen by no row of the tile
  int visible_end;
  int key_begin;    // first key of KV block 0: visible_begin, or the first key of the TMA box that contains it
  int kv_blocks;    // from key_begin on; at least 1: a tile without keys has one, all masked
  int partial_row;  // first row of the tile's partial results
  int split;        // which of its KV splits
  int num_splits;   // 1: the keys are not split
};
constexpr int kJobBuffers = 4;

// The jobs of the CTA, in order, as every producer reads them, by all its threads that are counted in job_empty. A
// producer with few registers reads a job in shared memory while it works, and releases the buffer afterwards:
//   for (; jobs.next(); jobs.release()) { const Job& job = jobs.job(); ... }
// The others copy it, and release the buffer at once:
//   while (jobs.take(job)) { ... }
template <class Shared>
class JobReader {
 public:
  CUTE_DEVICE explicit JobReader(Shared& shared) : shared_(shared) {}

  // Waits for the next job. Returns false if there is none.
  CUTE_DEVICE bool next() {
    shared_.job_full[ring_.index].wait(ring_.phase);
    return job().valid != 0;
  }
  CUTE_DEVICE const Job& job() const { return shared_.jobs[ring_.index]; }
  CUTE_DEVICE void release() {
    shared_.job_empty[ring_.index].arrive();
    ring_.advance();
  }

  // All three at once.
  CUTE_DEVICE bool take(Job& copy) {
    shared_.job_full[ring_.index].wait(ring_.phase);
    copy = job();
    if (copy.valid == 0) return false;
    release();
    return true;
  }

 private:
  Shared& shared_;
  Ring<kJobBuffers> ring_;
};

// ---- Shared memory of a CTA: stages of Q, K, V and O, jobs, and the barriers between warps.
//
// Matrices are stored as panels of 128 bytes, the span of the swizzle of TMA and wgmma: C = 64 columns of 16 bits, or
// 128 of e4m3. Shapes below are (row, column, panel).

// Named barriers (bar.sync), by ID. Of kBarrierTurn and kBarrierVote there is one per consumer warpgroup, up to three:
// kBarrierTurn + warpgroup.
enum NamedBarrier : int {
  //                   arrives                               waits
  kBarrierCta = 0,   // all threads, mbarriers being ready     all threads: __syncthreads()
  kBarrierTurn = 1,  // the previous warpgroup, its turn over  the warpgroup, to issue its products
  kBarrierVote = 4,  // the threads of the warpgroup           the same, to agree: skip a KV block? does P fit?
};

// Offsets of the rows that a warp gathers (load_gather.h): row r at [r % 4][r / 4]. A lane reads four words at once,
// those of every fourth row; the gap puts the words of a warp in different banks (of 96 rows 8 words more
// would make 32, the same banks again).
template <int kRows>
struct RowOffsets {
  alignas(16) std::uint32_t of[4][kRows / 4 + (kRows % 128 == 96 ? 16 : 8)];
};
struct Nothing {};

// The source of a TMA box (load.h): a page, and the slot of the box's first key there.
struct alignas(8) BoxSource {
  int page;
  int slot;
};
constexpr int kBoxBatch = 32;  // boxes that are looked up together, one per lane

// V of e4m3 until it is transposed (load_fp8.h); below 16-bit queries K and V, in turn, until they are converted
// (load_gather.h).
template <class Tile, bool kStaged = (Tile::kStagedStages > 0)>
struct StagedValues {};
template <class Tile>
struct alignas(1024) StagedValues<Tile, true> {
  static constexpr int kStagedBytes = Tile::kBlockN * ((Tile::kHeadDimVo + 127) / 128 * 128);

  char staged[Tile::kStagedStages][kStagedBytes];  // (BLK_N, C, D_VO / C), PIPE_STAGED of them
};

template <class Tile>
struct Shared : StagedValues<Tile> {
  static constexpr bool kTransposed = Tile::kTransposers > 0;
  static constexpr int kColumns = 128 / Tile::kElementBytes;  // C
  static constexpr bool kPair = Tile::kCtasPerTile == 2;
  static constexpr int kPanelBytesQ = kWarpgroupRows * 128;
  static constexpr int kPanelBytesKv = Tile::kBlockN * 128;
  static constexpr int kPanelsQk = (Tile::kHeadDimQk + kColumns - 1) / kColumns;
  static constexpr int kPanelsVo = (Tile::kHeadDimVo + kColumns - 1) / kColumns;
  static constexpr int kPanelsO = (Tile::kHeadDimVo + 63) / 64;
  // V, transposed, has rows of ones behind its columns: P V then has the sums of P, too.
  static constexpr int kRowsOfOnes = 8;
  static constexpr int kPanelBytesVt = (Tile::kHeadDimVo + kRowsOfOnes) * 128;
  static_assert(!kTransposed || kPanelBytesVt % 1024 == 0, "panels begin where a swizzle does");
  static constexpr int kQBytes = kPanelBytesQ * kPanelsQk;
  static constexpr int kKBytes = kPanelBytesKv * kPanelsQk;
  static constexpr int kVBytes =
      kTransposed ? kPanelBytesVt * ((Tile::kBlockN + 127) / 128) : kPanelBytesKv * kPanelsVo;
  static constexpr int kOBytes = kPanelBytesQ * Tile::kOPanels;
  static_assert(kPanelsO % Tile::kOPanels == 0, "O leaves in whole passes of kOPanels panels.");
  static_assert(Tile::kBlockN <= 8 * kBoxBatch);
  static_assert(Tile::kBlockN % (32 / Tile::kElementBytes) == 0, "P V takes 16 keys per instruction, of e4m3 32");

  // The alignment is explicit, because members of a derived struct may be placed in the padding of its base.
  static constexpr int kAlignment = Tile::kStagedStages > 0 ? 1024 : 16;
  // Q: (64, C, D_QK / C), PIPE_Q of them.
  alignas(kAlignment) char q[Tile::kQBuffers][kQBytes];
  // K: (BLK_N, C, D_QK / C), PIPE_K of them.
  char k[Tile::kKStages][kKBytes];
  // V: (BLK_N, C, D_VO / C), PIPE_V of them; of e4m3, transposed: (D_VO + 8, 128, BLK_N / 128).
  char v[Tile::kVStages][kVBytes];
  // O: (64, 64, kOPanels) of 16 bits per warpgroup. Each warp uses its own 16 rows. Of a pair of CTAs, also the partial
  // sums of S that the warpgroup receives: a warp's in the memory of its own rows.
  char o[Tile::kConsumers][kOBytes];

  Job jobs[kJobBuffers];
  Job sent_jobs[kPair ? kJobBuffers : 1];

  //             arrives                                          waits
  // job_wanted  K warp, one KV block before the end of its tile; scheduler warp
  //             at the start of the kernel, once
  // job_full    scheduler warp                                   Q warp, K and V lanes, all consumer threads
  // job_empty   Q warp, K and V lanes, all consumer threads      scheduler warp
  // q_full      Q warp, with the bytes of TMA                    the consumer warpgroup of the buffer
  // q_empty     the 4 warps of that warpgroup                    Q warp
  // k_full      K warp, with the bytes of TMA                    all consumer warpgroups
  // k_empty     all consumer warps                               K warp
  // v_full      V warp, with the bytes of TMA; plainly, where    all consumer warpgroups
  //             it has cleared rows or transposed them
  // v_empty     all consumer warps                               V warp
  // v_landed    V warp, with the bytes of TMA                    V warp, to clear rows before it arrives at v_full
  //
  // Of a pair of CTAs (pair.h):
  // s_full        thread 0 of the warpgroup, with the bytes that     the warpgroup, to add them
  //               the other CTA sends
  // s_empty       the 4 warps of the other CTA's warpgroup           the warpgroup, to send
  // job_sent      scheduler warp of CTA 1, with the bytes that CTA   the same, to read sent_jobs
  //               0 sends
  //
  // Of K or V in staged stages:
  // staged_full   loading warp, with the bytes of TMA; lanes         transposing or converting warps
  //               that copy, once it has landed
  // staged_empty  transposing or converting warps                    loading warp
  //
  // Of e4m3, the loading warp stands for the Q and K warps, and the transposing warps for the V warp. Where rows are
  // gathered from pages, every lane that copies arrives at k_full and v_full; where they are converted, the
  // converting warps do, and wait at k_empty and v_empty; their lanes read jobs, too.
  Barrier job_wanted;
  Barrier job_full[kJobBuffers];
  Barrier job_empty[kJobBuffers];
  Barrier q_full[Tile::kQBuffers];
  Barrier q_empty[Tile::kQBuffers];
  Barrier k_full[Tile::kKStages];
  Barrier k_empty[Tile::kKStages];
  Barrier v_full[Tile::kVStages];
  Barrier v_empty[Tile::kVStages];
  Barrier v_landed;
  static_assert(!kPair || kOBytes == kWarpgroupRows * Tile::kBlockN * int(sizeof(float)));
  Barrier s_full[kPair ? Tile::kConsumers : 1];
  Barrier s_empty[kPair ? Tile::kConsumers : 1];
  Barrier job_sent[kPair ? kJobBuffers : 1];
  static constexpr int kStaged = Tile::kStagedStages > 0 ? Tile::kStagedStages : 1;
  Barrier staged_full[kStaged];
  Barrier staged_empty[kStaged];

  BoxSource boxes[2][kBoxBatch];  // (K and V, 32)
  std::conditional_t<Tile::kGather, RowOffsets<Tile::kBlockN / Tile::kCopyWarps>[2][Tile::kCopyWarps], Nothing>
      row_offsets;  // (K and V, copying warps)
  // Where batches without a list find their splits.
  std::conditional_t<Tile::kPacked, SplitTable, Nothing> splits;
};

}  // namespace cutlass_kernels::fa3
