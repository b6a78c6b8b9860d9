// fa3: attention forward with TMA and wgmma, for sm_90a.
//
// Computes O = softmax(mask(f(Q K^T))) V and the LSE of each row, for every request and query head; f is scale, soft
// cap or bias.
//
// Persistent CTAs, one to three per SM, compute one tile after the other: 64 query rows per consumer warpgroup,
// against the KV blocks that the tile sees, from the last to the first. A producer warpgroup finds the tiles and
// loads; consumers compute and store:
//
//   producer warpgroup               rings in shared memory                    consumer warpgroups
//
//   warp 0  find_tiles  -job_full->  jobs, 4                        ------>  all warps; warps 1 to 3, too
//                       <-job_empty  (all who read the job)
//                       <-job_wanted (the K warp, one KV block before the end of its tile)
//   warp 1  Q           --q_full-->  Q (64, C, D_QK / C), PIPE_Q    ------>  its warpgroup: S = Q K^T    products.h
//                       <-q_empty--
//   warp 2  K           --k_full-->  K (BLK_N, C, D_QK / C), PIPE_K ------>  each warpgroup: S = Q K^T   products.h
//                       <-k_empty--                                          masks, softmax              softmax.h
//   warp 3  V           --v_full-->  V (BLK_N, C, D_VO / C), PIPE_V ------>  each warpgroup: O += P V    products.h
//                       <-v_empty--
//                                    O (64, 64, panels)             <------  each warp: its 16 rows      store.h
//                                                                   ------>  TMA: global memory
//
// C is 64 columns, the panel of the swizzle. shared_memory.h says of each barrier who arrives and who waits. Nothing
// waits at the end of a tile: producers run ahead into the next one, and each warpgroup stores its rows when they are
// done (main_loop.h).
//
// K and V come from ragged tensors or from pages by TMA (load.h). Where the page size is no multiple of 8, they come
// row by row (load_gather.h); a second producer warpgroup, warps 4 and 5, may help. Of e4m3:
//   below 16-bit queries  bytes are gathered from pages of any size; four warps of a second producer warpgroup convert
//                         them to stages of 16 bits (load_gather.h)
//   throughout            warp 1 loads Q, K and V, warps 2 and 3 transpose V (load_fp8.h); O is a sum in fp32 of the
//                         P V of KV blocks (main_loop.h)
//
// Of head dimension 512, a pair of CTAs computes a tile, each half of its columns (pair.h).
//
// Numbers of hd128, as an example (config.h has them for every tile). Shared memory: Q 4 x 16 KB, K and V 2 x 32 KB
// each, O 2 x 16 KB, 225 KB of 227 in all. Registers: 168 per thread at launch, after setmaxnreg 40 per producer and
// 232 per consumer thread, of which S takes 64, P 32, O 64 and Q 32. Why two consumer warpgroups: they share each
// stage of K and V, and while one takes exponentials, the products of the other keep the tensor cores busy. Three
// would have 160 registers per thread, as much as S, P and O alone.
#pragma once

#include <cute/config.hpp>

#include "common/dependent_launch.h"
#include "common/ptx/setmaxnreg.h"
#include "fa3/find_tiles.h"
#include "fa3/load.h"
#include "fa3/load_fp8.h"
#include "fa3/load_gather.h"
#include "fa3/main_loop.h"
#include "fa3/pair.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"
#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

