// Where the rows of a paged cache lie, and their loads.
//
// A warp copies the same rows of every block (RowLoader: one in four of K and of V), 32 or 16 in all. So it keeps their
// addresses to itself, in shared memory, written by a lane each: no other warp reads or waits for them, and one copy of
// the table is enough. Each lane reads the page number of its row while the block before is computed. The loads find
// an address per row, in one broadcast.
#pragma once

#include <cstdint>

#include "common/ldmatrix.h"
#include "fa2/params.h"
#include "fa2/shared.h"

namespace cutlass_kernels::fa2 {

// Entries [warp][K, V][step of the loader][row of the warp's step]; null: zeros instead of a row.
template <class Tile>
struct PageRows {
  using Loader = RowLoader<Tile, Tile::kBlockN>;
  static constexpr int kStepRows = 32 / SharedLayout<Tile>::kChunks;  // of a warp
  static constexpr int kRows = Loader::kSteps * kStepRows;            // of a warp, of K or of V
  static_assert(kStepRows * Tile::kWarps == Loader::kRowStep && 2 * kRows <= 32);

  const KernelParams& params;
  const char** table;
  int kv_begin;  // the request's first entry of the page table
  int kv_head;
  int key_begin;  // keys outside [key_begin, key_begin + key_extent) are not loaded
  int key_extent;

  CUTE_DEVICE static bool is_v(int thread) { return thread % 32 >= kRows; }

  // The key whose row is this lane's.
  CUTE_DEVICE static int key(int k_block, int v_block, int thread) {
    const int index = thread % kRows;
    const int row = index / kStepRows * Loader::kRowStep + thread / 32 * kStepRows + index % kStepRows;
    return (is_v(thread) ? v_block : k_block) * Tile::kBlockN + row;
  }

  // The page of this lane's row; -1 if there is none.
  CUTE_DEVICE int fetch(int k_block, int v_block, int thread) const {
    const PageTable& pages = params.attention.pages;
    const int of_key = key(k_block, v_block, thread);
    if (std::uint32_t(of_key - key_begin) >= std::uint32_t(key_extent)) return -1;
    return __ldg((is_v(thread) ? pages.v_indices : pages.indices) + kv_begin +
                 params.page_size.divide(of_key));
  }

  // Writes the warp's entries, which replace those it has used.
  CUTE_DEVICE void store(int page, int k_block, int v_block, int thread) const {
    const AttentionParams& p = params.attention;
    const ConstTensorView& view = is_v(thread) ? p.v : p.k;
    const int of_key = key(k_block, v_block, thread);
    const int slot = of_key - int(params.page_size.divide(of_key)) * p.pages.page_size;
    const char* row = nullptr;
    if (page >= 0 && page < p.pages.num_pages) {
      row = static_cast<const char*>(view.data) +
            2 * (page * (is_v(thread) ? p.pages.v_stride_page : p.pages.k_stride_page) +
                 slot * view.stride_token + kv_head * view.stride_head);
    }
    __syncwarp();
    if (thread % 32 < 2 * kRows) table[thread / 32 * (2 * kRows) + thread % 32] = row;
    __syncwarp();
  }

  // A thread's first entry of K; those of V are kRows further on.
  CUTE_DEVICE const char* const* entries(int thread) const {
    return table + thread / 32 * (2 * kRows) + thread % 32 / SharedLayout<Tile>::kChunks;
  }
};

// RowLoader's twin for rows of pages. Addresses are read kAhead steps before their loads.
template <class Tile>
struct PageLoader {
  using Layout = SharedLayout<Tile>;
  using Rows = PageRows<Tile>;
  static constexpr int kSteps = Rows::Loader::kSteps;
  static constexpr int kRowStep = Rows::Loader::kRowStep;
  static constexpr int kPatterns = Rows::Loader::kPatterns;
  static constexpr int kAhead = 2;

  const char* const* entries;
  const char* rows[kAhead];
  int column_bytes;
  bool in_columns;
  std::uint32_t to[kPatterns];

  CUTE_DEVICE PageLoader(std::uint32_t shared, const char* const* entries_, int head_dim, int thread)
      : entries(entries_) {
    const int thread_row = thread / Layout::kChunks;
    const int chunk = thread % Layout::kChunks;
    column_bytes = chunk * 16;
    in_columns = chunk * 8 < head_dim;
    CUTE_UNROLL
    for (int i = 0; i < kPatterns; ++i) {
      to[i] = shared + Layout::offset(thread_row + i * kRowStep, chunk);
    }
  }

  CUTE_DEVICE void begin() {
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) rows[i] = entries[i * Rows::kStepRows];
  }

  CUTE_DEVICE void issue(int i) {
    const char* row = rows[i % kAhead];
    if (i + kAhead < kSteps) rows[i % kAhead] = entries[(i + kAhead) * Rows::kStepRows];
    cp_async_16(to[i % kPatterns] + (i - i % kPatterns) * kRowStep * Layout::kRowBytes,
                row + column_bytes, row != nullptr && in_columns);
  }

  CUTE_DEVICE void issue_all() {
    begin();
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) issue(i);
  }
};

}  // namespace cutlass_kernels::fa2
