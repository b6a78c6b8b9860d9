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
//   producer warps 4 and 5, in some kernels that gather: rows of K and of V, too
//   consumer warpgroups: see mma.h, store.h
//
// Of e4m3, warp 1 loads Q, K and V (load_fp8.h), and warps 2 and 3 transpose V (transpose_values.h).
//
// Nothing waits at the end of a tile: the producers run ahead into the next one, and each warpgroup stores its
// rows when it is done with them.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/dependent_launch.h"
#include "fa3/hidden_values.h"
#include "fa3/load.h"
#include "fa3/load_fp8.h"
#include "fa3/load_pages.h"
#include "fa3/mma.h"
#include "fa3/params.h"
#include "fa3/shared.h"
#include "fa3/transpose_values.h"

namespace cutlass_kernels::fa3 {

// K or V, from wherever it lies, by number `part` of the warps that share it. kHides: a custom mask may hide keys from all rows
// of a tile.
template <class Tile, int kPanels, int kStages, bool kIsK, bool kHides>
CUTE_DEVICE void load(const KernelParams& params, Shared<Tile>& shared, const CUtensorMap* map,
                      Barrier* full, Barrier* empty, char* stages, int part) {
  if constexpr (Tile::kGather) {
    gather_keys<Tile, kPanels, kStages, kIsK, kHides>(params, shared, full, empty, stages, part);
  } else if (params.attention.pages.page_size > 0) {
    load_boxes<Tile, kPanels, kStages, kIsK, kHides>(params, shared, map, full, empty, stages);
  } else {
    if constexpr (kHides) {
      if (params.attention.mask.words != nullptr) {
        load_visible_values<Tile, kPanels, kStages>(params, shared);
        return;
      }
    }
    load_keys<Tile, kPanels, kStages, kIsK>(params, shared, map, full, empty, stages);
  }
}

// The warps of the producing warpgroup, where V is transposed.
template <class Tile, bool kHides>
CUTE_DEVICE void produce_transposed(const KernelParams& params, Shared<Tile>& shared, int warp) {
  static_assert(Tile::kTransposers == 2);
  if (warp == 0) {
    if (threadIdx.x % 32 == 0) find_jobs<Tile, kHides>(params, shared);
  } else if (warp == 1) {
    load_tiles<Tile>(params, shared);
  } else {
    transpose_values<Tile>(params, shared, warp - 2);
  }
}

template <class Element, class Tile, Logits kLogits>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    attention_kernel(__grid_constant__ const KernelParams params) {
  using Layout = Shared<Tile>;
  constexpr bool kHides =
      kLogits == Logits::kGeneral;  // a mask may hide keys from all rows of a tile
  extern __shared__ __align__(1024) char shared_memory[];
  Layout& shared = *reinterpret_cast<Layout*>(shared_memory);

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int warpgroup = warp / 4;
  const bool paged = params.attention.pages.page_size > 0;
  const bool hides = kHides && params.attention.mask.words != nullptr;
  // Lanes of the K and of the V warp that take part. All of them say when they are done with a job: racecheck does not
  // follow an order through lane 0.
  const int k_lanes = paged ? 32 * Tile::kCopyWarps : 1;
  const int v_lanes = paged || hides ? 32 * Tile::kCopyWarps : 1;
  // The descriptions that TMA will need come while barriers are made and the first tile is found.
  if (threadIdx.x == 32) cute::prefetch_tma_descriptor(&params.q_map);
  if (threadIdx.x == 64) cute::prefetch_tma_descriptor(&params.k_map);
  if (threadIdx.x == 96) cute::prefetch_tma_descriptor(&params.v_map);
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Tile::kConsumers;
    // Rows gathered from pages arrive with every lane's copies, all else with the bytes of TMA.
    constexpr int kKeyLoaders = Tile::kGather ? 32 * Tile::kCopyWarps : 1;
    shared.job_wanted.init(1);
    shared.v_landed.init(1);
    for (int i = 0; i < kJobSlots; ++i) {
      shared.job_full[i].init(1);
      constexpr int kProducerWarps = 1 + Tile::kTransposers;
      const int producers = Layout::kTransposed ? 32 * kProducerWarps : 1 + k_lanes + v_lanes;
      shared.job_empty[i].init(producers + 32 * kConsumerWarps);
    }
    for (int i = 0; i < Tile::kQBuffers; ++i) {
      shared.q_full[i].init(1);
      shared.q_empty[i].init(4);
    }
    for (int i = 0; i < Tile::kKStages; ++i) {
      shared.k_full[i].init(kKeyLoaders);
      shared.k_empty[i].init(kConsumerWarps);
    }
    for (int i = 0; i < Tile::kVStages; ++i) {
      shared.v_full[i].init(Layout::kTransposed ? Tile::kTransposers : kKeyLoaders);
      shared.v_empty[i].init(kConsumerWarps);
    }
    if constexpr (Layout::kTransposed) {
      for (int i = 0; i < Tile::kStagedStages; ++i) {
        shared.staged_full[i].init(1);
        shared.staged_empty[i].init(Tile::kTransposers);
      }
    }
    fence_barrier_init();
  }
  if constexpr (Tile::kPacked) {
    allow_next_kernel();  // to merge what pieces of keys give
    // Rows that are nobody's are never loaded: not a number, they would keep the others from lazy maxima.
    if (params.packed.tokens * params.packed.heads.divisor < kWarpgroupRows) {
      auto* q = reinterpret_cast<uint4*>(shared.q);
      for (int i = threadIdx.x; i < int(sizeof(shared.q) / 16); i += Tile::kThreads) q[i] = {};
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
  }
  __syncthreads();

  if (warpgroup < Tile::kProducers) {
    cutlass::arch::warpgroup_reg_dealloc<Tile::producer_registers(kHides)>();
    if constexpr (Layout::kTransposed) {
      produce_transposed<Tile, kHides>(params, shared, warp);
    } else {
      // Of a second warpgroup, the first two warps copy: on the schedulers that the copying warps of the first leave alone.
      const int role = warp < 4 ? warp : warp < 6 ? warp - 2 : -1;
      const int part = warp / 4;
      const int lanes = role == 2 ? k_lanes : role == 3 ? v_lanes : 1;
      if (int(threadIdx.x % 32) >= lanes) return;
      switch (role) {
        case 0:
          find_jobs<Tile, kHides>(params, shared);
          break;
        case 1:
          load_q<Tile>(params, shared);
          break;
        case 2:
          load<Tile, Layout::kPanelsQk, Tile::kKStages, true, false>(
              params, shared, &params.k_map, shared.k_full, shared.k_empty, shared.k[0], part);
          break;
        case 3:
          load<Tile, Layout::kPanelsVo, Tile::kVStages, false, kHides>(
              params, shared, &params.v_map, shared.v_full, shared.v_empty, shared.v[0], part);
          break;
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Tile::consumer_registers(kHides)>();
    Consumer<Element, Tile, kLogits>(params, shared, warpgroup - Tile::kProducers).run();
  }
}

}  // namespace cutlass_kernels::fa3
