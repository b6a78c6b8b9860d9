// Loads of Q, K and V by TMA.
#pragma once

#include <cute/config.hpp>

#include "common/bit_mask.h"
#include "common/mask.h"
#include "common/ptx/cp_async.h"
#include "common/ptx/shared_address.h"
#include "fa3/pair.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"
#include "fa3/tensor_map.h"
#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

// ---- Keys that are not to be used: those outside what the tile sees, and those that a custom mask hides from every
// row of the tile.
//
// Scores of such keys are masked whatever K contains. Their V must be zeros: V of a masked key may be anything, NaN
// too, and 0 * NaN is not 0. So the V producer looks for fully masked keys in each KV block, and copies a block that
// has some row by row, with zeros in their place.

// Rows [begin, end) of a K or V stage.
struct StageRows {
  int begin;
  int end;

  CUTE_DEVICE bool contains(int row) const { return begin <= row && row < end; }
};

// The rows of a stage, whose first key is first_key, that contain keys within the job's visible range.
template <int kRows>
CUTE_DEVICE StageRows visible_rows(const Job& job, int first_key) {
  return {max(job.visible_begin - first_key, 0), min(job.visible_end - first_key, kRows)};
}

// Keys of a KV block within the visible range that the custom mask hides from every row of the tile: a bit each, the
// same in all lanes of the warp.
template <int kRows>
struct FullyMaskedKeys {
  std::uint32_t words[kRows / 32] = {};  // (BLK_N / 32)

  CUTE_DEVICE bool any() const {
    std::uint32_t all = 0;
    CUTE_UNROLL
    for (int w = 0; w < kRows / 32; ++w) all |= words[w];
    return all != 0;
  }

  // By all lanes of a warp, each of which looks at every 32nd row of the tile.
  template <class Tile>
  CUTE_DEVICE void find(const KernelParams& params, const Job& job, int kv_block) {
    const int first_key = job.key_begin + kv_block * kRows;
    const int tile_rows = Tile::kPacked ? params.attention.plan.tile_rows : int(Tile::kBlockM);
    const int rows = min(tile_rows, job.qo_len - job.row_begin);
    const IntervalMask mask = make_mask<false>(params, job.batch, job.qo_len, job.kv_len);
    std::uint32_t seen[kRows / 32] = {};  // (BLK_N / 32)
    for (int i = threadIdx.x % 32; i < rows; i += 32) {
      const int row = job.row_begin + i;
      const std::int64_t bit = std::int64_t(job.mask_begin) * 8 + std::int64_t(row) * job.kv_len + first_key;
      CUTE_UNROLL
      for (int w = 0; w < kRows / 32; ++w) {
        const int key = first_key + 32 * w;
        seen[w] |= bits_at(params.attention.mask, bit + 32 * w) &
                   bits_between(mask.begin_of_all(row) - key, mask.end_of_all<true>(row) - key);
      }
    }
    const StageRows visible = visible_rows<kRows>(job, first_key);
    CUTE_UNROLL
    for (int w = 0; w < kRows / 32; ++w) {
      words[w] = ~__reduce_or_sync(0xffffffffu, seen[w]) & bits_between(visible.begin - 32 * w, visible.end - 32 * w);
    }
  }
};

// ---- The producer warps of Q, and of K and V that lie one after the other (ragged tensors): one thread each, all by
// TMA.

// Loads a box of rows of a request, panel by panel. Row coordinates count backwards from the request's end, so that
// rows past its end lie outside the tensor map (tensor_map.h).
template <int kPanels, int kPanelBytes, int kColumns = 64>
CUTE_DEVICE void load_rows(const CUtensorMap* map, Barrier& full, char* shared, int row, int length, int head, int end,
                           CacheHint hint, int column = 0) {
  full.arrive_and_expect(kPanels * kPanelBytes);
  CUTE_UNROLL
  for (int panel = 0; panel < kPanels; ++panel) {
    tma_load(map, full, hint, shared + panel * kPanelBytes, column + panel * kColumns, kMapRows - length + row, head,
             end, int(kMapRows));
  }
}

