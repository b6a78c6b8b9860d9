// The K warps of requests that name their keys by slots (PageTable::slots_per_page): row by row, through cp.async.
#pragma once

#include <cute/config.hpp>

#include <type_traits>

#include "common/ptx/cp_async.h"
#include "common/ptx/shared_address.h"
#include "fa3/load_gather.h"
#include "latent/fa3/load.h"
#include "latent/fa3/shared_memory.h"

namespace cutlass_kernels::mla {

// K warp `half`, by all its lanes: half of the rows of every block. A lane looks up a row, one block ahead; eight lanes
// copy it. An arrival at the first panel of a group stands for all its panels.
//
// A warp's loads queue behind its copies, reloads of spilled registers, too: with 44 bytes of spills, 4096 rows of 128
// heads over 2048 keys took 4330 us instead of 4090.
template <class Tile>
CUTE_DEVICE void gather_slots(const fa3::KernelParams& params, Shared<Tile>& shared, int half) {
  constexpr int kRows = 32;
  constexpr std::uint32_t kAll = 0xffffffffu;
  constexpr int kNoSlot = -1;
  static_assert(Tile::kBlockN == 2 * kRows);
  const int lane = threadIdx.x % 32;
  const LaunchParams& p = params.attention;
  const char* const latent = fa3::kept(static_cast<const char*>(p.k.data) + lane % 8 * 16);
  const char* const rope = (p.k_rope.data == nullptr ? static_cast<const char*>(p.k.data) + 2 * kLatentDim
                                                     : static_cast<const char*>(p.k_rope.data)) +
                           lane % 8 * 16;
  const std::uint32_t to = shared_address(shared.k) + (half * kRows + lane / 8) * 128 + ((lane % 8 ^ lane / 8) << 4);
  const std::uint32_t num_slots = params.num_pages * params.page_size.divisor;
  fa3::JobReader<Shared<Tile>> jobs(shared);
  int block = 0;  // among all of the CTA
  if (half == 0 && lane == 0) shared.job_wanted.arrive();
  for (; jobs.next(); jobs.release()) {
    const Job& job = jobs.job();
    const int kv_blocks = job.kv_blocks;
    const std::int32_t* const list = params.k_pages.indices + job.kv_begin;
    int key = job.key_begin + kv_blocks * Tile::kBlockN + half * kRows + lane;  // of the lane
    const auto look_up = [&] {
      key -= Tile::kBlockN;
      return key >= job.key_begin && key < job.visible_end ? __ldg(list + key) : kNoSlot;
    };
    int slot = look_up();
    CUTE_NO_UNROLL
    for (int i = 0; i < kv_blocks; ++i, ++block) {
      const bool exists = std::uint32_t(slot) < num_slots;
      const std::uint32_t page = exists ? params.page_size.divide(std::uint32_t(slot)) : 0;
      const std::uint32_t in_page = exists ? std::uint32_t(slot) - page * params.page_size.divisor : 0;
      slot = look_up();
      const std::uint32_t of_latent = page * params.k_units.page + in_page * params.k_units.slot;
      const std::uint32_t of_rope = page * params.v_units.page + in_page * params.v_units.slot;
      const std::uint32_t listed = __ballot_sync(kAll, exists);
      std::uint32_t offsets[kRows / 4];
      CUTE_UNROLL
      for (int j = 0; j < kRows / 4; ++j) offsets[j] = __shfl_sync(kAll, of_latent, 4 * j + lane / 8);
      const int stage = stage_of<Tile>(block);
      const std::uint32_t empty = phase_of<Tile>(block) ^ 1;
      const std::uint32_t to_stage = to + stage * (kPanels * kPanelBytes);
      // The lane's 16 bytes of `panels` panels of a row, the j-th four rows on.
      const auto copy_row = [&](auto panels, auto complete, int j, const char* data, std::uint32_t offset,
                                std::uint32_t unit, std::uint32_t to_panel) {
        std::uint64_t bytes;
        asm("mul.wide.u32 %0, %1, %2;" : "=l"(bytes) : "r"(offset), "r"(unit));
        const char* const from = data + bytes;
        const std::uint32_t to_row = (to_panel ^ (j % 2 * 64)) + j * (4 * 128);
        CUTE_UNROLL
        for (int panel = 0; panel < decltype(panels)::value; ++panel) {
          if constexpr (decltype(complete)::value) {
            cp_async_16(to_row + panel * kPanelBytes, from + panel * 128);
          } else {
            cp_async_16(to_row + panel * kPanelBytes, from + panel * 128, listed >> (4 * j + lane / 8) & 1);
          }
        }
      };
      const auto copy_half = [&](auto complete, int first) {
        CUTE_UNROLL
        for (int j = 0; j < kRows / 4; ++j) {
          copy_row(std::integral_constant<int, kHalfPanels>{}, complete, j, latent + first * 128, offsets[j],
                   params.k_units.bytes, to_stage + first * kPanelBytes);
        }
      };
      CUTE_NO_UNROLL
      for (int n = 0; n < kPanelGroups; ++n) {
        const PanelGroup group = nth_group(i % 2, n);
        const int first = first_panel(group);
        shared.k_empty[stage][group].wait(empty);
        if (group == kRope) {
          if (lane == 0) {
            shared.listed[stage][half] = listed;
            shared.k_full[stage][kRopePanel].arrive();
          }
          CUTE_UNROLL
          for (int j = 0; j < kRows / 4; ++j) {
            copy_row(std::integral_constant<int, 1>{}, std::false_type{}, j, rope,
                     __shfl_sync(kAll, of_rope, 4 * j + lane / 8), params.v_units.bytes,
                     to_stage + kRopePanel * kPanelBytes);
          }
        } else if (listed == kAll) {
          copy_half(std::true_type{}, first);
        } else {
          copy_half(std::false_type{}, first);
        }
        fa3::arrive_when_landed(shared.k_full[stage][first]);
      }
      if (half == 0 && lane == 0 && i == max(kv_blocks - 2, 0)) shared.job_wanted.arrive();
    }
  }
}

}  // namespace cutlass_kernels::mla
