// Loads of rows of a tensor into shared memory.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/ptx/cp_async.h"
#include "cutlass_kernels/params.h"
#include "fa2/shared_memory.h"

namespace cutlass_kernels::fa2 {

// Where a token of a head begins.
CUTE_DEVICE const char* element_ptr(const ConstTensorView& view, std::int64_t token, int head, int bytes) {
  return static_cast<const char*>(view.data) + bytes * (token * view.stride_token + head * view.stride_head);
}

// Whether the 16 bytes of a chunk are inside the tensor's own head dimension, a multiple of 8 elements: all or nothing.
template <int kElementBytes>
struct ColumnBytes {
  bool inside;

  ColumnBytes() = default;
  CUTE_DEVICE ColumnBytes(int chunk, int head_dim) : inside(chunk * 8 < head_dim) {}
  template <bool kOnce>
  CUTE_DEVICE void copy(std::uint32_t to, const char* from, bool valid) const {
    if constexpr (kOnce) {
      cp_async_16_once(to, from, valid && inside);
    } else {
      cp_async_16(to, from, valid && inside);
    }
  }
};

// Head dimensions of 8-bit keys are multiples of 16: all or nothing, of which the instruction takes less to tell than
// bytes.
template <>
struct ColumnBytes<1> {
  bool inside;

  ColumnBytes() = default;
  CUTE_DEVICE ColumnBytes(int chunk, int head_dim) : inside(chunk * 16 < head_dim) {}
  template <bool kOnce>
  CUTE_DEVICE void copy(std::uint32_t to, const char* from, bool valid) const {
    if constexpr (kOnce) {
      cp_async_16_once_unless(to, from, !valid || !inside);
    } else {
      cp_async_16_unless(to, from, !valid || !inside);
    }
  }
};

// Copies kRows rows of a [rows, head_dim] global tensor into shared memory, 16 bytes per thread and step.
// Rows outside [begin, begin + extent) and columns past the tensor's own head dimension become zero: garbage
// in keys that no row sees never reaches a product. Steps are issued one by one, so that the main loop can
// spread them over the softmax: in a burst before the products they hold up the ldmatrix behind them.
//
// kOnce: no other thread block reads them.
template <class Tile, int kRows, int kElementBytes = 2, bool kOnce = false>
struct RowLoader {
  using Layout = SharedLayout<Tile>;
  static constexpr int kChunks = Tile::kHeadDim * kElementBytes / 16;
  static constexpr int kRowBytes = Tile::kHeadDim * kElementBytes;
  static constexpr int kRowStep = Tile::kThreads / kChunks;
  static constexpr int kSteps = kRows / kRowStep;
  static constexpr int kPatterns = kRowStep < 8 ? 8 / kRowStep : 1;  // the swizzle repeats after 8 rows
  static_assert(kRows % kRowStep == 0 && Tile::kThreads % kChunks == 0,
                "All threads copy 16 bytes of a row at each step, and steps end with the rows.");

  const char* from;  // this thread's 16 bytes of the next row to copy
  std::int64_t step_bytes;
  std::uint32_t relative;  // that row, counted from `begin`; wraps around to large values before it
  std::uint32_t extent;
  ColumnBytes<kElementBytes> columns;
  std::uint32_t to[kPatterns];  // (step % kPatterns)

  // `base`: the tensor's first row for this head; rows [first, first + kRows) go to `shared`.
  CUTE_DEVICE RowLoader(std::uint32_t shared, const char* base, std::int64_t stride_token, int head_dim, int first,
                        int begin, int extent_, int thread) {
    const int thread_row = thread / kChunks;
    const int chunk = thread % kChunks;
    from = base + std::int64_t(first + thread_row) * (stride_token * kElementBytes) + chunk * 16;
    step_bytes = stride_token * (kElementBytes * kRowStep);
    relative = first + thread_row - begin;
    extent = extent_;
    columns = ColumnBytes<kElementBytes>(chunk, head_dim);
    CUTE_UNROLL
    for (int i = 0; i < kPatterns; ++i) {
      const int row = thread_row + i * kRowStep;
      to[i] = shared + (kElementBytes == 1 ? Layout::kv_offset(row, chunk) : Layout::offset(row, chunk));
    }
  }

  CUTE_DEVICE void begin() {}  // PageLoader's reads addresses

  // Step i of kSteps, in order. cp.async reads nothing where it is not valid.
  CUTE_DEVICE void issue(int i) {
    columns.template copy<kOnce>(to[i % kPatterns] + (i - i % kPatterns) * kRowStep * kRowBytes, from,
                                 relative + i * kRowStep < extent);
    from += step_bytes;
  }

  CUTE_DEVICE void issue_all() {
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) issue(i);
  }
};

// Loads to be issued piecemeal, after begin(): issue(step, steps) issues the share of step `step` of `steps`.
template <class Loader>
struct PendingLoads {
  Loader matrices[2];  // K, V

  CUTE_DEVICE void begin() { matrices[0].begin(); }
  CUTE_DEVICE void issue(int step, int steps) {
    constexpr int kLoads = 2 * Loader::kSteps;
    CUTE_UNROLL
    for (int i = step * kLoads / steps; i < (step + 1) * kLoads / steps; ++i) {
      if (i + 1 == Loader::kSteps) matrices[1].begin();
      matrices[i / Loader::kSteps].issue(i % Loader::kSteps);
    }
  }
  CUTE_DEVICE void issue_all() { issue(0, 1); }
};

struct NoLoads {
  CUTE_DEVICE void issue(int, int) {}
};

}  // namespace cutlass_kernels::fa2