// Loads Q of one warpgroup of a packed tile: a box of all heads of the pack by its tokens (tensor_map.h). Unused
// rows, past the last token, keep what they contain: their results are not stored.
template <class Tile>
CUTE_DEVICE void load_packed_q(const KernelParams& params, const Job& job, Barrier& full, char* q, int token) {
  full.arrive_and_expect(Shared<Tile>::kPanelsQk * 128 * params.packed.tokens * int(params.packed.heads.divisor));
  CUTE_UNROLL
  for (int panel = 0; panel < Shared<Tile>::kPanelsQk; ++panel) {
    tma_load(&params.q_map, full, CacheHint::kEvictFirst, q + panel * Shared<Tile>::kPanelBytesQ,
             first_column<Tile>(Tile::kHeadDimQk) + panel * Shared<Tile>::kColumns, job.head,
             kMapRows - job.qo_len + token, job.q_end, int(kMapRows));
  }
}

// Loads Q of a tile, a buffer per warpgroup, by one thread.
template <class Tile>
CUTE_DEVICE void load_q_of_tile(const KernelParams& params, Shared<Tile>& shared, const Job& job,
                                Ring<Tile::kQBuffers>& ring) {
  using Layout = Shared<Tile>;
  const int column = first_column<Tile>(Tile::kHeadDimQk);
  if constexpr (Tile::kQBuffers < 2 * Tile::kConsumers && !Tile::kPacked) {
    // No buffer is free for the next tile's Q before the last product with this tile's: at least bring it to L2.
    for (int wg = 0; wg < Tile::kConsumers; ++wg) {
      for (int panel = 0; panel < Layout::kPanelsQk; ++panel) {
        tma_prefetch(&params.q_map, column + panel * Layout::kColumns,
                     kMapRows - job.qo_len + job.row_begin + wg * kWarpgroupRows, job.head, job.q_end, int(kMapRows));
      }
    }
  }
  for (int wg = 0; wg < Tile::kConsumers; ++wg) {
    shared.q_empty[ring.index].wait(ring.phase ^ 1);
    if constexpr (Tile::kPacked) {
      load_packed_q<Tile>(params, job, shared.q_full[ring.index], shared.q[ring.index],
                          job.row_begin + wg * params.packed.tokens);
    } else {
      load_rows<Layout::kPanelsQk, Layout::kPanelBytesQ, Layout::kColumns>(
          &params.q_map, shared.q_full[ring.index], shared.q[ring.index], job.row_begin + wg * kWarpgroupRows,
          job.qo_len, job.head, job.q_end, CacheHint::kEvictFirst, column);
    }
    ring.advance();
  }
}

// The Q producer, by one thread.
template <class Tile>
CUTE_DEVICE void load_q(const KernelParams& params, Shared<Tile>& shared) {
  JobReader jobs(shared);
  Ring<Tile::kQBuffers> ring;
  Job job;
  while (jobs.take(job)) {
    load_q_of_tile(params, shared, job, ring);
  }
}

// The K or V producer of ragged tensors, by one thread: kPanels, kStages, map, full, empty and stages are those of
// the matrix. kWantsJobs: the K producer asks for the next tile one KV block before the last of this one.
template <class Tile, int kPanels, int kStages, bool kWantsJobs>
CUTE_DEVICE void load_keys(const KernelParams& params, Shared<Tile>& shared, const CUtensorMap* map, Barrier* full,
                           Barrier* empty, char* stages) {
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  JobReader jobs(shared);
  Ring<kStages> ring;
  if (kWantsJobs) shared.job_wanted.arrive();
  Job job;
  while (jobs.take(job)) {
    const int last_but_one = min(1, job.kv_blocks - 1);
    for (int kv_block = job.kv_blocks - 1; kv_block >= 0; --kv_block) {
      empty[ring.index].wait(ring.phase ^ 1);
      if (kWantsJobs && kv_block == last_but_one) shared.job_wanted.arrive();
      load_rows<kPanels, kPanelBytes>(map, full[ring.index], stages + ring.index * (kPanels * kPanelBytes),
                                      job.key_begin + kv_block * Tile::kBlockN, job.visible_end, job.kv_head,
                                      job.kv_begin + job.visible_end, CacheHint::kEvictLast,
                                      first_column<Tile>(64 * kPanels));
      ring.advance();
    }
  }
}

// ---- V of KV blocks with fully masked keys, copied row by row with zeros in the place of these keys; and the V
// producer of ragged tensors under a custom mask. That of pages, below, uses the same copy.

