// Consumer: from S to logits. Scales, soft cap and ALiBi change S; masks replace it by -inf.
//
// Most KV blocks need no mask: a block is masked only if some row of the warpgroup may not see all of its keys
// (needs_mask()).
#pragma once

#include "common/bit_mask.h"
#include "fa3/consumer.h"

namespace cutlass_kernels::fa3 {

template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::transform(ScoreFragment& s) const {
  if constexpr (kFoldsScale) {
    if (head_transform.changes_logits()) head_transform.apply(s, kN / 2);
  } else if constexpr (kLogits == Logits::kTransformed) {
    params.transform.apply(s, kN / 2);
  }
  if constexpr (kLogits == Logits::kGeneral) {
    if (!params.changes_logits) return;
    const Alibi& alibi = params.attention.alibi;
    float factor[2], slope[2];  // per row (2)
    int distance[2];            // per row (2)
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int head = shared.jobs[jobs.index].head + pack_head(r);
      factor[r] = logits_scale_of(params.attention, shared.jobs[jobs.index].batch, head);
      slope[r] = alibi.slopes == nullptr ? 0.0f : __ldg(alibi.slopes + head);
      distance[r] = block_begin + lane % 4 * 2 - (alibi.relative ? token(r) : 0);
    }
    params.general.apply(s, factor, slope, distance);
  }
}

// Whether some row of the warpgroup may not see all keys of the KV block that begins at `begin`.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::needs_mask(int begin) const {
  return begin < unmasked_begin || begin + kN > unmasked_end;
}

// Replaces by -inf the scores of keys that a row does not see.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::apply_mask(ScoreFragment& s) const {
  const IntervalMask mask =
      make_mask<kIsGeneral>(params, shared.jobs[jobs.index].batch, qo_len, kv_len);
  if (has_bits()) {
    apply_bits(s);
    if (!mask.hides_keys() && block_begin + kN <= kv_len) return;
  }
  const int key0 = block_begin + lane % 4 * 2;
  const bool below = block_begin < unmasked_begin;  // hides keys at the block's low end, too
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int lo = mask.template lo<kIsGeneral>(token(r));
    const int hi = mask.template hi<kIsGeneral>(token(r));
    if (below) {
      // Seen if lo <= key < hi: one unsigned comparison of the distance from lo.
      const std::uint32_t from_lo = key0 - lo;
      const std::uint32_t extent = max(hi - lo, 0);
      CUTE_UNROLL
      for (int i = 0; i < kN / 8; ++i) {
        mask_unless_below(s[4 * i + 2 * r], from_lo + i * 8, extent);
        mask_unless_below(s[4 * i + 2 * r + 1], from_lo + i * 8 + 1, extent);
      }
    } else {
      // With a constant on one side of the comparison there is no addition per key.
      const int limit = hi - key0;
      CUTE_UNROLL
      for (int i = 0; i < kN / 8; ++i) {
        mask_unless_above(s[4 * i + 2 * r], limit, i * 8);
        mask_unless_above(s[4 * i + 2 * r + 1], limit, i * 8 + 1);
      }
    }
  }
}

// Custom masks: a bit per row and key. Not of e4m3, which is copied to 16 bits for them.

template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::has_bits() const {
  return kIsGeneral && !kFp8 && params.attention.mask.words != nullptr;
}

// Index of the first of the lane's 32 bits of row r.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE std::int64_t Consumer<Element, Tile, kLogits>::first_bit(int r) const {
  return std::int64_t(shared.jobs[jobs.index].mask_begin) * 8 + std::int64_t(token(r)) * kv_len +
         block_begin + lane % 4 % kQuadWords * 32;
}

// Reads the bits of the KV block that lies `ahead` keys before block_begin: a block ahead of their use, as memory takes
// longer than the products of a block (8 heads, 64 rows over 64k keys: 94 -> 84 us).
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::read_bits(int ahead) {
  if constexpr (kIsGeneral && !kFp8) {
    const int begin = block_begin - ahead;
    if (!has_bits() || begin < key_begin || !needs_mask(begin)) return;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const std::int64_t word = (first_bit(r) - ahead) >> 5;
      low_bits[r] = word_at(params.attention.mask, word);
      high_bits[r] = word_at(params.attention.mask, word + 1);
    }
  }
}

template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::apply_bits(ScoreFragment& s) const {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    // A row past the end sees all keys, of which it makes nothing. Its bits are those of another request: the lazy
    // maximum, on which a warp votes, must not depend on them.
    const std::uint32_t own =
        token(r) < qo_len ? __funnelshift_r(low_bits[r], high_bits[r], std::uint32_t(first_bit(r)))
                          : ~0u;
    CUTE_UNROLL
    for (int w = 0; w < kQuadWords; ++w) {
      const std::uint32_t bits = __shfl_sync(0xffffffffu, own, (lane & ~3) | w) >> (lane % 4 * 2);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        mask_unless_bit(s[16 * w + 4 * i + 2 * r], bits, 8 * i);
        mask_unless_bit(s[16 * w + 4 * i + 2 * r + 1], bits, 8 * i + 1);
      }
    }
  }
}

}  // namespace cutlass_kernels::fa3
