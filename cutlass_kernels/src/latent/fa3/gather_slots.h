// The producer warps of requests that name their keys by slots (PageTable::slots_per_page): row by row, through
// cp.async.
#pragma once

#include <cute/config.hpp>

#include <type_traits>

#include "common/ptx/cp_async.h"
#include "common/ptx/shared_address.h"
#include "fa3/load_gather.h"
#include "latent/fa3/load.h"
#include "latent/fa3/shared_memory.h"

namespace cutlass_kernels::mla {

// One of three warps, by all its lanes. Two copy the latent columns, of half of the rows each, groups of panels in the
// order in which S takes them. The third, kPositions, copies those of the position, of all rows, says which keys are
// slots, and loads Q. A lane looks up a row or two, one block ahead; eight lanes copy a row. An arrival at the first
// panel of a group stands for all its panels.
//
// The copies of a block are 144 instructions of 11 cycles (L2 gives an SM 46 bytes per cycle), and what lies between
// them counts. 4096 rows of 128 heads over 2048 of 128k slots, FlashMLA's time / ours: 1.08; with the positions copied by
// the first two warps, too, 1.06; with a warp per group of panels 0.97. Prefetches into the L2 cache, or an arrival per
// two panels: 7 % more time. A warp's loads queue behind its copies, reloads of spilled registers, too: 44 bytes of
// spills cost 6 %.
template <class Tile, bool kPositions>
CUTE_DEVICE void gather_slots(const fa3::KernelParams& params, Shared<Tile>& shared, int half = 0) {
  constexpr int kOwnRows = kPositions ? Tile::kBlockN : Tile::kBlockN / 2;
  constexpr int kCopied = kPositions ? 1 : kHalfPanels;
  constexpr std::uint32_t kAll = 0xffffffffu;
  constexpr int kNoSlot = -1;
  constexpr int kLaneRows = kOwnRows / 32;
  const int lane = threadIdx.x % 32;
  const LaunchParams& p = params.attention;
  const bool own_tensor = kPositions && p.k_rope.data != nullptr;
  const char* const data = fa3::kept(static_cast<const char*>(own_tensor ? p.k_rope.data : p.k.data) +
                                     (kPositions && !own_tensor ? 2 * kLatentDim : 0) + lane % 8 * 16);
  const fa3::PageUnits units = kPositions ? params.v_units : params.k_units;
  const std::uint32_t to = shared_address(shared.k) + (half * kOwnRows + lane / 8) * 128 +
                           ((lane % 8 ^ lane / 8) << 4) + (kPositions ? kRopePanel * kPanelBytes : 0);
  const std::uint32_t num_slots = params.num_pages * params.page_size.divisor;
  fa3::JobReader<Shared<Tile>> jobs(shared);
  std::uint32_t q_phase = 1;
  int block = 0;  // among all of the CTA
  if (!kPositions && half == 0 && lane == 0) shared.job_wanted.arrive();
  for (; jobs.next(); jobs.release()) {
    const Job& job = jobs.job();
    if constexpr (kPositions) {
      if (lane == 0) load_q_of_job<Tile>(params, shared, job, q_phase);
      __syncwarp();
      q_phase ^= 1;
    }
    const int kv_blocks = job.kv_blocks;
    const std::int32_t* const list = params.k_pages.indices + job.kv_begin;
    int key = job.key_begin + kv_blocks * Tile::kBlockN + half * kOwnRows + lane;  // the first of the lane
    int slots[kLaneRows];
    const auto look_up = [&] {
      key -= Tile::kBlockN;
      CUTE_UNROLL
      for (int n = 0; n < kLaneRows; ++n) {
        const bool visible = key + 32 * n >= job.key_begin && key + 32 * n < job.visible_end;
        slots[n] = visible ? __ldg(list + key + 32 * n) : kNoSlot;
      }
    };
    look_up();
    CUTE_NO_UNROLL
    for (int i = 0; i < kv_blocks; ++i, ++block) {
      std::uint32_t listed[kLaneRows];
      std::uint32_t of_lane[kLaneRows];
      CUTE_UNROLL
      for (int n = 0; n < kLaneRows; ++n) {
        const bool exists = std::uint32_t(slots[n]) < num_slots;
        const std::uint32_t page = exists ? params.page_size.divide(std::uint32_t(slots[n])) : 0;
        const std::uint32_t in_page = exists ? std::uint32_t(slots[n]) - page * params.page_size.divisor : 0;
        of_lane[n] = page * units.page + in_page * units.slot;
        listed[n] = __ballot_sync(kAll, exists);
      }
      // Of the positions not ahead: there are twice as many.
      const auto offset_of = [&](int j) { return __shfl_sync(kAll, of_lane[j / 8], 4 * (j % 8) + lane / 8); };
      std::uint32_t offsets[kPositions ? 1 : kOwnRows / 4];
      if constexpr (!kPositions) {
        CUTE_UNROLL
        for (int j = 0; j < kOwnRows / 4; ++j) offsets[j] = offset_of(j);
      }
      look_up();
      const int stage = stage_of<Tile>(block);
      const std::uint32_t to_stage = to + stage * (kPanels * kPanelBytes);
      const bool complete = (listed[0] & listed[kLaneRows - 1]) == kAll;
      const auto copy = [&](auto all, int first) {
        const char* const from_panel = data + first * 128;
        const std::uint32_t to_panel = to_stage + first * kPanelBytes;
        CUTE_UNROLL
        for (int j = 0; j < kOwnRows / 4; ++j) {
          std::uint64_t bytes;
          asm("mul.wide.u32 %0, %1, %2;"
              : "=l"(bytes)
              : "r"(kPositions ? offset_of(j) : offsets[kPositions ? 0 : j]), "r"(units.bytes));
          const char* const from = from_panel + bytes;
          const std::uint32_t to_row = (to_panel ^ (j % 2 * 64)) + j * (4 * 128);
          CUTE_UNROLL
          for (int panel = 0; panel < kCopied; ++panel) {
            if constexpr (decltype(all)::value) {
              cp_async_16(to_row + panel * kPanelBytes, from + panel * 128);
            } else {
              cp_async_16(to_row + panel * kPanelBytes, from + panel * 128,
                          listed[j / 8] >> (4 * (j % 8) + lane / 8) & 1);
            }
          }
        }
      };
      const std::uint32_t empty = phase_of<Tile>(block) ^ 1;
      CUTE_NO_UNROLL
      for (int n = 0; n < (kPositions ? 1 : 2); ++n) {
        const PanelGroup group = kPositions ? kRope : nth_group(i % 2, 2 * n);
        shared.k_empty[stage][group].wait(empty);
        if (kPositions && lane == 0) {
          CUTE_UNROLL
          for (int r = 0; r < kLaneRows; ++r) shared.listed[stage][r] = listed[r];
          shared.k_full[stage][kRopePanel].arrive();
        }
        if (kPositions && !Tile::kHasPositions) continue;
        const int first = kPositions ? 0 : first_panel(group);
        if (complete) {
          copy(std::true_type{}, first);
        } else {
          copy(std::false_type{}, first);
        }
        fa3::arrive_when_landed(shared.k_full[stage][kPositions ? kRopePanel : first]);
      }
      if (!kPositions && half == 0 && lane == 0 && i == max(kv_blocks - 2, 0)) shared.job_wanted.arrive();
    }
  }
}

}  // namespace cutlass_kernels::mla
