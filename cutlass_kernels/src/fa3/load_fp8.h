// Loads of e4m3 tensors: K as it is, V transposed.
#pragma once

#include "common/ptx/ldmatrix.h"
#include "common/ptx/shared_address.h"
#include "fa3/load.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"
#include "fa3/store.h"
#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

// ---- The loading warp of e4m3: Q, K and V of one tile after the other, all by TMA. V goes to the stages that the
// transposing warps read.
//
// Nothing is copied row by row. A box may contain keys outside the visible range: their scores are masked, and the
// transposing warps write zeros in the place of their V.

// Loads a KV block of K or V to `stage` (BLK_N, 128, panels), once that is empty. By all lanes of a warp.
template <class Tile, bool kIsK>
CUTE_DEVICE void load_block(const KernelParams& params, const Job& job, int kv_block, Barrier& full, Barrier& empty,
                            std::uint32_t parity, char* stage) {
  using Layout = Shared<Tile>;
  constexpr int kPanels = kIsK ? Layout::kPanelsQk : Layout::kPanelsVo;
  const CUtensorMap* map = kIsK ? &params.k_map : &params.v_map;
  const int lane = threadIdx.x % 32;
  const int first_key = job.key_begin + kv_block * Tile::kBlockN;
  if (params.box_rows == 0) {
    empty.wait(parity);
    if (lane == 0) {
      load_rows<kPanels, Layout::kPanelBytesKv, Layout::kColumns>(map, full, stage, first_key, job.visible_end,
                                                                  job.kv_head, job.kv_begin + job.visible_end,
                                                                  CacheHint::kEvictLast);
    }
    __syncwarp();
    return;
  }
  // A box per lane, of all that contain visible keys. The page is read before waiting for the stage, to hide the
  // latency.
  const int keys = min(job.visible_end - first_key, Tile::kBlockN);
  const int row = lane * params.box_rows;
  int page = kNoPage;
  if (row < keys) {
    page = (kIsK ? params.k_pages : params.v_pages).indices[job.kv_begin + params.page_size.divide(first_key + row)];
    if constexpr (!kIsK) page = page_of_entry(params.v_pages, page);
    if (std::uint32_t(page) >= params.num_pages) page = kNoPage;
  }
  empty.wait(parity);
  if (lane == 0) {
    const int rows = max((keys + params.box_rows - 1) & -params.box_rows, 0);
    full.arrive_and_expect(rows * (128 * kPanels));
  }
  __syncwarp();
  if (row < keys) {
    const int slot = params.page_size.modulo(first_key + row);
    CUTE_NO_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      tma_load(map, full, CacheHint::kEvictLast, stage + panel * Layout::kPanelBytesKv + row * 128,
               panel * Layout::kColumns, slot, job.kv_head, page);
    }
  }
  __syncwarp();
}

// The loading warp, by all its lanes.
template <class Tile>
CUTE_DEVICE void load_tiles(const KernelParams& params, Shared<Tile>& shared) {
  const int lane = threadIdx.x % 32;
  JobReader jobs(shared);
  Ring<Tile::kQBuffers> q_ring;  // lane 0's
  Ring<Tile::kKStages> k_ring;
  Ring<Tile::kStagedStages> v_ring;
  if (lane == 0) shared.job_wanted.arrive();
  for (; jobs.next(); jobs.release()) {
    const Job& job = jobs.job();
    const int kv_blocks = job.kv_blocks;
    CUTE_NO_UNROLL
    for (int kv_block = kv_blocks - 1; kv_block >= 0; --kv_block) {
      load_block<Tile, true>(params, job, kv_block, shared.k_full[k_ring.index], shared.k_empty[k_ring.index],
                             k_ring.phase ^ 1, shared.k[k_ring.index]);
      k_ring.advance();
      if (kv_block == kv_blocks - 1) {  // Q is wanted as early as K, but its buffer may be free later
        if (lane == 0) load_q_of_tile(params, shared, job, q_ring);
        __syncwarp();
      }
      if (lane == 0 && kv_block == min(1, kv_blocks - 1)) shared.job_wanted.arrive();
      load_block<Tile, false>(params, job, kv_block, shared.staged_full[v_ring.index],
                              shared.staged_empty[v_ring.index], v_ring.phase ^ 1, shared.staged[v_ring.index]);
      v_ring.advance();
    }
  }
}

// ---- The transposing warps of e4m3: wgmma takes 8-bit matrices only with k contiguous, which in P V is the key.
//
// Two warps transpose V of each KV block from where TMA left it, [key][column], to the stage that consumers read,
// [column][key], by ldmatrix.trans of pairs of bytes, byte permutations, and stmatrix.
//
// On the way the keys of each 16 are permuted, so that P needs no exchange between threads: thread c of a quad holds
// S of keys 2c, 2c + 1, 8 + 2c, 9 + 2c, while an A operand of 8 bits takes its k = 4c .. 4c + 3 from it. So k = 4c +
// j is key 8 (j / 2) + 2c + j % 2.

// Bytes of keys 2c, 2c + 1, 8 + 2c, 9 + 2c of 16 that are visible.
CUTE_DEVICE std::uint32_t visible_bytes(const StageRows& visible, int first_row) {
  const int row = first_row + threadIdx.x % 4 * 2;
  std::uint32_t bytes = 0;
  CUTE_UNROLL
  for (int j = 0; j < 4; ++j) {
    if (visible.contains(row + j / 2 * 8 + j % 2)) bytes |= 0xffu << (8 * j);
  }
  return bytes;
}

