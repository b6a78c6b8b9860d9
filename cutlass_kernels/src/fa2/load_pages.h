// Where the rows of a paged cache lie, and their loads.
//
// A warp copies the same rows of every KV block, as in RowLoader: one in four of K and of V, 32 or 16 in all. It
// keeps their addresses in a table of its own in shared memory, written by a lane per row. Between the loads of one
// KV block and the addresses for the next lies a __syncwarp(): no second copy of the table, no barrier of the thread
// block.
//
//   page indices     read while Q K^T of an earlier KV block is computed
//   addresses        written when the last loads that need the old ones are issued: 64-bit arithmetic once per row, not
//                    once per 16 bytes
//   loads            find an address per row, in one broadcast
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/bit_mask.h"
#include "common/mask.h"
#include "cutlass_kernels/params.h"
#include "fa2/load.h"
#include "fa2/params.h"
#include "fa2/shared_memory.h"

namespace cutlass_kernels::fa2 {

// Entries [warp][K, V][step of the loader][row of the warp's step]; null: zeros instead of a row.
//
// kTensorsToo: rows may be those of a tensor.
template <class Tile, bool kTensorsToo>
struct PageRows {
  using Loader = RowLoader<Tile, Tile::kBlockN, Tile::kKvBytes>;
  static constexpr int kLanes = Loader::kChunks < 32 ? Loader::kChunks : 32;  // that copy a row
  static constexpr int kPieces = Loader::kChunks / kLanes;                    // of a row
  static constexpr int kStepRows = 32 / kLanes;                               // of a warp
  static constexpr int kRowStep = kStepRows * Tile::kWarps;
  static constexpr int kRows = Tile::kBlockN / Tile::kWarps;  // of a warp, of K or of V
  static_assert(kRows % kStepRows == 0 && 2 * kRows <= 32,
                "A warp copies whole rows, and a lane looks up one of its rows of K or of V.");

  const KernelParams& params;
  const char** table;
  int kv_begin;  // the request's first entry of the page table; of a tensor, its first row
  int kv_head;
  int key_begin;  // keys outside [key_begin, key_begin + key_extent) are not loaded
  int key_extent;

  // Read anew each time, not kept in a register.
  CUTE_DEVICE static int thread_index() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    if constexpr (Tile::kKvBytes == 1) thread &= Tile::kThreads - 1;  // >= 0
    return thread;
  }

  CUTE_DEVICE static bool is_v(int thread) { return thread % 32 >= kRows; }

  // This lane's row, in its KV block, and the key.
  CUTE_DEVICE static int row_of_block(int thread) {
    const int index = thread % kRows;
    return index / kStepRows * kRowStep + thread / 32 * kStepRows + index % kStepRows;
  }
  CUTE_DEVICE static int key(int k_block, int v_block, int thread) {
    return (is_v(thread) ? v_block : k_block) * Tile::kBlockN + row_of_block(thread);
  }

  // The page of this lane's row; -1 if there is none.
  CUTE_DEVICE int fetch(int k_block, int v_block) const {
    const int thread = thread_index();
    const int of_key = key(k_block, v_block, thread);
    int page = -1;
    if (std::uint32_t(of_key - key_begin) < std::uint32_t(key_extent)) {
      const std::int32_t* index = params.paged[is_v(thread)].indices + kv_begin + params.page_size.divide(of_key);
      // In its place among loads: left alone, the compiler moves it to where its result is needed.
      if constexpr (kTensorsToo) {
        page = kv_begin;  // of a tensor: set_pages()
        asm volatile(
            "{\n.reg .pred paged;\nsetp.ne.s32 paged, %2, 0;\n"
            "@paged ld.global.nc.b32 %0, [%1];\n}"
            : "+r"(page)
            : "l"(index), "r"(params.attention.pages.page_size)
            : "memory");
      } else {
        asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(page) : "l"(index) : "memory");
      }
    }
    return page;
  }

  // Writes the warp's entries, which replace those it has used.
  CUTE_DEVICE void store(int page, int k_block, int v_block) const {
    const int thread = thread_index();
    const char* row = nullptr;
    // Modulo 2^32: -1, for none, is no page of V either.
    page = int(std::uint32_t(page) - (is_v(thread) ? params.first_v_page : 0u));
    if (std::uint32_t(page) < params.num_pages) {
      const PagedMatrix& matrix = params.paged[is_v(thread)];
      const int of_key = key(k_block, v_block, thread);
      const int slot = of_key - int(params.page_size.divide(of_key)) * params.attention.pages.page_size;
      row = matrix.data + page * matrix.stride_page + slot * matrix.stride_token + kv_head * matrix.stride_head;
    }
    __syncwarp();
    if (thread % 32 < 2 * kRows) table[thread / 32 * (2 * kRows) + thread % 32] = row;
    __syncwarp();
  }

  // A thread's first entry of K; those of V are kRows further on.
  CUTE_DEVICE const char* const* entries(int thread) const {
    return table + thread / 32 * (2 * kRows) + thread % 32 / kLanes;
  }
};

