// The producer warps: one finds the tiles, the others load Q, K and V, each at its own pace.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "common/mask.h"
#include "common/tickets.h"
#include "common/work.h"
#include "fa3/params.h"
#include "fa3/shared.h"
#include "fa3/tensor_map.h"
#include "mask_extents.h"

namespace cutlass_kernels::fa3 {

using CacheHint = cute::TMA::CacheHintSm90;

// Rows of a request, counted so that those past its end lie outside the tensor map (tensor_map.h).
template <int kPanels, int kPanelBytes, int kColumns = 64>
CUTE_DEVICE void load_rows(const CUtensorMap* map, Barrier& full, char* shared, int row, int length,
                           int head, int end, CacheHint hint) {
  full.arrive_and_expect(kPanels * kPanelBytes);
  CUTE_UNROLL
  for (int panel = 0; panel < kPanels; ++panel) {
    cute::SM90_TMA_LOAD_5D::copy(map, reinterpret_cast<std::uint64_t*>(&full),
                                 static_cast<std::uint64_t>(hint), shared + panel * kPanelBytes,
                                 panel * kColumns, kMapRows - length + row, head, end,
                                 int(kMapRows));
  }
}

// Finds this block's tiles: the first by its own index. With a counter, it takes each further one when it is about to need it;
// without, every gridDim.x-th is its own.
template <bool kSplits>
class TileClaims {
 public:
  CUTE_DEVICE explicit TileClaims(const KernelParams& params)
      : params_(params),
        count_(params.order.tiles * params.heads),
        counter_(reinterpret_cast<unsigned long long*>(params.attention.schedule.next_tile)),
        index_(-1) {}

  // The next tile; false once there is none.
  CUTE_DEVICE bool claim(WorkItem& work, int& head, int& rank) {
    for (bool found = false; !found;) {
      if (index_ < 0) {
        index_ = blockIdx.x;
      } else if (counter_ == nullptr) {
        index_ += int(gridDim.x);
      } else {
        // As many tickets as there are tiles: one for each but the blocks' first, and one with which each block is refused.
        const bool is_first = index_ < int(gridDim.x);
        index_ =
            int(gridDim.x) + int(take_ticket(counter_, (unsigned long long)(count_), is_first));
      }
      // Unsigned: no ticket leads out of memory, even where calls that overlap in time share a counter.
      if (unsigned(index_) >= unsigned(count_)) return false;
      const TileOrder::Position position = params_.order(index_);
      head = position.head;
      rank = position.rank;
      found = find_work<true, true, kSplits>(params_.attention, params_.rows, position.rank, work);
    }
    return true;
  }

