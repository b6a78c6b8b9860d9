// The producer warps of few heads (few_heads.h): as in gather_quantized.h, but tokens come to memory of their own first,
// for which Q of 16 rows leaves room. So a copy waits for no consumer, and its latency is that of two halves.
#pragma once

#include "latent/fa3/gather_quantized.h"

namespace cutlass_kernels::mla {

template <class Element, class Tile>
struct StagedGather : QuantizedGather<Element, Tile> {
  using Base = QuantizedGather<Element, Tile>;
  using Base::Base;
  using Base::has_positions, Base::kAll, Base::kFormat, Base::kLaneRows, Base::kPositionsAreValues, Base::kScaleBytes;
  using Base::lane, Base::first_row, Base::shared, Base::warp;

  CUTE_DEVICE std::uint32_t latent(bool second) const {
    return shared_address(shared.staged.latent[second]) + first_row * sizeof(shared.staged.latent[0][0]);
  }
  // The lane's 16 bytes of a row, eight lanes to a row.
  CUTE_DEVICE std::uint32_t positions(bool second, int n) const {
    return shared_address(shared.staged.positions[second]) + (first_row + this->position_row() + n) * 128 +
           lane % 8 * 16;
  }

  CUTE_DEVICE void copy(bool second, bool right) {
    const bool with_positions = has_positions(second, right);
    const char* rows_of_lane[kLaneRows];  // all before the first copy, whose registers are free late
    const char* rows_of_positions[kLaneRows / 2];
    CUTE_UNROLL
    for (int n = 0; n < kLaneRows; ++n) rows_of_lane[n] = this->row_of(n);
    CUTE_UNROLL
    for (int n = 0; n < kLaneRows / 2; ++n) rows_of_positions[n] = this->row_of(this->position_row() + n);
    if (with_positions) {
      CUTE_UNROLL
      for (int n = 0; n < kLaneRows / 2; ++n) {
        cp_async_16(positions(second, n), rows_of_positions[n] + (kFormat.positions_at + lane % 8 * 16));
      }
    }
    if (!kPositionsAreValues || !right || lane % 16 < 12) {
      const int column = right * (kLatentDim / 2) + lane % 16 * 16;
      CUTE_UNROLL
      for (int n = 0; n < kLaneRows; ++n) {
        cp_async_16(latent(second) + n * 256 + lane % 16 * 16, rows_of_lane[n] + column);
      }
    }
  }

  CUTE_DEVICE void begin(const Job& job, int block) {
    this->begin_list(job);
    this->begin_block(stage_of<Tile>(block));
    copy(false, false);
    cp_async_commit();
    copy(true, true);
    cp_async_commit();
  }

  CUTE_DEVICE void widen(int stage, bool second, bool right) {
    if (kFormat.has_exponents && !second) this->widen_scales(stage);
    const bool with_positions = has_positions(second, right);
    uint2 position[kLaneRows / 2][2];
    if (with_positions) {
      CUTE_UNROLL
      for (int n = 0; n < kLaneRows / 2; ++n) {
        position[n][0] = load_shared_8(positions(second, n));
        position[n][1] = load_shared_8(positions(second, n) + 8);
      }
    }
    const int panel_of_part = lane / 8 % 2;
    const std::uint32_t raw = latent(second) + lane % 16 * 8;
    const std::uint32_t to =
        this->rows(stage) + (right * kHalfPanels + panel_of_part) * kPanelBytes + ((lane ^ first_row) % 8 << 4);
    const std::uint32_t factors = this->own_scales(stage, right);
    uint2 numbers[kLaneRows][2], scale[kLaneRows];
    CUTE_UNROLL
    for (int row = 0; row < kLaneRows; ++row) {
      CUTE_UNROLL
      for (int part = 0; part < 2; ++part) numbers[row][part] = load_shared_8(raw + row * 256 + part * 128);
      scale[row] = load_shared_8(factors + row * kScaleBytes);
    }
    CUTE_UNROLL
    for (int row = 0; row < kLaneRows; ++row) {
      CUTE_UNROLL
      for (int part = 0; part < 2; ++part) {
        const float factor = __uint_as_float(part == 0 ? scale[row].x : scale[row].y);
        const uint2 low = scaled<Element>(numbers[row][part].x, factor);
        const uint2 high = scaled<Element>(numbers[row][part].y, factor);
        if (!kPositionsAreValues || !right || part == 0 || panel_of_part == 0) {
          store_shared_16((to ^ row << 4) + 2 * part * kPanelBytes + row * 128, low, high);
        }
      }
    }
    if (with_positions) {
      CUTE_UNROLL
      for (int n = 0; n < kLaneRows / 2; ++n) {
        store_shared_16(this->position_address(stage, n), position[n][0], position[n][1]);
      }
    }
  }

  // Widens a half of a block, and begins to copy the half of the next block that takes its place.
  template <bool kSecond>
  CUTE_DEVICE void step(int block, bool right, bool has_next) {
    const int stage = stage_of<Tile>(block);
    cp_async_wait<1>();  // the other half, or nothing, may be under way
    if (!kSecond) {
      const std::uint32_t phase = phase_of<Tile>(block) ^ 1;
      for (Barrier& group : shared.k_empty[stage]) group.wait(phase);
      if (lane == 0) {
        reinterpret_cast<std::uint8_t*>(shared.listed[stage])[warp] = std::uint8_t(this->listed);
      }
    }
    __syncwarp();
    widen(stage, kSecond, right);
    __syncwarp();
    if (lane == 0) {
      if (kSecond) shared.k_full[stage][kRopePanel].arrive();
      shared.k_full[stage][right ? kHalfPanels : 0].arrive();
    }
    if (has_next) {
      if (!kSecond) this->begin_block(stage_of<Tile>(block + 1));
      copy(kSecond, !right);
    }
    cp_async_commit();
  }
  CUTE_DEVICE void take_blocks(int first_block, int kv_blocks) {
    CUTE_NO_UNROLL
    for (int i = 0; i < kv_blocks; ++i) {
      step<false>(first_block + i, i % 2 != 0, i + 1 < kv_blocks);
      step<true>(first_block + i, i % 2 == 0, i + 1 < kv_blocks);
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
  if (first) publish_job<Tile>(params, shared, jobs);
  while (true) {
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
    if (first) publish_job<Tile>(params, shared, jobs);
    __syncwarp();
  }
}

}  // namespace cutlass_kernels::mla
