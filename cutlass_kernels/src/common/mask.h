// Which keys a query row sees, as a half-open interval [lo, hi): padding, causal, sliding window and
// chunked masks are all of this form, and both bounds never decrease from one row to the next.
//
// A mask mode is added here: a field of IntervalMask, where it comes from (make()), what it does to lo or hi, and what
// the estimates should know of it.
#pragma once

#include <cute/config.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/fast_divisor.h"
#include "cutlass_kernels/params.h"

namespace cutlass_kernels {

// What the host prepares.
struct MaskDivisors {
  FastDivisor chunk;

  MaskDivisors() = default;
  explicit MaskDivisors(const AttentionParams& params) : chunk(std::uint32_t(params.chunk_size)) {}
};

// The right window, whichever way it is asked for.
CUTE_HOST_DEVICE int window_right_of(const AttentionParams& p) {
  return p.causal ? 0 : p.window_right;
}

// Of a request.
struct IntervalMask {
  int kv_len;
  int offset;   // kv_len - qo_len: row i stands at absolute position i + offset (may be negative)
  bool causal;  // hi = position + 1
  int window_left;  // < 0: none; else lo >= position - window_left
  int chunk_size;  // 0: none; else lo >= position rounded down to a multiple of it, and hi is no more than the next
  FastDivisor chunk;
  int window_right;  // < 0: none; else hi <= position + window_right + 1; 0 if causal

  // Of problems whose host has set causal and window_right alike: launch().
  CUTE_HOST_DEVICE static IntervalMask make(const AttentionParams& p, const MaskDivisors& divisors,
                                            int qo_len, int kv_len) {
    return {kv_len,        kv_len - qo_len, p.causal || p.chunk_size > 0,
            p.window_left, p.chunk_size,    divisors.chunk,
            p.window_right};
  }

  CUTE_HOST_DEVICE int lo(int row) const {
    const int position = row + offset;
    int bound = 0;
    if (window_left >= 0 && position > window_left) bound = position - window_left;
    if (chunk_size > 0 && position > 0) {
      const int chunk_begin = int(chunk.divide(position)) * chunk_size;
      bound = chunk_begin > bound ? chunk_begin : bound;
    }
    return bound;
  }

  // kGeneral: for every mask; else for those that are not has_general_end(). Kernels have general variants for these: in
  // all, the few instructions more would cost fa2 up to 6 % (hd64).
  template <bool kGeneral>
  CUTE_HOST_DEVICE int hi(int row) const {
    if constexpr (kGeneral) {
      const int position = row + offset;
      int bound = kv_len;
      if (window_right >= 0 && bound > position + window_right) bound = position + window_right + 1;
      if (chunk_size > 0) {
        const int chunks = position < 0 ? 0 : int(chunk.divide(position)) + 1;
        if (bound > chunks * chunk_size) bound = chunks * chunk_size;
      }
      return bound < 0 ? 0 : bound;
    }
    if (!causal) return kv_len;
    const int bound = row + offset + 1;
    return bound < 0 ? 0 : (bound < kv_len ? bound : kv_len);
  }

  // Whether a row may see fewer keys than its request has.
  CUTE_HOST_DEVICE bool hides_keys() const {
    return window_right >= 0 || window_left >= 0 || chunk_size > 0;
  }
};

// ---- Estimates, before a request's lengths are known. ----

inline bool hides_later_keys(const AttentionParams& params) {
  return window_right_of(params) >= 0 || params.chunk_size > 0;
}

// Whether rows may see keys behind their own position and not all of them: a window to the right, or a chunk.
inline bool has_general_end(const AttentionParams& params) {
  const int right = window_right_of(params);
  return right > 0 || (params.chunk_size > 0 && right < 0);
}

inline bool hides_keys(const AttentionParams& params) {
  return hides_later_keys(params) || params.window_left >= 0;
}

// Of `keys` keys those that a row sees, at most, wherever it stands.
inline std::int64_t most_keys_of_row(const AttentionParams& params, std::int64_t keys) {
  const int right = window_right_of(params);
  if (params.window_left >= 0 && right >= 0) {
    keys = std::min(keys, std::int64_t(params.window_left) + right + 1);
  }
  if (params.chunk_size > 0) keys = std::min<std::int64_t>(keys, params.chunk_size);
  return keys;
}

// Keys that so many rows in a row see together, at most, however many there are.
inline std::int64_t most_keys_of_rows(const AttentionParams& params, std::int64_t rows) {
  const int right = window_right_of(params);
  if (params.chunk_size > 0) return std::int64_t(params.chunk_size) * (right == 0 ? 1 : 2) + rows;
  if (params.window_left >= 0 && right >= 0) {
    return std::int64_t(params.window_left) + right + rows;
  }
  return std::numeric_limits<std::int64_t>::max();
}

}  // namespace cutlass_kernels
