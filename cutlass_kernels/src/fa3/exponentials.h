// Consumer: the reference m of the softmax, P = 2^(logits - m), and row sums.
//
// m need not be the maximum of a row, only close enough: see kLazyMax in consumer.h and common/softmax.h.
#pragma once

#include "fa3/consumer.h"

namespace cutlass_kernels::fa3 {

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
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::find_maximum(const ScoreFragment& s,
                                                                RowFactors& row_max) {
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
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::raise_to(RowFactors& row_max,
                                                            RowFactors& factor) {
  bool raised = false;
  if (__any_sync(0xffffffffu, softmax.exceeds(row_max, headroom()))) {
    OnlineSoftmax<2>::reduce_max(row_max);
    softmax.template raise<kLift>(row_max, [&](int r, float f) { factor[r] = f; }, headroom());
    raised = true;
  }
  return raised;
}
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE bool Consumer<Element, Tile, kLogits>::raise_maximum(const ScoreFragment& s,
                                                                 RowFactors& factor) {
  float row_max[2];  // (row)
  find_maximum(s, row_max);
  return raise_to(row_max, factor);
}

// P = 2^(scale s - m), packed, and, if kSums, its row sums. S stays as it is. The unit of the exponentials takes eight
// times as long as the others and leaves seven of eight issue slots: sums and packing go there.
template <class Element, class Tile, Logits kLogits>
template <bool kSums>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::take_exponentials(const ScoreFragment& s,
                                                                     ProbabilityFragment& p,
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
    if constexpr (kFp8) {  // eight keys on: V lies in that order, see transpose_values.h
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
