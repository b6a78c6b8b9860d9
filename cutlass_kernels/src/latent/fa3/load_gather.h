// The K warps of a cache whose page size is no multiple of 8, which TMA boxes need: row by row, through cp.async.
#pragma once

#include "common/ptx/shared_address.h"
#include "fa3/load_gather.h"
#include "latent/fa3/load.h"

namespace cutlass_kernels::mla {

// The K warp of the blocks of `owner`, by all its lanes. It reads the page table one of its blocks ahead.
template <class Tile>
CUTE_DEVICE void gather_keys(const fa3::KernelParams& params, Shared<Tile>& shared, int owner) {
  constexpr int kRows = Tile::kBlockN;
  constexpr int kHalfColumns = kLatentDim / 2;
  const int lane = threadIdx.x % 32;
  const LaunchParams& p = params.attention;
  const char* const latent = static_cast<const char*>(p.k.data) + lane % 8 * 16;
  const char* const rope =
      (p.k_rope.data == nullptr ? static_cast<const char*>(p.k.data) + 2 * kLatentDim
                                : static_cast<const char*>(p.k_rope.data)) +
      lane % 8 * 16;
  const std::uint32_t to = shared_address(shared.k) + lane / 8 * 128 + ((lane % 8 ^ lane / 8) << 4);
  auto& of_latent = shared.row_offsets[owner][0];
  auto& of_rope = shared.row_offsets[owner][1];
  fa3::JobReader<Shared<Tile>> jobs(shared);
  int first_block = 0;  // of the tile, among all of the CTA
  if (owner == 0 && lane == 0) shared.job_wanted.arrive();
  for (; jobs.next(); jobs.release()) {
    const Job& job = jobs.job();
    const int kv_blocks = job.kv_blocks;
    const std::int32_t* const table = params.k_pages.indices + job.kv_begin;
    int key = job.key_begin + (kv_blocks - 1 - owner) * kRows;  // first of the block
    fa3::PageEntries<kRows, true> entries;
    entries.read(params, table, key, fa3::visible_rows<kRows>(job, key));
    CUTE_NO_UNROLL
    for (int i = owner; i < kv_blocks; i += 2) {
      bool complete = true;
      CUTE_UNROLL
      for (int half = 0; half < kRows / 32; ++half) {
        const int slot = int(params.page_size.modulo(key + 32 * half + lane));
        const int page = entries.page[half];
        const bool exists = std::uint32_t(page) < params.num_pages;
        of_latent.of[lane % 4][8 * half + lane / 4] =
            exists ? page * params.k_units.page + slot * params.k_units.slot : fa3::kNoRow;
        of_rope.of[lane % 4][8 * half + lane / 4] =
            exists ? page * params.v_units.page + slot * params.v_units.slot : fa3::kNoRow;
        complete = complete && exists;
      }
      key -= 2 * kRows;
      if (i + 2 < kv_blocks) {
        entries.read(params, table, key, fa3::visible_rows<kRows>(job, key));
      }
      complete = __all_sync(0xffffffffu, complete);
      __syncwarp();
      const int stage = stage_of<Tile>(first_block + i);
      const std::uint32_t empty = phase_of<Tile>(first_block + i) ^ 1;
      const std::uint32_t to_stage = to + stage * (kPanels * kPanelBytes);
      const auto gather = [&](auto columns, const auto& offsets, const char* data,
                              const fa3::PageUnits& units, int panel) {
        constexpr int kColumns = decltype(columns)::value;
        if (complete) {
          fa3::gather_rows<true, kRows, kColumns, kPanelBytes>(
              offsets.of[lane / 8], data, units.bytes, kColumns, to_stage + panel * kPanelBytes);
        } else {
          fa3::gather_rows<false, kRows, kColumns, kPanelBytes>(
              offsets.of[lane / 8], data, units.bytes, kColumns, to_stage + panel * kPanelBytes);
        }
      };
      CUTE_NO_UNROLL
      for (int n = 0; n < kPanelGroups; ++n) {
        const PanelGroup group = nth_group(owner, n);
        const int first = first_panel(group);
        shared.k_empty[stage][group].wait(empty);
        if (group == kRope) {
          gather(std::integral_constant<int, kRopeDim>{}, of_rope, rope, params.v_units, first);
        } else {
          gather(std::integral_constant<int, kHalfColumns>{}, of_latent, latent + first * 128,
                 params.k_units, first);
        }
        for (int panel = first; panel < first + panel_count(group); ++panel) {
          fa3::arrive_when_landed(shared.k_full[stage][panel]);
        }
      }
      if (lane == 0 && owner == 0 && i + 2 >= kv_blocks) shared.job_wanted.arrive();
      __syncwarp();  // before the offsets are overwritten
    }
    first_block += kv_blocks;
  }
}

}  // namespace cutlass_kernels::mla
