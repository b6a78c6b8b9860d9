// V of e4m3 on its way to P V: wgmma takes 8-bit matrices only with k, here the keys, contiguous.
//
// Two warps transpose each block from where TMA left it, [key][column], to the stage that consumers read, [column][key], by
// ldmatrix.trans of pairs of bytes, byte permutations, and stmatrix.
//
// On the way the keys change places in each 16, so that P needs no exchange between threads: thread c of a quad holds S of
// keys 2c, 2c + 1, 8 + 2c, 9 + 2c, while an A operand of 8 bits wants k = 4c .. 4c + 3 of it. So k = 4c + j is key
// 8 (j / 2) + 2c + j % 2.
#pragma once

#include "common/ldmatrix.h"
#include "fa3/hidden_keys.h"
#include "fa3/params.h"
#include "fa3/shared.h"
#include "fa3/store.h"

namespace cutlass_kernels::fa3 {

// Bytes of keys 2c, 2c + 1, 8 + 2c, 9 + 2c of 16 that are wanted.
CUTE_DEVICE std::uint32_t wanted_bytes(const Rows& wanted, int first_row) {
  const int row = first_row + threadIdx.x % 4 * 2;
  std::uint32_t bytes = 0;
  CUTE_UNROLL
  for (int j = 0; j < 4; ++j) {
    if (wanted.contains(row + j / 2 * 8 + j % 2)) bytes |= 0xffu << (8 * j);
  }
  return bytes;
}

// The part of a block that is warp `part`'s, of kParts. kHidden: some keys are not wanted, zeros take their place.
//
// Four 8 x 8 matrices of pairs of bytes at a time: keys 0-7 and 8-15 of 16 columns, and the same of the next 16. Of a
// transposed pair of them, thread (u, c) = (lane / 4, lane % 4) holds columns 2u, 2u + 1 of its four keys: a word of each
// column's row of 16 keys. Rows of 128 bytes, swizzled, meet in the same banks if they are eight apart, so that neither all even
// nor all odd columns of 16 are written by one matrix, but the even ones of the lower eight and the odd ones of the upper.
template <class Tile, int kParts, bool kHidden>
CUTE_DEVICE void transpose_block(std::uint32_t from, std::uint32_t to, int part,
                                 const Rows& wanted) {
  using Layout = Shared<Tile>;
  constexpr int kGroups = Tile::kBlockN / 16;       // of keys
  constexpr int kBatch = kGroups % 4 == 0 ? 4 : 2;  // transposed at a time, to hide latencies
  static_assert(kGroups % kBatch == 0 && Tile::kHeadDimVo % (32 * kParts) == 0,
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
  for (int d32 = part; d32 < Tile::kHeadDimVo / 32; d32 += kParts) {
    const std::uint32_t source =
        from + d32 / 4 * Layout::kPanelBytesKv + (((d32 % 4 * 2 + matrix / 2) ^ u) << 4);
    const std::uint32_t target = to + d32 * (32 * 128);
    CUTE_UNROLL
    for (int first = 0; first < kGroups; first += kBatch) {
      std::uint32_t x[kBatch][4];
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) ldmatrix_x4_trans(x[i], source + (first + i) * (16 * 128));
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int group = first + i;
        std::uint32_t y[4] = {
            __byte_perm(x[i][0], x[i][1], even), __byte_perm(x[i][0], x[i][1], odd),
            __byte_perm(x[i][2], x[i][3], even), __byte_perm(x[i][2], x[i][3], odd)};
        if constexpr (kHidden) {
          const std::uint32_t bytes = wanted_bytes(wanted, group * 16);
          CUTE_UNROLL
          for (int j = 0; j < 4; ++j) y[j] &= bytes;
        }
        stmatrix_x4((target ^ (group % 8 << 4)) + group / 8 * Layout::kPanelBytesVt, y[0], y[1],
                    y[2], y[3]);
      }
    }
  }
}

// By all lanes of transposing warp `part`.
template <class Tile>
CUTE_DEVICE void transpose_values(const KernelParams& params, Shared<Tile>& shared, int part) {
  constexpr int kRows = Tile::kBlockN;
  const int lane = threadIdx.x % 32;
  const std::uint32_t staged = cute::cast_smem_ptr_to_uint(shared.staged);
  const std::uint32_t values = cute::cast_smem_ptr_to_uint(shared.v);
  Ring<kJobSlots> jobs;
  Ring<Tile::kStagedStages> from;
  Ring<Tile::kVStages> to;
  while (true) {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job& job = shared.jobs[jobs.index];
    if (job.valid == 0) return;
    CUTE_NO_UNROLL
    for (int block = job.blocks - 1; block >= 0; --block) {
      const Rows wanted = wanted_rows<kRows>(job, job.key_begin + block * kRows);
      const std::uint32_t source = staged + from.index * Shared<Tile>::kStagedBytes;
      const std::uint32_t target = values + to.index * Shared<Tile>::kVBytes;
      shared.v_empty[to.index].wait(to.phase ^ 1);
      shared.staged_full[from.index].wait(from.phase);
      if (wanted.begin > 0 || wanted.end < kRows) {
        transpose_block<Tile, Tile::kTransposers, true>(source, target, part, wanted);
      } else {
        transpose_block<Tile, Tile::kTransposers, false>(source, target, part, wanted);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads it
      __syncwarp();
      if (lane == 0) {
        shared.staged_empty[from.index].arrive();
        shared.v_full[to.index].arrive();
      }
      from.advance();
      to.advance();
    }
    shared.job_empty[jobs.index].arrive();
    jobs.advance();
  }
}

}  // namespace cutlass_kernels::fa3
