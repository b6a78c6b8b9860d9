// The scheduler warp: finds the tiles of the CTA and publishes them as jobs.
#pragma once

#include "common/mask.h"
#include "common/ptx/atomic.h"
#include "common/ptx/shared_address.h"
#include "fa3/pair.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"
#include "fa3/tma.h"
#include "mask_extents.h"
#include "schedule/batch_splits.h"
#include "schedule/find_work.h"
#include "schedule/tickets.h"

namespace cutlass_kernels::fa3 {

// ---- What a CTA does before its first packed tile, by all its threads; a barrier follows.

// Unused rows of Q are never loaded. NaN in them would keep the other rows from lazy maxima.
template <class Tile, int kRows, class SharedMemory>
CUTE_DEVICE void clear_unused_rows(const KernelParams& params, SharedMemory& shared) {
  if (params.packed.tokens * params.packed.heads.divisor >= kRows) return;
  auto* q = reinterpret_cast<uint4*>(shared.q);
  for (int i = threadIdx.x; i < int(sizeof(shared.q) / 16); i += Tile::kThreads) q[i] = {};
  fence_proxy_async();
}

template <class Tile, int kRows = kWarpgroupRows, class SharedMemory>
CUTE_DEVICE void begin_packed(const KernelParams& params, SharedMemory& shared, int warp) {
  if constexpr (!Tile::kBySlots) {
    if (warp == 0 && splits_batch(params.attention)) shared.splits.fill(params.attention);
  }
  clear_unused_rows<Tile, kRows>(params, shared);
}

// ---- The scheduler warp: finds the tiles of the CTA and publishes them as jobs.

// Claims tiles for this CTA: the first by its own index. With a counter in device memory, it claims each further one
// when it is about to need it; without, every gridDim.x-th index is its own. A pair of CTAs
// counts as one, in gridDim.x, too: the first claims its tiles, and sends them to the second (pair.h).
template <class Tile, class SharedMemory>
class TileClaims {
 public:
  // index: that of the tile claimed last; -1 if there is none.
  CUTE_DEVICE TileClaims(const KernelParams& params, const SharedMemory& shared, int index = -1)
      : params_(params),
        shared_(shared),
        ranks_(num_ranks(params.attention.plan)),
        counter_(reinterpret_cast<TicketCounter*>(params.attention.plan.tile_counter)),
        claimers_(int(gridDim.x) / Tile::kCtasPerTile),
        index_(index) {}

  CUTE_DEVICE int index() const { return index_; }

  // The next tile; false once there is none. `work`, `head` and `rank` are those of the last one.
  CUTE_DEVICE bool claim(WorkItem& work, int& head, int& rank) {
    if constexpr (Tile::kBySlots) {
      return claim_row(work, head, rank);
    } else {
      return claim_tile(work, head, rank);
    }
  }

 private:
  CUTE_DEVICE bool claim_tile(WorkItem& work, int& head, int& rank) {
    const LaunchParams& p = params_.attention;
    const int count = ranks_ * params_.heads;
    const auto find_split = [&](int split) {
      if constexpr (Tile::kPacked) return shared_.splits.find(p, split);
      return RequestSplits{};
    };
    while (true) {
      const bool is_first = index_ < 0;
      if (Tile::kShares && !is_first && work.next > 0) {
        rank = work.next;
      } else {
        claim_index(count);
        // The first tile is looked at before it is known how many there are: one latency instead of two.
        if (!is_first && unsigned(index_) >= unsigned(count)) return false;
        place(head, rank);
      }
      const bool found = find_work<true, true, Tile::kPacked>(p, params_.rows, find_split, rank, work);
      if (unsigned(index_) >= unsigned(count)) return false;
      if (found) return true;
    }
  }

  CUTE_DEVICE void claim_index(int count) {
    if (index_ < 0) {
      index_ = int(blockIdx.x) / Tile::kCtasPerTile;
    } else if (counter_ == nullptr) {
      index_ += claimers_;
    } else {
      // As many tickets as there are tiles: one for each but the CTAs' first, and one with which each CTA is refused.
      // Compared unsigned, no ticket leads out of memory, even where calls that overlap in time share a counter.
      const bool had_none = index_ < claimers_;
      index_ = claimers_ + int(take_ticket<RelaxedAtomics>(counter_, TicketCounter(count), had_none));
    }
  }

