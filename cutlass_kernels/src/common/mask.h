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

// Of a request.
struct IntervalMask {
  int kv_len;
  int offset;   // kv_len - qo_len: row i stands at absolute position i + offset (may be negative)
  bool causal;  // hi = position + 1
  int window_left;  // < 0: none; else lo >= position - window_left
  int chunk_size;  // 0: none; else lo >= position rounded down to a multiple of it (implies causal)
  FastDivisor chunk;

  CUTE_HOST_DEVICE static IntervalMask make(const AttentionParams& p, const MaskDivisors& divisors,
                                            int qo_len, int kv_len) {
    return {kv_len,        kv_len - qo_len, p.causal || p.chunk_size > 0,
            p.window_left, p.chunk_size,    divisors.chunk};
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

  CUTE_HOST_DEVICE int hi(int row) const {
    if (!causal) return kv_len;
    const int bound = row + offset + 1;
    return bound < 0 ? 0 : (bound < kv_len ? bound : kv_len);
  }

  // Whether a row may see fewer keys than its request has.
  CUTE_HOST_DEVICE bool hides_keys() const { return causal || window_left >= 0; }
  // Whether lo may be above 0 where there is a bit mask, too, which replaces all but the window.
  CUTE_HOST_DEVICE bool hides_first_keys() const { return window_left >= 0; }
};

// ---- Estimates, before a request's lengths are known. ----

inline bool hides_later_keys(const AttentionParams& params) {
  return params.causal || params.chunk_size > 0;
}

inline bool hides_keys(const AttentionParams& params) {
  return hides_later_keys(params) || params.window_left >= 0;
}

// Of `keys` keys those that a row sees, at most, wherever it stands.
inline std::int64_t most_keys_of_row(const AttentionParams& params, std::int64_t keys) {
  if (params.window_left >= 0) keys = std::min(keys, std::int64_t(params.window_left) + 1);
  if (params.chunk_size > 0) keys = std::min<std::int64_t>(keys, params.chunk_size);
  return keys;
}

// Keys that so many rows in a row see together, at most, however many there are.
inline std::int64_t most_keys_of_rows(const AttentionParams& params, std::int64_t rows) {
  if (params.window_left >= 0 && params.causal) return params.window_left + rows;
  if (params.chunk_size > 0) return params.chunk_size + rows;
  return std::numeric_limits<std::int64_t>::max();
}

}  // namespace cutlass_kernels
