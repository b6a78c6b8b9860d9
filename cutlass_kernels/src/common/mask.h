// Which keys a query row sees, as a half-open interval [lo, hi): padding, causal, sliding window and
// chunked masks are all of this form, and both bounds never decrease from one row to the next.
#pragma once

#include <cute/config.hpp>

#include "common/fast_divisor.h"

namespace cutlass_kernels {

struct IntervalMask {
  int kv_len;
  int offset;   // kv_len - qo_len: row i stands at absolute position i + offset (may be negative)
  bool causal;  // hi = position + 1
  int window_left;  // < 0: none; else lo >= position - window_left
  int chunk_size;  // 0: none; else lo >= position rounded down to a multiple of it (implies causal)
  FastDivisor chunk;

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
};

}  // namespace cutlass_kernels
