// fa2: attention forward with mma.sync and cp.async, for sm_80 and newer.
//
// One block computes one query tile of one head: O = softmax(Q K^T) V over the keys some row of the
// tile sees, from the last block of keys to the first.
//
//            +---------------------- block j ----------------------+
//  tensor    | S = Q K(j)^T |                        | O += P V(j)  |
//  softmax   |              | mask, max              | P = 2^(s - m), 16 keys ahead of their products
//  loads     |              | K(j - s), V(j - s), s = stages - 1    |
//            +------------------------------------------------------+
//
// Warps own whole rows, so softmax needs no exchange between them; a scheduler's two or three warps overlap one's
// softmax with another's products. At head dimension 256 two warps share rows: shared_rows.h has that drawing. How keys
// and values in pages are found: pages.h. Masks of any form: visible_keys.h. Tiles of several heads, and of a part of the
// keys: packed_rows.h.
//
// What is scarce is registers (255 per thread) and, at one row tile per warp, shared-memory bandwidth:
// short live ranges beat fewer instructions.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include <type_traits>

#include "common/dependent_launch.h"
#include "common/finish_row.h"
#include "common/ldmatrix.h"
#include "common/logits.h"
#include "common/mask.h"
#include "common/softmax.h"
#include "common/work.h"
#include "fa2/config.h"
#include "fa2/decode_rows.h"
#include "fa2/fp8.h"
#include "fa2/packed_rows.h"
#include "fa2/pages.h"
#include "fa2/params.h"
#include "fa2/shared.h"
#include "fa2/shared_keys.h"
#include "fa2/shared_rows.h"
#include "fa2/visible_keys.h"
#include "mask_extents.h"

namespace cutlass_kernels::fa2 {

// Loads to be issued piecemeal: issue(step, steps) issues the share of step `step` of `steps`.
template <class Loader>
struct PendingLoads {
  Loader matrices[2];  // K, V

