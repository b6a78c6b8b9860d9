// From scores to P: logits, the reference of the softmax, exponentials.
#pragma once

#include "common/bit_mask.h"
#include "common/mask.h"
#include "fa3/consumer.h"

namespace cutlass_kernels::fa3 {

// ---- Consumer: from S to logits. Scales, soft cap and ALiBi change S; masks replace it by -inf.
//
// Most KV blocks need no mask: a block is masked only if some row of the warpgroup may not see all of its keys
// (needs_mask()).

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
  const IntervalMask mask = make_mask<kIsGeneral>(params, shared.jobs[jobs.index].batch, qo_len, kv_len);
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
  return std::int64_t(shared.jobs[jobs.index].mask_begin) * 8 + std::int64_t(token(r)) * kv_len + block_begin +
         lane % 4 % kQuadWords * 32;
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
        token(r) < qo_len ? __funnelshift_r(low_bits[r], high_bits[r], std::uint32_t(first_bit(r))) : ~0u;
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

// ---- Consumer: the reference m of the softmax, P = 2^(logits - m), and row sums.
//
// m need not be the maximum of a row, only close enough: see kLazyMax in consumer.h and common/softmax.h.

// Whether m is to be the maximum itself, not only close to it.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::is_exact() const {
  return kHasStats && params.attention.stats != nullptr;
}
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE float Consumer<Element, Tile, kLogits>::headroom() const {
  if constexpr (kSkipsNegligible) return 0.0f;
  return kHasStats ? params.stats.headroom : kHeadroom;
}

// The maxima of the thread's part of its rows.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::find_maximum(const ScoreFragment& s, RowFactors& row_max) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    // Four chains, since each step of one waits for the step before.
    float chain[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) chain[i] = s[i / 2 * 4 + 2 * r + i % 2];
    CUTE_UNROLL
    for (int i = 4; i < kN / 4; ++i) {
      chain[i % 4] = fmaxf(chain[i % 4], s[i / 2 * 4 + 2 * r + i % 2]);
    }
    row_max[r] = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
  }
}

// Whether weights with these maxima are negligible in all rows of the warpgroup. A thread need not know the maximum
// of a whole row: if the maxima of all its parts are below the threshold, so is the row's. Rows past the end of the
// request have no vote.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::are_negligible(const RowFactors& row_max) const {
  bool below = true;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    below &= token(r) >= qo_len || softmax.is_below(log2_threshold, r, row_max[r]);
  }
  return all_agree(below);
}

// Raises m where a row's maximum leaves no headroom. Returns whether O must be multiplied by `factor`.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::raise_to(RowFactors& row_max, RowFactors& factor) {
  bool raised = false;
  if (__any_sync(0xffffffffu, softmax.exceeds(row_max, headroom()))) {
    OnlineSoftmax<2>::reduce_max(row_max);
    softmax.template raise<kLift>(row_max, [&](int r, float f) { factor[r] = f; }, headroom());
    raised = true;
  }
  return raised;
}
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::raise_maximum(const ScoreFragment& s, RowFactors& factor) {
  float row_max[2];  // (row)
  find_maximum(s, row_max);
  return raise_to(row_max, factor);
}

// P = 2^(scale s - m), packed, and, if kSums, its row sums. S stays as it is. The unit of the exponentials takes eight
// times as long as the others and leaves seven of eight issue slots: sums and packing go there.
template <class Element, class Tile, Logits kLogits>
template <bool kSums>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::take_exponentials(const ScoreFragment& s, ProbabilityFragment& p,
                                                                     RowFactors& sum) const {
  sum[0] = sum[1] = 0.0f;
  float more[2] = {0.0f, 0.0f};  // of e4m3, half of each sum: an addition waits for the one before
  CUTE_UNROLL
  for (int i = 0; i < kPRegisters; ++i) {
    const int r = i % 2;
    const int first = kFp8 ? i / 2 * 8 + 2 * r : 2 * i;
    const float p0 = exp2_unordered(fmaf(s[first], softmax.scale, softmax.minus_m[r]));
    const float p1 = exp2_unordered(fmaf(s[first + 1], softmax.scale, softmax.minus_m[r]));
    if constexpr (kSums) sum[r] += p0;
    if constexpr (kSums) sum[r] += p1;
    if constexpr (kFp8) {  // eight keys on: V lies in that order, see load_fp8.h
      const float p2 = exp2_unordered(fmaf(s[first + 4], softmax.scale, softmax.minus_m[r]));
      const float p3 = exp2_unordered(fmaf(s[first + 5], softmax.scale, softmax.minus_m[r]));
      if constexpr (kSums) more[r] += p2;
      if constexpr (kSums) more[r] += p3;
      p[i] = Operand::pack(p0, p1, p2, p3);
    } else {
      p[i] = Operand::pack(p0, p1);
    }
  }
  if constexpr (kFp8) {
    sum[0] += more[0];
    sum[1] += more[1];
  }
}

// Whether P of a row fits its type: of 16 bits, by the sums.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::fits(const RowFactors& sum, int r) {
  return sum[r] < kSumLimit;
}

// And of e4m3: whether all are numbers below 256.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::fits(const ProbabilityFragment& p, int r) {
  std::uint32_t carries = 0;  // adding 8 to a byte of 256 or more, or of NaN, sets its highest bit
  CUTE_UNROLL
  for (int i = r; i < kPRegisters; i += 2) carries |= p[i] + 0x08080808u;
  return (carries & 0x80808080u) == 0;
}

}  // namespace cutlass_kernels::fa3
