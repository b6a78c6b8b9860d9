// The K and V producers of a paged cache. Consumers do not know that there are pages.
//
// load_boxes(): boxes of box_rows keys (the largest power of two, 8 or more, that divides a page and a block) come by TMA. Of
// values at either end of the keys that a tile sees, those that it does not see are then cleared.
// gather_keys(): all rows through cp.async, for pages too small for boxes, in kernels whose producers have more registers or
// are more.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "common/ldmatrix.h"
#include "fa3/hidden_keys.h"
#include "fa3/load.h"
#include "fa3/params.h"
#include "fa3/shared.h"

namespace cutlass_kernels::fa3 {

constexpr int kNoPage = 0x7fffffff;  // outside every tensor map: reads as zeros

// V of one head of one request.
struct PagedValuesOfHead {
  const KernelParams& params;
  const std::int32_t* indices;  // of the request
  const char* data;             // of the head

  CUTE_DEVICE PagedValuesOfHead(const KernelParams& params_, const Job& job)
      : params(params_),
        indices(params.v_pages.indices + job.kv_begin),
        data(static_cast<const char*>(params.attention.v.data) +
             2 * (job.kv_head * params.attention.v.stride_head)) {}

  // Where a key's row is, from `data`; -1 if its page is none of the cache.
  CUTE_DEVICE std::int64_t offset_of(int key) const {
    const int entry = params.page_size.divide(key);
    const int page = page_of_entry(params.v_pages, indices[entry]);
    const int slot = key - entry * params.attention.pages.page_size;
    return std::uint32_t(page) < params.num_pages
               ? page * params.v_pages.page_bytes + slot * params.v_pages.slot_bytes
               : -1;
  }

  CUTE_DEVICE bool has_column(int column) const { return column < params.attention.head_dim_vo; }
};

// Copies rows [32 i, 32 i + 32) of a block to a stage at `to`; lane l's row 32 i + l lies at `offset`, zeros are written where
// that is negative.
template <int kRows, int kPanels, class Source>
CUTE_DEVICE void copy_rows(const Source& source, std::int64_t offset, int first_row,
                           std::uint32_t to) {
  const int chunk = threadIdx.x % 8;  // of the 128 bytes of a panel's row: eight lanes copy one
  const int row_of_four = threadIdx.x % 32 / 8;
  const char* data = source.data + chunk * 16;
  to += (first_row + row_of_four) * 128 + ((chunk ^ row_of_four) << 4);
  CUTE_NO_UNROLL
  for (int j = 0; j < 8; ++j) {
    const std::int64_t row_offset = __shfl_sync(0xffffffffu, offset, 4 * j + row_of_four);
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      // Rows four apart differ in the bit of 64 bytes of their swizzle.
      cp_async_16((to ^ (j % 2 * 64)) + j * (4 * 128) + panel * (kRows * 128),
                  data + row_offset + panel * 128,
                  row_offset >= 0 && source.has_column(panel * 64 + chunk * 8));
    }
  }
}

