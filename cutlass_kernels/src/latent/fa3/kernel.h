// mla: multi-head latent attention in its absorbed form, with TMA and wgmma, for sm_90a.
//
// Computes O = softmax(mask(Q K^T)) V, where all heads of a token share their keys (576 columns), and V is the first
// 512 columns of K: one copy in shared memory serves both products. Rows of a tile are those of several tokens and
// heads.
//
//   producer warpgroup               shared memory                          consumer warpgroups
//
//   warp 0  scheduler   -job_full->  jobs, 4                       ------>  all warps
//   warp 1  Q           --q_full-->  Q (64, 64, 9)                 ------>  both: S = Q K^T
//   warp 2  K, even     --k_full-->  K (64, 64, 9), 2 stages       ------>  0: S of even blocks, left half of O
//   warp 3  K, odd      <-k_empty--                                ------>  1: S of odd blocks, right half of O
//                                    P in the ninth panel of K     <----->  to the other warpgroup
//
// Of quantized caches, all four producer warps copy rows of every block, and widen them (gather_quantized.h); of 128
// heads, and of multiples, for the tiles of two CTAs, each half. With up to 16 heads, keys are the rows of wgmma, and
// there are sixteen producer warps (few_heads.h, gather_staged.h).
//
// Of keys by slots, warps 2 and 3 copy half of the rows of every block, warp 1 their columns of the position
// (gather_slots.h), and registers are 56 and 224.
//
// consumer.h has the order in which warpgroups compute, shared_memory.h says of each barrier who arrives and who waits.
//
// Numbers. Shared memory: Q 72 KB, K 2 x 72 KB, 221 KB of 227 in all with the rest. Registers: 168 per thread at
// launch, then 40 per producer and 232 per consumer thread, of which O takes 128, S 32, both P 16 each. A block of 64
// keys takes the tensor cores 2176 cycles: 1152 for S, whose operands both come from shared memory, 1024 for P V.
#pragma once

#include <cute/config.hpp>

#include "common/dependent_launch.h"
#include "common/ptx/setmaxnreg.h"
#include "fa3/find_tiles.h"
#include "fa3/pair.h"
#include "fa3/tma.h"
#include "latent/fa3/consumer.h"
#include "latent/fa3/few_heads.h"
#include "latent/fa3/gather_slots.h"
#include "latent/fa3/gather_staged.h"
#include "latent/fa3/load.h"
#include "latent/fa3/shared_memory.h"

namespace cutlass_kernels::mla {

template <class Tile>
CUTE_DEVICE void init_barriers(Shared<Tile>& shared, KeySource source) {
  shared.job_wanted.init(1);
  for (int i = 0; i < kJobBuffers; ++i) {
    shared.job_full[i].init(1);
    constexpr int kReaders = Tile::kQuantized ? Tile::kProducerWarps * 32 : Tile::kBySlots ? 3 * 32 : 1 + 2 * 32;
    shared.job_empty[i].init(kReaders + 256);
  }
  shared.q_full.init(1);
  shared.q_empty.init(8);
  // The latent columns by two warps, or by a lane of each of four; those of the position with `listed`.
  constexpr int kLatentArrivals = Tile::kQuantized ? Tile::kProducerWarps : 2 * 32;
  constexpr int kRopeArrivals = Tile::kQuantized ? Tile::kProducerWarps : Tile::kHasPositions ? 32 + 1 : 1;
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    for (int panel = 0; panel < kPanels; ++panel) {
      shared.k_full[stage][panel].init(Tile::kBySlots ? (panel == kRopePanel ? kRopeArrivals : kLatentArrivals)
                                       : source == KeySource::kGathered ? 32
                                                                        : 1);
    }
    for (int group = 0; group < kPanelGroups; ++group) shared.k_empty[stage][group].init(4 * Tile::kCtasPerTile);
  }
  for (int warp = 0; warp < 4; ++warp) {
    shared.m_full[warp].init(1);
    shared.p_full[0][warp].init(1);
    shared.p_full[1][warp].init(1);
  }
  shared.landed[0].init(1);
  shared.landed[1].init(1);
  if constexpr (Tile::kQuantized) shared.claimed.index = -1;
  if constexpr (Tile::kCtasPerTile == 2) {
    for (Barrier& sent : shared.from_peer.sent) sent.init(1);
  }
  fa3::fence_barrier_init();
}

template <class Element, class Tile>
CUTE_DEVICE void produce(const fa3::KernelParams& params, Shared<Tile>& shared, int warp, KeySource source) {
  const int lane = threadIdx.x % 32;
  if constexpr (Tile::kQuantized) {
    gather_quantized<Element, Tile>(params, shared, warp);
  } else if (warp == 0) {
    if (lane == 0) fa3::find_tiles<Tile, true>(params, shared);
  } else if constexpr (Tile::kBySlots) {
    if (warp == 1) {
      gather_slots<Tile, true>(params, shared);
    } else {
      gather_slots<Tile, false>(params, shared, warp - 2);
    }
  } else if (warp == 1) {
    if (lane == 0) load_q<Tile>(params, shared);
  } else if (source == KeySource::kBoxes) {
    load_keys<Tile, true>(params, shared, warp - 2);
  } else if (source == KeySource::kRows) {
    load_keys<Tile, false>(params, shared, warp - 2);
  } else {
    gather_keys<Tile>(params, shared, warp - 2);
  }
}

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_kernel(__grid_constant__ const fa3::KernelParams params) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(shared_memory);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const KeySource source = params.box_rows > 0                     ? KeySource::kBoxes
                           : params.attention.pages.page_size == 0 ? KeySource::kRows
                                                                   : KeySource::kGathered;
  if (threadIdx.x == 32) fa3::prefetch_tensor_map(&params.q_map);
  if (threadIdx.x == 64) fa3::prefetch_tensor_map(&params.k_map);
  if (threadIdx.x == 96) fa3::prefetch_tensor_map(&k_rope_map(params));
  if (threadIdx.x == 0) init_barriers<Tile>(shared, source);
  await_previous_kernel();
  allow_next_kernel();
  fa3::begin_packed<Tile, Tile::kQRows>(params, shared, warp);
  if constexpr (Tile::kCtasPerTile == 2) {
    fa3::sync_pair();
  } else {
    __syncthreads();
  }
  if constexpr (Tile::kFewHeads) {
    if (warp < 4 || warp >= 12) {
      decrease_registers<Tile::kProducerRegisters>();
      produce<Element, Tile>(params, shared, warp < 4 ? warp : warp - 8, source);
    } else if (warp < 8) {
      increase_registers<Tile::kConsumerRegisters>();
      FewHeadsConsumer<Element, Tile, 0>(params, shared).run();
    } else {
      increase_registers<Tile::kConsumerRegisters>();
      FewHeadsConsumer<Element, Tile, 1>(params, shared).run();
    }
  } else if (warp < 4) {
    decrease_registers<Tile::kProducerRegisters>();
    produce<Element, Tile>(params, shared, warp, source);
  } else if (warp < 8) {
    increase_registers<Tile::kConsumerRegisters>();
    Consumer<Element, Tile, 0>(params, shared).run();
  } else {
    increase_registers<Tile::kConsumerRegisters>();
    Consumer<Element, Tile, 1>(params, shared).run();
  }
  if constexpr (Tile::kCtasPerTile == 2) fa3::sync_pair();  // the other CTA may still arrive at barriers of this one
}

}  // namespace cutlass_kernels::mla