// Transposes the columns of a KV block that belong to warp `warp` of kWarps, from (BLK_N, 128, D_VO / 128) to
// (D_VO, 128, BLK_N / 128). kHidden: some keys are not visible; zeros take their place.
//
// Four 8 x 8 matrices of pairs of bytes at a time: keys 0-7 and 8-15 of 16 columns, and the same of the next 16. Of a
// transposed pair of them, thread (u, c) = (lane / 4, lane % 4) holds columns 2u, 2u + 1 of its four keys: a word of
// each column's row of 16 keys. Rows of 128 bytes, swizzled, meet in the same banks if they are eight apart, so that
// neither all even nor all odd columns of 16 are written by one matrix, but the even ones of the lower eight and the
// odd ones of the upper.
template <class Tile, int kWarps, bool kHidden>
CUTE_DEVICE void transpose_block(std::uint32_t from, std::uint32_t to, int warp, const StageRows& visible) {
  using Layout = Shared<Tile>;
  constexpr int kGroups = Tile::kBlockN / 16;       // of keys
  constexpr int kBatch = kGroups % 4 == 0 ? 4 : 2;  // transposed at a time, to hide latencies
  static_assert(kGroups % kBatch == 0 && Tile::kHeadDimVo % (32 * kWarps) == 0,
                "V is transposed 32 columns at a time by each warp, in batches of 16 keys.");
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
  const int u = lane % 8;
  // Where the lane's row of a matrix is read: key u or 8 + u, columns 16 (matrix / 2) + 0..15.
  from += (matrix % 2 * 8 + u) * 128;
  // And where it is written.
  const int column_of_32 = matrix / 2 * 16 + 2 * u + (matrix % 2 ^ u / 4);
  to += column_of_32 * 128 + ((column_of_32 & 7) << 4);
  const bool lower = lane < 16;  // u of the data it holds, below 4
  const std::uint32_t even = lower ? 0x6420 : 0x7531;
  const std::uint32_t odd = lower ? 0x7531 : 0x6420;
  CUTE_NO_UNROLL
  for (int d32 = warp; d32 < Tile::kHeadDimVo / 32; d32 += kWarps) {
    const std::uint32_t source = from + d32 / 4 * Layout::kPanelBytesKv + (((d32 % 4 * 2 + matrix / 2) ^ u) << 4);
    const std::uint32_t target = to + d32 * (32 * 128);
    CUTE_UNROLL
    for (int first = 0; first < kGroups; first += kBatch) {
      std::uint32_t x[kBatch][4];  // (16 keys, fragment)
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) ldmatrix_x4_trans(x[i], source + (first + i) * (16 * 128));
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int group = first + i;
        std::uint32_t y[4] = {__byte_perm(x[i][0], x[i][1], even), __byte_perm(x[i][0], x[i][1], odd),
                              __byte_perm(x[i][2], x[i][3], even), __byte_perm(x[i][2], x[i][3], odd)};
        if constexpr (kHidden) {
          const std::uint32_t bytes = visible_bytes(visible, group * 16);
          CUTE_UNROLL
          for (int j = 0; j < 4; ++j) y[j] &= bytes;
        }
        stmatrix_x4((target ^ (group % 8 << 4)) + group / 8 * Layout::kPanelBytesVt, y[0], y[1], y[2], y[3]);
      }
    }
  }
}

// Writes the rows of ones behind the columns of V, which stay.
template <class Tile>
CUTE_DEVICE void write_ones(Shared<Tile>& shared, int warp) {
  using Layout = Shared<Tile>;
  constexpr int kChunks = Layout::kRowsOfOnes * 128 / 16;
  constexpr std::uint32_t kOnes = 0x38383838;
  for (int i = 0; i < Tile::kVStages * (Layout::kVBytes / Layout::kPanelBytesVt); ++i) {
    char* ones = shared.v[0] + (i + 1) * Layout::kPanelBytesVt - Layout::kRowsOfOnes * 128;
    for (int chunk = warp * 32 + threadIdx.x % 32; chunk < kChunks; chunk += 32 * Tile::kTransposers) {
      reinterpret_cast<uint4*>(ones)[chunk] = make_uint4(kOnes, kOnes, kOnes, kOnes);
    }
  }
}

// A transposing warp, by all its lanes: index `warp` of kTransposers.
template <class Tile>
CUTE_DEVICE void transpose_values(const KernelParams& params, Shared<Tile>& shared, int warp) {
  constexpr int kRows = Tile::kBlockN;
  const int lane = threadIdx.x % 32;
  const std::uint32_t staged = shared_address(shared.staged);
  const std::uint32_t values = shared_address(shared.v);
  JobReader jobs(shared);
  Ring<Tile::kStagedStages> from;
  Ring<Tile::kVStages> to;
  write_ones(shared, warp);
  for (; jobs.next(); jobs.release()) {
    const Job& job = jobs.job();
    CUTE_NO_UNROLL
    for (int kv_block = job.kv_blocks - 1; kv_block >= 0; --kv_block) {
      const StageRows visible = visible_rows<kRows>(job, job.key_begin + kv_block * kRows);
      const std::uint32_t source = staged + from.index * Shared<Tile>::kStagedBytes;
      const std::uint32_t target = values + to.index * Shared<Tile>::kVBytes;
      shared.v_empty[to.index].wait(to.phase ^ 1);
      shared.staged_full[from.index].wait(from.phase);
      if (visible.begin > 0 || visible.end < kRows) {
        transpose_block<Tile, Tile::kTransposers, true>(source, target, warp, visible);
      } else {
        transpose_block<Tile, Tile::kTransposers, false>(source, target, warp, visible);
      }
      fence_proxy_async();  // wgmma reads it
      __syncwarp();
      if (lane == 0) {
        shared.staged_empty[from.index].arrive();
        shared.v_full[to.index].arrive();
      }
      from.advance();
      to.advance();
    }
  }
}

}  // namespace cutlass_kernels::fa3