  CUTE_DEVICE void issue(int step, int steps) {
    constexpr int kLoads = 2 * Loader::kSteps;
    CUTE_UNROLL
    for (int i = step * kLoads / steps; i < (step + 1) * kLoads / steps; ++i) {
      matrices[i / Loader::kSteps].issue(i % Loader::kSteps);
    }
  }
  CUTE_DEVICE void issue_all() { issue(0, 1); }
};

struct NoLoads {
  CUTE_DEVICE void issue(int, int) {}
};

// A logits transform needs registers of its own: a third block per SM would spill.
template <class Tile, Logits kLogits>
constexpr int blocks_per_sm() {
  return kLogits != Logits::kPlain && Tile::kBlocksPerSm > 2 && !Tile::kPacked ? 2
                                                                               : Tile::kBlocksPerSm;
}

// Kv: Element, or what K and V hold instead (fp8.h).
template <class Element, class Kv, class Tile, Logits kLogits, bool kPaged>
__global__ void __launch_bounds__(Tile::kThreads, blocks_per_sm<Tile, kLogits>())
    attention_kernel(__grid_constant__ const KernelParams params) {
  using Layout = SharedLayout<Tile>;
  constexpr bool kFp8 = Tile::kKvBytes == 1;
  using Factor = std::conditional_t<kFp8, fp16, Element>;  // of products
  using Mma = typename Factor::Mma;
  constexpr int kRowTiles = Tile::kRowTiles;
  constexpr int kBlockN = Tile::kBlockN;
  constexpr int kStages = Tile::kStages;
  constexpr int kAhead = Tile::kAhead;
  constexpr int kStepN = Tile::kStepN;
  constexpr int kSharers = Tile::kSharers;
  constexpr int kTilesN = kStepN / 8 / kSharers;  // m16n8 tiles of a warp's S along the keys
  constexpr int kTilesD = Tile::kHeadDim / 8 / kSharers;  // and of O along the head dimension
  constexpr int kRows = 2 * kRowTiles;                    // rows a thread holds a part of
  const AttentionParams& p = params.attention;

  extern __shared__ __align__(128) char shared_memory[];
  const std::uint32_t shared = cute::cast_smem_ptr_to_uint(shared_memory);

  // To merge what pieces of keys give. What the next kernel reads before this one ends was written before this one began.
  if constexpr (Tile::kDecodes) await_previous_kernel();
  if constexpr (Tile::kPacked) allow_next_kernel();

  // ---- Which tile of which head. ----
  const TileOrder::Position position = params.order(blockIdx.x);
  const int head = Tile::kPacked ? position.head * int(params.pack.divisor)  // of a pack the first
                                 : position.head;
  const int kv_head =
      head / params.group_size;  // a FastDivisor makes ptxas order the main loop anew: 3 % slower
  WorkItem work;
  if (!find_work<kPaged, false, Tile::kDecodes, !kFp8>(p, params.rows, position.rank, work)) return;
  const int tile_rows = Tile::kPacked ? p.schedule.tile_rows : Tile::kBlockM;
  const int row_begin = work.tile * tile_rows;
  const int row_end = min(row_begin + tile_rows, work.qo_len);
  const IntervalMask mask{work.kv_len,
                          work.kv_len - work.qo_len,
                          p.causal || p.chunk_size > 0,
                          p.window_left,
                          p.chunk_size,
                          params.chunk};
  int key_begin = mask.lo(row_begin);
  int key_end = mask.hi(row_end - 1);
  [[maybe_unused]] bool hides = p.mask.words != nullptr;  // some key may be seen by no row
  [[maybe_unused]] int bits_begin = 0, bits_end = 0;      // keys that all rows see, by a bit mask
  if constexpr (kLogits == Logits::kGeneral) {
    if (p.schedule.mask_extents != nullptr) {
      const MaskExtent extent =
          static_cast<const MaskExtent*>(p.schedule.mask_extents)[position.rank];
      key_begin = max(key_begin, extent.begin);
      key_end = max(min(key_end, extent.end), key_begin);
      hides = extent.hides != 0;
      if (p.window_left < 0) {
        bits_begin = extent.all_begin;
        bits_end = extent.all_end;
      }
    }
  }
  int block_begin = key_begin / kBlockN;
  int block_end = (key_end + kBlockN - 1) / kBlockN;
  if constexpr (Tile::kPacked) {
    if (work.pieces > 1) take_piece(work, kBlockN, key_begin, key_end, block_begin, block_end);
  }

  constexpr bool kGeneral = kLogits == Logits::kGeneral;
  std::int64_t request_bit = 0;
  if constexpr (kGeneral) {
    if (p.mask.indptr != nullptr) request_bit = std::int64_t(p.mask.indptr[work.batch]) * 8;
  }

  const int thread = threadIdx.x;
  const int warp = thread / 32;
  const int lane = thread % 32;

  // ---- Loads. ----
  auto element_ptr = [](const ConstTensorView& view, std::int64_t token, int h, int bytes) {
    return static_cast<const char*>(view.data) +
           bytes * (token * view.stride_token + h * view.stride_head);
  };
  const int key_extent = key_end - key_begin;
  using RaggedLoader = std::conditional_t<kGeneral, SeenRowLoader<Tile>,
                                          RowLoader<Tile, kBlockN, Tile::kKvBytes, Tile::kDecodes>>;
  using BlockLoader = std::conditional_t<kPaged, PageLoader<Tile>, RaggedLoader>;
  std::conditional_t<kGeneral, SeenPageRows<Tile>, PageRows<Tile>> pages{
      params,        reinterpret_cast<const char**>(shared_memory + Layout::kTable),
      work.kv_begin, kv_head,
      key_begin,     key_extent};
  [[maybe_unused]] SeenKeys<Tile> seen{p.mask, mask, request_bit, row_begin, row_end, hides, {}};
  if constexpr (kGeneral) pages.seen = &seen;
  auto k_loader = [&](int block, int stage, int t) {
    const std::uint32_t to = shared + Layout::kK + stage * Layout::kStageBytes;
    if constexpr (kPaged) {
      return PageLoader<Tile>(to, pages.entries(t), p.head_dim_qk, t);
    } else {
      BlockLoader loader(to, element_ptr(p.k, work.kv_begin, kv_head, Tile::kKvBytes),
                         p.k.stride_token, p.head_dim_qk, block * kBlockN, key_begin, key_extent,
                         t);
      if constexpr (kGeneral) loader.take_only(seen, t);
      return loader;
    }
  };
  auto v_loader = [&](int block, int stage, int t) {
    const std::uint32_t to = shared + Layout::kV + stage * Layout::kStageBytes;
    if constexpr (kPaged) {
      return PageLoader<Tile>(to, pages.entries(t) + PageRows<Tile>::kRows, p.head_dim_vo, t);
    } else {
      BlockLoader loader(to, element_ptr(p.v, work.kv_begin, kv_head, Tile::kKvBytes),
                         p.v.stride_token, p.head_dim_vo, block * kBlockN, key_begin, key_extent,
                         t);
      if constexpr (kGeneral) loader.take_only(seen, t);
      return loader;
    }
  };

  // ---- This warp's rows. ----
  const int part = warp % kSharers;  // of the keys in Q K^T, of the columns in P V
  const SharedKeys<Tile> keys((row_end - row_begin) * int(params.pack.divisor), warp);
  const int warp_row = keys.row_group * (kRowTiles * 16);  // in the tile
  const WarpRows<Tile> row_at{row_begin, warp_row, params.pack};
  const int first_row = row_at(0);  // in the request
  const int last_row = Tile::kPacked ? min(row_at(kRowTiles * 16 - 1), row_end - 1)
                                     : min(row_at(kRowTiles * 16), row_end) - 1;
  const bool has_rows = first_row <= last_row && keys.has_part();
  // Keys that some / that every row of the warp sees.
  const int any_begin = has_rows ? mask.lo(first_row) : 0;
  const int any_end = has_rows ? mask.hi(last_row) : 0;
  const int all_begin = has_rows ? mask.lo(last_row) : 0;
  const int all_end = has_rows ? mask.hi(first_row) : 0;

  // ldmatrix addresses: lanes 0-15 point at rows 0-15 of a 16 x 16 tile, lanes 16-31 at the same rows eight
  // columns on. For K, four 8 x 8 matrices in the order (keys 0-7, d 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15)
  // are the B fragments of two n8 tiles. For V, transposed, lanes as for Q.
  const int lane_row = lane % 16;
  const int lane_chunk = lane / 16;
  const int k_row = (lane % 8) + (lane / 16) * 8;
  const int k_chunk = (lane / 8) % 2;
  const int swizzle_q = lane_chunk ^ (lane_row & 7);
  const int swizzle_k = k_chunk ^ Layout::kv_swizzle(k_row);
  const int swizzle_v = lane_chunk ^ Layout::kv_swizzle(lane_row);
  const std::uint32_t q_row_base = shared + Layout::kQ + (warp_row + lane_row) * Layout::kRowBytes;
  const std::uint32_t k_row_base =
      shared + Layout::kK + (part * kTilesN * 8 + k_row) * Layout::kKvRowBytes;
  const std::uint32_t v_row_base =
      shared + Layout::kV + lane_row * Layout::kKvRowBytes + part * kTilesD * 16;

  float o[kRowTiles][kTilesD][4];  // (row tile, d tile, fragment)
  CUTE_UNROLL
  for (int m = 0; m < kRowTiles; ++m) {
    CUTE_UNROLL
    for (int d = 0; d < kTilesD; ++d) {
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) o[m][d][e] = 0.0f;
    }
  }
  OnlineSoftmax<kRows> softmax(params.transform.scale);
  const float headroom =
      kGeneral && !kFp8 ? params.stats.headroom : OnlineSoftmax<kRows>::kHeadroom;

