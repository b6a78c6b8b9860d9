// Shared memory of an fa3 block.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "fa3/config.h"

namespace cutlass_kernels::fa3 {

// A tile to be computed; found by the warp that loads K, read by all others.
struct alignas(16) Job {
  int valid;  // 0: no more tiles
  int head;
  int row_begin;  // of the tile, in its request
  int q_end;      // first row after the request, in the tensor
  int qo_len;
  int kv_end;
  int kv_len;
  int block_begin;
  int block_end;  // > block_begin: rows without keys have one block, all masked
};
constexpr int kJobSlots = 4;

// Matrices are stored as panels of 64 columns (128 bytes, the span of the TMA and wgmma swizzle):
//   Q buffer (64, 64, Dqk / 64), K stage (N, 64, Dqk / 64), V stage (N, 64, Dvo / 64), as (row, column, panel).
// Each warp stages its 16 rows of O in its own part of `o`.
template <class Tile>
struct Shared {
  static constexpr int kPanelBytesQ = kWarpgroupRows * 128;
  static constexpr int kPanelBytesKv = Tile::kBlockN * 128;
  static constexpr int kPanelsQk = Tile::kHeadDimQk / 64;
  static constexpr int kPanelsVo = Tile::kHeadDimVo / 64;
  static constexpr int kQBytes = kPanelBytesQ * kPanelsQk;
  static constexpr int kKBytes = kPanelBytesKv * kPanelsQk;
  static constexpr int kVBytes = kPanelBytesKv * kPanelsVo;
  static constexpr int kOBytes = kPanelBytesQ * Tile::kOPanels;
  static_assert(kPanelsVo % Tile::kOPanels == 0);
  static_assert(Tile::kBlockN % 16 == 0, "P V takes 16 keys per instruction");

  using Barrier = cutlass::arch::ClusterTransactionBarrier;

  char q[Tile::kQBuffers][kQBytes];
  char k[Tile::kStages][kKBytes];
  char v[Tile::kStages][kVBytes];
  char o[Tile::kConsumers][kOBytes];
  Job jobs[kJobSlots];
  //                                   arrives                        waits
  Barrier job_full[kJobSlots];       // K warp                         Q and V warps, consumers
  Barrier job_empty[kJobSlots];      // Q and V warps, consumer warps  K warp
  Barrier q_full[Tile::kQBuffers];   // Q warp, with the TMA's bytes   its consumer warpgroup
  Barrier q_empty[Tile::kQBuffers];  // the 4 warps of that            Q warp
  Barrier k_full[Tile::kStages];     // K warp, with the TMA's bytes   all consumers
  Barrier k_empty[Tile::kStages];    // all consumer warps             K warp
  Barrier v_full[Tile::kStages];     // V warp, with the TMA's bytes   all consumers
  Barrier v_empty[Tile::kStages];    // all consumer warps             V warp
};

// A position in a ring of buffers, and the parity of the pass over it.
template <int kSize>
struct Ring {
  int index = 0;
  std::uint32_t phase = 0;

  CUTE_DEVICE void advance() {
    if (++index == kSize) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Named barriers (0 is __syncthreads()): kBarrierTurn + warpgroup is its turn to issue products, granted by the previous
// warpgroup.
constexpr int kBarrierTurn = 1;

}  // namespace cutlass_kernels::fa3
