// Producers: Q, and keys from ragged tensors or pages, by TMA; of pages whose size is no multiple of 8 row by row
// (gather_keys()).
//
// A KV block arrives panel by panel, each with a barrier of its own: S begins with the panels that came first. Blocks
// of even number in their tile are those of warpgroup 0, the others those of warpgroup 1; each kind has a warp that
// loads it. The panels that the owner's half of the output takes from its V are free first, so they are loaded first.
#pragma once

#include <cute/config.hpp>

#include <type_traits>

#include "common/ptx/shared_address.h"
#include "fa3/load.h"
#include "fa3/load_gather.h"
#include "fa3/tma.h"
#include "latent/fa3/shared_memory.h"

namespace cutlass_kernels::mla {

enum class KeySource { kRows, kBoxes, kGathered };

// Columns of the position have maps of their own. V is part of K, and O is not written by TMA: theirs are free.
CUTE_DEVICE const CUtensorMap& q_rope_map(const fa3::KernelParams& params) { return params.o_map; }
CUTE_DEVICE const CUtensorMap& k_rope_map(const fa3::KernelParams& params) { return params.v_map; }
// Of keys by slots, which are not loaded by TMA, k_map is that of O.
CUTE_DEVICE const CUtensorMap& output_map(const fa3::KernelParams& params) { return params.k_map; }

// By one thread. q_empty: the phase of it to wait for.
template <class Tile>
CUTE_DEVICE void load_q_of_job(const fa3::KernelParams& params, Shared<Tile>& shared, const Job& job,
                               std::uint32_t q_empty) {
  shared.q_empty.wait(q_empty);
  constexpr int kPanelsQ = Tile::kHeadDimQk / 64;
  shared.q_full.arrive_and_expect(kPanelsQ * 128 * params.packed.tokens * int(params.packed.heads.divisor));
  CUTE_NO_UNROLL
  for (int panel = 0; panel < kPanelsQ; ++panel) {
    const bool rope = panel == kRopePanel;
    fa3::tma_load(rope ? &q_rope_map(params) : &params.q_map, shared.q_full, fa3::CacheHint::kEvictFirst,
                  shared.q + panel * (Tile::kQRows * 128), rope ? 0 : panel * 64, job.head,
                  fa3::kMapRows - job.qo_len + job.row_begin, job.q_end, int(fa3::kMapRows));
  }
}
template <class Tile>
CUTE_DEVICE void load_q(const fa3::KernelParams& params, Shared<Tile>& shared) {
  fa3::JobReader<Shared<Tile>> jobs(shared);
  Job job;
  for (std::uint32_t phase = 1; jobs.take(job); phase ^= 1) load_q_of_job<Tile>(params, shared, job, phase);
}

// The panels of a group, the groups in the order in which they are loaded, and in which S takes them.
CUTE_DEVICE PanelGroup nth_group(int owner, int n) {
  if (n == 1) return kRope;
  return (n == 0) == (owner == 0) ? kLeft : kRight;
}
CUTE_DEVICE int first_panel(PanelGroup group) {
  return group == kLeft ? 0 : group == kRight ? kHalfPanels : kRopePanel;
}
CUTE_DEVICE int panel_count(PanelGroup group) { return group == kRope ? 1 : kHalfPanels; }

// The panels of K in the order in which S of the blocks of `owner` takes them: n below kHalfPanels are those of its own
// half of V, then comes that of the position, if there is one.
template <class Tile>
CUTE_DEVICE constexpr int score_panel(int owner, int n) {
  constexpr int kOtherHalf = Tile::kHeadDimQk / 64 - kHalfPanels;
  return n < kHalfPanels  ? n + owner * kHalfPanels
         : n < kOtherHalf ? kRopePanel
                          : n - kOtherHalf + (1 - owner) * kHalfPanels;
}
// Whether that is the first of a group.
template <class Tile>
CUTE_DEVICE constexpr bool begins_group(int n) {
  return n == 0 || n == kHalfPanels || n == Tile::kHeadDimQk / 64 - kHalfPanels;
}

// Where the KV blocks of a CTA lie: the n-th of all its tiles together.
template <class Tile>
CUTE_DEVICE int stage_of(int block) {
  return block % Tile::kStages;
}
template <class Tile>
CUTE_DEVICE std::uint32_t phase_of(int block) {
  return block / Tile::kStages & 1;
}

struct NoPages {
  CUTE_DEVICE NoPages(const fa3::KernelParams&, const fa3::PagesOfMatrix&, const Job&, int) {}
};

// The K warp of the blocks of `owner`, by all its lanes, of which lane p loads panel p.
//
// Behind a tile with an odd number of blocks the warps exchange stages. They wait for a stage in turn all the same, and
// none is two phases ahead of a barrier's: consumers give back the groups of panels in the order of blocks, and the
// next tile is there only after warp 0 has waited for all groups of its last block (job_wanted).
template <class Tile, bool kPaged>
CUTE_DEVICE void load_keys(const fa3::KernelParams& params, Shared<Tile>& shared, int owner) {
  constexpr int kRows = Tile::kBlockN;
  constexpr auto kHint = fa3::CacheHint::kEvictFirst;
  const int lane = threadIdx.x % 32;
  const int own_group = lane == kRopePanel   ? int(kRope)
                        : lane >= kRopePanel ? -1
                        : lane < kHalfPanels ? int(kLeft)
                                             : int(kRight);
  const CUtensorMap* const map = lane == kRopePanel ? &k_rope_map(params) : &params.k_map;
  const int column = lane == kRopePanel ? 0 : lane * 64;
  const int per_block = kPaged ? kRows >> params.box_rows_log2 : 1;
  const int box_bytes = kPaged ? 128 << params.box_rows_log2 : kRows * 128;
  using Lookup = std::conditional_t<kPaged, fa3::BoxLookup<fa3::kBoxBatch>, NoPages>;
  fa3::BoxSource* const sources = shared.boxes[owner];  // (32)
  fa3::JobReader<Shared<Tile>> jobs(shared);
  fa3::Ring<1> landed;
  int first_block = 0;  // of the tile, among all of the CTA
  if (owner == 0 && lane == 0) shared.job_wanted.arrive();
  for (; jobs.next(); jobs.release()) {
    const Job& job = jobs.job();
    const int kv_blocks = job.kv_blocks;
    Lookup lookup(params, params.k_pages, job, kv_blocks * per_block - 1);
    [[maybe_unused]] int published = -1;  // batch of boxes
    CUTE_NO_UNROLL
    for (int i = owner; i < kv_blocks; i += 2) {
      const int kv_block = kv_blocks - 1 - i;
      const int first_key = job.key_begin + kv_block * kRows;
      int boxes = per_block;
      if constexpr (kPaged) {
        const int first_box = kv_block * per_block;
        if (published != first_box / fa3::kBoxBatch) {
          published = first_box / fa3::kBoxBatch;
          while (lookup.batch >= published) lookup.publish(sources);
        }
        boxes = min(max(lookup.count - first_box, 0), per_block);
      }
      const fa3::StageRows visible = fa3::visible_rows<kRows>(job, first_key);
      const bool clears = kPaged && visible.end - visible.begin < kRows;
      const int stage = stage_of<Tile>(first_block + i);
      const std::uint32_t empty = phase_of<Tile>(first_block + i) ^ 1;
      char* const to = shared.k[stage];  // (BLK_N, 64, panels)
      if (clears) {
        if (lane == 0) shared.landed[owner].arrive_and_expect(kPanels * boxes * box_bytes);
        __syncwarp();
      }
      Barrier& signal = clears ? shared.landed[owner] : shared.k_full[stage][lane < kPanels ? lane : 0];
      CUTE_NO_UNROLL
      for (int n = 0; n < kPanelGroups; ++n) {
        const PanelGroup group = nth_group(owner, n);
        shared.k_empty[stage][group].wait(empty);
        if (own_group != group) continue;
        if (group == kRope) fa3::fence_proxy_async();  // P was written there
        if (!clears) signal.arrive_and_expect(boxes * box_bytes);
        char* const panel = to + lane * kPanelBytes;
        if constexpr (kPaged) {
          CUTE_NO_UNROLL
          for (int box = 0; box < boxes; ++box) {
            const fa3::BoxSource source = sources[(kv_block * per_block + box) % fa3::kBoxBatch];
            fa3::tma_load(map, signal, kHint, panel + box * box_bytes, column, source.slot, 0, source.page);
          }
        } else {
          fa3::tma_load(map, signal, kHint, panel, column, fa3::kMapRows - job.visible_end + first_key, 0,
                        job.kv_begin + job.visible_end, int(fa3::kMapRows));
        }
      }
      if (lane == 0 && owner == 0 && i + 2 >= kv_blocks) shared.job_wanted.arrive();
      __syncwarp();
      if (clears) {
        shared.landed[owner].wait(landed.phase);
        landed.advance();
        fa3::clear_rows<kRows, kRopePanel>(visible, to);  // V
        if (lane < kPanels) shared.k_full[stage][lane].arrive();
      }
    }
    first_block += kv_blocks;
  }
}

// ---- The K warps of a cache whose page size is no multiple of 8, which TMA boxes need: row by row, through cp.async.

// The K warp of the blocks of `owner`, by all its lanes. It reads the page table one of its blocks ahead.
template <class Tile>
CUTE_DEVICE void gather_keys(const fa3::KernelParams& params, Shared<Tile>& shared, int owner) {
  constexpr int kRows = Tile::kBlockN;
  constexpr int kHalfColumns = kLatentDim / 2;
  const int lane = threadIdx.x % 32;
  const LaunchParams& p = params.attention;
  const char* const latent = static_cast<const char*>(p.k.data) + lane % 8 * 16;
  const char* const rope = (p.k_rope.data == nullptr ? static_cast<const char*>(p.k.data) + 2 * kLatentDim
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
      const auto gather = [&](auto columns, const auto& offsets, const char* data, const fa3::PageUnits& units,
                              int panel) {
        constexpr int kColumns = decltype(columns)::value;
        if (complete) {
          fa3::gather_rows<true, kRows, kColumns, kPanelBytes>(offsets.of[lane / 8], data, units.bytes, kColumns,
                                                               to_stage + panel * kPanelBytes);
        } else {
          fa3::gather_rows<false, kRows, kColumns, kPanelBytes>(offsets.of[lane / 8], data, units.bytes, kColumns,
                                                                to_stage + panel * kPanelBytes);
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
          gather(std::integral_constant<int, kHalfColumns>{}, of_latent, latent + first * 128, params.k_units, first);
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
