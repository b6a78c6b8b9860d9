// Host side of the fa3 backend: which tile, which tensor maps, which grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "common/packing.h"
#include "cuda_failure.h"
#include "device.h"
#include "fa3/kernel.h"
#include "fa3/tensor_map.h"
#include "registry.h"

namespace cutlass_kernels::fa3 {

template <class Tile>
std::int64_t tile_count(const AttentionParams& params) {
  return (params.total_q + Tile::kBlockM - 1) / Tile::kBlockM * params.num_qo_heads;
}

// Keys that a mask leaves to a request, on average. Where only the device knows how many there are, as many as queries.
inline std::int64_t keys_in_mask(const AttentionParams& params) {
  const std::int64_t total = params.total_kv > 0 ? params.total_kv : params.total_q;
  std::int64_t keys = total / params.batch_size;
  if (params.window_left >= 0) keys = std::min(keys, std::int64_t(params.window_left) + 1);
  if (params.chunk_size > 0) keys = std::min<std::int64_t>(keys, params.chunk_size);
  return keys;
}

// A swizzle pattern is eight rows: boxes of fewer rows, which no page splits, would not start at one.
inline bool gathers(const AttentionParams& params) { return params.pages.page_size % 8 != 0; }

template <class Tile>
int packed_tile_rows(const AttentionParams& params) {
  return Tile::kConsumers * (kWarpgroupRows / packed_heads(params, kWarpgroupRows));
}

template <class Packed>
TileShape packed_tile_shape(const AttentionParams& params, int heads) {
  TileShape shape{packed_tile_rows<Packed>(params), kPacked, heads, Packed::kBlocksPerSm};
  shape.splits_without_list = true;
  return shape;
}

// The tile of a problem.
template <int HeadDimQk, int HeadDimVo>
TileShape tile_shape(const AttentionParams& params, int compute_capability) {
  using Tiles = TileTable<HeadDimQk, HeadDimVo>;
  const int heads = packed_heads(params, kWarpgroupRows);
  if (packs(params, heads, Tiles::Large::kBlockM)) {
    return packed_tile_shape<typename Tiles::Packed>(params, heads);
  }
  const bool general = GeneralTransform::needed(params);
  const bool masked = params.causal || params.window_left >= 0 || params.chunk_size > 0;
  const bool small = compute_capability == 0 ||  // an unknown device: the smallest
                     params.total_q / params.batch_size <= Tiles::Small::kBlockM ||
                     (masked && keys_in_mask(params) <= Tiles::kSmallUpToKeys) ||
                     tile_count<typename Tiles::Large>(params) < Tiles::kFewTiles;
  if (gathers(params)) {
    return {general ? Tiles::GatherGeneral::kBlockM
            : small ? Tiles::GatherSmall::kBlockM
                    : Tiles::Gather::kBlockM,
            kGather};
  }
  if (general) return {Tiles::General::kBlockM, kGeneral};
  return {small ? Tiles::Small::kBlockM : Tiles::Large::kBlockM, kRows};
}

// Which of the two tiles of the same rows: whether a mask leaves few keys to a row, on average.
inline bool few_keys(const AttentionParams& params) {
  const std::int64_t keys = keys_in_mask(params);
  const std::int64_t hidden =
      params.causal ? std::min(keys, params.total_q / params.batch_size) / 2 : 0;
  return keys - hidden <=
         1024;  // hd128, 16k tokens: 3 % faster at 512 keys, with and without a mask; -3 % at 8k
}

inline Status make_maps_of_rows(const AttentionParams& p, int block_n,
                                KernelParams* kernel_params) {
  // Without keys there may be no K and V, but there must be a map, all of which is out of bounds.
  const bool keys = p.total_kv > 0;
  const void* k = keys ? p.k.data : p.q.data;
  const void* v = keys ? p.v.data : p.q.data;
  const int kv_heads = keys ? p.num_kv_heads : 1;
  const RowsOfTensor k_rows{k,          p.k.stride_token, p.k.stride_head,
                            p.total_kv, kv_heads,         p.head_dim_qk};
  const RowsOfTensor v_rows{v,          p.v.stride_token, p.v.stride_head,
                            p.total_kv, kv_heads,         p.head_dim_vo};
  Status made = make_tensor_map("k", k_rows, p.kv_dtype, block_n, &kernel_params->k_map);
  return made.ok() ? make_tensor_map("v", v_rows, p.kv_dtype, block_n, &kernel_params->v_map)
                   : made;
}

// What both strides of a matrix are multiples of, and the strides in it. 32 bits hold the place of every row: of 64 GB or more,
// as strides are multiples of 16 bytes, and in practice of a row.
inline Status make_units(const char* name, const PagesOfMatrix& pages, const PageTable& table,
                         PageUnits* units) {
  const std::int64_t slot_bytes = table.page_size > 1 ? pages.slot_bytes : 0;
  const std::int64_t unit = std::gcd(std::gcd(pages.page_bytes, slot_bytes), std::int64_t(1) << 30);
  const std::int64_t page = pages.page_bytes / unit;
  const std::int64_t slot = slot_bytes / unit;
  // Below: 2^32 - 1 stands for no row. As a quotient, for the product may not fit.
  const std::int64_t most = 0xfffffffe - (table.page_size - 1) * slot;
  if (most < 0 || (page > 0 && table.num_pages - 1 > most / page)) {
    return Status::invalid(
        "fa3 counts places of rows in 32 bits: " + std::to_string(table.num_pages) + " pages of " +
        name + ", " + std::to_string(pages.page_bytes) + " bytes apart, and slots " +
        std::to_string(slot_bytes) + " bytes apart are too many. Use backend='fa2'.");
  }
  *units = {std::uint32_t(unit), std::uint32_t(page), std::uint32_t(slot)};
  return Status::success();
}

inline Status make_maps_of_pages(const AttentionParams& p, int block_n,
                                 KernelParams* kernel_params) {
  const PageTable& table = p.pages;
  const bool any = table.num_pages > 0;  // else a map that nothing is read through
  const void* k = any ? p.k.data : p.q.data;
  const void* v = any ? p.v.data : p.q.data;
  const int heads = any ? p.num_kv_heads : 1;
  const std::int64_t pages = std::max<std::int64_t>(table.num_pages, 1);
  kernel_params->page_size = FastDivisor(std::uint32_t(table.page_size));
  kernel_params->num_pages = std::uint32_t(std::clamp<std::int64_t>(table.num_pages, 0, kNoPage));
  const int bytes = size_of(p.kv_dtype);
  kernel_params->k_pages = {table.indices, 0, bytes * table.k_stride_page,
                            bytes * p.k.stride_token};
  kernel_params->v_pages = {table.v_indices == nullptr ? table.indices : table.v_indices,
                            std::uint32_t(table.v_offset), bytes * table.v_stride_page,
                            bytes * p.v.stride_token};
  if (gathers(p)) {
    Status made = make_units("k", kernel_params->k_pages, table, &kernel_params->k_units);
    return made.ok() ? make_units("v", kernel_params->v_pages, table, &kernel_params->v_units)
                     : made;
  }
  kernel_params->box_rows = std::gcd(table.page_size, block_n & -block_n);
  while (1 << kernel_params->box_rows_log2 < kernel_params->box_rows)
    ++kernel_params->box_rows_log2;
  const PagesOfTensor k_pages{k,
                              p.k.stride_token,
                              p.k.stride_head,
                              table.k_stride_page,
                              any ? table.page_size : 1,
                              heads,
                              pages,
                              p.head_dim_qk};
  const PagesOfTensor v_pages{v,
                              p.v.stride_token,
                              p.v.stride_head,
                              table.v_stride_page,
                              any ? table.page_size : 1,
                              heads,
                              pages,
                              p.head_dim_vo};
  const int rows =
      kernel_params->box_rows;  // of an empty cache, too: its pages lie outside the map
  Status made = make_tensor_map("k", k_pages, p.kv_dtype, rows, &kernel_params->k_map);
  return made.ok() ? make_tensor_map("v", v_pages, p.kv_dtype, rows, &kernel_params->v_map) : made;
}

inline Status make_maps(const AttentionParams& p, int block_n, KernelParams* kernel_params) {
  kernel_params->box_rows = 0;
  kernel_params->box_rows_log2 = 0;
  Status made = p.pages.page_size > 0 ? make_maps_of_pages(p, block_n, kernel_params)
                                      : make_maps_of_rows(p, block_n, kernel_params);
  if (!made.ok()) return made;
  const RowsOfTensor q{p.q.data,  p.q.stride_token, p.q.stride_head,
                       p.total_q, p.num_qo_heads,   p.head_dim_qk};
  const RowsOfTensor o{p.o.data,  p.o.stride_token, p.o.stride_head,
                       p.total_q, p.num_qo_heads,   p.head_dim_vo};
  if (p.schedule.packed_heads > 0) {  // O is not written by TMA
    return make_packed_tensor_map("q", q, p.q_dtype, p.schedule.packed_heads,
                                  kernel_params->packed.tokens, &kernel_params->q_map);
  }
  if (Status of_q = make_tensor_map("q", q, p.q_dtype, kWarpgroupRows, &kernel_params->q_map);
      !of_q.ok()) {
    return of_q;
  }
  if (size_of(p.o_dtype) == 1) return Status::success();  // O of e4m3 neither
  return make_tensor_map("o", o, p.o_dtype, 16 /* rows of a warp */, &kernel_params->o_map);
}

template <class Element, class Tile, Logits kLogits>
Status launch_tile(const AttentionParams& params, cudaStream_t stream) {
  KernelParams kernel_params;
  kernel_params.attention = params;
  const AttentionParams& p = kernel_params.attention;
  Device device;
  if (Status asked = current_device(&device); !asked.ok()) return asked;
  const int blocks = device.multiprocessors * Tile::kBlocksPerSm;

  const int tiles = p.schedule.capacity;
  const int packed_heads = std::max(p.schedule.packed_heads, 1);
  kernel_params.heads = p.num_qo_heads / packed_heads;
  kernel_params.packed.heads = FastDivisor(std::uint32_t(packed_heads));
  kernel_params.packed.tokens = kWarpgroupRows / packed_heads;
  kernel_params.packed.last_token = (kWarpgroupRows - 1) / packed_heads;
  // Dealt out beforehand, tiles even out only where they come in one order of lengths, without sections.
  const bool dealt = p.schedule.next_tile == nullptr;
  kernel_params.order = dealt ? TileOrder::make(p, tiles, std::int64_t(tiles) * kernel_params.heads,
                                                std::numeric_limits<std::int64_t>::max())
                              : TileOrder::make(p, tiles, 2 * blocks);
  kernel_params.transform = LogitsTransform::make(params);
  kernel_params.general = GeneralTransform::make(params);
  kernel_params.stats = RowStats::make(params);
  kernel_params.changes_logits = GeneralTransform::changes(params);
  if (kLogits == Logits::kGeneral) kernel_params.transform.scale = kernel_params.general.scale;
  kernel_params.chunk = FastDivisor(std::uint32_t(p.chunk_size));
  kernel_params.group_size = FastDivisor(std::uint32_t(p.num_qo_heads / p.num_kv_heads));
  kernel_params.rows = RowTiles::make(p);

  if (Status made = make_maps(p, Tile::kBlockN, &kernel_params); !made.ok()) return made;

  auto* kernel = &attention_kernel<Element, Tile, kLogits>;
  constexpr int kBytes = sizeof(Shared<Tile>);
  static_assert(kBytes * Tile::kBlocksPerSm <= (227 << 10) - 1024 * (Tile::kBlocksPerSm - 1),
                "fa3: the shared memory of an SM is 227 KB for one block, and 1 KB less for each "
                "further one.");
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(unsigned(std::min<std::int64_t>(blocks, std::int64_t(tiles) * kernel_params.heads)));
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  static DoneOnDevices allowed;  // this kernel, so much shared memory
  const cudaError_t error =
      launch_with_shared_memory(config, kernel, kernel_params, device.index, &allowed);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the fa3 kernel", error);
}

inline Status no_such_tile(const AttentionParams& params) {
  return Status::invalid("The schedule is for tiles of " +
                         std::to_string(params.schedule.tile_rows) + " rows (kind " +
                         std::to_string(params.schedule.tile_kind) +
                         "), but fa3 has none such for these head dimensions, this mask and these "
                         "pages: make it with make_schedule() from the same parameters.");
}

// The kernel for one head's rows.
template <class Element, class Tiles, Logits kLogits>
Status launch_rows(const AttentionParams& params, cudaStream_t stream) {
  using Large = typename Tiles::Large;
  using FewKeys = typename Tiles::FewKeys;
  using Small = typename Tiles::Small;
  static_assert(Large::kBlockM == FewKeys::kBlockM && Small::kBlockM <= Large::kBlockM);
  const int rows = params.schedule.tile_rows;
  if (rows == Large::kBlockM) {
    if constexpr (kLogits == Logits::kPlain) {
      if (params.skip_softmax_factor > 0.0f) {
        return launch_tile<Element, Large, Logits::kSkipping>(params, stream);
      }
    }
    return few_keys(params) ? launch_tile<Element, FewKeys, kLogits>(params, stream)
                            : launch_tile<Element, Large, kLogits>(params, stream);
  }
  return rows == Small::kBlockM ? launch_tile<Element, Small, kLogits>(params, stream)
                                : no_such_tile(params);
}

template <class Element, class Tile>
Status launch_logits(const AttentionParams& params, cudaStream_t stream) {
  return GeneralTransform::needed(params) || LogitsTransform::needed(params)
             ? launch_tile<Element, Tile, Logits::kGeneral>(params, stream)
             : launch_tile<Element, Tile, Logits::kPlain>(params, stream);
}

template <class Element, class Tile>
Status launch_capped(const AttentionParams& params, cudaStream_t stream) {
  return LogitsTransform::needed(params)
             ? launch_tile<Element, Tile, Logits::kTransformed>(params, stream)
             : launch_tile<Element, Tile, Logits::kPlain>(params, stream);
}

// The kernel for pages too small for TMA.
template <class Element, class Tiles>
Status launch_gather(const AttentionParams& params, cudaStream_t stream) {
  using Gather = typename Tiles::Gather;
  using Small = typename Tiles::GatherSmall;
  using General = typename Tiles::GatherGeneral;
  const int rows = params.schedule.tile_rows;
  if (!GeneralTransform::needed(params)) {
    if (rows == Gather::kBlockM) return launch_capped<Element, Gather>(params, stream);
    if (rows == Small::kBlockM) return launch_capped<Element, Small>(params, stream);
  }
  return rows == General::kBlockM ? launch_tile<Element, General, Logits::kGeneral>(params, stream)
                                  : no_such_tile(params);
}

template <class Packed>
bool is_packed_schedule(const AttentionParams& params) {
  return params.schedule.tile_kind == kPacked &&
         params.schedule.packed_heads == packed_heads(params, kWarpgroupRows) &&
         params.schedule.tile_rows == packed_tile_rows<Packed>(params);
}

template <class Element, int HeadDimQk, int HeadDimVo>
Status launch(const AttentionParams& params, cudaStream_t stream) {
  using Tiles = TileTable<HeadDimQk, HeadDimVo>;
  const bool general = GeneralTransform::needed(params);
  switch (params.schedule.tile_kind) {
    case kPacked:
      if (!is_packed_schedule<typename Tiles::Packed>(params)) return no_such_tile(params);
      return gathers(params) ? launch_logits<Element, typename Tiles::PackedGather>(params, stream)
                             : launch_logits<Element, typename Tiles::Packed>(params, stream);
    case kGather:
      if (!gathers(params)) return no_such_tile(params);
      return launch_gather<Element, Tiles>(params, stream);
    case kGeneral:
      if (gathers(params) || params.schedule.tile_rows != Tiles::General::kBlockM) {
        return no_such_tile(params);
      }
      return launch_tile<Element, typename Tiles::General, Logits::kGeneral>(params, stream);
    case kRows:
      if (general || gathers(params)) return no_such_tile(params);
      return LogitsTransform::needed(params)
                 ? launch_rows<Element, Tiles, Logits::kTransformed>(params, stream)
                 : launch_rows<Element, Tiles, Logits::kPlain>(params, stream);
  }
  return no_such_tile(params);
}

}  // namespace cutlass_kernels::fa3
