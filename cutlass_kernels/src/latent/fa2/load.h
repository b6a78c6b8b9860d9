// The tile of a thread block, and the loads of its Q and keys, by cp.async: rows of tensors, or of pages of any size.
//
// A warp copies four rows at a time, 128 bytes of each in a step: eight lanes the 128 bytes of a row. So a lane has one
// row of every 32, whose address serves all steps, and a copy is a single instruction. The last step copies the last 64
// columns, which may lie in a tensor of their own; of 8-bit keys these are 64 bytes, and half of the lanes rest. The
// page indices of a KV block are read while the block before it in the order of copies is computed.
//
// Of keys by slots, the lanes that look an entry up leave in shared memory, with the stage, whether it is a slot
// (BySlots::kListed). WarpScores::hide_missing() hides the others. Rows of queries and keys may have no columns of the
// position (512/512): zeros take their place in shared memory, and S skips their products.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/dependent_launch.h"
#include "common/ptx/cp_async.h"
#include "fa2/params.h"
#include "fa2/tile_work.h"
#include "latent/fa2/config.h"
#include "latent/fa2/products.h"
#include "schedule/find_work.h"

namespace cutlass_kernels::mla::mma_sync {

using fa2::KernelParams;
using fa2::TileWork;

// Which tile and keys a thread block has; false if none.
template <class Tile>
CUTE_DEVICE bool find_tile(const KernelParams& params, TileWork& tile) {
  const LaunchParams& p = params.attention;
  const TileOrder::Position position = params.order(blockIdx.x);
  const auto find_split = [&](int split) {
    return p.batch_size == 1 ? BatchSplits::find_in_one(p, split) : BatchSplits(p).find(p, split);
  };
  const bool found = find_work<true, false, true>(p, params.rows, find_split, position.rank, tile.item);
  if (found) tile.begin<Tile, true>(params, position);
  return found;
}

// The thread block's TileWork in shared memory.
template <class Tile>
CUTE_DEVICE TileWork& kept_tile(char* shared_memory) {
  static_assert(sizeof(TileWork) <= Tile::kBytes - Tile::kWork);
  return *reinterpret_cast<TileWork*>(shared_memory + Tile::kWork);
}

// By all threads: find_tile(), and a copy in `kept`, which all may read behind the next barrier. The previous kernel
// may write the counters. Then the next kernel may start: all that it reads before this kernel ends was written before
// this kernel began.
template <class Tile>
CUTE_DEVICE bool begin_tile(const KernelParams& params, TileWork& tile, TileWork& kept) {
  await_previous_kernel();
  allow_next_kernel();
  if (!find_tile<Tile>(params, tile)) return false;
  if (threadIdx.x == 0) kept = tile;
  return true;
}

// Whether queries and keys have columns of the position. Those of keys in pages do.
template <class Tile>
CUTE_DEVICE bool has_positions(const KernelParams& params) {
  return !Tile::kBySlots || params.attention.head_dim_qk > kLatentDim;
}

// The row, counted in its four, and the 16 bytes of each 128 that are a lane's; where the swizzle puts them.
CUTE_DEVICE int row_of_lane(int lane) { return lane / 8; }
CUTE_DEVICE int bytes_of_lane(int lane) { return lane % 8 * 16; }
CUTE_DEVICE int place_in_row(int row, int lane) { return (lane ^ row) % 8 << 4; }

// A lane's 16 bytes of each 128 of a row of elements of kBytes. Of keys by slots, only latent columns may exist.
template <int kBytes, bool kBySlots>
struct RowCopy {
  static constexpr int kRopeStep = kLatentDim * kBytes / 128;
  static constexpr int kSteps = kRopeStep + 1;

  std::uint32_t to;
  const char* latent = nullptr;  // null: zeros
  const char* rope = nullptr;    // with kBySlots, the same

  CUTE_DEVICE void operator()(int step) const {
    if (step == kRopeStep && bytes_of_lane(threadIdx.x) >= kRopeDim * kBytes) return;
    cp_async_16(to + step * 128, step < kRopeStep ? latent + step * 128 : rope,
                (kBySlots && step == kRopeStep ? rope : latent) != nullptr);
  }
};

CUTE_DEVICE const char* bytes_at(const ConstTensorView& view) { return static_cast<const char*>(view.data); }

// Q of the tile's tokens and heads; zeros where there is none. The panels that are kept in registers go to `kept`
// (BLK_M, 576), the others to `read` (BLK_M, 64 columns of each).
template <class Tile>
CUTE_DEVICE void load_q(const KernelParams& params, const TileWork& tile, std::uint32_t kept, std::uint32_t read,
                        int warp, int lane) {
  const LaunchParams& p = params.attention;
  const bool separate = p.q_rope.data != nullptr;
  for (int first = warp * 4; first < Tile::kBlockM; first += Tile::kRoleWarps * 4) {
    const int row = first + row_of_lane(lane);
    const int token = int(params.pack.divide(row));
    const int head = tile.head + row - token * int(params.pack.divisor);
    const std::int64_t at = std::int64_t(tile.item.q_begin) + tile.row_begin + token;
    RowCopy<2, Tile::kBySlots> copy{kept + row * Tile::kRowBytes + place_in_row(row, lane)};
    if (tile.row_begin + token < tile.row_end) {
      copy.latent = bytes_at(p.q) + 2 * (at * p.q.stride_token + head * p.q.stride_head) + bytes_of_lane(lane);
      copy.rope = separate ? bytes_at(p.q_rope) + bytes_of_lane(lane) +
                                 2 * (at * p.q_rope.stride_token + head * p.q_rope.stride_head)
                           : copy.latent + 2 * kLatentDim;
      if (!has_positions<Tile>(params)) copy.rope = nullptr;
    }
    CUTE_UNROLL
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      if (panel == Tile::kQPanels) {
        copy.to = read + row * Tile::kQRowBytes - panel * 128 + place_in_row(row, lane);
      }
      copy(panel);
    }
  }
}

