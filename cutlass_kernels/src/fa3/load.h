// The producer warps: one loads Q, one V, one finds the tiles and loads K, each at its own pace.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "common/mask.h"
#include "common/work.h"
#include "fa3/params.h"
#include "fa3/shared.h"
#include "fa3/tensor_map.h"

namespace cutlass_kernels::fa3 {

using CacheHint = cute::TMA::CacheHintSm90;

struct BlockRange {
  int begin;
  int end;
};

// Blocks of keys that some row of a tile sees; at least one.
template <class Tile>
CUTE_DEVICE BlockRange block_range(const KernelParams& params, const WorkItem& work) {
  const IntervalMask mask = make_mask(params, work.qo_len, work.kv_len);
  const int row_begin = work.tile * Tile::kBlockM;
  const int row_end = min(row_begin + Tile::kBlockM, work.qo_len);
  BlockRange range;
  range.begin = mask.lo(row_begin) / Tile::kBlockN;
  range.end = (mask.hi(row_end - 1) + Tile::kBlockN - 1) / Tile::kBlockN;
  range.end = max(range.end, range.begin + 1);
  return range;
}

// Rows of a request, counted so that those past its end lie outside the tensor map (tensor_map.h).
template <int kPanels, int kPanelBytes>
CUTE_DEVICE void load_rows(const CUtensorMap* map, cutlass::arch::ClusterTransactionBarrier& full,
                           char* shared, int row, int length, int head, int end, CacheHint hint) {
  full.arrive_and_expect_tx(kPanels * kPanelBytes);
  CUTE_UNROLL
  for (int panel = 0; panel < kPanels; ++panel) {
    cute::SM90_TMA_LOAD_5D::copy(map, reinterpret_cast<std::uint64_t*>(&full),
                                 static_cast<std::uint64_t>(hint), shared + panel * kPanelBytes,
                                 panel * 64, kMapRows - length + row, head, end, int(kMapRows));
  }
}

// Finds this block's tiles. With a counter, a block takes the next tile when it is about to need one; without, every
// gridDim.x-th is its own.
class TileClaims {
 public:
  CUTE_DEVICE explicit TileClaims(const KernelParams& params)
      : params_(params),
        count_(params.order.tiles * params.attention.num_qo_heads),
        counter_(params.attention.schedule.next_tile),
        index_(blockIdx.x) {}

  // The next tile; false once there is none.
  CUTE_DEVICE bool claim(WorkItem& work, int& head) {
    bool found = false;
    while (!found && index_ < count_) {
      const TileOrder::Position position = params_.order(index_);
      head = position.head;
      found = find_work(params_.attention, params_.order, position.rank, work);
      index_ =
          counter_ != nullptr ? int(gridDim.x) + atomicAdd(counter_, 1) : index_ + int(gridDim.x);
    }
    return found;
  }

  // The last block to finish leaves the counters as it found them, at zero, for the next launch.
  CUTE_DEVICE void finish() {
    if (counter_ == nullptr) return;
    __threadfence();
    if (atomicAdd(counter_ + 1, 1) == int(gridDim.x) - 1) {
      counter_[0] = 0;
      counter_[1] = 0;
    }
  }

 private:
  const KernelParams& params_;
  const int count_;
  int* const counter_;
  int index_;
};

template <class Tile>
CUTE_DEVICE void load_q(const KernelParams& params, Shared<Tile>& shared) {
  using Layout = Shared<Tile>;
  Ring<kJobSlots> jobs;
  Ring<Tile::kQBuffers> ring;
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job job = shared.jobs[jobs.index];
    if (job.valid == 0) return;
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
    for (int wg = 0; wg < Tile::kConsumers; ++wg) {
      shared.q_empty[ring.index].wait(ring.phase ^ 1);
      load_rows<Layout::kPanelsQk, Layout::kPanelBytesQ>(
          &params.q_map, shared.q_full[ring.index], shared.q[ring.index],
          job.row_begin + wg * kWarpgroupRows, job.qo_len, job.head, job.q_end,
          CacheHint::EVICT_FIRST);
      ring.advance();
    }
  }
}

template <class Tile>
CUTE_DEVICE void load_k(const KernelParams& params, Shared<Tile>& shared) {
  using Layout = Shared<Tile>;
  Ring<kJobSlots> jobs;
  Ring<Tile::kStages> ring;
  TileClaims claims(params);
  WorkItem work;
  Job job;
  do {
    job.valid = claims.claim(work, job.head);
    if (job.valid) {
      const BlockRange range = block_range<Tile>(params, work);
      job.row_begin = work.tile * Tile::kBlockM;
      job.q_end = work.q_begin + work.qo_len;
      job.qo_len = work.qo_len;
      job.kv_end = work.kv_begin + work.kv_len;
      job.kv_len = work.kv_len;
      job.block_begin = range.begin;
      job.block_end = range.end;
    }
    shared.job_empty[jobs.index].wait(jobs.phase ^ 1);
    shared.jobs[jobs.index] = job;
    shared.job_full[jobs.index].arrive();
    jobs.advance();
    if (!job.valid) break;
    const int kv_head = job.head / params.group_size;
    for (int block = job.block_end - 1; block >= job.block_begin; --block) {
      shared.k_empty[ring.index].wait(ring.phase ^ 1);
      load_rows<Layout::kPanelsQk, Layout::kPanelBytesKv>(
          &params.k_map, shared.k_full[ring.index], shared.k[ring.index], block * Tile::kBlockN,
          job.kv_len, kv_head, job.kv_end, CacheHint::EVICT_LAST);
      ring.advance();
    }
  } while (true);
  claims.finish();
}

template <class Tile>
CUTE_DEVICE void load_v(const KernelParams& params, Shared<Tile>& shared) {
  using Layout = Shared<Tile>;
  Ring<kJobSlots> jobs;
  Ring<Tile::kStages> ring;
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job job = shared.jobs[jobs.index];
    if (job.valid == 0) return;
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
    const int kv_head = job.head / params.group_size;
    for (int block = job.block_end - 1; block >= job.block_begin; --block) {
      shared.v_empty[ring.index].wait(ring.phase ^ 1);
      load_rows<Layout::kPanelsVo, Layout::kPanelBytesKv>(
          &params.v_map, shared.v_full[ring.index], shared.v[ring.index], block * Tile::kBlockN,
          job.kv_len, kv_head, job.kv_end, CacheHint::EVICT_LAST);
      ring.advance();
    }
  }
}

}  // namespace cutlass_kernels::fa3