// V of one head of one request, whose keys lie one after the other, from the CTA's first column on.
struct RaggedValues {
  const LaunchParams& p;
  const int first_column;
  const char* data;

  CUTE_DEVICE RaggedValues(const KernelParams& params, const Job& job, int first_column_)
      : p(params.attention),
        first_column(first_column_),
        data(static_cast<const char*>(p.v.data) +
             2 * (job.kv_begin * p.v.stride_token + job.kv_head * p.v.stride_head + first_column)) {}
  CUTE_DEVICE std::int64_t offset_of(int key) const { return 2 * (key * p.v.stride_token); }
  CUTE_DEVICE bool has_column(int column) const { return first_column + column < p.head_dim_vo; }
};

// The same, in pages.
struct PagedValues {
  const KernelParams& params;
  const int first_column;
  const std::int32_t* indices;  // page table of the request
  const char* data;             // of the head

  CUTE_DEVICE PagedValues(const KernelParams& params_, const Job& job, int first_column_)
      : params(params_),
        first_column(first_column_),
        indices(params.v_pages.indices + job.kv_begin),
        data(static_cast<const char*>(params.attention.v.data) +
             2 * (job.kv_head * params.attention.v.stride_head + first_column)) {}

  // Bytes from `data` to the row of a key; -1 if its page lies outside the cache.
  CUTE_DEVICE std::int64_t offset_of(int key) const {
    const int entry = params.page_size.divide(key);
    const int page = page_of_entry(params.v_pages, indices[entry]);
    const int slot = key - entry * params.attention.pages.page_size;
    return std::uint32_t(page) < params.num_pages ? page * params.v_pages.page_bytes + slot * params.v_pages.slot_bytes
                                                  : -1;
  }

  CUTE_DEVICE bool has_column(int column) const { return first_column + column < params.attention.head_dim_vo; }
};

// Copies 32 rows from first_row on to the stage at `to`. Lane l brings the offset of row first_row + l in `offset`;
// zeros are written for a negative one.
template <int kRows, int kPanels, class Values>
CUTE_DEVICE void copy_rows(const Values& values, std::int64_t offset, int first_row, std::uint32_t to) {
  const int chunk = threadIdx.x % 8;  // of the 128 bytes of a panel's row: eight lanes copy one
  const int row_of_four = threadIdx.x % 32 / 8;
  const char* data = values.data + chunk * 16;
  to += (first_row + row_of_four) * 128 + ((chunk ^ row_of_four) << 4);
  CUTE_NO_UNROLL
  for (int j = 0; j < 8; ++j) {
    const std::int64_t row_offset = __shfl_sync(0xffffffffu, offset, 4 * j + row_of_four);
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      // Rows four apart differ in the bit of 64 bytes of their swizzle.
      cp_async_16((to ^ (j % 2 * 64)) + j * (4 * 128) + panel * (kRows * 128), data + row_offset + panel * 128,
                  row_offset >= 0 && values.has_column(panel * 64 + chunk * 8));
    }
  }
}

// Copies V of a KV block to `stage` (BLK_N, 64, D_VO / 64), with zeros for keys that are fully masked or outside the
// visible range. By all lanes of a warp.
template <class Tile, int kPanels, class Values>
CUTE_DEVICE void copy_visible_values(const Values& values, const Job& job, int kv_block,
                                     const FullyMaskedKeys<Tile::kBlockN>& masked, char* stage) {
  constexpr int kRows = Tile::kBlockN;
  const int lane = threadIdx.x % 32;
  const int first_key = job.key_begin + kv_block * kRows;
  const StageRows visible = visible_rows<kRows>(job, first_key);
  CUTE_UNROLL
  for (int w = 0; w < kRows / 32; ++w) {
    const int row = 32 * w + lane;
    const bool seen = visible.contains(row) && (masked.words[w] >> lane & 1) == 0;
    const std::int64_t offset = seen ? values.offset_of(first_key + row) : -1;
    copy_rows<kRows, kPanels>(values, offset, 32 * w, shared_address(stage));
  }
  cp_async_wait<0>();
  fence_proxy_async();
  __syncwarp();
}