// The thread block's shared memory, whose address takes no register.
CUTE_DEVICE char* shared_bytes() {
  extern __shared__ __align__(128) char shared_memory[];
  return shared_memory;
}

template <class Tile>
struct KeyLoader {
  using KeyCopy = RowCopy<Tile::kKeyBytes, Tile::kBySlots>;
  static constexpr int kSteps = KeyCopy::kSteps;
  static constexpr int kRows = Tile::kBlockN / Tile::kRoleWarps / 4;  // of a lane
  static constexpr int kRowStep = Tile::kRoleWarps * 4;

  // The pages, or slots, of a lane's keys of a KV block, -1 for none; of tensors the rows.
  struct Places {
    int of[kRows];
  };
  struct Copies {
    KeyCopy of[kRows];

    CUTE_DEVICE void operator()(int step) const {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) of[r](step);
    }
  };

  const KernelParams& params;
  std::uint32_t to;  // the lane's 16 bytes of its first row
  int kv_begin;      // the request's first key, or first entry of its page table
  int key_begin;     // keys outside [key_begin, key_begin + key_extent) are zeros
  std::uint32_t key_extent;
  int row;  // the lane's first one

  CUTE_DEVICE KeyLoader(const KernelParams& params_, const TileWork& tile, std::uint32_t shared, int warp, int lane)
      : params(params_),
        kv_begin(tile.item.kv_begin),
        key_begin(tile.key_begin),
        key_extent(tile.key_end - tile.key_begin),
        row(int(held(warp * 4 + row_of_lane(lane)))) {
    to =
        held(shared + row * Tile::kKeyRowBytes + (Tile::kSwizzlesKeys ? place_in_row(row, lane) : bytes_of_lane(lane)));
  }

  // Of a KV block that is not there: none. The loads are in flight until copies() is called.
  CUTE_DEVICE Places find(int block, bool is_there) const {
    Places places;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int key = block * Tile::kBlockN + row + r * kRowStep;
      places.of[r] = -1;
      if (is_there && std::uint32_t(key - key_begin) < key_extent) {
        places.of[r] = kv_begin + key;
        if (Tile::kBySlots || params.attention.pages.page_size > 0) {
          const std::uint32_t entry = Tile::kBySlots ? std::uint32_t(key) : params.page_size.divide(key);
          asm volatile("ld.global.nc.b32 %0, [%1];"
                       : "=r"(places.of[r])
                       : "l"(params.attention.pages.indices + kv_begin + entry)
                       : "memory");
        }
      }
    }
    return places;
  }

  // Nobody reads `stage` before the next barrier.
  CUTE_DEVICE Copies copies(int block, int stage, const Places& places) const {
    const LaunchParams& p = params.attention;
    const bool paged = Tile::kBySlots || p.pages.page_size > 0;
    const std::uint32_t end = paged ? params.num_pages : 1u << 31;
    const int bytes = bytes_of_lane(threadIdx.x % 32);
    Copies copies;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int key = block * Tile::kBlockN + row + r * kRowStep;
      const int page = Tile::kBySlots ? int(params.page_size.divide(places.of[r])) : places.of[r];
      // The page of a negative slot, as an unsigned number, is not below `end` either.
      const bool exists = std::uint32_t(page) < end;
      const std::int64_t place = page;
      const int slot = Tile::kBySlots ? places.of[r] - page * int(params.page_size.divisor)
                       : paged        ? key - int(params.page_size.divide(key)) * p.pages.page_size
                                      : 0;
      if constexpr (Tile::kBySlots) {
        if (bytes == 0) shared_bytes()[Tile::kListed + stage * Tile::kBlockN + row + r * kRowStep] = exists;
      }
      const auto address = [&](const ConstTensorView& view, std::int64_t stride_page) {
        const std::int64_t at = place * (paged ? stride_page : view.stride_token) + slot * view.stride_token;
        return bytes_at(view) + bytes + Tile::kKeyBytes * at;
      };
      copies.of[r] = {to + stage * Tile::kStageBytes + r * kRowStep * Tile::kKeyRowBytes};
      if (exists) {
        copies.of[r].latent = address(p.k, p.pages.k_stride_page);
        copies.of[r].rope = p.k_rope.data != nullptr ? address(p.k_rope, p.pages.k_rope_stride_page)
                                                     : copies.of[r].latent + Tile::kKeyBytes * kLatentDim;
        if (!has_positions<Tile>(params)) copies.of[r].rope = nullptr;
      }
    }
    return copies;
  }
};

}  // namespace cutlass_kernels::mla::mma_sync