// RowLoader's twin for rows of pages. Addresses are read kAhead rows before their loads. A row of more than 512 bytes
// is loaded in pieces.
template <class Tile>
struct PageLoader {
  using Layout = SharedLayout<Tile>;
  using Rows = PageRows<Tile, false>;
  static constexpr int kPieces = Rows::kPieces;
  static constexpr int kPieceBytes = Rows::kLanes * 16;
  static constexpr int kRowSteps = Rows::kRows / Rows::kStepRows;
  static constexpr int kSteps = kRowSteps * kPieces;
  static constexpr int kRowStep = Rows::kRowStep;
  static constexpr int kPatterns = kRowStep < 8 ? 8 / kRowStep : 1;
  static constexpr int kAhead = 2;

  const char* const* entries;
  const char* rows[kAhead];
  int column_bytes;
  ColumnBytes<Tile::kKvBytes> columns[kPieces];
  std::uint32_t to[kPatterns];  // (row step % kPatterns)

  CUTE_DEVICE PageLoader(std::uint32_t shared, const char* const* entries_, int head_dim, int thread)
      : entries(entries_) {
    const int thread_row = thread / Rows::kLanes;
    const int chunk = thread % Rows::kLanes;
    column_bytes = chunk * 16;
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      columns[i] = ColumnBytes<Tile::kKvBytes>(chunk + i * Rows::kLanes, head_dim);
    }
    CUTE_UNROLL
    for (int i = 0; i < kPatterns; ++i) {
      int row = thread_row + i * kRowStep;
      if constexpr (Tile::kDecodes) {
        // shared + kv_offset(row, chunk), with the sum inside the XOR: to a sum outside, copies with a cache policy add
        // a uniform register, for which ptxas 13.0 emits illegal instructions (hd128, hd256 of 8 bits).
        to[i] = (shared + row * Layout::kKvRowBytes + chunk * 16) ^ (Layout::kv_swizzle(row) << 4);
      } else {
        // Opaque, so that offsets are computed behind the loads of page indices: before them they cost 4 % at hd64.
        asm volatile("" : "+r"(row));
        to[i] = shared + (Tile::kKvBytes == 1 ? Layout::kv_offset(row, chunk) : Layout::offset(row, chunk));
      }
    }
  }

  CUTE_DEVICE void begin() {
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (i < kRowSteps) rows[i] = entries[i * Rows::kStepRows];
    }
  }

  CUTE_DEVICE void issue(int step) {
    const int i = step / kPieces;
    const int piece = step % kPieces;
    const char* row = rows[i % kAhead];
    if (piece + 1 == kPieces && i + kAhead < kRowSteps) {
      rows[i % kAhead] = entries[(i + kAhead) * Rows::kStepRows];
    }
    columns[piece].template copy<Tile::kDecodes>(
        to[i % kPatterns] + (i - i % kPatterns) * kRowStep * Layout::kKvRowBytes + piece * kPieceBytes,
        row + column_bytes + piece * kPieceBytes, row != nullptr);
  }

  CUTE_DEVICE void issue_all() {
    begin();
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) issue(i);
  }
};

// PendingLoads' twin: the loads of a KV block, and the table for those of the next one.
template <class Tile, bool kTensorsToo>
struct PagedLoads {
  using Loader = PageLoader<Tile>;

  Loader matrices[2];  // K, V
  const PageRows<Tile, kTensorsToo>* rows;
  int next_block;
  int page;  // of this lane's row of it

  template <class Rows>
  CUTE_DEVICE void fetch(const Rows& rows_, int next_block_) {
    rows = &rows_;
    next_block = next_block_;
    page = rows_.fetch(next_block, next_block);
  }

  CUTE_DEVICE void issue(int step, int steps) {
    constexpr int kLoads = 2 * Loader::kSteps;
    if (step == 0) matrices[0].begin();
    CUTE_UNROLL
    for (int i = step * kLoads / steps; i < (step + 1) * kLoads / steps; ++i) {
      if (i + 1 == Loader::kSteps) matrices[1].begin();
      matrices[i / Loader::kSteps].issue(i % Loader::kSteps);
    }
    if (step + 1 == steps) store(*rows);
  }

