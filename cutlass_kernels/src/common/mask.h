// Which keys a query row sees, as a half-open interval [lo, hi): padding, causal, sliding window and
// chunked masks are all of this form, and both bounds never decrease from one row to the next. Where keys are spread
// over devices (KvShard), bounds among the keys of the request become bounds among the keys that this device holds.
//
// A mask mode is added here: a field of IntervalMask, where it comes from (make()), what it does to lo or hi, and what
// the estimates should know of it.
#pragma once

#include <cute/config.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/fast_divisor.h"
#include "common/kv_shard.h"
#include "cutlass_kernels/params.h"

namespace cutlass_kernels {

// What the host prepares.
struct MaskDivisors {
  FastDivisor chunk;
  FastDivisor period;  // keys of a round of blocks over all devices

  MaskDivisors() = default;
  explicit MaskDivisors(const AttentionParams& params)
      : chunk(std::uint32_t(params.chunk_size)),
        period(std::uint32_t(params.kv_shard.world) * std::uint32_t(params.kv_shard.block)) {}
};

// The right window, whichever way it is asked for.
CUTE_HOST_DEVICE int window_right_of(const AttentionParams& p) { return p.causal ? 0 : p.window_right; }

// The mask of one request's rows.
struct IntervalMask {
  int kv_len;       // keys that this device holds
  int total;        // keys on all devices
  int offset;       // total - qo_len: row i stands at absolute position i + offset (may be negative)
  bool causal;      // hi = position + 1
  int window_left;  // < 0: none; else lo >= position - window_left
  int chunk_size;   // 0: none; else lo >= position rounded down to a multiple of it, and hi is no more than the next
  FastDivisor chunk;
  int window_right;  // < 0: none; else hi <= position + window_right + 1; 0 if causal
  KvShard shard;
  FastDivisor period;

  // kGeneral: for every mask; else for those that are not needs_general_mask(). Kernels have general variants for
  // these: in all, the few instructions more would cost fa2 up to 6 % (hd64).
  //
  // Of problems whose host has set causal and window_right alike: launch().
  template <bool kGeneral>
  CUTE_DEVICE static IntervalMask make(const AttentionParams& p, const MaskDivisors& divisors, int batch, int qo_len,
                                       int kv_len) {
    int total = kv_len;
    if constexpr (kGeneral) {
      if (p.kv_shard.world > 1) total = p.seqused_k[batch];
    }
    return {kv_len,        total,          total - qo_len, p.causal || p.chunk_size > 0,
            p.window_left, p.chunk_size,   divisors.chunk, p.window_right,
            p.kv_shard,    divisors.period};
  }

  // Keys [begin_of_all(), end_of_all()) of the request, on all devices.
  CUTE_HOST_DEVICE int begin_of_all(int row) const {
    const int position = row + offset;
    int bound = 0;
    if (window_left >= 0 && position > window_left) bound = position - window_left;
    if (chunk_size > 0 && position > 0) {
      const int chunk_begin = int(chunk.divide(position)) * chunk_size;
      bound = chunk_begin > bound ? chunk_begin : bound;
    }
    return bound;
  }
  template <bool kGeneral>
  CUTE_HOST_DEVICE int end_of_all(int row) const {
    if constexpr (kGeneral) {
      const int position = row + offset;
      int bound = total;
      // Differences are small or negative where sums would not fit: a window may have 2^31 - 1 keys.
      if (window_right >= 0 && bound - position > window_right) bound = position + window_right + 1;
      if (chunk_size > 0) {
        if (position < 0) return 0;
        const int chunk_begin = int(chunk.divide(position)) * chunk_size;
        if (bound - chunk_begin > chunk_size) bound = chunk_begin + chunk_size;
      }
      return bound < 0 ? 0 : bound;
    }
    if (!causal) return kv_len;
    const int bound = row + offset + 1;
    return bound < 0 ? 0 : (bound < kv_len ? bound : kv_len);
  }

  // Of the first keys of the request, those that this device holds.
  CUTE_HOST_DEVICE int held(int keys) const {
    // Unlikely, which moves it out of the way: in line it cost fa2 7 % of ALiBi (hd64).
    if (__builtin_expect(shard.world > 1, 0)) {
      return keys_held(shard, keys, int(period.divide(keys)));
    }
    return keys;
  }

  template <bool kGeneral>
  CUTE_HOST_DEVICE int lo(int row) const {
    return kGeneral ? held(begin_of_all(row)) : begin_of_all(row);
  }
  template <bool kGeneral>
  CUTE_HOST_DEVICE int hi(int row) const {
    return kGeneral ? held(end_of_all<true>(row)) : end_of_all<false>(row);
  }

  // Whether a row may see fewer keys than its request has.
  CUTE_HOST_DEVICE bool hides_keys() const { return window_right >= 0 || window_left >= 0 || chunk_size > 0; }
};

// ---- Estimates, before a request's lengths are known. ----

inline bool hides_later_keys(const AttentionParams& params) {
  return window_right_of(params) >= 0 || params.chunk_size > 0;
}

inline bool hides_keys(const AttentionParams& params) { return hides_later_keys(params) || params.window_left >= 0; }

// Whether rows may see keys behind their own position and not all of them (a window to the right, or a chunk), or do
// not see all keys of requests that are spread over devices. (A single causal row sees all.)
inline bool needs_general_mask(const AttentionParams& params) {
  const int right = window_right_of(params);
  const bool sees_all = params.max_qo_len == 1 && right == 0 && params.window_left < 0 && params.chunk_size == 0;
  return right > 0 || (params.chunk_size > 0 && right < 0) ||
         (params.kv_shard.world > 1 && hides_keys(params) && !sees_all);
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