// Copies a block of V, zeros in the place of rows that are hidden or not wanted.
template <class Tile, int kPanels, class Source>
CUTE_DEVICE void copy_visible(const Source& source, const Job& job, int block,
                              const HiddenKeys<Tile::kBlockN>& hidden, char* stage) {
  constexpr int kRows = Tile::kBlockN;
  const int lane = threadIdx.x % 32;
  const int first_key = job.key_begin + block * kRows;
  const Rows wanted = wanted_rows<kRows>(job, first_key);
  CUTE_UNROLL
  for (int w = 0; w < kRows / 32; ++w) {
    const int row = 32 * w + lane;
    const bool seen = wanted.contains(row) && (hidden.words[w] >> lane & 1) == 0;
    const std::int64_t offset = seen ? source.offset_of(first_key + row) : -1;
    copy_rows<kRows, kPanels>(source, offset, 32 * w, cute::cast_smem_ptr_to_uint(stage));
  }
  cute::cp_async_wait<0>();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// Where the boxes of a tile's keys come from, looked up 32 at a time, a lane each, and a batch ahead of its use. Boxes are
// numbered from the tile's first key on, and used from the last to the first.
//
// Consumers need nearly every issue slot: what the two warps do per block of keys costs as many percent as it has times 20
// instructions (hd128).
struct BoxLookup {
  const KernelParams& params;
  const PagesOfMatrix& pages;
  const std::int32_t* table;  // of the request
  int key_begin;
  int count;  // boxes that hold a key that some row of the tile sees
  int batch;  // that `page` is of
  int page;   // the lane's

  CUTE_DEVICE BoxLookup(const KernelParams& params_, const PagesOfMatrix& pages_, const Job& job,
                        int last_box)
      : params(params_),
        pages(pages_),
        table(pages.indices + job.kv_begin),
        key_begin(job.key_begin) {
    count = job.first_key < job.key_end
                ? (job.key_end - key_begin + params.box_rows - 1) >> params.box_rows_log2
                : 0;
    batch = last_box / kBoxBatch;
    read();
  }

  CUTE_DEVICE int lane_box() const { return batch * kBoxBatch + int(threadIdx.x % 32); }
  CUTE_DEVICE int first_key(int box) const { return key_begin + (box << params.box_rows_log2); }
  CUTE_DEVICE void read() {
    page = kNoPage;
    const int box = lane_box();
    if (0 <= box && box < count) {
      page = page_of_entry(pages, __ldg(table + params.page_size.divide(first_key(box))));
    }
  }

  // Leaves the batch in shared memory, when what lies there has been used, and begins to read the next one.
  CUTE_DEVICE void publish(BoxSource* sources) {
    const int slot = int(params.page_size.modulo(first_key(lane_box())));
    __syncwarp();
    sources[threadIdx.x % 32] = {std::uint32_t(page) < params.num_pages ? page : kNoPage, slot};
    __syncwarp();
    --batch;
    read();
  }
};

// Writes zeros to the rows of a stage that are not wanted.
template <int kRows, int kPanels>
CUTE_DEVICE void clear_rows(const Rows& wanted, char* stage) {
  CUTE_NO_UNROLL
  for (unsigned i = threadIdx.x % 32; i < kPanels * kRows * 8; i += 32) {
    if (!wanted.contains(int(i / 8 % kRows))) reinterpret_cast<uint4*>(stage)[i] = {};
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// K or V, by all lanes of a warp: kPanels, kStages, map, full, empty and stages are that matrix's.
template <class Tile, int kPanels, int kStages, bool kIsK, bool kHides>
CUTE_DEVICE void load_boxes(const KernelParams& params, Shared<Tile>& shared,
                            const CUtensorMap* map, Barrier* full, Barrier* empty, char* stages) {
  constexpr int kRows = Tile::kBlockN;
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  const int lane = threadIdx.x % 32;
  const int per_block = kRows >> params.box_rows_log2;
  BoxSource* const sources = shared.boxes[kIsK ? 0 : 1];
  Ring<kJobSlots> jobs;
  Ring<kStages> ring;
  Ring<1> landed;
  if (kIsK && lane == 0) shared.job_wanted.arrive();
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job& job = shared.jobs[jobs.index];
    if (job.valid == 0) return;
    const int blocks = job.blocks;
    BoxLookup lookup(params, kIsK ? params.k_pages : params.v_pages, job, blocks * per_block - 1);
    CUTE_NO_UNROLL
    for (int block = blocks - 1; block >= 0; --block) {
      // All that needs no stage is done before there is one: from then on consumers may be waiting.
      const int first_box = block * per_block;
      if (block == blocks - 1 || ((first_box + per_block) & (kBoxBatch - 1)) == 0)
        lookup.publish(sources);
      const int count = min(max(lookup.count - first_box, 0), per_block);
      [[maybe_unused]] HiddenKeys<kRows> hidden;
      if constexpr (kHides) {
        if (params.attention.mask.words != nullptr && job.hides != 0)
          hidden.template find<Tile>(params, job, block);
      }
      // Scores of keys that no row sees are masked whatever K is, but values must be zeros there. By arithmetic, as from a
      // choice between predicates ptxas concludes that lanes differ, and hands TMA's operands over one lane at a time.
      const Rows wanted = wanted_rows<kRows>(job, job.key_begin + block * kRows);
      const bool clears = !kIsK && wanted.end - wanted.begin < kRows;
      empty[ring.index].wait(ring.phase ^ 1);
      char* stage = stages + ring.index * (kPanels * kPanelBytes);
      if constexpr (kHides) {
        if (hidden.any()) {
          copy_visible<Tile, kPanels>(PagedValuesOfHead(params, job), job, block, hidden, stage);
          if (lane == 0) full[ring.index].arrive();
          ring.advance();
          continue;
        }
      }
      if (lane == 0) {
        Barrier& signal = clears ? shared.v_landed : full[ring.index];
        signal.arrive_and_expect((count << params.box_rows_log2) * (128 * kPanels));
        const int head = job.kv_head;
        char* to = stage;
        const BoxSource* of_block = sources + (first_box & (kBoxBatch - 1));
        CUTE_NO_UNROLL
        for (int i = 0; i < count; ++i) {
          const BoxSource source = of_block[i];
          CUTE_UNROLL
          for (int panel = 0; panel < kPanels; ++panel) {
            cute::SM90_TMA_LOAD_4D::copy(map, reinterpret_cast<std::uint64_t*>(&signal),
                                         static_cast<std::uint64_t>(CacheHint::EVICT_LAST),
                                         to + panel * kPanelBytes, panel * 64, source.slot, head,
                                         source.page);
          }
          to += 128 << params.box_rows_log2;
        }
        if (kIsK && block == min(1, blocks - 1)) shared.job_wanted.arrive();
      }
      if (clears) {
        __syncwarp();
        shared.v_landed.wait(landed.phase);
        landed.advance();
        clear_rows<kRows, kPanels>(wanted, stage);
        if (lane == 0) full[ring.index].arrive();
      }
      ring.advance();
    }
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
  }
}

// Arrives once all copies of this thread have landed. No fence can follow them that tells the async proxy, which wgmma reads
// through; as in CUTLASS, copies that have landed are taken to be in shared memory for every reader.
CUTE_DEVICE void arrive_when_landed(Barrier& full) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   cute::cast_smem_ptr_to_uint(&full))
               : "memory");
}

