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
#include "fa3/pair.h"
#include "latent/fa3/load.h"
#include "latent/fa3/shared_memory.h"
#include "schedule/requests.h"

namespace cutlass_kernels::mla {

CUTE_DEVICE uint2 load_shared_8(std::uint32_t from) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
  return x;
}
CUTE_DEVICE uint4 load_shared_16(std::uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
CUTE_DEVICE std::uint32_t load_shared_4(std::uint32_t from) {
  std::uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
CUTE_DEVICE void store_shared_8(std::uint32_t to, std::uint64_t x) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(x) : "memory");
}
CUTE_DEVICE void store_shared_16(std::uint32_t to, const uint2& x, const uint2& y) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(y.x), "r"(y.y) : "memory");
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

// Publishes the next job, by one thread: what find_tiles() does with a warp of its own. Of a pair, CTA 1 has the heads
// behind those of CTA 0.
template <class Tile>
CUTE_DEVICE void publish_job(const fa3::KernelParams& params, Shared<Tile>& shared,
                             const fa3::Ring<kJobBuffers>& jobs) {
  constexpr bool kPair = Tile::kCtasPerTile == 2;
  Job& job = shared.jobs[jobs.index];
  if constexpr (kPair) {
    if (fa3::rank_in_pair() == 1) {
      Barrier& sent = shared.from_peer.sent[jobs.index];
      sent.arrive_and_expect(sizeof(Job));
      sent.wait(jobs.phase);
      shared.job_empty[jobs.index].wait(jobs.phase ^ 1);
      fa3::copy_job(shared.from_peer.jobs[jobs.index], job);
      job.head += int(params.packed.heads.divisor);
      shared.job_full[jobs.index].arrive();
      return;
    }
  }
  fa3::TileClaims<Tile, Shared<Tile>> claims(params, shared, shared.claimed.index);
  WorkItem work = shared.claimed.work;
  int head = shared.claimed.head, rank = 0;
  const bool found = claims.claim(work, head, rank);
  shared.job_empty[jobs.index].wait(jobs.phase ^ 1);
  job.valid = found;
  if (found) fa3::describe_job<Tile, true>(params, work, head * Tile::kCtasPerTile, rank, job);
  if constexpr (kPair) fa3::send_job(job, shared.from_peer.jobs[jobs.index], shared.from_peer.sent[jobs.index]);
  shared.claimed.index = claims.index();
  shared.claimed.head = head;
  shared.claimed.work = work;
  shared.job_full[jobs.index].arrive();
}

// ue8m0 as a number.
CUTE_DEVICE float power_of(std::uint32_t exponent) {
  return exponent == 255 ? NAN : __uint_as_float(max(exponent << 23, 1u << 22));
}

// Each lane's own x, in a way that keeps ptxas from computing it anew, from special registers and constants, where it
// is used.
CUTE_DEVICE std::uint32_t held(std::uint32_t x) { return __shfl_sync(0xffffffffu, x, threadIdx.x % 32); }

// A token of zeros, in the place of one that does not exist.
__device__ const uint4 kNoToken[41] = {};

// One of four producer warps, which copies 16 rows of every block and widens them in place. The e4m3 of half of the
// columns land in panels of that half, of whose rows a warp has its own: 128 columns in the third one and 128 in the
// fourth. Where the last of four panels is that of the position, which comes as it is, they land in the second, and 64
// in the first. While one half is in flight, the one before is widened.
//
// Lanes 0 to 15 have the first rows, the others those behind: they copy 256 bytes of a row together, and widen 8
// numbers of both parts of it each. All look up a slot each at once: those of several blocks.
//
// A warp is alone on its scheduler most of the time, so its latencies count, not its instructions: with branches,
// special registers read again, and entries of the list awaited where they are read, 256 rows of 128 heads over 2048
// slots took 503 us instead of 385. What did not help: e4m3 read into registers (461: 32 bytes per lane in flight leave
// no registers for the rest), rows brought to the L2 cache a block ahead (406), eight producer warps (448: with 128
// registers at launch ptxas takes wgmma one by one).
template <class Element, class Tile>
struct QuantizedGather {
  static constexpr TokenFormat kFormat = Tile::kFormat;
  static constexpr bool kPositionsAreValues = kFormat.columns < kLatentDim;
  static constexpr bool kPair = Tile::kCtasPerTile == 2;
  static constexpr int kCtaRows = Tile::kBlockN / Tile::kCtasPerTile;  // that the CTA widens
  static constexpr int kRows = kCtaRows / Tile::kProducerWarps;        // of the warp
  static constexpr int kLaneRows = kRows / 2;
  static constexpr std::uint32_t kAll = 0xffffffffu;
  static constexpr int kStageBytes = Tile::kStagePanels * kPanelBytes;
  static constexpr int kScaleBytes = Tile::kScales * 4;
  static constexpr std::uint32_t kPointerBytes = sizeof(typename TokensToRead<Tile>::At);
  static constexpr int kGroup = 32 / kRows;  // blocks that are looked up at once