  // Of rows with lists of slots: an entry of the list of tiles, or one of the KV splits of a row. find_work() would do,
  // but has 4,500 instructions more, and what runs once waits for memory, as instructions do.
  CUTE_DEVICE bool claim_row(WorkItem& work, int& head, int& rank) {
    const LaunchParams& p = params_.attention;
    const WorkItem* const list = p.plan.tile_list;
    const int count = num_ranks(p.plan) * params_.heads;
    do {
      const bool is_first = index_ < 0;
      if (list != nullptr && !is_first && work.next > 0) {
        rank = work.next;
      } else {
        claim_index(count);
        if (!is_first && unsigned(index_) >= unsigned(count)) return false;
        place(head, rank);
      }
      if (list != nullptr) {
        work = list[rank];
      } else {
        find_split_of_row(p, params_.splits_of_row, rank, work);
      }
      work.tile = 0;
      work.qo_len = 1;
      if (unsigned(index_) >= unsigned(count)) return false;
    } while (work.batch < 0 || !lies_inside(p, work));
    return true;
  }

  // The head, and the rank among its tiles, of the claimed index.
  CUTE_DEVICE void place(int& head, int& rank) const {
    const bool listed = params_.attention.plan.tile_list != nullptr;
    const TileOrder::Position position = Tile::kBySlots
                                             ? params_.order.at(index_, 0, 0)  // there is one key head, and one section
                                         : listed ? params_.order.among(ranks_, index_)
                                                  : params_.order(index_);
    head = position.head;
    // The first is placed before it is known how many there are.
    rank = listed ? min(position.rank, params_.order.tiles - 1) : position.rank;
    if (Tile::kSharesKeys && !listed) rank = params_.rows.with_keys_together(rank);
  }

