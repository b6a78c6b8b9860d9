// The producer warps of few heads (few_heads.h): as in gather_quantized.h, but tokens come to memory of their own
// first, for which Q of 16 rows leaves room. So a copy waits for no consumer. Of each of 16 warps, two rows of 656
// bytes, or four of fewer, are in flight while two are widened.
//
// A bulk copy per token writes shared memory in one pass. Copies of 16 bytes by lanes keep it busy two and a half times
// as long, those of the scales, one per row, eight times. 256 rows of 16 heads over 2048 slots, H200: 144 us with such
// copies, two halves of a block at once and eight warps, 138 with three; with bulk copies 148 with eight warps, 135
// with sixteen. Three rows in flight instead of two, each with a barrier of its own: 150, as registers are spilled.
#pragma once

#include "latent/fa3/gather_quantized.h"

namespace cutlass_kernels::mla {

template <class Element, class Tile>
struct StagedGather : QuantizedGather<Element, Tile> {
  using Base = QuantizedGather<Element, Tile>;
  using Base::kAll, Base::kFormat, Base::kGroup, Base::kPositionsAreValues, Base::kRows, Base::kScaleBytes;
  using Base::lane, Base::listed, Base::shared, Base::warp, Base::warp_row;
  using Staged = StagedTokens<Tile>;
  static constexpr int kUnits = Staged::kUnits;
  static constexpr int kUnitsOfBlock = kRows / Staged::kUnitRows;
  static constexpr int kUnitBytes = Staged::kUnitRows * Staged::kRecordBytes;
  static constexpr bool kScalesApart = kFormat.by_page;
  static_assert(Staged::kUnitRows == 2, "half a warp has a row");
  static_assert((kUnitsOfBlock < kUnits || !kScalesApart) && kUnits <= 2 * kUnitsOfBlock, "begin_scales()");

  fa3::Ring<kUnits> ring;
  std::uint32_t listed_of_block;  // Base::listed, of the block that is being widened: lookups are ahead

  CUTE_DEVICE StagedGather(const fa3::KernelParams& params, Shared<Tile>& shared_, int warp_, int lane_)
      : Base(params, shared_, warp_, lane_) {
    if (lane == 0) {
      for (Barrier& full : shared.staged.full[warp]) full.init(1);
      fa3::fence_barrier_init();
    }
    __syncwarp();
  }

  CUTE_DEVICE std::uint32_t unit(int index) const {
    return shared_address(shared.staged.records[warp]) + index * kUnitBytes;
  }

  // Begins to copy the n-th unit of a tile, to memory of the ring that is free.
  CUTE_DEVICE void begin_unit(int n, int kv_blocks, int index) {
    if (n >= kv_blocks * kUnitsOfBlock) return;
    if (n % (kGroup * kUnitsOfBlock) == 0) {
      this->look_up();
    }
    Barrier& full = shared.staged.full[warp][index];
    if (lane == 0) full.arrive_and_expect(kUnitBytes);
    if (lane / Staged::kUnitRows == n % (kGroup * kUnitsOfBlock)) {
      fa3::bulk_load(unit(index) + lane % Staged::kUnitRows * Staged::kRecordBytes,
                     this->pointer_at(this->own_pointer()), Staged::kRecordBytes, full);
    }
  }
  CUTE_DEVICE void begin_scales(int stage, int i, int kv_blocks) {
    if constexpr (kScalesApart) {
      if (i >= kv_blocks) return;
      if (lane / kRows == i % kGroup) this->copy_scales(stage, lane % kRows, this->pointer_at(this->own_pointer() + 8));
      cp_async_commit();
    }
  }

  CUTE_DEVICE void begin(const Job& job, int first_block) {
    this->begin_list(job);
    fa3::Ring<kUnits> next = ring;
    CUTE_NO_UNROLL
    for (int n = 0; n < kUnits; ++n, next.advance()) begin_unit(n, job.kv_blocks, next.index);
    begin_scales(stage_of<Tile>(first_block), 0, job.kv_blocks);
  }

