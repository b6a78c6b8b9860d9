// Loads of Q and of keys, by cp.async: rows of tensors, or of pages of any size.
//
// A warp copies whole rows, an eighth of a KV block: 1 KB of the latent columns and 128 bytes of the others, which may
// lie in a tensor of their own. One lane knows where such a piece of a row begins and hands its address to the others.
// The page indices of a KV block are read while the one before it is computed.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/cp_async.h"
#include "fa2/params.h"
#include "fa2/tile_work.h"
#include "mla/mma_config.h"

namespace cutlass_kernels::mla::mma_sync {

using fa2::KernelParams;
using fa2::TileWork;

// The tensor of a lane's piece of a row.
struct Source {
  const char* data;
  std::int64_t stride_token;  // in bytes
  std::int64_t stride_head;   // or of a page
};

CUTE_DEVICE Source make_source(const ConstTensorView& latent, std::int64_t stride,
                               const ConstTensorView& rope, std::int64_t rope_stride,
                               bool is_rope) {
  if (is_rope && rope.data != nullptr) {
    return {static_cast<const char*>(rope.data), 2 * rope.stride_token, 2 * rope_stride};
  }
  return {static_cast<const char*>(latent.data) + (is_rope ? 2 * kLatentDim : 0),
          2 * latent.stride_token, 2 * stride};
}

// A warp's rows of `shared` (rows, 576), kRows from its first on. Lane i has the address of the latent columns of row i %
// kRows if i / kRows is even, else of the others; null: zeros instead. They are copied in kPieces pieces: products are in
// between, since in a burst before them copies hold up the ldmatrix behind.
template <class Tile, int kRows>
struct WarpRows {
  static_assert(2 * kRows <= 32);
  static constexpr int kRopePieces = (kRows + 3) / 4;
  static constexpr int kPieces = kRows + kRopePieces;

  std::uint32_t to;
  const char* address;

  CUTE_DEVICE static bool is_rope(int lane) { return lane / kRows % 2 != 0; }

  CUTE_DEVICE WarpRows(std::uint32_t shared, int warp, const char* address_)
      : to(shared + warp * kRows * Tile::kRowBytes), address(address_) {}

  CUTE_DEVICE const char* of_lane(int lane) const {
    const auto bits = reinterpret_cast<std::uint64_t>(address);
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, bits, lane));
  }

  CUTE_DEVICE void copy(int piece) const {
    const int lane = threadIdx.x % 32;
    const int first = threadIdx.x / 32 * kRows;  // not kept: registers
    if (piece < kRows) {
      const char* row = of_lane(piece);
      const std::uint32_t lane_to =
          to + piece * Tile::kRowBytes + lane / 8 * 128 + ((lane ^ (first + piece)) % 8 << 4);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        cp_async_16(lane_to + half * 512, row + half * 512 + lane * 16, row != nullptr);
      }
    } else {
      const int row = (piece - kRows) * 4 + lane / 8;
      const char* from = of_lane(kRows + row % kRows);
      if (kRows % 4 == 0 || row < kRows) {
        cp_async_16(to + row * Tile::kRowBytes + kLatentDim * 2 + ((lane ^ (first + row)) % 8 << 4),
                    from + lane % 8 * 16, from != nullptr);
      }
    }
  }
  CUTE_DEVICE void copy_all() const {
    CUTE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) copy(piece);
  }
};

// Q of the tile's tokens and heads; zeros where there is none.
template <class Tile>
CUTE_DEVICE void load_q(const KernelParams& params, const TileWork& tile, std::uint32_t shared,
                        int warp, int lane) {
  constexpr int kRows = Tile::kBlockM / Tile::kWarps;
  using Rows = WarpRows<Tile, kRows>;
  const LaunchParams& p = params.attention;
  const Source source =
      make_source(p.q, p.q.stride_head, p.q_rope, p.q_rope.stride_head, Rows::is_rope(lane));
  const int row = warp * kRows + lane % kRows;
  const int token = int(params.pack.divide(row));
  const int head = tile.head + row - token * int(params.pack.divisor);
  const char* address = nullptr;
  if (tile.row_begin + token < tile.row_end) {
    address = source.data +
              (std::int64_t(tile.item.q_begin) + tile.row_begin + token) * source.stride_token +
              head * source.stride_head;
  }
  Rows(shared, warp, address).copy_all();
}

template <class Tile>
struct KeyLoader {
  static constexpr int kRows = Tile::kBlockN / Tile::kWarps;
  using Rows = WarpRows<Tile, kRows>;

  const KernelParams& params;
  std::uint32_t shared;
  int kv_begin;   // the request's first key, or first entry of its page table
  int key_begin;  // keys outside [key_begin, key_begin + key_extent) are zeros
  std::uint32_t key_extent;
  int warp, lane;

  CUTE_DEVICE KeyLoader(const KernelParams& params_, const TileWork& tile, std::uint32_t shared_,
                        int warp_, int lane_)
      : params(params_),
        shared(shared_),
        kv_begin(tile.item.kv_begin),
        key_begin(tile.key_begin),
        key_extent(tile.key_end - tile.key_begin),
        warp(warp_),
        lane(lane_) {}

  CUTE_DEVICE int key(int block) const {
    return block * Tile::kBlockN + warp * kRows + lane % kRows;
  }

  // The page of this lane's key, -1 for none; of tensors the row. The load is in flight until rows().
  CUTE_DEVICE int find(int block) const {
    const int of_key = key(block);
    int place = -1;
    if (std::uint32_t(of_key - key_begin) < key_extent) {
      place = kv_begin + of_key;
      if (params.attention.pages.page_size > 0) {
        asm volatile(
            "ld.global.nc.b32 %0, [%1];"
            : "=r"(place)
            : "l"(params.attention.pages.indices + kv_begin + params.page_size.divide(of_key))
            : "memory");
      }
    }
    return place;
  }

  // Copies of a KV block, to be issued.
  CUTE_DEVICE Rows rows(int block, int stage, int place) const {
    const LaunchParams& p = params.attention;
    const Source source = make_source(p.k, p.pages.k_stride_page, p.k_rope,
                                      p.pages.k_rope_stride_page, Rows::is_rope(lane));
    const char* address = nullptr;
    if (p.pages.page_size == 0) {
      if (place >= 0) address = source.data + place * source.stride_token;
    } else if (std::uint32_t(place) < params.num_pages) {
      const int of_key = key(block);
      const int slot = of_key - int(params.page_size.divide(of_key)) * p.pages.page_size;
      address = source.data + place * source.stride_head + slot * source.stride_token;
    }
    return Rows(shared + stage * Tile::kStageBytes, warp, address);
  }
};

}  // namespace cutlass_kernels::mla::mma_sync