// The V producer of ragged tensors under a custom mask, by all lanes of a warp.
template <class Tile, int kPanels, int kStages>
CUTE_DEVICE void load_masked_values(const KernelParams& params, Shared<Tile>& shared) {
  constexpr int kRows = Tile::kBlockN;
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  const int lane = threadIdx.x % 32;
  const int column = first_column<Tile>(64 * kPanels);
  JobReader jobs(shared);
  Ring<kStages> ring;
  for (; jobs.next(); jobs.release()) {
    const Job& job = jobs.job();
    for (int kv_block = job.kv_blocks - 1; kv_block >= 0; --kv_block) {
      FullyMaskedKeys<kRows> masked;
      if (job.has_hidden_keys != 0) masked.template find<Tile>(params, job, kv_block);
      shared.v_empty[ring.index].wait(ring.phase ^ 1);
      if (masked.any()) {
        copy_visible_values<Tile, kPanels>(RaggedValues(params, job, column), job, kv_block, masked,
                                           shared.v[ring.index]);
        if (lane == 0) shared.v_full[ring.index].arrive();
      } else if (lane == 0) {
        load_rows<kPanels, kPanelBytes>(&params.v_map, shared.v_full[ring.index], shared.v[ring.index],
                                        job.key_begin + kv_block * kRows, job.visible_end, job.kv_head,
                                        job.kv_begin + job.visible_end, CacheHint::kEvictLast, column);
      }
      __syncwarp();
      ring.advance();
    }
  }
}

// ---- The K and V producers of a paged cache, by TMA. Consumers do not see pages.
//
// A KV block arrives in boxes of box_rows keys: the largest power of two, 8 or more, that divides the page size and
// the KV block. Boxes at either end of a tile's visible keys contain other keys, too: their V is then cleared. Pages
// of a size that is no multiple of 8 are gathered row by row (load_gather.h).

// Looks up the pages of a tile's boxes, kBatch boxes at a time, one per lane, and one batch ahead of its use. Boxes are
// counted from the tile's key_begin, and used from the last to the first.
//
// Consumers need nearly every issue slot: 20 instructions of the two warps per KV block cost 1 % (hd128).
template <int kBatch>
struct BoxLookup {
  const KernelParams& params;
  const PagesOfMatrix& pages;
  const std::int32_t* table;  // page table of the request
  int key_begin;
  int count;  // boxes that contain visible keys
  int batch;  // index of the batch that `page` belongs to
  int page;   // of the lane's box

  CUTE_DEVICE BoxLookup(const KernelParams& params_, const PagesOfMatrix& pages_, const Job& job, int last_box)
      : params(params_), pages(pages_), table(pages.indices + job.kv_begin), key_begin(job.key_begin) {
    count = job.visible_begin < job.visible_end
                ? (job.visible_end - key_begin + params.box_rows - 1) >> params.box_rows_log2
                : 0;
    batch = last_box / kBatch;
    read();
  }

  CUTE_DEVICE static int in_batch(int box) {
    return kBatch == kBoxBatch ? box & (kBoxBatch - 1) : int(unsigned(box) % kBatch);
  }
  CUTE_DEVICE int lane_box() const { return batch * kBatch + int(threadIdx.x % 32); }
  CUTE_DEVICE int first_key(int box) const { return key_begin + (box << params.box_rows_log2); }
  CUTE_DEVICE void read() {
    page = kNoPage;
    const int box = lane_box();
    if (0 <= box && box < count) {
      page = page_of_entry(pages, __ldg(table + params.page_size.divide(first_key(box))));
    }
  }

  // Writes the batch to shared memory, once the previous one has been used, and begins to read the next one.
  CUTE_DEVICE void publish(BoxSource* sources) {
    const int slot = int(params.page_size.modulo(first_key(lane_box())));
    __syncwarp();
    sources[threadIdx.x % 32] = {std::uint32_t(page) < params.num_pages ? page : kNoPage, slot};
    __syncwarp();
    --batch;
    read();
  }
};

// Writes zeros to the rows of a stage (BLK_N, 64, panels) that are not visible.
template <int kRows, int kPanels>
CUTE_DEVICE void clear_rows(const StageRows& visible, char* stage) {
  const int begin = min(visible.begin, kRows), end = max(visible.end, begin);
  const int hidden = kRows - (end - begin);
  CUTE_NO_UNROLL
  for (int panel = 0; panel < kPanels; ++panel) {
    auto* const rows = reinterpret_cast<uint4*>(stage) + panel * (kRows * 8);
    CUTE_NO_UNROLL
    for (int i = int(threadIdx.x % 32); i < hidden * 8; i += 32) {
      rows[i < begin * 8 ? i : i + (end - begin) * 8] = {};
    }
  }
  fence_proxy_async();
  __syncwarp();
}