constexpr std::uint32_t kNoRow = 0xffffffff;  // in the place of a row's place: zeros are wanted

// Pages of the rows that a lane looks up for its warp: 32 i + lane, of kRows rows.
template <int kRows, bool kIsK>
struct PageEntries {
  static constexpr int kCount = kRows / 32;
  int page[kCount];

  // Of the rows from `key` on, of which `wanted` are.
  CUTE_DEVICE void read(const KernelParams& params, const std::int32_t* table, int key,
                        const Rows& wanted) {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int row = 32 * i + int(threadIdx.x % 32);
      page[i] = kNoPage;
      if (wanted.contains(row)) {
        page[i] = __ldg(table + params.page_size.divide(key + row));
        if constexpr (!kIsK) page[i] = page_of_entry(params.v_pages, page[i]);
      }
    }
  }

  // Where row i is; kNoRow if its page is none of the cache.
  CUTE_DEVICE std::uint32_t place(const KernelParams& params, int key, int i) const {
    const PageUnits& units = kIsK ? params.k_units : params.v_units;
    std::uint32_t place = page[i] * units.page;
    if (params.page_size.divisor > 1) {
      place += params.page_size.modulo(key + 32 * i + threadIdx.x % 32) * units.slot;
    }
    return std::uint32_t(page[i]) < params.num_pages ? place : kNoRow;
  }
};

// Copies a warp's kRows rows, eight lanes a panel's row, four rows at a time. Of these, the lane's row is that at places[0],
// and `to` its part of the first four. kComplete: no row and no column is to be zeros.
template <bool kComplete, int kRows, int kPanels, int kPanelBytes>
CUTE_DEVICE void gather_rows(const std::uint32_t* places, const char* data, std::uint32_t unit,
                             int head_dim, std::uint32_t to) {
  const int column = threadIdx.x % 8 * 8;
  constexpr int kUnroll = kComplete ? kRows / 16 : 1;
#pragma unroll kUnroll
  for (int i = 0; i < kRows / 16; ++i) {
    const uint4 of_rows = reinterpret_cast<const uint4*>(places)[i];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      const std::uint32_t place = j == 0   ? of_rows.x
                                  : j == 1 ? of_rows.y
                                  : j == 2 ? of_rows.z
                                           : of_rows.w;
      std::uint64_t
          offset;  // its sum with `data` is one instruction, unlike that of mad or of a product in C++
      asm("mul.wide.u32 %0, %1, %2;" : "=l"(offset) : "r"(place), "r"(unit));
      const char* from = data + offset;
      // Rows four apart differ in the bit of 64 bytes of their swizzle.
      const std::uint32_t to_row = (to ^ (j % 2 * 64)) + (4 * i + j) * (4 * 128);
      CUTE_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        if constexpr (kComplete) {
          cp_async_16(to_row + panel * kPanelBytes, from + panel * 128);
        } else {
          cp_async_16(to_row + panel * kPanelBytes, from + panel * 128,
                      place != kNoRow && panel * 64 + column < head_dim);
        }
      }
    }
  }
}