  // ---- One block of keys. ----
  auto compute_scores = [&](float (&s)[kRowTiles][kTilesN][4], std::uint32_t k_sub) {
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      CUTE_UNROLL
      for (int n = 0; n < kTilesN; ++n) {
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) s[m][n][e] = 0.0f;
      }
    }
    if constexpr (kFp8) {
      add_scores<Kv, Tile>(s, q_row_base, swizzle_q, k_sub, swizzle_k);
      return;
    }
    // Fragments are read kAhead steps before their products; a step is one pair of n tiles.
    constexpr int kStepsK = Tile::kHeadDim / 16;
    constexpr int kStepsN = kTilesN / 2;
    constexpr int kSlots = kAhead + 1;
    std::uint32_t b[kSlots][4];
    std::uint32_t a[2][kRowTiles][4];
    auto read_q = [&](int kd) {
      CUTE_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        ldmatrix_x4(a[kd % 2][m], q_row_base + m * 16 * Layout::kRowBytes +
                                      Layout::chunk_offset(swizzle_q, 2 * kd));
      }
    };
    auto read_k = [&](int step) {
      if (step < kStepsK * kStepsN) {
        ldmatrix_x4(b[step % kSlots], k_sub + step % kStepsN * 16 * Layout::kRowBytes +
                                          Layout::chunk_offset(swizzle_k, 2 * (step / kStepsN)));
      }
    };
    read_q(0);
    CUTE_UNROLL
    for (int step = 0; step < kAhead; ++step) read_k(step);
    CUTE_UNROLL
    for (int kd = 0; kd < kStepsK; ++kd) {
      if (kd + 1 < kStepsK) read_q(kd + 1);
      CUTE_UNROLL
      for (int pair = 0; pair < kStepsN; ++pair) {
        const int step = kd * kStepsN + pair;
        read_k(step + kAhead);
        CUTE_UNROLL
        for (int m = 0; m < kRowTiles; ++m) {
          mma<Mma>(s[m][2 * pair], a[kd % 2][m], b[step % kSlots][0], b[step % kSlots][1]);
          mma<Mma>(s[m][2 * pair + 1], a[kd % 2][m], b[step % kSlots][2], b[step % kSlots][3]);
        }
      }
    }
  };

  auto multiply_rows = [&](float (&s)[kRowTiles][kTilesN][4], const float (&factors)[kRows]) {
    __syncwarp();  // keeps this a branch
    CUTE_UNROLL
    for (int i = 0; i < kRowTiles * kTilesN * 4; ++i) {
      s[i / 4 / kTilesN][i / 4 % kTilesN][i % 4] *= factors[i / 4 / kTilesN * 2 + i % 4 / 2];
    }
  };

  auto apply_mask = [&](float (&s)[kRowTiles][kTilesN][4], int first_key) {
    __syncwarp();  // keeps this a branch: predicated, its selects would cost every unmasked block 10 %
    const int key0 = first_key + (lane % 4) * 2;
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = row_at(m * 16 + half * 8 + lane / 4);
        // Seen if lo <= key < hi: one unsigned comparison of the distance from lo.
        const int lo = mask.lo(row);
        const std::uint32_t from_lo = key0 - lo;
        const std::uint32_t extent = max(mask.hi(row) - lo, 0);
        CUTE_UNROLL
        for (int n = 0; n < kTilesN; ++n) {
          CUTE_UNROLL
          for (int e = 0; e < 2; ++e) {
            mask_unless_below(s[m][n][half * 2 + e], from_lo + (n * 8 + e), extent);
          }
        }
      }
    }
  };

  // ---- What only the general variant has. ----
  // Warps without rows see no range: they skip the steps.
  VisibleKeys<Tile> visible{p.mask,
                            mask,
                            request_bit,
                            row_at,
                            row_end,
                            has_rows ? bits_begin : 0,
                            has_rows ? bits_end : 0};
  std::uint32_t found = 0;  // by the lane, of the step
  auto fetch_mask = [&](int first_key) {
    if constexpr (kGeneral) visible.fetch(first_key + part * kTilesN * 8);
  };
  auto find_visible = [&](int first_key) {
    if constexpr (kGeneral) found = visible.find(first_key + part * kTilesN * 8);
  };

  auto transform_general = [&](float (&s)[kRowTiles][kTilesN][4], int first_key, bool capped) {
    GeneralTransform transform = params.general;
    transform.capped = capped;  // a constant here: one branch for all logits
    if constexpr (Tile::kPacked) {
      float logits_scale[2], slope[2];
      int distance[2];
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = half * 8 + lane / 4;
        const int of_head = head + row_at.pack_head(row);
        logits_scale[half] = scale_of(p.logits_scale, of_head);
        slope[half] = p.alibi.slopes == nullptr ? 0.0f : __ldg(p.alibi.slopes + of_head);
        distance[half] = first_key + lane % 4 * 2 - (p.alibi.relative ? row_at(row) : 0);
      }
      transform.apply(reinterpret_cast<float (&)[kTilesN * 4]>(s), logits_scale, slope, distance);
      return;
    }
    const float logits_scale = scale_of(p.logits_scale, head);
    const float slope = p.alibi.slopes == nullptr ? 0.0f : __ldg(p.alibi.slopes + head);
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      const int row = first_row + m * 16 + lane / 4;
      const int key = first_key + (lane % 4) * 2;
      const int from_row = p.alibi.relative ? row : 0;
      const int from_row_8 = p.alibi.relative ? row + 8 : 0;
      transform.apply(reinterpret_cast<float (&)[kTilesN * 4]>(s[m]), {logits_scale, logits_scale},
                      {slope, slope}, {key - from_row, key - from_row_8});
    }
  };

  // Logits transform and mask.
  auto finish_scores = [&](float (&s)[kRowTiles][kTilesN][4], int first_key) {
    const int own_key = first_key + part * kTilesN * 8;
    if constexpr (kGeneral) {
      if (params.transforms) {
        if (params.general.capped) {
          transform_general(s, own_key, true);
        } else {
          transform_general(s, own_key, false);
        }
      }
      const bool all = found == VisibleKeys<Tile>::kAll;
      if (!__all_sync(0xffffffffu, all)) VisibleKeys<Tile>::apply(s, found);
    } else {
      if constexpr (kLogits == Logits::kTransformed) {
        constexpr bool kFewRegisters = Tile::kHeadDim >= 128;
        params.transform.template apply<kFewRegisters>(&s[0][0][0], kRowTiles * kTilesN * 4);
      }
      if (first_key < all_begin || first_key + kStepN > all_end) apply_mask(s, own_key);
    }
  };

  // Each thread's maximum of its part of the rows; takes the loads of the next block along, if asked to.
  using BlockLoads = std::conditional_t<kPaged, PagedLoads<Tile>, PendingLoads<BlockLoader>>;
  using Loads = std::conditional_t<kSharers == 1, BlockLoads, NoLoads>;
  auto take_max = [&](float (&s)[kRowTiles][kTilesN][4], float (&thread_max)[kRows], Loads& next,
                      bool load) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float value = s[r / 2][0][r % 2 * 2];
      CUTE_UNROLL
      for (int n = 0; n < kTilesN; ++n) {
        value = fmaxf(value, fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
        if (load) next.issue(r * kTilesN + n, kRows * kTilesN);
      }
      thread_max[r] = value;
    }
  };
  auto rescale = [&](int r, float factor) {
    CUTE_UNROLL
    for (int d = 0; d < kTilesD; ++d) {
      o[r / 2][d][r % 2 * 2] *= factor;
      o[r / 2][d][r % 2 * 2 + 1] *= factor;
    }
  };
  // Two packed elements of P: tile pair k, row tile pack / 4, fragment register pack % 4, which is (tile 2k, row 0),
  // (2k, row 8), (2k + 1, row 0), (2k + 1, row 8).
  auto make_p = [&](float (&s)[kRowTiles][kTilesN][4], int k, int pack) {
    const int m = pack / 4;
    const int i = pack % 4;
    const int r = m * 2 + i % 2;
    const float* pair = &s[m][2 * k + i / 2][(i % 2) * 2];
    const float p0 = softmax.exponential(r, pair[0]);
    const float p1 = softmax.exponential(r, pair[1]);
    softmax.partial_sum[r] += p0;
    softmax.partial_sum[r] += p1;
    return Factor::pack(p0, p1);
  };

  const SharedRows<Tile> shared_rows(shared_memory, warp, lane);
  auto accumulate = [&](float (&s)[kRowTiles][kTilesN][4], std::uint32_t v_sub) {
    if constexpr (kFp8) {
      add_values<Kv, Tile, kTilesN / 2>(o, v_sub, swizzle_v,
                                        [&](int k, int pack) { return make_p(s, k, pack); });
      return;
    }
    constexpr int kOwnSteps = kTilesN / 2;  // of 16 keys and this warp's P; the other's follow
    constexpr int kStepsK = kOwnSteps * kSharers;
    static_assert(kSharers == 1 || kOwnSteps > 1);
    constexpr int kStepsD = kTilesD / 2;
    constexpr int kSlots = kAhead + 1;
    std::uint32_t b[kSlots][4];
    auto read_v = [&](int step) {
      if (step < kStepsK * kStepsD) {
        const int k = step / kStepsD;
        const int of_part = k < kOwnSteps ? part : part ^ 1;
        const int key = (of_part * kOwnSteps + k % kOwnSteps) * 16;
        ldmatrix_x4_trans(
            b[step % kSlots],
            v_sub + key * Layout::kRowBytes + Layout::chunk_offset(swizzle_v, step % kStepsD * 2));
      }
    };
    CUTE_UNROLL
    for (int step = 0; step < kAhead; ++step) read_v(step);

    // P of the next 16 keys is computed between the products of these.
    constexpr int kPacks = kRowTiles * 4;
    std::uint32_t a[2][kRowTiles][4];
    CUTE_UNROLL
    for (int pack = 0; pack < kPacks; ++pack) a[0][pack / 4][pack % 4] = make_p(s, 0, pack);
    if constexpr (kSharers > 1) shared_rows.write_p(0, a[0]);
    CUTE_UNROLL
    for (int k = 0; k < kStepsK; ++k) {
      if constexpr (kSharers > 1) {
        if (k == kOwnSteps) {
          shared_rows.await_p();
          shared_rows.read_p(0, a[k % 2]);
        }
        if (k >= kOwnSteps && k + 1 < kStepsK) {
          shared_rows.read_p(k + 1 - kOwnSteps, a[(k + 1) % 2]);
        }
      }
      CUTE_UNROLL
      for (int pair = 0; pair < kStepsD; ++pair) {
        const int step = k * kStepsD + pair;
        // Never taken. Left alone, the compiler computes all of P before the first product; it does not
        // move instructions across a possible exit, so exponentials and products alternate (4 % at hd64).
        if (k < kOwnSteps && pair % 2 == 0 && params.order.tiles < 0) asm volatile("exit;");
        read_v(step + kAhead);
        CUTE_UNROLL
        for (int m = 0; m < kRowTiles; ++m) {
          mma<Mma>(o[m][2 * pair], a[k % 2][m], b[step % kSlots][0], b[step % kSlots][1]);
          mma<Mma>(o[m][2 * pair + 1], a[k % 2][m], b[step % kSlots][2], b[step % kSlots][3]);
        }
        if (k + 1 < kOwnSteps) {
          CUTE_UNROLL
          for (int pack = pair * kPacks / kStepsD; pack < (pair + 1) * kPacks / kStepsD; ++pack) {
            a[(k + 1) % 2][pack / 4][pack % 4] = make_p(s, k + 1, pack);
          }
        }
      }
      if constexpr (kSharers > 1) {
        if (k + 1 < kOwnSteps) shared_rows.write_p(k + 1, a[(k + 1) % 2]);
        if (k + 2 == kOwnSteps) shared_rows.p_is_written();
      }
    }
  };

  // ---- Main loop, from the last block to the first. ----
  // A paged block is loaded in three steps: page numbers, addresses of rows, rows. The numbers of the first blocks are
  // read together, to wait once.
  constexpr int kFirstBlocks = kSharers == 1 ? kStages : 2;
  int page[kFirstBlocks];
  if constexpr (kPaged) {
    CUTE_UNROLL
    for (int i = 0; i < kFirstBlocks; ++i) {
      if constexpr (kGeneral) {
        if (kSharers == 1 || i == 0) seen.find(block_end - 1 - i);
      }
      page[i] = pages.fetch(block_end - 1 - i, kSharers == 1 ? block_end - 1 - i : block_end - 1);
    }
  }
  const int last_step = keys.last_step();  // of this warp, in a block
  if constexpr (kGeneral) {
    visible.fetch_last((block_end - 1) * kBlockN + last_step * kStepN + part * kTilesN * 8);
  }
  [[maybe_unused]] std::conditional_t<kFp8, PackedQ<Element, Tile>, int> packed_q(thread);
  if constexpr (kFp8) {
    packed_q.begin(params, work.q_begin, row_begin, row_end, head);
  } else if constexpr (Tile::kPacked) {
    load_packed_q<Tile>(params, shared + Layout::kQ, work.q_begin, row_begin, row_end, head,
                        thread);
  } else {
    RowLoader<Tile, Tile::kBlockM>(shared + Layout::kQ, element_ptr(p.q, work.q_begin, head, 2),
                                   p.q.stride_token, p.head_dim_qk, row_begin, row_begin,
                                   row_end - row_begin, thread)
        .issue_all();
  }
  if constexpr (kSharers == 1) {
    // Past the first block all rows are outside [key_begin, key_end): zeros that nobody reads.
    // A piece of a decode tile may have a block or two in all, and the instructions of loads that it does not need would be a
    // tenth of its time. (The general variant lacks the registers to tell.)
    constexpr bool kSkipsLoads = Tile::kDecodes && !kGeneral;
    CUTE_UNROLL
    for (int i = 0; i < kStages - 1; ++i) {
      if (!kSkipsLoads || block_end - 1 - i >= block_begin) {
        if constexpr (kPaged) {
          pages.store(page[i], block_end - 1 - i, block_end - 1 - i);
        } else if constexpr (kGeneral) {
          seen.find(block_end - 1 - i);
        }
        k_loader(block_end - 1 - i, i, thread).issue_all();
        v_loader(block_end - 1 - i, i, thread).issue_all();
      }
      cute::cp_async_fence();
    }
    if constexpr (kPaged) {
      pages.store(page[kStages - 1], block_end - kStages, block_end - kStages);
    }
    if constexpr (kFp8) packed_q.finish(shared_memory);
    // The blocks whose keys are found an iteration ahead: the next to be loaded, or those whose addresses are.
    constexpr int kSeenAhead = kPaged ? kStages : kStages - 1;
    if constexpr (kGeneral) seen.find(block_end - 1 - kSeenAhead);
    int stage = 0;
    int next_stage = kStages - 1;
    for (int block = block_end - 1; block >= block_begin; --block) {
      cute::cp_async_wait<kStages - 2>();
      __syncthreads();  // this block's K and V have landed; everyone is done with the previous block

      int opaque_thread = thread;  // addresses are computed anew, not kept in registers
      asm volatile("" : "+r"(opaque_thread));
      if constexpr (Tile::kSharesKeys)
        opaque_thread &= Tile::kThreads - 1;  // >= 0: cheap to divide
      Loads next{{k_loader(block - kStages + 1, next_stage, opaque_thread),
                  v_loader(block - kStages + 1, next_stage, opaque_thread)}};
      const bool loads_next = !kSkipsLoads || block - kStages + 1 >= block_begin;
      if constexpr (kPaged) {
        if (loads_next) next.fetch(pages, block - kStages);
      }
      if constexpr (Tile::kSharesKeys) {
        // At once: memory is what takes time, and steps may be another warp's.
        if (loads_next) next.issue_all();
        [[maybe_unused]] float factors[kRows];
        [[maybe_unused]] bool scales = false;
        if constexpr (kFp8) scales = packed_q.read_factors(shared_memory, warp_row, factors);
        CUTE_NO_UNROLL
        for (int sub = last_step; sub >= 0; sub -= keys.groups) {
          const int first_key = block * kBlockN + sub * kStepN;
          const int offset = stage * Layout::kStageBytes + sub * kStepN * Layout::kKvRowBytes;
          const int next_key = first_key - keys.groups * kStepN;
          find_visible(first_key);
          if (kGeneral ? !__any_sync(0xffffffffu, found != 0)
                       : first_key >= any_end || first_key + kStepN <= any_begin) {
            fetch_mask(next_key);
            continue;
          }
          float s[kRowTiles][kTilesN][4];
          float thread_max[kRows];
          compute_scores(s, k_row_base + offset);
          if constexpr (kFp8) {
            if (scales) multiply_rows(s, factors);
          }
          finish_scores(s, first_key);
          take_max(s, thread_max, next, false);
          fetch_mask(next_key);
          if (__any_sync(0xffffffffu, softmax.exceeds(thread_max, headroom))) {
            softmax.reduce_max(thread_max);
            softmax.raise(thread_max, rescale, headroom);
          }
          accumulate(s, v_row_base + offset);
        }
        if constexpr (kPaged) {
          if (loads_next) next.store();
        }
      } else {
        CUTE_UNROLL
        for (int sub = kBlockN / kStepN - 1; sub >= 0; --sub) {
          const int first_key = block * kBlockN + sub * kStepN;
          const int offset = stage * Layout::kStageBytes + sub * kStepN * Layout::kRowBytes;
          const bool loads = sub == kBlockN / kStepN - 1;
          // A warp takes part only where one of its rows sees a key.
          find_visible(first_key);
          if (kGeneral ? __any_sync(0xffffffffu, found != 0)
                       : first_key < any_end && first_key + kStepN > any_begin) {
            float s[kRowTiles][kTilesN][4];
            float thread_max[kRows];
            compute_scores(s, k_row_base + offset);
            finish_scores(s, first_key);
            take_max(s, thread_max, next, loads);
            fetch_mask(first_key - kStepN);
            if (__any_sync(0xffffffffu, softmax.exceeds(thread_max, headroom))) {
              softmax.reduce_max(thread_max);
              softmax.raise(thread_max, rescale, headroom);
            }
            accumulate(s, v_row_base + offset);
          } else {
            if (loads) next.issue(0, 1);
            fetch_mask(first_key - kStepN);
          }
        }
      }
      if constexpr (kGeneral) seen.find(block - 1 - kSeenAhead);
      cute::cp_async_fence();
      stage = stage + 1 == kStages ? 0 : stage + 1;
      next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;
    }
  } else {
    // One stage: V of a block is loaded in a burst during Q K^T, K of the next during P V. The first block's are
    // under way from the start.
    if constexpr (kPaged) pages.store(page[0], block_end - 1, block_end - 1);
    if (block_begin < block_end) {
      if constexpr (kGeneral && !kPaged) seen.find(block_end - 1);
      k_loader(block_end - 1, 0, thread).issue_all();
      cute::cp_async_fence();
      v_loader(block_end - 1, 0, thread).issue_all();
    }
    cute::cp_async_fence();
    if constexpr (kPaged) pages.store(page[1], block_end - 2, block_end - 1);
    Loads none;
    // All warps take part in all blocks, even those without a row that sees a key: they meet at the same barriers.
    for (int block = block_end - 1; block >= block_begin; --block) {
      cute::cp_async_wait<1>();
      __syncthreads();  // A (the letters are those of the drawing in shared_rows.h)

      int opaque_thread = thread;  // addresses are computed anew, not kept in registers
      asm volatile("" : "+r"(opaque_thread));
      if (block + 1 < block_end) v_loader(block, 0, opaque_thread).issue_all();
      float s[kRowTiles][kTilesN][4];
      float thread_max[kRows];
      find_visible(block * kBlockN);
      compute_scores(s, k_row_base);
      finish_scores(s, block * kBlockN);
      take_max(s, thread_max, none, false);
      fetch_mask((block - 1) * kBlockN);
      if constexpr (kGeneral) seen.find(block - 1);
      if constexpr (kPaged) page[0] = pages.fetch(block - 2, block - 1);
      cute::cp_async_fence();
      cute::cp_async_wait<0>();
      const bool raise = __syncthreads_or(softmax.exceeds(thread_max, headroom));  // B

      asm volatile("" : "+r"(opaque_thread));
      if (block > block_begin) k_loader(block - 1, 0, opaque_thread).issue_all();
      cute::cp_async_fence();
      if constexpr (kPaged) pages.store(page[0], block - 2, block - 1);
      if (raise) {
        softmax.reduce_max(thread_max);
        shared_rows.write_rows(thread_max);
        __syncthreads();
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          thread_max[r] = fmaxf(thread_max[r], shared_rows.read_row(r));
        }
        softmax.raise(thread_max, rescale, headroom);
      }
      accumulate(s, v_row_base);
      cute::cp_async_fence();  // no loads: stands for V, which the wait at A leaves under way
    }
  }
  float row_m[kRows], row_sum[kRows];
  auto finish_softmax = [&] {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) softmax.finish(r, row_m[r], row_sum[r]);
  };
  if constexpr (kSharers > 1) {
    finish_softmax();
    shared_rows.write_rows(row_sum);
  }
  cute::cp_async_wait<0>();
  __syncthreads();  // Q has landed even if there was no key; its rows become the output's
  if (!has_rows) return;

  // ---- Epilogue: normalise, stage the warp's part of its rows in shared memory, write 16 bytes per lane. ----
  if constexpr (kSharers > 1) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) row_sum[r] += shared_rows.read_row(r);
  } else {
    finish_softmax();
  }
  if constexpr (Tile::kDecodes) {
    DecodeRows<Element, Tile, kGeneral>{params, work, shared_memory, row_begin, row_end - row_begin,
                                        head,   warp, keys.groups}
        .store(o, row_m, row_sum);
    return;
  }
  // Masked keys have p = 0, but their V may be infinite: a row without keys is 0 whatever V is.
  bool no_key[kRows];
  bool any_without = false;
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    no_key[r] = has_no_key(row_m[r], row_sum[r]);
    any_without |= no_key[r];
  }
  if (__any_sync(0xffffffffu, any_without)) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int d = 0; d < kTilesD; ++d) {
        if (no_key[r]) o[r / 2][d][r % 2 * 2] = o[r / 2][d][r % 2 * 2 + 1] = 0.0f;
      }
    }
  }
  if constexpr (Tile::kSharesKeys) {
    if (!keys.merge(shared_memory, lane, o, row_m, row_sum)) return;
  }
  if constexpr (Tile::kPacked) {
    if constexpr (kRowTiles == 1) {
      store_packed<Element, Tile, kGeneral>(params, work, shared_memory, row_at, row_end, head, o,
                                            row_m, row_sum);
    } else {
      static_assert(!kGeneral);
      CUTE_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        const WarpRows<Tile> rows{row_begin, warp_row + m * 16, params.pack};
        store_packed<Element, Tile, kGeneral>(
            params, work, shared_memory, rows, row_end, head,
            reinterpret_cast<const float (&)[1][kTilesD][4]>(o[m]),
            {row_m[2 * m], row_m[2 * m + 1]}, {row_sum[2 * m], row_sum[2 * m + 1]});
      }
    }
    return;
  }
  if constexpr (kGeneral) {
    if (p.stats != nullptr && part == 0 && lane % 4 == 0) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int row = row_begin + warp_row + (r / 2) * 16 + (r % 2) * 8 + lane / 4;
        if (row < row_end) {
          params.stats.store(p, std::int64_t(work.q_begin) + row, head, row_m[r], row_sum[r]);
        }
      }
    }
  }
  [[maybe_unused]] const float output_scale = kGeneral ? scale_of(p.output_scale, head) : 1.0f;
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const FinishedRow finished =
        finish_row(row_m[r], row_sum[r], p.sinks, head, [&](float weight) { rescale(r, weight); });
    float scale = finished.scale(p.v_scale);
    if constexpr (kGeneral) scale *= output_scale;
    const int row = warp_row + (r / 2) * 16 + (r % 2) * 8 + lane / 4;
    CUTE_UNROLL
    for (int d = 0; d < kTilesD; ++d) {
      const std::uint32_t packed =
          Element::pack(o[r / 2][d][(r % 2) * 2] * scale, o[r / 2][d][(r % 2) * 2 + 1] * scale);
      *reinterpret_cast<std::uint32_t*>(shared_memory + Layout::kQ +
                                        Layout::offset(row, part * kTilesD + d) + (lane % 4) * 4) =
          packed;
    }
    if (p.lse != nullptr && part == 0 && lane % 4 == 0 && row_begin + row < row_end) {
      p.lse[(work.q_begin + std::int64_t(row_begin + row)) * p.lse_stride_token +
            head * p.lse_stride_head] = finished.lse();
    }
  }
  __syncwarp();
  char* out = static_cast<char*>(p.o.data) +
              2 * (std::int64_t(work.q_begin) * p.o.stride_token + head * p.o.stride_head);
  constexpr int kPartChunks = Layout::kChunks / kSharers;
  constexpr int kRowsPerStep = 32 / kPartChunks;
  const int out_chunk = part * kPartChunks + lane % kPartChunks;
  CUTE_UNROLL
  for (int i = 0; i < kRowTiles * 16 / kRowsPerStep; ++i) {
    const int row = warp_row + i * kRowsPerStep + lane / kPartChunks;
    if (row_begin + row < row_end && out_chunk * 8 < p.head_dim_vo) {
      const uint4 value = *reinterpret_cast<const uint4*>(shared_memory + Layout::kQ +
                                                          Layout::offset(row, out_chunk));
      *reinterpret_cast<uint4*>(out + 2 * (std::int64_t(row_begin + row) * p.o.stride_token) +
                                out_chunk * 16) = value;
    }
  }
}

}  // namespace cutlass_kernels::fa2
