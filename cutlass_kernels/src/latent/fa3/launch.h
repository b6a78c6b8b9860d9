// Host side: which problems the kernel takes, its tile, its launch.
#pragma once

#include <algorithm>
#include <limits>
#include <string>

#include "fa3/launch.h"
#include "fa3/tensor_map.h"
#include "latent/fa3/kernel.h"
#include "schedule/requests.h"

namespace cutlass_kernels::mla {

inline Candidates candidates(const AttentionParams& params, const Device&) {
  TileShape shape = fa3::packed_tile_shape<Tile>(params, packed_heads(params, fa3::kWarpgroupRows));
  shape.has_shares = true;
  if (params.pages.slots_per_page > 0) {
    // A split writes 2 KB for each of its heads, which are read again. Up to 32 heads, splits may be short. With more,
    // they are so only of few KV blocks: with 16 splits instead of 8, 4 rows of 128 heads over 2048 slots take 32 us
    // instead of 25.
    constexpr int kFewSplits = 10, kMostBlocks = 4;
    const int blocks = (params.max_kv_len + Tile::kBlockN - 1) / Tile::kBlockN;
    const int least = shape.packed_heads <= 16   ? 1
                      : shape.packed_heads <= 32 ? 2
                                                 : std::clamp((blocks + kFewSplits - 1) / kFewSplits, 1, kMostBlocks);
    shape.least_split_keys = least * Tile::kBlockN;
  }
  return {{"packed", shape, {}}};
}

// Of quantized latent caches.
inline Status describe_caches(const LaunchParams& p, fa3::KernelParams* out) {
  const fa3::PagesOfMatrix& k = out->k_pages;
  const auto slots_of = [](std::int64_t pages, int per_page) {
    return std::uint32_t(std::clamp<std::int64_t>(pages, 0, fa3::kNoPage / per_page) * per_page);
  };
  out->first_keys = std::numeric_limits<int>::max();
  const bool has_lists = p.pages.table_width > 0;  // else some memory to read instead
  out->caches[0] = {static_cast<const char*>(p.k.data),
                    has_lists ? k.indices : static_cast<const std::int32_t*>(p.q.data),
                    p.seqused_k,
                    has_lists ? p.pages.table_stride : 0,
                    k.page_bytes,
                    out->page_size,
                    out->k_units,
                    slots_of(p.pages.num_pages, p.pages.slots_per_page),
                    p.pages.table_width};
  const SecondSlots& second = p.second;
  if (second.data == nullptr) {
    out->caches[1] = out->caches[0];
    return Status::success();
  }
  out->first_keys = keys_before_second(p);
  PageTable table;
  table.slots_per_page = second.slots_per_page;
  table.num_pages = second.num_pages;
  fa3::PageUnits units;
  const fa3::PagesOfMatrix pages{second.indices, 0, second.stride_page, second.stride_token};
  if (Status made = fa3::make_units("second", pages, table, &units); !made.ok()) return made;
  out->caches[1] = {static_cast<const char*>(second.data),
                    second.indices,
                    second.lengths,
                    second.table_stride,
                    second.stride_page,
                    FastDivisor(std::uint32_t(second.slots_per_page)),
                    units,
                    slots_of(second.num_pages, second.slots_per_page),
                    second.table_width};
  return Status::success();
}

// The latent columns as k_map and q_map, those of the position as the maps that load.h names.
inline Status make_maps(const LaunchParams& params, int block_n, fa3::KernelParams* out) {
  constexpr std::int64_t kOffset = 2 * kLatentDim;  // bytes
  const bool has_positions = params.head_dim_qk > kLatentDim;
  LaunchParams latent = params, rope = params;
  latent.head_dim_qk = kLatentDim;
  rope.head_dim_qk = kRopeDim;
  const auto behind = [](const ConstTensorView& latent_columns, const ConstTensorView& own) {
    if (own.data != nullptr || latent_columns.data == nullptr) return own;
    return ConstTensorView{static_cast<const char*>(latent_columns.data) + kOffset, latent_columns.stride_token,
                           latent_columns.stride_head};
  };
  rope.q = behind(params.q, params.q_rope);
  rope.k = behind(params.k, params.k_rope);
  if (params.k_rope.data != nullptr) rope.pages.k_stride_page = params.pages.k_rope_stride_page;
  fa3::KernelParams of_rope = *out;
  if (Status made = fa3::make_maps(latent, block_n, out); !made.ok()) return made;
  if (has_positions) {
    if (Status made = fa3::make_maps(rope, block_n, &of_rope); !made.ok()) return made;
    out->o_map = of_rope.q_map;
    out->v_map = of_rope.k_map;
    out->v_units = of_rope.k_units;
  }
  if (params.pages.slots_per_page == 0) return Status::success();
  const fa3::RowsOfTensor o{params.o.data,  params.o.stride_token, params.o.stride_head,
                            params.total_q, params.num_qo_heads,   kLatentDim};
  Status made = fa3::make_output_map(o, params.o_dtype, params.plan.packed_heads, kHalfPanels, &out->k_map);
  return made.ok() && token_format(params.kv_dtype).bytes > 0 ? describe_caches(params, out) : made;
}

inline std::string refusal(const AttentionParams& p) {
  if (std::string fault = common_refusal(p); !fault.empty()) return fault;
  if (std::string fault = fa3::refusal(p); !fault.empty()) return fault;
  // Columns with a tensor of their own have maps of their own.
  AttentionParams rope = p;
  if (p.q_rope.data != nullptr) rope.q = p.q_rope;
  if (p.k_rope.data != nullptr) {
    rope.k = p.k_rope;
    rope.pages.k_stride_page = p.pages.k_rope_stride_page;
  }
  return fa3::refusal(rope, "q_rope", "k_rope");
}

template <class Element, class Tile>
Status launch_tile(const LaunchParams& params, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<Tile>);
  static_assert(kBytes <= 227 << 10, "mla: an SM has 227 KB of shared memory for a CTA.");
  static DoneOnDevices allowed;  // this kernel to use kBytes
  const fa3::KernelFacts facts{&attention_kernel<Element, Tile>,
                               Tile::kThreads,
                               kBytes,
                               Tile::kBlockN,
                               Tile::kCtasPerSm,
                               Tile::kCtasPerTile,
                               Tile::kCtasPerTile,
                               false,
                               &make_maps,
                               Tile::kQRows};
  return fa3::enqueue_kernel(facts, params, stream, &allowed);
}

