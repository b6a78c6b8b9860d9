// fa3: attention forward with TMA and wgmma, for sm_90a.
//
// Persistent blocks, one to three per SM, compute tiles of 64 query rows per consumer warpgroup, from a tile's last block of keys to
// its first:
//
//   producer warp 0   finds tiles  -> job_full / job_empty
//   producer warp 1   loads Q      -> q_full / q_empty, a buffer per warpgroup and tile
//   producer warp 2   loads K      -> k_full / k_empty
//   producer warp 3   loads V      -> v_full / v_empty
//                     (of a paged cache: load_pages.h)
//   consumer warpgroups: see mma.h, store.h
//
// Nothing waits at the end of a tile: the producers run ahead into the next one, and each warpgroup stores its
// rows when it is done with them.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "fa3/load.h"
#include "fa3/load_pages.h"
#include "fa3/mma.h"
#include "fa3/params.h"
#include "fa3/shared.h"

namespace cutlass_kernels::fa3 {

template <class Element, class Tile, bool kTransform>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    attention_kernel(__grid_constant__ const KernelParams params) {
  using Layout = Shared<Tile>;
  extern __shared__ __align__(1024) char shared_memory[];
  Layout& shared = *reinterpret_cast<Layout*>(shared_memory);

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int warpgroup = warp / 4;
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Tile::kConsumers;
    shared.job_wanted.init(1);
    for (int i = 0; i < kJobSlots; ++i) {
      shared.job_full[i].init(1);
      shared.job_empty[i].init(3 + 32 * kConsumerWarps);
    }
    for (int i = 0; i < Tile::kQBuffers; ++i) {
      shared.q_full[i].init(1);
      shared.q_empty[i].init(4);
    }
    for (int i = 0; i < Tile::kKStages; ++i) {
      shared.k_full[i].init(1);
      shared.k_empty[i].init(kConsumerWarps);
    }
    for (int i = 0; i < Tile::kVStages; ++i) {
      shared.v_full[i].init(1);
      shared.v_empty[i].init(kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Tile::kProducerRegisters>();
    const bool paged = params.attention.pages.page_size > 0;
    if (threadIdx.x % 32 != 0 && !(paged && warp >= 2)) return;
    switch (warp) {
      case 0:
        find_jobs<Tile>(params, shared);
        break;
      case 1:
        load_q<Tile>(params, shared);
        break;
      case 2:
        if (paged) {
          load_pages<Tile, Layout::kPanelsQk, Tile::kKStages, true>(
              params, shared, &params.k_map, shared.k_full, shared.k_empty, shared.k[0]);
        } else {
          load_keys<Tile, Layout::kPanelsQk, Tile::kKStages, true>(
              params, shared, &params.k_map, shared.k_full, shared.k_empty, shared.k[0]);
        }
        break;
      case 3:
        if (paged) {
          load_pages<Tile, Layout::kPanelsVo, Tile::kVStages, false>(
              params, shared, &params.v_map, shared.v_full, shared.v_empty, shared.v[0]);
        } else {
          load_keys<Tile, Layout::kPanelsVo, Tile::kVStages, false>(
              params, shared, &params.v_map, shared.v_full, shared.v_empty, shared.v[0]);
        }
        break;
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Tile::kConsumerRegisters>();
    Consumer<Element, Tile, kTransform>(params, shared, warpgroup - 1).run();
  }
}

}  // namespace cutlass_kernels::fa3