  // The two halves of issue(0, 1): what needs the pages of this KV block, and of the next. The second is given the rows
  // again: if fetch() depends on a condition, they would lie in local memory for the sake of the pointer.
  CUTE_DEVICE void issue_all() {
    matrices[0].issue_all();
    matrices[1].issue_all();
  }
  template <class Rows>
  CUTE_DEVICE void store(const Rows& rows_) const {
    rows_.store(page, next_block, next_block);
  }
};

// ---- Loads that skip keys which a bit mask hides from all rows of the tile. Zeros take their place.

// Which keys of a KV block some row of the tile sees, by a bit mask. Zeros are loaded instead of the others: they may
// hold anything, NaN too, and 0 * NaN is not 0.
template <class Tile>
struct SeenKeys {
  static constexpr int kWords = (Tile::kBlockN + 31) / 32;

  const BitMask& bit_mask;
  IntervalMask interval;
  std::int64_t request_bit;  // the request's first bit
  int row_begin;             // the tile's, in its request
  int row_end;
  bool hides;                   // whether there may be such keys
  std::uint32_t words[kWords];  // of the KV block that find() was called for

  // By all lanes of a warp, a row each. Warps do without each other's help: the words, of which each reads all, are few
  // beside the keys, and no barrier lies between this and the loads.
  CUTE_DEVICE void find(int block) {
    const int first_key = block * Tile::kBlockN;
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) words[w] = ~0u;
    if (!hides) return;
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) words[w] = 0;
    CUTE_NO_UNROLL
    for (int row = row_begin + int(threadIdx.x % 32); row < row_end; row += 32) {
      const std::int64_t bit = request_bit + std::int64_t(row) * interval.kv_len + first_key;
      const bool windowed = interval.hides_keys();
      CUTE_UNROLL
      for (int w = 0; w < kWords; ++w) {
        const int key = first_key + 32 * w;
        const std::uint32_t inside =
            windowed ? bits_between(interval.begin_of_all(row) - key, interval.end_of_all<true>(row) - key) : ~0u;
        words[w] |= bits_at(bit_mask, bit + 32 * w) & inside;
      }
    }
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) words[w] = __reduce_or_sync(0xffffffffu, words[w]);
  }

  CUTE_DEVICE bool has(int key_of_block) const {
    static_assert(kWords <= 2);
    const std::uint32_t word = key_of_block < 32 ? words[0] : words[kWords - 1];
    return word >> key_of_block % 32 & 1;
  }
};

// RowLoader of keys of which some are not wanted.
template <class Tile>
struct SeenRowLoader : RowLoader<Tile, Tile::kBlockN, Tile::kKvBytes, Tile::kDecodes> {
  using Rows = RowLoader<Tile, Tile::kBlockN, Tile::kKvBytes, Tile::kDecodes>;
  static_assert(32 % Rows::kRowStep == 0);

  std::uint32_t seen[SeenKeys<Tile>::kWords];  // from the thread's first row on

  using Rows::Rows;
  CUTE_DEVICE void take_only(const SeenKeys<Tile>& keys, int thread) {
    CUTE_UNROLL
    for (int w = 0; w < SeenKeys<Tile>::kWords; ++w) {
      seen[w] = keys.words[w] >> thread / Rows::kChunks;
    }
  }

  CUTE_DEVICE void issue(int i) {
    const int row = i * Rows::kRowStep;
    const std::uint32_t all = Rows::extent;
    Rows::extent = seen[row / 32] >> row % 32 & 1 ? all : 0;
    Rows::issue(i);
    Rows::extent = all;
  }

  CUTE_DEVICE void issue_all() {
    CUTE_UNROLL
    for (int i = 0; i < Rows::kSteps; ++i) issue(i);
  }
};

// PageRows of such keys: they have no page.
template <class Tile, bool kTensorsToo>
struct SeenPageRows : PageRows<Tile, kTensorsToo> {
  using Rows = PageRows<Tile, kTensorsToo>;

  const SeenKeys<Tile>* seen = nullptr;  // found for v_block

  // K of another KV block than v_block is loaded whatever it is: scores of hidden keys become -inf.
  CUTE_DEVICE int fetch(int k_block, int v_block) const {
    const int thread = Rows::thread_index();
    const bool found = k_block == v_block || Rows::is_v(thread);
    return found && !seen->has(Rows::row_of_block(thread)) ? -1 : Rows::fetch(k_block, v_block);
  }
};

}  // namespace cutlass_kernels::fa2