  const fa3::KernelParams& params;
  Shared<Tile>& shared;
  const int warp, lane;
  const int warp_row;        // the first of the warp's
  const int first_row;       // of the lane's
  const std::uint32_t peer;  // the distance of what both CTAs of a pair have
  int batch;                 // the request
  int key;                   // to be looked up
  int first_end, end;        // where keys of the caches end
  int slot;                  // the next to be looked up
  int blocks_left;           // that have been looked up, behind the one that is read
  std::uint32_t listed;      // a bit for each row of that one, and of those: whether there is such a slot
  std::uint32_t pointers;    // to the rows of the warp

  CUTE_DEVICE QuantizedGather(const fa3::KernelParams& params_, Shared<Tile>& shared_, int warp_, int lane_)
      : params(params_),
        shared(shared_),
        warp(warp_),
        lane(lane_),
        warp_row((kPair ? fa3::rank_in_pair() * kCtaRows : 0) + warp_ * kRows),
        first_row(held(warp_row + lane_ / 16 * kLaneRows)),
        peer(kPair ? fa3::address_in_peer(shared_address(&shared_)) - shared_address(&shared_) : 0) {}

  CUTE_DEVICE std::uint32_t rows(int stage) const {
    return shared_address(shared.k) + stage * kStageBytes + first_row * 128;
  }
  CUTE_DEVICE std::uint32_t scales(int stage) const {
    return shared_address(&shared.tokens.scales[stage]) + first_row * kScaleBytes;
  }
  CUTE_DEVICE std::uint32_t first_pointers() const {
    return shared_address(shared.tokens.at) + warp * (kRows * kPointerBytes);
  }
  // Whether the scales of a page lie behind the data of its tokens.
  CUTE_DEVICE bool by_page() const {
    return Tile::kAnyOf528 ? params.attention.kv_dtype == DType::kLatentV41ByPage : kFormat.by_page;
  }
  // Where e4m3 of the part-th 128 columns of a half land, among the half's panels.
  CUTE_DEVICE static int raw_panel(bool right, int part) { return kPositionsAreValues && right ? 1 - part : 2 + part; }