// Of keys by slots whose tokens are records of a quantized latent cache.
template <class Element, DType kTokens>
Status launch_quantized(const LaunchParams& params, cudaStream_t stream) {
  if (!fa3::is_packed_schedule<Tile>(params)) return fa3::no_such_tile(params);
  if (std::string fault = refusal(params); !fault.empty()) {
    return Status::invalid(std::move(fault));
  }
  if (params.plan.packed_heads <= FewHeadsTile<kTokens>::kQRows) {
    return launch_tile<Element, FewHeadsTile<kTokens>>(params, stream);
  }
  const int head_tiles = params.num_qo_heads / params.plan.packed_heads;
  return head_tiles % 2 == 0 ? launch_tile<Element, QuantizedPairTile<kTokens>>(params, stream)
                             : launch_tile<Element, QuantizedTile<kTokens>>(params, stream);
}

template <class Element>
Status launch(const LaunchParams& params, cudaStream_t stream) {
  if (!fa3::is_packed_schedule<Tile>(params)) return fa3::no_such_tile(params);
  // The plan may have been made for other tensors: values of their own would not be read.
  if (std::string fault = refusal(params); !fault.empty()) {
    return Status::invalid(std::move(fault));
  }
  if (params.pages.slots_per_page == 0) return launch_tile<Element, Tile>(params, stream);
  return params.head_dim_qk == kLatentDim ? launch_tile<Element, NarrowSlotsTile>(params, stream)
                                          : launch_tile<Element, SlotsTile>(params, stream);
}

}  // namespace cutlass_kernels::mla