  const KernelParams& params_;
  const SharedMemory& shared_;
  const int ranks_;  // tiles of each head
  TicketCounter* const counter_;
  const int claimers_;
  int index_;
};

// Of a pair: from a job of CTA 0 to one of CTA 1, a few words at a time: the thread has few registers. A buffer is free
// in CTA 0 when its consumers are done with the job in it. Warpgroup 0, which has rows of every tile, has then received
// parts of S from the other CTA's consumers, who had read the same job: CTA 1 has copied it out of sent_jobs. (Of
// latent attention, CTA 0 has had keys from the other CTA's producers, who had.)
constexpr int kJobWords = sizeof(Job) / sizeof(int4);
static_assert(sizeof(Job) % sizeof(int4) == 0);

CUTE_DEVICE void send_job(const Job& job, Job& sent, Barrier& barrier) {
  const std::uint32_t to = address_in_peer(shared_address(&sent));
  const std::uint32_t peer_barrier = address_in_peer(barrier.address());
  CUTE_NO_UNROLL
  for (int i = 0; i < kJobWords; ++i) {
    send(to + i * std::uint32_t(sizeof(int4)), peer_barrier, reinterpret_cast<const int4*>(&job)[i]);
  }
}
CUTE_DEVICE void copy_job(const Job& sent, Job& job) {
  CUTE_NO_UNROLL
  for (int i = 0; i < kJobWords; ++i) {
    reinterpret_cast<int4*>(&job)[i] = reinterpret_cast<const int4*>(&sent)[i];
  }
}

// Restricts a job to the KV blocks [begin, end) of its tile, those of a KV split.
template <class Tile>
CUTE_DEVICE void keep_blocks(Job& job, int begin, int end) {
  if (begin == end) {  // fewer KV blocks than splits: one block past all keys, all masked
    job.visible_begin = job.key_begin = job.visible_end = job.kv_len;
    job.kv_blocks = 1;
    return;
  }
  job.visible_end = min(job.visible_end, job.key_begin + end * Tile::kBlockN);
  job.key_begin += begin * Tile::kBlockN;
  job.visible_begin = max(job.visible_begin, job.key_begin);
  job.kv_blocks = end - begin;
}

// The keys that rows [row_begin, row_end) of a request see, at most. kCustomMask: a custom mask may hide keys from all
// of them.
template <bool kCustomMask>
CUTE_DEVICE void find_visible_keys(const KernelParams& params, const WorkItem& work, int row_begin, int row_end,
                                   int rank, Job& job) {
  const IntervalMask mask = make_mask<kCustomMask>(params, work.batch, work.qo_len, work.kv_len);
  const std::int32_t* mask_indptr = params.attention.mask.indptr;
  job.mask_begin = mask_indptr == nullptr ? 0 : mask_indptr[work.batch];
  // Only keys of this range are loaded, the rest of the last KV block is zeros: other keys may hold anything, and
  // 0 * inf is not 0.
  job.visible_begin = mask.lo<kCustomMask>(row_begin);
  job.visible_end = mask.hi<kCustomMask>(row_end - 1);
  if constexpr (kCustomMask) {
    job.has_hidden_keys = 1;
    job.unmasked_begin = 0;
    job.unmasked_end = params.attention.mask.words == nullptr ? work.kv_len : 0;
    if (params.attention.plan.mask_extents != nullptr) {
      const MaskExtent extent = params.attention.plan.mask_extents[rank];
      job.has_hidden_keys = extent.hides;
      job.unmasked_begin = extent.all_begin;
      job.unmasked_end = extent.all_end;
      job.visible_begin = max(job.visible_begin, extent.begin);
      job.visible_end = max(min(job.visible_end, extent.end), job.visible_begin);
    }
  }
  job.key_begin = params.box_rows > 0 ? job.visible_begin & -params.box_rows : job.visible_begin;
}

// The job of a tile. kCustomMask: a custom mask may hide keys from all rows of a tile.
template <class Tile, bool kCustomMask>
CUTE_DEVICE void describe_job(const KernelParams& params, const WorkItem& work, int head, int rank, Job& job) {
  const int tile_rows = Tile::kPacked ? params.attention.plan.tile_rows : int(Tile::kBlockM);
  const int row_begin = work.tile * tile_rows;
  const int row_end = min(row_begin + tile_rows, work.qo_len);
  job.head = Tile::kPacked ? head * int(params.packed.heads.divisor) : head;
  job.kv_head = int(params.group_size.divide(job.head));
  job.batch = work.batch;
  job.row_begin = row_begin;
  job.q_end = work.q_begin + work.qo_len;
  job.qo_len = work.qo_len;
  job.kv_begin = work.kv_begin;
  job.kv_len = work.kv_len;
  if constexpr (Tile::kBySlots) {
    job.visible_begin = job.key_begin = 0;
    job.visible_end = work.kv_len;
  } else {
    find_visible_keys<kCustomMask>(params, work, row_begin, row_end, rank, job);
  }
  job.kv_blocks = max((job.visible_end - job.key_begin + Tile::kBlockN - 1) / Tile::kBlockN, 1);
  if constexpr (Tile::kPacked) {
    job.partial_row = work.partial_row;
    job.split = work.split;
    job.num_splits = work.num_splits;
    if (work.num_splits > 1) {
      const SplitBlocks blocks = blocks_of_split<Tile::kShares>(work, job.kv_blocks);
      keep_blocks<Tile>(job, blocks.begin, blocks.end);
    }
  }
}

// Publishes the jobs of this CTA, by one thread.
template <class Tile, bool kCustomMask, class SharedMemory>
CUTE_DEVICE void find_tiles(const KernelParams& params, SharedMemory& shared) {
  constexpr bool kPair = Tile::kCtasPerTile == 2;
  Ring<kJobBuffers> jobs;
  TileClaims<Tile, SharedMemory> claims(params, shared);
  WorkItem work;
  int head, rank;
  bool found;
  Ring<1> wanted;
  do {
    // Late, so that tiles go to the CTAs that are free first; early enough to hide the latency.
    shared.job_wanted.wait(wanted.phase);
    wanted.advance();
    Job& job = shared.jobs[jobs.index];
    if (!kPair || rank_in_pair() == 0) {
      found = claims.claim(work, head, rank);
      shared.job_empty[jobs.index].wait(jobs.phase ^ 1);
      job.valid = found;
      if (found) describe_job<Tile, kCustomMask>(params, work, head, rank, job);
      if constexpr (kPair) send_job(job, shared.sent_jobs[jobs.index], shared.job_sent[jobs.index]);
    } else if constexpr (kPair) {
      shared.job_sent[jobs.index].arrive_and_expect(sizeof(Job));
      shared.job_sent[jobs.index].wait(jobs.phase);
      shared.job_empty[jobs.index].wait(jobs.phase ^ 1);
      copy_job(shared.sent_jobs[jobs.index], job);
      found = job.valid != 0;
    }
    shared.job_full[jobs.index].arrive();
    jobs.advance();
  } while (found);
}

}  // namespace cutlass_kernels::fa3