  CUTE_DEVICE void begin_list(const Job& job) {
    batch = job.batch;
    const fa3::SlotsOfCache& cache = params.caches[0];
    first_end = min(listed_keys(params.attention, cache.lengths, cache.width, batch), job.visible_end);
    end = job.visible_end;
    key = job.key_begin + (job.kv_blocks - 1 - lane / kRows + kGroup) * Tile::kBlockN + warp_row + lane % kRows;
    blocks_left = 0;
    read_list();
  }
  CUTE_DEVICE void begin(const Job& job, int block) {
    begin_list(job);
    const int stage = stage_of<Tile>(block);
    empty(stage, false).wait(phase_of<Tile>(block) ^ 1);
    begin_half(stage, false, false);
  }
  // Not behind a branch, or a condition: the warp would wait for the entry at once.
  CUTE_DEVICE void read_list() {
    key -= kGroup * Tile::kBlockN;
    const bool second = key >= params.first_keys;
    const fa3::SlotsOfCache& cache = params.caches[second];
    const int index = max(min(second ? key - params.first_keys : key, cache.width - 1), 0);
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(slot) : "l"(cache.indices + batch * cache.table_stride + index));
  }

  // Where the lane's slot lies, or a token of zeros.
  struct Located {
    const char* record;
    const char* scales;
    bool exists;
  };
  CUTE_DEVICE Located locate() const {
    const bool second = key >= params.first_keys;
    const fa3::SlotsOfCache& cache = params.caches[second];
    const bool exists = key < (second ? end : first_end) && std::uint32_t(slot) < cache.num_slots;
    const std::uint32_t page = cache.page_size.divide(slot);
    const std::uint32_t in_page = slot - page * cache.page_size.divisor;
    const std::uint64_t offset =
        std::uint64_t(page * cache.units.page + in_page * cache.units.slot) * cache.units.bytes;
    const char* const record = exists ? cache.data + offset : reinterpret_cast<const char*>(kNoToken);
    const char* scales = record + kFormat.scales_at;
    if (by_page() && exists) {
      scales = cache.data + page * cache.page_bytes + std::uint64_t(cache.page_size.divisor) * kFormat.data_bytes() +
               in_page * kFormat.scale_bytes;
    }
    return {record, scales, exists};
  }
  // To where the slot lies that the lane has looked up.
  CUTE_DEVICE std::uint32_t own_pointer() const {
    return first_pointers() + (lane / kRows * kCtaRows + lane % kRows) * kPointerBytes;
  }
  // Of the next kGroup blocks: where the rows of the warp lie, and which exist.
  CUTE_DEVICE void look_up() {
    const Located slot = locate();
    const std::uint32_t to = own_pointer();
    __syncwarp();  // where rows of the blocks before lie has been read
    if constexpr (kFormat.by_page) {
      store_shared_16(to, words_of(slot.record), words_of(slot.scales));
    } else {
      store_shared_8(to, reinterpret_cast<std::uint64_t>(slot.record));
    }
    listed = __ballot_sync(kAll, slot.exists);
    __syncwarp();
    read_list();
  }

  // Before the first half of a block.
  CUTE_DEVICE void begin_block(int stage) {
    if (blocks_left > 0) {
      --blocks_left;
      listed >>= kRows;
      pointers += kCtaRows * kPointerBytes;
    } else {
      look_up();
      blocks_left = kGroup - 1;
      pointers = first_pointers();
    }
    if (lane < kRows) {
      const std::uint32_t own = pointers + lane * kPointerBytes;
      copy_scales(stage, lane, kFormat.by_page ? pointer_at(own + 8) : pointer_at(own) + kFormat.scales_at);
    }
  }
  // Of a row of the warp.
  CUTE_DEVICE void copy_scales(int stage, int row, const char* from) {
    const std::uint32_t to = shared_address(&shared.tokens.scales[stage]) + (warp_row + row) * kScaleBytes;
    if constexpr (kFormat.scale_bytes == 8) {
      cp_async_8(to, from, true);
    } else {
      cp_async_16(to, from);
    }
  }

  CUTE_DEVICE static uint2 words_of(const char* x) {
    const std::uint64_t bits = reinterpret_cast<std::uint64_t>(x);
    return {std::uint32_t(bits), std::uint32_t(bits >> 32)};
  }
  CUTE_DEVICE static const char* pointer_at(std::uint32_t address) {
    const uint2 x = load_shared_8(address);
    return reinterpret_cast<const char*>(std::uint64_t(x.y) << 32 | x.x);
  }
  // The lane's n-th row.
  CUTE_DEVICE const char* row_of(int n) const {
    return pointer_at(pointers + (lane / 16 * kLaneRows + n) * kPointerBytes);
  }

  // Columns of the position come with one of the halves. Eight lanes copy a row.
  CUTE_DEVICE static bool has_positions(bool second, bool right) {
    return Tile::kHasPositions ? second : kPositionsAreValues && right;
  }
  CUTE_DEVICE int position_row() const { return lane / 8 % 2 * (kLaneRows / 2); }
  CUTE_DEVICE std::uint32_t position_address(int stage, int n) const {
    const int row = position_row() + n;
    return rows(stage) + (Tile::kHasPositions ? kRopePanel : kRopePanel - 1) * kPanelBytes + row * 128 +
           ((lane ^ (first_row + row)) % 8 << 4);
  }

  // Half of the columns; the memory is free.
  CUTE_DEVICE void copy(int stage, bool second, bool right) {
    if (second && lane == 0) {
      if constexpr (!kPair) {
        static_assert(kRows == 16 || Tile::kFewHeads);
        reinterpret_cast<std::uint16_t*>(shared.listed[stage])[warp] = std::uint16_t(listed);
      } else {
        std::uint32_t& word = shared.listed[stage][warp_row / kRows];
        const std::uint32_t own = listed & ((1u << kRows) - 1);
        word = own;
        fa3::send(shared_address(&word) + peer, shared.k_full[stage][kRopePanel].address() + peer, own);
      }
    }
    if (has_positions(second, right)) {
      const char* from[kLaneRows / 2];
      CUTE_UNROLL
      for (int n = 0; n < kLaneRows / 2; ++n) {
        from[n] = row_of(position_row() + n) + (kFormat.positions_at + lane % 8 * 16);
      }
      CUTE_UNROLL
      for (int n = 0; n < kLaneRows / 2; ++n) cp_async_16(position_address(stage, n), from[n]);
    }
    const std::uint32_t to =
        rows(stage) + (right * kHalfPanels + raw_panel(right, lane % 16 / 8)) * kPanelBytes + lane % 8 * 16;
    const int column = right * (kLatentDim / 2) + lane % 16 * 16;
    if (!kPositionsAreValues || !right || lane % 16 < 12) {
      const char* from[kLaneRows];  // before the first copy, whose registers are free late
      CUTE_UNROLL
      for (int n = 0; n < kLaneRows; ++n) from[n] = row_of(n) + column;
      CUTE_UNROLL
      for (int n = 0; n < kLaneRows; ++n) cp_async_16(to + n * 128, from[n]);
    }
    cp_async_commit();
  }

  // Stored scales become numbers: (half of the columns, group of a part, part).
  CUTE_DEVICE void widen_scales(int stage) {
    const auto power = [](std::uint32_t exponents, int n) {
      return __float_as_uint(power_of(exponents >> 8 * n & 0xff));
    };
    if constexpr (Tile::kAnyOf528) {
      // 8 bytes of a half: exponents of 4 groups of either part, or an fp32 of either, for its 4 groups.
      const bool has_exponents = params.attention.kv_dtype != DType::kLatentV32Nope;
      constexpr int kPerLane = (kLaneRows + 3) / 4;
      const int place = lane % 16;  // among four rows: (row, half, two groups)
      uint2 stored[kPerLane];
      CUTE_UNROLL
      for (int n = 0; n < kPerLane; ++n) {
        if (place / 4 < kLaneRows) {
          stored[n] = load_shared_8(scales(stage) + (4 * n + place / 4) * kScaleBytes + place / 2 % 2 * 8);
        }
      }
      __syncwarp();
      CUTE_UNROLL
      for (int n = 0; n < kPerLane; ++n) {
        const auto of_group = [&](int group) {
          return has_exponents ? uint2{power(stored[n].x, group), power(stored[n].y, group)} : stored[n];
        };
        if (place / 4 < kLaneRows) {
          store_shared_16(scales(stage) + (16 * n + place) * 16, of_group(place % 2 * 2), of_group(place % 2 * 2 + 1));
        }
      }
    } else {
      const int half = lane / 8 % 2;
      const std::uint32_t of_row = scales(stage) + lane % kLaneRows * kScaleBytes;
      const std::uint32_t exponents = load_shared_4(of_row + half * 4);
      __syncwarp();
      store_shared_16(of_row + half * 16, {power(exponents, 0), power(exponents, 2)},
                      {power(exponents, 1), power(exponents, 3)});
    }
    __syncwarp();
  }
  // Where the scales of the lane's columns of both parts are, of the first of its rows.
  CUTE_DEVICE std::uint32_t own_scales(int stage, bool right) const {
    return scales(stage) + right * (kScaleBytes / 2) + lane % 16 / (kFormat.group / 8) * 8;
  }

  // Half a warp reads and writes one row at a time: reads come before the writes over them.
  CUTE_DEVICE void widen(int stage, bool second, bool right) {
    if (kFormat.has_exponents && !second) widen_scales(stage);
    const int panel_of_part = lane / 8 % 2;
    const std::uint32_t full = shared.k_full[stage][right ? kHalfPanels : 0].address() + peer;  // of the peer
    if (kPair && Tile::kHasPositions && second) {
      const std::uint32_t barrier = shared.k_full[stage][kRopePanel].address() + peer;
      CUTE_UNROLL
      for (int n = 0; n < kLaneRows / 2; ++n) {
        const std::uint32_t there = position_address(stage, n);
        const uint4 x = load_shared_16(there);
        fa3::send(there + peer, barrier, int4{int(x.x), int(x.y), int(x.z), int(x.w)});
      }
    }
    // Columns of the position among the values are sent in the place of numbers that the lane does not have.
    const bool is_position = kPair && kPositionsAreValues && right && panel_of_part == 1;  // of part 1
    const std::uint32_t half = rows(stage) + right * (kHalfPanels * kPanelBytes);
    const std::uint32_t raw = half + lane % 16 * 8;
    const std::uint32_t to = half + panel_of_part * kPanelBytes + ((lane ^ first_row) % 8 << 4);
    const std::uint32_t factors = own_scales(stage, right);
    const auto place = [&](int row, int part) { return (to ^ row << 4) + 2 * part * kPanelBytes + row * 128; };
    struct {
      uint2 numbers[2], scale;  // [part]
      uint2 more;               // of a position
    } read[2];
    const auto load = [&](int row) {
      CUTE_UNROLL
      for (int part = 0; part < 2; ++part) {
        const std::uint32_t from = raw + raw_panel(right, part) * kPanelBytes + row * 128;
        read[row % 2].numbers[part] = load_shared_8(is_position && part == 1 ? place(row, part) : from);
      }
      if (kPair && kPositionsAreValues && right) read[row % 2].more = load_shared_8(place(row, 1) + 8);
      read[row % 2].scale = load_shared_8(factors + row * kScaleBytes);
    };
    load(0);
    CUTE_UNROLL
    for (int row = 0; row < kLaneRows; ++row) {
      if (row + 1 < kLaneRows) load(row + 1);
      __syncwarp();
      CUTE_UNROLL
      for (int part = 0; part < 2; ++part) {
        const uint2 numbers = read[row % 2].numbers[part];
        const float scale = __uint_as_float(part == 0 ? read[row % 2].scale.x : read[row % 2].scale.y);
        uint2 low = scaled<Element>(numbers.x, scale);
        uint2 high = scaled<Element>(numbers.y, scale);
        if (is_position && part == 1) low = numbers, high = read[row % 2].more;
        const bool has_numbers = !kPositionsAreValues || !right || part == 0 || panel_of_part == 0;
        if (kPair || has_numbers) store_shared_16(place(row, part), low, high);
        if constexpr (kPair) {
          fa3::send(place(row, part) + peer, full, int4{int(low.x), int(low.y), int(high.x), int(high.y)});
        }
      }
    }
  }

  CUTE_DEVICE Barrier& empty(int stage, bool right) const { return shared.k_empty[stage][right ? kRight : kLeft]; }
  CUTE_DEVICE void begin_half(int stage, bool second, bool right) {
    if (!second) begin_block(stage);
    copy(stage, second, right);
  }

  // Widens a half of a block, and begins the half behind it, as soon as its memory is free.
  template <bool kSecond>
  CUTE_DEVICE void step(int block, bool right, bool has_next) {
    const int stage = stage_of<Tile>(block);
    const int next_stage = stage_of<Tile>(block + kSecond);
    const std::uint32_t next_empty = phase_of<Tile>(block + kSecond) ^ 1;
    const bool next_right = right == kSecond;
    Barrier& next = empty(next_stage, next_right);
    // P, in the panel of the positions, is read before either half of the values is given back.
    const bool begins = __all_sync(kAll, has_next && next.test(next_empty));
    if (begins) {
      begin_half(next_stage, !kSecond, next_right);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncwarp();
    widen(stage, kSecond, right);
    __syncwarp();
    if (lane == 0) {
      const auto arrive = [&](Barrier& barrier, int from_peer) {
        if (kPair && warp == 0) {
          barrier.arrive_and_expect(from_peer);
        } else {
          barrier.arrive();
        }
      };
      constexpr int kPeerRows = Tile::kBlockN - kCtaRows;
      constexpr int kListedBytes = 4 * Tile::kProducerWarps;
      if (kSecond) arrive(shared.k_full[stage][kRopePanel], kListedBytes + (Tile::kHasPositions ? kPeerRows * 128 : 0));
      arrive(shared.k_full[stage][right ? kHalfPanels : 0], kPeerRows * kHalfPanels * 128);
    }
    if (has_next && !begins) {
      next.wait(next_empty);
      begin_half(next_stage, !kSecond, next_right);
    }
  }
  CUTE_DEVICE void take_blocks(int first_block, int kv_blocks) {
    CUTE_NO_UNROLL
    for (int i = 0; i < kv_blocks; ++i) {
      step<false>(first_block + i, i % 2 != 0, true);
      step<true>(first_block + i, i % 2 == 0, i + 1 < kv_blocks);
    }
  }
};

}  // namespace cutlass_kernels::mla
