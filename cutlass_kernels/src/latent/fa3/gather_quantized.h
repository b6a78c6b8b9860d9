// The producer warps of keys by slots that lie in a quantized latent cache (token_format.h).
#pragma once

#include <cute/config.hpp>

#include <cstdint>
#include <type_traits>

#include "common/element_types.h"
#include "common/ptx/cp_async.h"
#include "common/ptx/shared_address.h"
#include "fa3/find_tiles.h"
#include "fa3/load_gather.h"
#include "latent/fa3/load.h"
#include "latent/fa3/shared_memory.h"

namespace cutlass_kernels::mla {

CUTE_DEVICE uint4 load_shared(std::uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
CUTE_DEVICE void store_shared(std::uint32_t to, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// Four numbers of e4m3 times `scale`, as 16-bit numbers.
template <class Element>
CUTE_DEVICE uint2 scaled(std::uint32_t numbers, float scale) {
  std::uint32_t low, high;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(numbers));
  const float2 x = fp16::decode(reinterpret_cast<const __half2&>(low));
  const float2 y = fp16::decode(reinterpret_cast<const __half2&>(high));
  return {Element::pack(x.x * scale, x.y * scale), Element::pack(y.x * scale, y.y * scale)};
}

// Publishes the next job, by one thread: what find_tiles() does with a warp of its own.
template <class Tile>
CUTE_DEVICE void publish_job(const fa3::KernelParams& params, Shared<Tile>& shared,
                             const fa3::Ring<kJobBuffers>& jobs) {
  fa3::TileClaims<Tile, Shared<Tile>> claims(params, shared, shared.claimed.index);
  WorkItem work = shared.claimed.work;
  int head = shared.claimed.head;
  int rank = shared.claimed.rank;
  const bool found = claims.claim(work, head, rank);
  shared.job_empty[jobs.index].wait(jobs.phase ^ 1);
  Job& job = shared.jobs[jobs.index];
  job.valid = found;
  if (found) fa3::describe_job<Tile, true>(params, work, head, rank, job);
  shared.claimed.index = claims.index();
  shared.claimed.work = work;
  shared.claimed.head = head;
  shared.claimed.rank = rank;
  shared.job_full[jobs.index].arrive();
}

// ue8m0 as a number.
CUTE_DEVICE float power_of(std::uint32_t exponent) {
  return exponent == 255 ? NAN : __uint_as_float(max(exponent << 23, 1u << 22));
}

// Each of four warps copies 16 rows of every block, and widens them in place. The e4m3 of half of the columns land in
// panels of that half, of whose rows a warp has its own: 128 columns in the third one and 128 in the fourth. Where the
// last of four panels is that of the position, which comes as it is, they land in the second, and 64 in the first. While
// one half is in flight, the one before is widened, or, as long as no memory is free, nothing else.
//
// A lane looks up row (lane / 8) * 4 + lane % 4 of the warp's.
template <class Element, class Tile>
CUTE_DEVICE void gather_quantized(const fa3::KernelParams& params, Shared<Tile>& shared, int warp) {
  constexpr TokenFormat kFormat = Tile::kFormat;
  constexpr bool kPositionsAreValues = kFormat.columns < kLatentDim;
  constexpr int kRows = Tile::kBlockN / 4;  // of the warp
  constexpr std::uint32_t kAll = 0xffffffffu;
  constexpr int kNoSlot = -1;
  constexpr int kStageBytes = kPanels * kPanelBytes;
  const int lane = threadIdx.x % 32;
  const bool first = warp == 0 && lane == 0;
  const std::uint32_t num_slots = params.num_pages * params.page_size.divisor;
  const std::uint32_t own_rows = shared_address(shared.k) + warp * kRows * 128;
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
    const std::int32_t* const list = params.k_pages.indices + job.kv_begin;
    int key = job.key_begin + kv_blocks * Tile::kBlockN + warp * kRows + lane / 8 * 4 + lane % 4;
    const auto look_up = [&] {
      key -= Tile::kBlockN;
      return key >= job.key_begin && key < job.visible_end ? __ldg(list + key) : kNoSlot;
    };
    const auto address = [&](std::uint32_t of_row) {
      std::uint64_t bytes;
      asm("mul.wide.u32 %0, %1, %2;" : "=l"(bytes) : "r"(of_row), "r"(params.k_units.bytes));
      return static_cast<const char*>(params.attention.k.data) + bytes;
    };
    int slot = look_up();
    std::uint32_t offset = 0;      // of the row looked up
    std::uint32_t listed = 0;      // whether that of each lane exists
    const char* scales = nullptr;  // of the row looked up
    // Of the row looked up, of a half: an fp32 scale of its first or second 128 columns, or exponents of these or of all.
    std::uint32_t scale = 0, next_scale = 0;
    // Where e4m3 of the part-th 128 columns of a half land, among the half's panels.
    const auto raw_panel = [&](bool right, int part) { return kPositionsAreValues && right ? 1 - part : 2 + part; };
    // Halves of blocks in the order in which S takes them: how many have been begun, and how many are done.
    int begun = 0, done = 0;
    const auto block_of = [&](int half) { return first_block + half / 2; };
    const auto group_of = [&](int half) { return nth_group(half / 2 % 2, half % 2 * 2); };
    const auto empty_of = [&](int half) -> Barrier& {
      return shared.k_empty[stage_of<Tile>(block_of(half))][group_of(half)];
    };
    CUTE_NO_UNROLL
    while (done < 2 * kv_blocks) {
      const int block = block_of(begun);
      const std::uint32_t empty = phase_of<Tile>(block) ^ 1;
      bool begins = begun < 2 * kv_blocks && begun - done < 2;
      if (begins) {
        if (begun == done) {
          empty_of(begun).wait(empty);
        } else {
          begins = __all_sync(kAll, empty_of(begun).test(empty));
        }
      }
      if (begins) {
        const int stage = stage_of<Tile>(block);
        const PanelGroup group = group_of(begun);
        if (begun % 2 == 0) {
          const bool exists = std::uint32_t(slot) < num_slots;
          const std::uint32_t page = exists ? params.page_size.divide(std::uint32_t(slot)) : 0;
          const std::uint32_t in_page = exists ? std::uint32_t(slot) - page * params.page_size.divisor : 0;
          offset = page * params.k_units.page + in_page * params.k_units.slot;
          listed = __ballot_sync(kAll, exists);
          scales = kFormat.by_page
                       ? static_cast<const char*>(params.attention.k.data) + page * params.k_pages.page_bytes +
                             std::uint64_t(params.page_size.divisor) * kFormat.data_bytes() +
                             in_page * kFormat.scale_bytes
                       : address(offset) + kFormat.scales_at;
          slot = look_up();
        } else {
          shared.k_empty[stage][kRope].wait(empty);
          if (lane == 0) {
            std::uint32_t rows = listed & 0x0f0f0f0f;
            rows = (rows | rows >> 4) & 0x00ff00ff;
            reinterpret_cast<std::uint16_t*>(shared.listed[stage])[warp] = std::uint16_t(rows | rows >> 8);
            shared.k_full[stage][kRopePanel].arrive();
          }
        }
        const bool right = group == kRight;
        if (Tile::kHasPositions ? begun % 2 == 1 : kPositionsAreValues && right) {
          constexpr int kPanel = Tile::kHasPositions ? kRopePanel : kRopePanel - 1;
          const std::uint32_t to = own_rows + stage * kStageBytes + kPanel * kPanelBytes + lane / 8 * (4 * 128);
          CUTE_UNROLL
          for (int j = 0; j < 4; ++j) {  // row lane / 8 * 4 + j, which eight lanes copy
            const std::uint32_t of_row = __shfl_sync(kAll, offset, j, 8);
            cp_async_16(to + j * 128 + ((lane % 8 ^ (lane / 8 % 2 * 4 + j)) << 4),
                        address(of_row) + kFormat.positions_at + lane % 8 * 16, listed >> (lane & 24) >> j & 1);
          }
          if (Tile::kHasPositions) fa3::arrive_when_landed(shared.k_full[stage][kRopePanel]);
        }
        std::uint32_t read = 0;
        if (listed >> lane & 1) {
          const int of_half = kFormat.scale_bytes / 2 * right;
          read = __ldg(reinterpret_cast<const std::uint32_t*>(scales + of_half) +
                       (kFormat.scale_bytes == 16 ? lane % 8 / 4 : 0));
        }
        (begun == done ? scale : next_scale) = read;
        const int part = lane % 16 / 8;
        const std::uint32_t to = own_rows + stage * kStageBytes +
                                 (first_panel(group) + raw_panel(right, part)) * kPanelBytes + lane / 16 * (8 * 128) +
                                 lane % 8 * 16;
        const bool is_stored = !kPositionsAreValues || !right || lane % 16 < 12;
        const int column = right * (kLatentDim / 2) + lane % 16 * 16;
        CUTE_UNROLL
        for (int j = 0; j < 8; ++j) {  // row lane / 16 * 8 + j, which a lane of 16 has looked up
          const int looked_up = j / 4 * 8 + j % 4;
          const std::uint32_t of_row = __shfl_sync(kAll, offset, looked_up, 16);
          if (is_stored) cp_async_16(to + j * 128, address(of_row) + column, listed >> (lane & 16) >> looked_up & 1);
        }
        cp_async_commit();
        if (begun++ == 0) {  // Q of the tile before may still be read: not in front of the copies
          if (first) load_q_of_job<Tile>(params, shared, job, q_phase);
          __syncwarp();
          q_phase ^= 1;
        }
        continue;
      }
      if (begun - done == 2) {
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      __syncwarp();
      const int stage = stage_of<Tile>(block_of(done));
      const int panel = first_panel(group_of(done));
      const bool odd = lane & 4;  // eight lanes write eight chunks: four the even ones first, four the odd ones
      const std::uint32_t rows = own_rows + stage * kStageBytes + panel * kPanelBytes + lane / 8 * (4 * 128);
      const bool right = panel != 0;
      CUTE_UNROLL
      for (int n = 0; n < 2; ++n) {
        // First what is not written over that of the other part.
        const int part = kPositionsAreValues && right ? 1 - n : n;
        uint4 numbers[4];
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
          numbers[j] = load_shared(rows + raw_panel(right, part) * kPanelBytes + j * 128 + lane % 8 * 16);
        }
        if (n == 1) __syncwarp();  // all lanes have read what is written now
        const std::uint32_t to =
            rows + (2 * part + lane / 4 % 2) * kPanelBytes + ((lane % 4 * 2 + odd ^ lane / 8 % 2 * 4) << 4);
        const bool is_stored = !kPositionsAreValues || !right || part == 0 || !odd;
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
          const std::uint32_t word = __shfl_sync(kAll, scale, part * 4 + j, 8);
          // The lane has columns 16 (lane % 8) and on of the part.
          const int group =
              (kFormat.scale_bytes == 16 ? 0 : 128 / kFormat.group * part) + lane % 8 * 16 / kFormat.group;
          const float of_row = kFormat.has_exponents ? power_of(word >> 8 * group & 0xff) : __uint_as_float(word);
          const uint4 x = numbers[j];
          const uint2 a = scaled<Element>(odd ? x.z : x.x, of_row);
          const uint2 b = scaled<Element>(odd ? x.w : x.y, of_row);
          if (is_stored) store_shared((to ^ j << 4) + j * 128, uint4{a.x, a.y, b.x, b.y});
          const uint2 c = scaled<Element>(odd ? x.x : x.z, of_row);
          const uint2 d = scaled<Element>(odd ? x.y : x.w, of_row);
          if (is_stored) store_shared((to ^ j << 4 ^ 16) + j * 128, uint4{c.x, c.y, d.x, d.y});
        }
      }
      __syncwarp();
      if (lane == 0) shared.k_full[stage][panel].arrive();
      scale = next_scale;
      ++done;
    }
    first_block += kv_blocks;
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
  }
}

}  // namespace cutlass_kernels::mla
