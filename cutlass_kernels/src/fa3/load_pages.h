// The K and V producers of a paged cache. Consumers do not know that there are pages.
//
// load_boxes(): boxes of box_rows keys (the largest power of two, 8 or more, that divides a page and a block) come by TMA; the
// rows at either end of the keys that a tile sees, where all but those keys must be zeros, through cp.async.
// gather_keys(): all rows through cp.async, for pages too small for boxes, in kernels whose producers have more registers.
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

// K or V of one head of one request.
template <bool kIsK>
struct PagesOfHead {
  const KernelParams& params;
  const std::int32_t* indices;  // of the request
  const char* data;             // of the head

  CUTE_DEVICE PagesOfHead(const KernelParams& params_, const Job& job) : params(params_) {
    const AttentionParams& p = params.attention;
    const ConstTensorView& view = kIsK ? p.k : p.v;
    indices = (kIsK ? params.k_pages : params.v_pages).indices + job.kv_begin;
    data = static_cast<const char*>(view.data) + 2 * (job.kv_head * view.stride_head);
  }

  CUTE_DEVICE int entry_of(int key) const { return params.page_size.divide(key); }

  // Where a key's row is, from `data`; -1 if its page is none of the cache.
  CUTE_DEVICE std::int64_t offset_of(int key) const {
    const PagesOfMatrix& matrix = kIsK ? params.k_pages : params.v_pages;
    const int entry = entry_of(key);
    const int page = indices[entry];
    const int slot = key - entry * params.attention.pages.page_size;
    return std::uint32_t(page) < params.num_pages
               ? page * matrix.page_bytes + slot * matrix.slot_bytes
               : -1;
  }

  CUTE_DEVICE bool has_column(int column) const {
    return column < (kIsK ? params.attention.head_dim_qk : params.attention.head_dim_vo);
  }
};

// Copies rows [32 i, 32 i + 32) of a block to a stage at `to`; lane l's row 32 i + l lies at `offset`, zeros are written where
// that is negative. Rows of `boxed` are left alone.
template <int kRows, int kPanels, int kUnroll, class Source>
CUTE_DEVICE void copy_rows(const Source& source, std::int64_t offset, int first_row,
                           const Rows& boxed, std::uint32_t to) {
  const int chunk = threadIdx.x % 8;  // of the 128 bytes of a panel's row: eight lanes copy one
  const int row_of_four = threadIdx.x % 32 / 8;
  const char* data = source.data + chunk * 16;
  to += (first_row + row_of_four) * 128 + ((chunk ^ row_of_four) << 4);
#pragma unroll kUnroll
  for (int j = 0; j < 8; ++j) {
    const std::int64_t row_offset = __shfl_sync(0xffffffffu, offset, 4 * j + row_of_four);
    if (!boxed.contains(first_row + 4 * j + row_of_four)) {
      CUTE_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        // Rows four apart differ in the bit of 64 bytes of their swizzle.
        cp_async_16((to ^ (j % 2 * 64)) + j * (4 * 128) + panel * (kRows * 128),
                    data + row_offset + panel * 128,
                    row_offset >= 0 && source.has_column(panel * 64 + chunk * 8));
      }
    }
  }
}

// Copies a block of V, zeros in the place of hidden rows.
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
    copy_rows<kRows, kPanels, 1>(source, offset, 32 * w, Rows{0, 0},
                                 cute::cast_smem_ptr_to_uint(stage));
  }
  cute::cp_async_wait<0>();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// Which rows of a block come by boxes. Computed where it is needed, twice: registers are few.
template <int kRows>
struct BlockRows {
  int first_key;
  Rows wanted;
  Rows boxed;

  CUTE_DEVICE BlockRows(const KernelParams& params, const Job& job, int block)
      : first_key(job.key_begin + block * kRows), wanted(wanted_rows<kRows>(job, first_key)) {
    boxed = {(wanted.begin + params.box_rows - 1) & -params.box_rows,
             wanted.end & -params.box_rows};
    if (boxed.begin >= boxed.end) boxed = {0, 0};
  }
};