  // A row of each half of the warp. The lane has 8 numbers of each 128.
  CUTE_DEVICE void widen_unit(int stage, int n, std::uint32_t records) {
    constexpr int kParts = kLatentDim / 128;
    int lane = this->lane;
    // What follows from it is not to be kept: that would spill 76 bytes. (Of other formats, it takes 4 % longer so.)
    if constexpr (Tile::kAnyOf528) asm volatile("" : "+r"(lane));
    const int row = warp_row + n * Staged::kUnitRows + lane / 16;
    const std::uint32_t from = records + lane / 16 * Staged::kRecordBytes;
    const std::uint32_t to =
        shared_address(shared.k[stage]) + row * 128 + lane / 8 % 2 * kPanelBytes + ((lane ^ row) % 8 << 4);
    uint2 numbers[kParts];
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) numbers[part] = load_shared_8(from + part * 128 + lane % 16 * 8);
    std::uint32_t factors[kParts];
    if constexpr (kScalesApart) {
      const std::uint32_t of_row = shared_address(&shared.tokens.scales[stage]) + row * kScaleBytes;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const uint2 x = load_shared_8(of_row + half * (kScaleBytes / 2) + lane % 16 / (kFormat.group / 8) * 8);
        factors[2 * half] = x.x, factors[2 * half + 1] = x.y;
      }
    } else {
      const uint4 x = load_shared_16(from + kFormat.scales_at);
      factors[0] = x.x, factors[1] = x.y, factors[2] = x.z, factors[3] = x.w;
    }
    uint4 position;
    if (kFormat.positions > 0) position = load_shared_16(from + kFormat.positions_at + lane % 8 * 16);
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      const float factor = __uint_as_float(factors[part]);
      uint2 low = scaled<Element>(numbers[part].x, factor), high = scaled<Element>(numbers[part].y, factor);
      if (kPositionsAreValues && part == kParts - 1 && lane / 8 % 2 == 1) {
        low = {position.x, position.y}, high = {position.z, position.w};
      }
      store_shared_16(to + 2 * part * kPanelBytes, low, high);
    }
    if (Tile::kHasPositions && lane / 8 % 2 == 0) {
      store_shared_16(to + kRopePanel * kPanelBytes, {position.x, position.y}, {position.z, position.w});
    }
  }

  CUTE_DEVICE void take_blocks(int first_block, int kv_blocks) {
    CUTE_NO_UNROLL
    for (int i = 0; i < kv_blocks; ++i) {
      const int block = first_block + i, stage = stage_of<Tile>(block);
      listed_of_block = i % kGroup == 0 ? listed : listed_of_block >> kRows;
      if constexpr (kScalesApart) {
        cp_async_wait<0>();
        __syncwarp();
        this->widen_scales(stage);
        begin_scales(stage_of<Tile>(block + 1), i + 1, kv_blocks);
      }
      const std::uint32_t phase = phase_of<Tile>(block) ^ 1;
      shared.k_empty[stage][kLeft].wait(phase);
      shared.k_empty[stage][kRight].wait(phase);
      if (lane == 0) shared.listed[stage][warp] = listed_of_block;
      CUTE_UNROLL
      for (int n = 0; n < kUnitsOfBlock; ++n, ring.advance()) {
        shared.staged.full[warp][ring.index].wait(ring.phase);
        widen_unit(stage, n, unit(ring.index));
        __syncwarp();
        begin_unit(i * kUnitsOfBlock + n + kUnits, kv_blocks, ring.index);
      }
      if (lane == 0) {
        shared.k_full[stage][0].arrive();
        shared.k_full[stage][kHalfPanels].arrive();
        shared.k_full[stage][kRopePanel].arrive();
      }
    }
  }
};

// By all lanes of a producer warp.
template <class Element, class Tile>
CUTE_DEVICE void gather_quantized(const fa3::KernelParams& params, Shared<Tile>& shared, int warp) {
  const int lane = held(threadIdx.x % 32);
  const bool first = warp == 0 && lane == 0;
  std::conditional_t<Tile::kFewHeads, StagedGather<Element, Tile>, QuantizedGather<Element, Tile>> gather(
      params, shared, warp, lane);
  fa3::Ring<kJobBuffers> jobs;
  std::uint32_t q_phase = 1;
  int first_block = 0;  // of the tile, among all of the CTA
  while (true) {
    if (first) publish_job<Tile>(params, shared, jobs);
    __syncwarp();
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job& job = shared.jobs[jobs.index];
    if (job.valid == 0) return;
    const int kv_blocks = job.kv_blocks;
    if (kv_blocks > 0) gather.begin(job, first_block);
    // Q of the tile before may still be read: not in front of the copies.
    if (first) load_q_of_job<Tile>(params, shared, job, q_phase);
    __syncwarp();
    q_phase ^= 1;
    gather.take_blocks(first_block, kv_blocks);
    first_block += kv_blocks;
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
  }
}

}  // namespace cutlass_kernels::mla