 private:
  const KernelParams& params_;
  const int count_;
  unsigned long long* const counter_;
  int index_;
};

// Leaves of a tile's keys the blocks of one piece.
template <class Tile>
CUTE_DEVICE void take_piece(const WorkItem& work, Job& job) {
  const auto [begin, end] = blocks_of_piece(work, job.blocks);
  if (begin == end) {  // fewer blocks than pieces: one past all keys, all masked
    job.first_key = job.key_begin = job.key_end = work.kv_len;
    job.blocks = 1;
    return;
  }
  job.key_end = min(job.key_end, job.key_begin + end * Tile::kBlockN);
  job.key_begin += begin * Tile::kBlockN;
  job.first_key = max(job.first_key, job.key_begin);
  job.blocks = end - begin;
}

// Publishes the tiles of this block.
template <class Tile, bool kHides>
CUTE_DEVICE void find_jobs(const KernelParams& params, Shared<Tile>& shared) {
  Ring<kJobSlots> jobs;
  TileClaims<Tile::kPacked> claims(params);
  WorkItem work;
  int head, rank;
  bool found;
  Ring<1> wanted;
  do {
    // Late, so that tiles go to the blocks that are free first; early enough to hide the latency.
    shared.job_wanted.wait(wanted.phase);
    wanted.advance();
    found = claims.claim(work, head, rank);
    shared.job_empty[jobs.index].wait(jobs.phase ^ 1);
    Job& job = shared.jobs[jobs.index];
    job.valid = found;
    if (found) {
      const IntervalMask mask = make_mask(params, work.qo_len, work.kv_len);
      const int tile_rows =
          Tile::kPacked ? params.attention.schedule.tile_rows : int(Tile::kBlockM);
      const int row_begin = work.tile * tile_rows;
      const int row_end = min(row_begin + tile_rows, work.qo_len);
      job.head = Tile::kPacked ? head * int(params.packed.heads.divisor) : head;
      job.kv_head = int(params.group_size.divide(job.head));
      job.row_begin = row_begin;
      job.q_end = work.q_begin + work.qo_len;
      job.qo_len = work.qo_len;
      job.kv_begin = work.kv_begin;
      job.kv_len = work.kv_len;
      const std::int32_t* mask_indptr = params.attention.mask.indptr;
      job.mask_begin = mask_indptr == nullptr ? 0 : mask_indptr[work.batch];
      // Only keys of this range are loaded, the rest of the last block is zeros: others may hold anything, and 0 * inf is
      // not 0.
      job.first_key = mask.lo(row_begin);
      job.key_end = mask.hi(row_end - 1);
      if constexpr (kHides) {
        job.hides = 1;
        job.all_begin = 0;
        job.all_end = params.attention.mask.words == nullptr ? work.kv_len : 0;
        if (params.attention.schedule.mask_extents != nullptr) {
          const MaskExtent extent =
              static_cast<const MaskExtent*>(params.attention.schedule.mask_extents)[rank];
          job.hides = extent.hides;
          job.all_begin = extent.all_begin;
          job.all_end = extent.all_end;
          job.first_key = max(job.first_key, extent.begin);
          job.key_end = max(min(job.key_end, extent.end), job.first_key);
        }
      }
      job.key_begin = params.box_rows > 0 ? job.first_key & -params.box_rows : job.first_key;
      job.blocks = max((job.key_end - job.key_begin + Tile::kBlockN - 1) / Tile::kBlockN, 1);
      if constexpr (Tile::kPacked) {
        job.partial_row = -1;
        if (work.pieces > 1) {
          job.partial_row = work.partial_row + work.piece * (row_end - row_begin);
          take_piece<Tile>(work, job);
        }
      }
    }
    shared.job_full[jobs.index].arrive();
    jobs.advance();
  } while (found);
}

// Q of a warpgroup of a packed tile: boxes of all heads of a pack by its tokens (tensor_map.h). Rows that are nobody's stay as
// they are: what comes of them goes nowhere.
template <class Tile>
CUTE_DEVICE void load_packed_q(const KernelParams& params, const Job& job, Barrier& full, char* q,
                               int token) {
  full.arrive_and_expect(Shared<Tile>::kPanelsQk * 128 * params.packed.tokens *
                         int(params.packed.heads.divisor));
  CUTE_UNROLL
  for (int panel = 0; panel < Shared<Tile>::kPanelsQk; ++panel) {
    cute::SM90_TMA_LOAD_5D::copy(&params.q_map, reinterpret_cast<std::uint64_t*>(&full),
                                 static_cast<std::uint64_t>(CacheHint::EVICT_FIRST),
                                 q + panel * Shared<Tile>::kPanelBytesQ,
                                 panel * Shared<Tile>::kColumns, job.head,
                                 kMapRows - job.qo_len + token, job.q_end, int(kMapRows));
  }
}

// Q of a tile, by one thread.
template <class Tile>
CUTE_DEVICE void load_q_of_tile(const KernelParams& params, Shared<Tile>& shared, const Job& job,
                                Ring<Tile::kQBuffers>& ring) {
  using Layout = Shared<Tile>;
  if constexpr (Tile::kQBuffers < 2 * Tile::kConsumers && !Tile::kPacked) {
    // There is no room for the next tile's Q before the last product with this one's: at least bring it to L2.
    for (int wg = 0; wg < Tile::kConsumers; ++wg) {
      for (int panel = 0; panel < Layout::kPanelsQk; ++panel) {
        cute::SM90_TMA_LOAD_5D::PREFETCH::copy(
            &params.q_map, panel * Layout::kColumns,
            kMapRows - job.qo_len + job.row_begin + wg * kWarpgroupRows, job.head, job.q_end,
            int(kMapRows));
      }
    }
  }
  for (int wg = 0; wg < Tile::kConsumers; ++wg) {
    shared.q_empty[ring.index].wait(ring.phase ^ 1);
    if constexpr (Tile::kPacked) {
      load_packed_q<Tile>(params, job, shared.q_full[ring.index], shared.q[ring.index],
                          job.row_begin + wg * params.packed.tokens);
    } else {
      load_rows<Layout::kPanelsQk, Layout::kPanelBytesQ, Layout::kColumns>(
          &params.q_map, shared.q_full[ring.index], shared.q[ring.index],
          job.row_begin + wg * kWarpgroupRows, job.qo_len, job.head, job.q_end,
          CacheHint::EVICT_FIRST);
    }
    ring.advance();
  }
}

template <class Tile>
CUTE_DEVICE void load_q(const KernelParams& params, Shared<Tile>& shared) {
  Ring<kJobSlots> jobs;
  Ring<Tile::kQBuffers> ring;
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job job = shared.jobs[jobs.index];
    if (job.valid == 0) return;
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
    load_q_of_tile(params, shared, job, ring);
  }
}

// K or V: kPanels, kStages, map, full, empty and stages are that matrix's.
template <class Tile, int kPanels, int kStages, bool kWantsJobs>
CUTE_DEVICE void load_keys(const KernelParams& params, Shared<Tile>& shared, const CUtensorMap* map,
                           Barrier* full, Barrier* empty, char* stages) {
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  Ring<kJobSlots> jobs;
  Ring<kStages> ring;
  if (kWantsJobs) shared.job_wanted.arrive();
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job job = shared.jobs[jobs.index];
    if (job.valid == 0) return;
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
    const int last_but_one = min(1, job.blocks - 1);
    for (int block = job.blocks - 1; block >= 0; --block) {
      empty[ring.index].wait(ring.phase ^ 1);
      if (kWantsJobs && block == last_but_one) shared.job_wanted.arrive();
      load_rows<kPanels, kPanelBytes>(
          map, full[ring.index], stages + ring.index * (kPanels * kPanelBytes),
          job.key_begin + block * Tile::kBlockN, job.key_end, job.kv_head,
          job.kv_begin + job.key_end, CacheHint::EVICT_LAST);
      ring.advance();
    }
  }
}

}  // namespace cutlass_kernels::fa3