// Keeps the compiler from adding up the address anew for every use.
template <class T>
CUTE_DEVICE const T* kept(const T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// The same for pages too small for boxes, by kCopyWarps warps, of which this is number `part`: each copies its rows of every
// block, having read the page table a block ahead. Every lane arrives at `full`.
template <class Tile, int kPanels, int kStages, bool kIsK, bool kHides>
CUTE_DEVICE void gather_keys(const KernelParams& params, Shared<Tile>& shared, Barrier* full,
                             Barrier* empty, char* stages, int part) {
  constexpr int kRows = Tile::kBlockN;
  constexpr int kOwnRows = kRows / Tile::kCopyWarps;
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  static_assert(kOwnRows % 32 == 0);
  const int lane = threadIdx.x % 32;
  const int first_row = Tile::kCopyWarps == 1 ? 0 : part * kOwnRows;
  const int head_dim = kIsK ? params.attention.head_dim_qk : params.attention.head_dim_vo;
  const std::uint32_t to = cute::cast_smem_ptr_to_uint(stages) + (first_row + lane / 8) * 128 +
                           ((lane % 8 ^ lane / 8) << 4);
  RowPlaces<kOwnRows>& places = shared.places[kIsK ? 0 : 1][part];
  Ring<kJobSlots> jobs;
  Ring<kStages> ring;
  if (kIsK && part == 0 && lane == 0) shared.job_wanted.arrive();
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job& job = shared.jobs[jobs.index];
    if (job.valid == 0) return;
    const ConstTensorView& view = kIsK ? params.attention.k : params.attention.v;
    const char* data = kept(static_cast<const char*>(view.data) +
                            2 * (job.kv_head * view.stride_head) + lane % 8 * 16);
    const std::int32_t* table =
        kept((kIsK ? params.k_pages : params.v_pages).indices + job.kv_begin);
    int key = job.key_begin + (job.blocks - 1) * kRows + first_row;  // of the warp's first row
    PageEntries<kOwnRows, kIsK> entries;
    entries.read(params, table, key, wanted_rows<kOwnRows>(job, key));
    CUTE_NO_UNROLL
    for (int block = job.blocks - 1; block >= 0; --block) {
      [[maybe_unused]] HiddenKeys<kRows> hidden;
      if constexpr (kHides) {
        if (params.attention.mask.words != nullptr && job.hides != 0)
          hidden.template find<Tile>(params, job, block);
      }
      bool complete = head_dim == 64 * kPanels;
      CUTE_UNROLL
      for (int i = 0; i < kOwnRows / 32; ++i) {
        std::uint32_t place = entries.place(params, key, i);
        if constexpr (kHides) {
          if (hidden.words[first_row / 32 + i] >> lane & 1) place = kNoRow;
        }
        complete = complete && place != kNoRow;
        places.of[lane % 4][8 * i + lane / 4] = place;
      }
      key -= kRows;
      if (block > 0) entries.read(params, table, key, wanted_rows<kOwnRows>(job, key));
      complete = __all_sync(0xffffffffu, complete);
      __syncwarp();
      empty[ring.index].wait(ring.phase ^ 1);
      if (kIsK && part == 0 && block == min(1, job.blocks - 1) && lane == 0) {
        shared.job_wanted.arrive();
      }
      const std::uint32_t to_stage = to + ring.index * (kPanels * kPanelBytes);
      std::uint32_t unit = (kIsK ? params.k_units : params.v_units).bytes;
      if (complete) {
        gather_rows<true, kOwnRows, kPanels, kPanelBytes>(places.of[lane / 8], data, unit, head_dim,
                                                          to_stage);
      } else {
        gather_rows<false, kOwnRows, kPanels, kPanelBytes>(places.of[lane / 8], data, unit,
                                                           head_dim, to_stage);
      }
      arrive_when_landed(full[ring.index]);
      ring.advance();
      __syncwarp();  // before others' places
    }
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
  }
}

}  // namespace cutlass_kernels::fa3