// K or V, by all lanes of a warp: kPanels, kStages, map, full, empty and stages are that matrix's.
template <class Tile, int kPanels, int kStages, bool kIsK, bool kHides>
CUTE_DEVICE void load_boxes(const KernelParams& params, Shared<Tile>& shared,
                            const CUtensorMap* map, Barrier* full, Barrier* empty, char* stages) {
  constexpr int kRows = Tile::kBlockN;
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  const int lane = threadIdx.x % 32;
  Ring<kJobSlots> jobs;
  Ring<kStages> ring;
  if (kIsK && lane == 0) shared.job_wanted.arrive();
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job& job = shared.jobs[jobs.index];  // read again for every block: registers are few
    if (job.valid == 0) return;
    CUTE_NO_UNROLL
    for (int block = job.blocks - 1; block >= 0; --block) {
      // Of the lane's box, if there is one; read before the stage is free, as that takes a while.
      int page = kNoPage;
      {
        const BlockRows<kRows> rows(params, job, block);
        const int row = rows.boxed.begin + lane * params.box_rows;
        if (row < rows.boxed.end) {
          page = (kIsK ? params.k_pages : params.v_pages)
                     .indices[job.kv_begin + params.page_size.divide(rows.first_key + row)];
          if (std::uint32_t(page) >= params.num_pages) page = kNoPage;
        }
      }
      [[maybe_unused]] HiddenKeys<kRows> hidden;
      if constexpr (kHides) {
        if (params.attention.mask.words != nullptr && job.hides != 0)
          hidden.template find<Tile>(params, job, block);
      }
      empty[ring.index].wait(ring.phase ^ 1);
      if (kIsK && block == min(1, job.blocks - 1) && lane == 0) shared.job_wanted.arrive();
      char* stage = stages + ring.index * (kPanels * kPanelBytes);
      if constexpr (kHides) {
        if (hidden.any()) {
          copy_visible<Tile, kPanels>(PagesOfHead<kIsK>(params, job), job, block, hidden, stage);
          if (lane == 0) full[ring.index].arrive();
          ring.advance();
          continue;
        }
      }
      if (const BlockRows<kRows> rows(params, job, block);
          rows.boxed.end - rows.boxed.begin < kRows) {
        const PagesOfHead<kIsK> source(params, job);
        CUTE_NO_UNROLL
        for (int row = 0; row < kRows; row += 32) {
          const std::int64_t offset =
              rows.wanted.contains(row + lane) ? source.offset_of(rows.first_key + row + lane) : -1;
          copy_rows<kRows, kPanels, 1>(source, offset, row, rows.boxed,
                                       cute::cast_smem_ptr_to_uint(stage));
        }
        cute::cp_async_wait<0>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
      }
      const BlockRows<kRows> rows(params, job, block);
      if (lane == 0) {
        full[ring.index].arrive_and_expect((rows.boxed.end - rows.boxed.begin) * (128 * kPanels));
      }
      __syncwarp();
      // The lanes take turns in a loop of eight instructions (measured: 1.3 times as fast as one lane that collects the
      // others' numbers).
      const int row = rows.boxed.begin + lane * params.box_rows;
      if (row < rows.boxed.end) {
        const int slot = params.page_size.modulo(rows.first_key + row);
        CUTE_NO_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
          cute::SM90_TMA_LOAD_4D::copy(map, reinterpret_cast<std::uint64_t*>(&full[ring.index]),
                                       static_cast<std::uint64_t>(CacheHint::EVICT_LAST),
                                       stage + panel * kPanelBytes + row * 128, panel * 64, slot,
                                       job.kv_head, page);
        }
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

// The same for pages too small for boxes. Every lane arrives at `full`.
template <class Tile, int kPanels, int kStages, bool kIsK, bool kHides>
CUTE_DEVICE void gather_keys(const KernelParams& params, Shared<Tile>& shared, Barrier* full,
                             Barrier* empty, char* stages) {
  constexpr int kRows = Tile::kBlockN;
  const int lane = threadIdx.x % 32;
  Ring<kJobSlots> jobs;
  Ring<kStages> ring;
  if (kIsK && lane == 0) shared.job_wanted.arrive();
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job& job = shared.jobs[jobs.index];
    if (job.valid == 0) return;
    const PagesOfHead<kIsK> source(params, job);
    for (int block = job.blocks - 1; block >= 0; --block) {
      const int first_key = job.key_begin + block * kRows;
      const Rows wanted = wanted_rows<kRows>(job, first_key);
      std::int64_t
          offsets[kRows / 32];  // before the stage is free: the loads from the table take a while
      CUTE_UNROLL
      for (int i = 0; i < kRows / 32; ++i) {
        const int row = 32 * i + lane;
        offsets[i] = wanted.contains(row) ? source.offset_of(first_key + row) : -1;
      }
      if constexpr (kHides) {
        if (params.attention.mask.words != nullptr && job.hides != 0) {
          HiddenKeys<kRows> hidden;
          hidden.template find<Tile>(params, job, block);
          CUTE_UNROLL
          for (int i = 0; i < kRows / 32; ++i) {
            if (hidden.words[i] >> lane & 1) offsets[i] = -1;
          }
        }
      }
      empty[ring.index].wait(ring.phase ^ 1);
      if (kIsK && block == min(1, job.blocks - 1) && lane == 0) shared.job_wanted.arrive();
      const std::uint32_t stage = cute::cast_smem_ptr_to_uint(
          stages + ring.index * (kPanels * Shared<Tile>::kPanelBytesKv));
      CUTE_UNROLL
      for (int i = 0; i < kRows / 32; ++i) {
        copy_rows<kRows, kPanels, 8>(source, offsets[i], 32 * i, Rows{0, 0}, stage);
      }
      arrive_when_landed(full[ring.index]);
      ring.advance();
    }
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
  }
}

}  // namespace cutlass_kernels::fa3
