// Loads of a tile's queries, for each kind of tile:
//   begin()         issues them; those of keys and values may follow
//   finish()        puts into shared memory what begin() has read into registers
//   read_factors()  what the scores of a warp's rows are to be multiplied by; false if nothing. After a barrier.
#pragma once

#include <cute/config.hpp>

#include <cstdint>
#include <type_traits>

#include "fa2/fragments.h"
#include "fa2/load.h"
#include "fa2/packed_rows.h"
#include "fa2/params.h"
#include "fa2/shared_memory.h"
#include "fa2/tile_work.h"

namespace cutlass_kernels::fa2 {

// 16-bit queries beside 16-bit keys: straight into shared memory.
template <class Tile>
struct CopiedQ {
  using Layout = SharedLayout<Tile>;

  int thread;

  CUTE_DEVICE explicit CopiedQ(int thread_) : thread(thread_) {}

  CUTE_DEVICE void begin(const KernelParams& params, const TileWork& work, std::uint32_t shared) {
    const LaunchParams& p = params.attention;
    if constexpr (Tile::kPacked) {
      load_packed_q<Tile>(params, shared + Layout::kQ, work.item.q_begin, work.row_begin,
                          work.row_end, work.head, thread);
    } else {
      RowLoader<Tile, Tile::kBlockM>(
          shared + Layout::kQ, element_ptr(p.q, work.item.q_begin, work.head, 2), p.q.stride_token,
          p.head_dim_qk, work.row_begin, work.row_begin, work.row_end - work.row_begin, thread)
          .issue_all();
    }
  }
  CUTE_DEVICE void finish(char*) {}
  CUTE_DEVICE bool read_factors(const char*, int, typename Fragments<Tile>::Rows&) const {
    return false;
  }
};

// Beside keys of 8 bits: converted to fp16 on the way.
template <class Element, class Tile>
struct ConvertedQ : PackedQ<Element, Tile> {
  using Base = PackedQ<Element, Tile>;
  using Base::Base;

  CUTE_DEVICE void begin(const KernelParams& params, const TileWork& work, std::uint32_t) {
    Base::begin(params, work.item.q_begin, work.row_begin, work.row_end, work.head);
  }
};

template <class Element, class Tile>
using QLoader = std::conditional_t<Tile::kKvBytes == 1, ConvertedQ<Element, Tile>, CopiedQ<Tile>>;

}  // namespace cutlass_kernels::fa2