// The K or V producer, by all lanes of a warp: kPanels, kStages, map, full, empty and stages are those of the matrix.
template <class Tile, int kPanels, int kStages, bool kIsK, bool kCustomMask>
CUTE_DEVICE void load_boxes(const KernelParams& params, Shared<Tile>& shared, const CUtensorMap* map, Barrier* full,
                            Barrier* empty, char* stages) {
  constexpr int kRows = Tile::kBlockN;
  constexpr int kPanelBytes = Shared<Tile>::kPanelBytesKv;
  const int lane = threadIdx.x % 32;
  const int column = first_column<Tile>(64 * kPanels);
  const int per_block = kRows >> params.box_rows_log2;
  // Boxes that are looked up together: as many as the lanes have of whole KV blocks, in boxes of 8 rows (of 128 keys
  // 2 x 16, of 96 2 x 12). Then no KV block of larger boxes lies in two batches either.
  using Lookup = BoxLookup<kBoxBatch / (kRows / 8) * (kRows / 8)>;
  BoxSource* const sources = shared.boxes[kIsK ? 0 : 1];  // (32)
  JobReader jobs(shared);
  Ring<kStages> ring;
  Ring<1> landed;
  if (kIsK && lane == 0) shared.job_wanted.arrive();
  for (; jobs.next(); jobs.release()) {
    const Job& job = jobs.job();
    const int kv_blocks = job.kv_blocks;
    Lookup lookup(params, kIsK ? params.k_pages : params.v_pages, job, kv_blocks * per_block - 1);
    CUTE_NO_UNROLL
    for (int kv_block = kv_blocks - 1; kv_block >= 0; --kv_block) {
      // All that needs no stage is done before waiting for one: from then on consumers may be waiting.
      const int first_box = kv_block * per_block;
      if (kv_block == kv_blocks - 1 || Lookup::in_batch(first_box + per_block) == 0) lookup.publish(sources);
      const int count = min(max(lookup.count - first_box, 0), per_block);
      [[maybe_unused]] FullyMaskedKeys<kRows> masked;
      if constexpr (kCustomMask) {
        if (params.attention.mask.words != nullptr && job.has_hidden_keys != 0)
          masked.template find<Tile>(params, job, kv_block);
      }
      // Scores of keys outside the visible range are masked whatever K is, but their V must be zeros. By arithmetic:
      // from a choice between predicates ptxas concludes that lanes differ, and hands TMA's operands over one lane at
      // a time.
      const StageRows visible = visible_rows<kRows>(job, job.key_begin + kv_block * kRows);
      const bool clears = !kIsK && visible.end - visible.begin < kRows;
      empty[ring.index].wait(ring.phase ^ 1);
      char* stage = stages + ring.index * (kPanels * kPanelBytes);  // (BLK_N, 64, panels)
      if constexpr (kCustomMask) {
        if (masked.any()) {
          copy_visible_values<Tile, kPanels>(PagedValues(params, job, column), job, kv_block, masked, stage);
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
        const BoxSource* of_block = sources + Lookup::in_batch(first_box);
        CUTE_NO_UNROLL
        for (int i = 0; i < count; ++i) {
          const BoxSource source = of_block[i];
          CUTE_UNROLL
          for (int panel = 0; panel < kPanels; ++panel) {
            tma_load(map, signal, CacheHint::kEvictLast, to + panel * kPanelBytes, column + panel * 64, source.slot,
                     head, source.page);
          }
          to += 128 << params.box_rows_log2;
        }
        if (kIsK && kv_block == min(1, kv_blocks - 1)) shared.job_wanted.arrive();
      }
      if (clears) {
        __syncwarp();
        shared.v_landed.wait(landed.phase);
        landed.advance();
        clear_rows<kRows, kPanels>(visible, stage);
        if (lane == 0) full[ring.index].arrive();
      }
      ring.advance();
    }
  }
}

}  // namespace cutlass_kernels::fa3
