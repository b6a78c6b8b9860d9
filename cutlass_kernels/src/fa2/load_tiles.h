// Loads of Q, and of K and V from wherever they lie.
#pragma once

#include <cute/config.hpp>

#include <cstdint>
#include <type_traits>

#include "fa2/load.h"
#include "fa2/load_pages.h"
#include "fa2/packed_rows.h"
#include "fa2/params.h"
#include "fa2/shared_memory.h"
#include "fa2/softmax.h"
#include "fa2/tile_work.h"

namespace cutlass_kernels::fa2 {

// ---- Loads of a tile's queries, for each kind of tile:
//   begin()         issues them; those of keys and values may follow
//   finish()        puts into shared memory what begin() has read into registers
//   read_factors()  beside 8-bit keys: what the scores of a warp's rows are to be multiplied by. After a barrier.

// 16-bit queries beside 16-bit keys: straight into shared memory.
template <class Tile>
struct CopiedQ {
  using Layout = SharedLayout<Tile>;

  int thread;

  CUTE_DEVICE CopiedQ(const KernelParams&, int thread_) : thread(thread_) {}

  CUTE_DEVICE void begin(const KernelParams& params, const TileWork& work, std::uint32_t shared) {
    const LaunchParams& p = params.attention;
    if constexpr (Tile::kPacked) {
      load_packed_q<Tile>(params, shared + Layout::kQ, work.item.q_begin, work.row_begin, work.row_end, work.head,
                          thread);
    } else {
      RowLoader<Tile, Tile::kBlockM>(shared + Layout::kQ, element_ptr(p.q, work.item.q_begin, work.head, 2),
                                     p.q.stride_token, p.head_dim_qk, work.row_begin, work.row_begin,
                                     work.row_end - work.row_begin, thread)
          .issue_all();
    }
  }
  CUTE_DEVICE void finish(char*) {}
};

// Beside keys of 8 bits: converted to fp16 on the way.
template <class Tile>
struct ConvertedQ : PackedQ<Tile> {
  using Base = PackedQ<Tile>;
  using Base::Base;

  CUTE_DEVICE void begin(const KernelParams& params, const TileWork& work, std::uint32_t) {
    Base::begin(params, work.item.q_begin, work.row_begin, work.row_end, work.head);
  }
};

template <class Tile>
using QLoader = std::conditional_t<Tile::kKvBytes == 1, ConvertedQ<Tile>, CopiedQ<Tile>>;

// ---- Where the K and V of a tile come from: rows of tensors, or pages of a cache.
//
// Both kinds of source have
//   k(), v()  loads of a KV block into a stage, to be issued at once
//   loads()   both, to be issued piecemeal
// Before them come two steps, which only some variants have: `pages` reads page indices and writes addresses of rows
// (load_pages.h), and `seen` finds which keys of a KV block some row sees by a bit mask (load_pages.h): for pages
// before their indices are read, for rows before they are loaded.

// Where the rows of K and V may lie.
enum class KvRows {
  kInTensors,  // a stride apart
  kInPages,    // each by its address
  kInEither,   // each by its address: short queries take up to 14 % longer over tensors, 5 % over pages
};

// kSeen: whether there may be a bit mask.
template <class Tile, bool kSeen>
struct RaggedKv {
  static constexpr bool kPaged = false;
  using Layout = SharedLayout<Tile>;
  using Loader =
      std::conditional_t<kSeen, SeenRowLoader<Tile>, RowLoader<Tile, Tile::kBlockN, Tile::kKvBytes, Tile::kDecodes>>;
  using Loads = PendingLoads<Loader>;
  static constexpr int kFoundAhead = Tile::kStages - 1;  // KV blocks: the next one to be loaded

  const LaunchParams& p;
  SeenKeys<Tile>& seen;
  std::uint32_t shared;
  int kv_begin;  // the request's first row
  int kv_head;
  int key_begin;  // keys outside [key_begin, key_begin + key_extent) are not loaded
  int key_extent;

  CUTE_DEVICE RaggedKv(const KernelParams& params, const TileWork& work, SeenKeys<Tile>& seen_, char*,
                       std::uint32_t shared_)
      : p(params.attention),
        seen(seen_),
        shared(shared_),
        kv_begin(work.item.kv_begin),
        kv_head(work.kv_head),
        key_begin(work.key_begin),
        key_extent(work.key_end - work.key_begin) {}

  CUTE_DEVICE Loader k(int block, int stage, int thread) const {
    return loader(p.k, p.head_dim_qk, Layout::kK, block, stage, thread);
  }
  CUTE_DEVICE Loader v(int block, int stage, int thread) const {
    return loader(p.v, p.head_dim_vo, Layout::kV, block, stage, thread);
  }
  CUTE_DEVICE Loads loads(int block, int stage, int thread) const {
    return {{k(block, stage, thread), v(block, stage, thread)}};
  }

 private:
  CUTE_DEVICE Loader loader(const ConstTensorView& view, int head_dim, int offset, int block, int stage,
                            int thread) const {
    Loader loader(shared + offset + stage * Layout::kStageBytes, element_ptr(view, kv_begin, kv_head, Tile::kKvBytes),
                  view.stride_token, head_dim, block * Tile::kBlockN, key_begin, key_extent, thread);
    if constexpr (kSeen) loader.take_only(seen, thread);
    return loader;
  }
};

template <class Tile, bool kSeen, bool kTensorsToo>
struct PagedKv {
  static constexpr bool kPaged = true;
  using Layout = SharedLayout<Tile>;
  using Loader = PageLoader<Tile>;
  using Loads = PagedLoads<Tile, kTensorsToo>;
  using Pages = std::conditional_t<kSeen, SeenPageRows<Tile, kTensorsToo>, PageRows<Tile, kTensorsToo>>;
  static constexpr int kFoundAhead = Tile::kStages;  // KV blocks: the next one whose pages are fetched

  const LaunchParams& p;
  SeenKeys<Tile>& seen;
  std::uint32_t shared;
  Pages pages;

  CUTE_DEVICE PagedKv(const KernelParams& params, const TileWork& work, SeenKeys<Tile>& seen_, char* shared_memory,
                      std::uint32_t shared_)
      : p(params.attention),
        seen(seen_),
        shared(shared_),
        pages{params,
              reinterpret_cast<const char**>(shared_memory + Layout::kTable),
              work.item.kv_begin,
              work.kv_head,
              work.key_begin,
              work.key_end - work.key_begin} {
    if constexpr (kSeen) pages.seen = &seen;
  }

  CUTE_DEVICE Loader k(int, int stage, int thread) const {
    return Loader(shared + Layout::kK + stage * Layout::kStageBytes, pages.entries(thread), p.head_dim_qk, thread);
  }
  CUTE_DEVICE Loader v(int, int stage, int thread) const {
    return Loader(shared + Layout::kV + stage * Layout::kStageBytes, pages.entries(thread) + Pages::kRows,
                  p.head_dim_vo, thread);
  }
  CUTE_DEVICE Loads loads(int block, int stage, int thread) const {
    return {{k(block, stage, thread), v(block, stage, thread)}};
  }
};

}  // namespace cutlass_kernels::fa2
