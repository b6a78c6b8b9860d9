// The K and V producers of a paged cache, by TMA. Consumers do not see pages.
//
// A KV block arrives in boxes of box_rows keys: the largest power of two, 8 or more, that divides the page size and
// the KV block. Boxes at either end of a tile's visible keys contain other keys, too: their V is then cleared. Pages
// of a size that is no multiple of 8 are gathered row by row (load_gather.h).
#pragma once

#include <cute/config.hpp>

#include "common/ptx/cp_async.h"
#include "fa3/fully_masked_keys.h"
#include "fa3/load.h"
#include "fa3/load_masked_values.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"
#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

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

  CUTE_DEVICE BoxLookup(const KernelParams& params_, const PagesOfMatrix& pages_, const Job& job,
                        int last_box)
      : params(params_),
        pages(pages_),
        table(pages.indices + job.kv_begin),
        key_begin(job.key_begin) {
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
template <class Tile, int kPanels, int kStages, bool kIsK, bool kHides>
CUTE_DEVICE void load_boxes(const KernelParams& params, Shared<Tile>& shared,
                            const CUtensorMap* map, Barrier* full, Barrier* empty, char* stages) {
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
      if (kv_block == kv_blocks - 1 || Lookup::in_batch(first_box + per_block) == 0)
        lookup.publish(sources);
      const int count = min(max(lookup.count - first_box, 0), per_block);
      [[maybe_unused]] FullyMaskedKeys<kRows> masked;
      if constexpr (kHides) {
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
      if constexpr (kHides) {
        if (masked.any()) {
          copy_visible_values<Tile, kPanels>(PagedValues(params, job, column), job, kv_block,
                                             masked, stage);
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
            tma_load(map, signal, CacheHint::kEvictLast, to + panel * kPanelBytes,
                     column + panel * 64, source.slot, head, source.page);
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