// Initialises the mbarriers, by one thread, with their counts of arrivals. k_lanes, v_lanes: threads that load K and V.
template <class Tile>
CUTE_DEVICE void init_barriers(Shared<Tile>& shared, int k_lanes, int v_lanes) {
  using Layout = Shared<Tile>;
  constexpr int kConsumerWarps = 4 * Tile::kConsumers;
  // Gathered rows arrive with every lane's copies, all else by one thread, of each warp of several.
  constexpr int kLoaders = Tile::kGather ? 32 * Tile::kCopyWarps : 1;
  constexpr int kStageWriters = Tile::kTransposers + Tile::kConverters;
  constexpr int kKeyLoaders = Tile::kConverts ? Tile::kConverters : kLoaders;
  shared.job_wanted.init(1);
  shared.v_landed.init(1);
  for (int i = 0; i < kJobBuffers; ++i) {
    shared.job_full[i].init(1);
    constexpr int kProducerWarps = 1 + Tile::kTransposers;
    const int producers = Layout::kTransposed ? 32 * kProducerWarps : 1 + k_lanes + v_lanes + 32 * Tile::kConverters;
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
  if constexpr (Tile::kStagedStages > 0) {
    for (int i = 0; i < Tile::kStagedStages; ++i) {
      shared.staged_full[i].init(kLoaders);
      shared.staged_empty[i].init(kStageWriters);
    }
  }
  if constexpr (Layout::kPair) {
    for (int i = 0; i < Tile::kConsumers; ++i) {
      shared.s_full[i].init(1);
      shared.s_empty[i].init(4);
    }
    for (int i = 0; i < kJobBuffers; ++i) shared.job_sent[i].init(1);
  }
  fence_barrier_init();
}

// The K or V producer, from wherever the matrix lies: warp copy_warp of those that share it. kCustomMask: a custom mask
// may hide keys from all rows of a tile.
template <class Tile, int kPanels, int kStages, bool kIsK, bool kCustomMask>
CUTE_DEVICE void load(const KernelParams& params, Shared<Tile>& shared, const CUtensorMap* map, Barrier* full,
                      Barrier* empty, char* stages, int copy_warp) {
  if constexpr (Tile::kConverts) {
    gather_keys<Tile, (64 * kPanels + 127) / 128, Tile::kStagedStages, kIsK, kCustomMask>(
        params, shared, shared.staged_full, shared.staged_empty, shared.staged[0], copy_warp);
  } else if constexpr (Tile::kGather) {
    gather_keys<Tile, kPanels, kStages, kIsK, kCustomMask>(params, shared, full, empty, stages, copy_warp);
  } else if (params.attention.pages.page_size > 0) {
    load_boxes<Tile, kPanels, kStages, kIsK, kCustomMask>(params, shared, map, full, empty, stages);
  } else {
    if constexpr (kCustomMask) {
      if (params.attention.mask.words != nullptr) {
        load_masked_values<Tile, kPanels, kStages>(params, shared);
        return;
      }
    }
    load_keys<Tile, kPanels, kStages, kIsK>(params, shared, map, full, empty, stages);
  }
}

// The producers below 16-bit queries.
template <class Element, class Tile, bool kCustomMask>
CUTE_DEVICE void produce(const KernelParams& params, Shared<Tile>& shared, int warp, int k_lanes, int v_lanes) {
  using Layout = Shared<Tile>;
  if constexpr (Tile::kConverts) {
    if (warp >= 4) {
      convert_keys<Element, Tile>(shared, warp - 4);
      return;
    }
  }
  enum Role { kFindTiles, kLoadQ, kLoadK, kLoadV, kIdle = -1 };
  // Of a second warpgroup, the first two warps copy: on the schedulers that the copying warps of the first leave alone.
  const int role = warp < 4 ? warp : warp < 6 ? warp - 2 : int(kIdle);
  const int copy_warp = warp / 4;
  const int lanes = role == kLoadK ? k_lanes : role == kLoadV ? v_lanes : 1;
  if (int(threadIdx.x % 32) >= lanes) return;
  switch (role) {
    case kFindTiles:
      find_tiles<Tile, kCustomMask>(params, shared);
      break;
    case kLoadQ:
      load_q<Tile>(params, shared);
      break;
    case kLoadK:
      load<Tile, Layout::kPanelsQk, Tile::kKStages, true, false>(params, shared, &params.k_map, shared.k_full,
                                                                 shared.k_empty, shared.k[0], copy_warp);
      break;
    case kLoadV:
      load<Tile, Layout::kPanelsVo, Tile::kVStages, false, kCustomMask>(params, shared, &params.v_map, shared.v_full,
                                                                        shared.v_empty, shared.v[0], copy_warp);
      break;
  }
}

// The producers of e4m3 tensors.
template <class Tile, bool kCustomMask>
CUTE_DEVICE void produce_fp8(const KernelParams& params, Shared<Tile>& shared, int warp) {
  static_assert(Tile::kTransposers == 2);
  if (warp == 0) {
    if (threadIdx.x % 32 == 0) find_tiles<Tile, kCustomMask>(params, shared);
  } else if (warp == 1) {
    load_tiles<Tile>(params, shared);
  } else {
    transpose_values<Tile>(params, shared, warp - 2);
  }
}

template <class Element, class Tile, Logits kLogits>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    attention_kernel(__grid_constant__ const KernelParams params) {
  using Layout = Shared<Tile>;
  constexpr bool kCustomMask = kLogits == Logits::kGeneral;
  extern __shared__ __align__(1024) char shared_memory[];
  Layout& shared = *reinterpret_cast<Layout*>(shared_memory);

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int warpgroup = warp / 4;
  const bool paged = params.attention.pages.page_size > 0;
  const bool hides = kCustomMask && params.attention.mask.words != nullptr;
  // Lanes of the K and of the V warps that take part. All of them release a job: racecheck does not follow an order
  // through lane 0.
  const int k_lanes = paged ? 32 * Tile::kCopyWarps : 1;
  const int v_lanes = paged || hides ? 32 * Tile::kCopyWarps : 1;
  // Tensor maps are fetched while barriers are initialised and the first tile is found.
  if (threadIdx.x == 32) prefetch_tensor_map(&params.q_map);
  if (threadIdx.x == 64) prefetch_tensor_map(&params.k_map);
  if (threadIdx.x == 96) prefetch_tensor_map(&params.v_map);
  if (threadIdx.x == 0) init_barriers<Tile>(shared, k_lanes, v_lanes);
  // From here on memory is read that the previous kernel may have written. Then the next kernel may start: all that it
  // reads before this one ends was written before this one began.
  await_previous_kernel();
  allow_next_kernel();
  if constexpr (Tile::kPacked) begin_packed<Tile>(params, shared, warp);
  if constexpr (Layout::kPair) {
    sync_pair();
  } else {
    __syncthreads();
  }

  if (warpgroup < Tile::kProducers) {
    decrease_registers<Tile::producer_registers(kCustomMask)>();
    if constexpr (Layout::kTransposed) {
      produce_fp8<Tile, kCustomMask>(params, shared, warp);
    } else {
      produce<Element, Tile, kCustomMask>(params, shared, warp, k_lanes, v_lanes);
    }
  } else {
    increase_registers<Tile::consumer_registers(kCustomMask)>();
    Consumer<Element, Tile, kLogits>(params, shared, warpgroup - Tile::kProducers).run();
  }
}

}  // namespace cutlass_kernels::fa3
