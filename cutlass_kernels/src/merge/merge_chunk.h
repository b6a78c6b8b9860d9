// 16 bytes of a row of a head, merged from several states.
//
// The mean of the states so far is what is kept, not their sum: it cannot overflow, and where one state alone has a
// weight, it is that state to the last bit.
#pragma once

#include "common/element_bytes.h"
#include "common/element_types.h"

namespace cutlass_kernels {

constexpr int kBytes = 16;  // of a row, a thread's

// States whose loads are on their way together, at most.
constexpr int kMostAhead = 6;

// Not through the read-only cache: merging in place writes what it has read.
inline __device__ Chunk<kBytes> load_chunk(const char* from) {
  const uint4 loaded = *reinterpret_cast<const uint4*>(from);
  return {{loaded.x, loaded.y, loaded.z, loaded.w}};
}

// Of a sum that is 0, NaN or from 1 to the number of states: 0 of 0, exactly 1 of 1, else right to the last bit or next
// to it.
inline __device__ float reciprocal(float total) {
  const float rough = __fdividef(1.0f, total);
  return total == 0.0f ? 0.0f : fmaf(rough, fmaf(-total, rough, 1.0f), rough);
}

// Merges 16 bytes of a row and returns the LSE of the row. load_state(i, v, s) loads those of state i.
template <class Element, int kAhead, class LoadState>
__device__ float merge_chunk(int num_states, const LoadState& load_state, char* to) {
  constexpr int kElements = kBytes / Element::kBytes;
  constexpr bool kMore = kAhead == kMostAhead;  // than kAhead states
  float mean[kElements] = {};
  float top = -INFINITY, total = 0.0f;  // of the states so far: the largest s, sum of 2^(s - top)
  int first = 0;
  do {
    Chunk<kBytes> v[kAhead];
    float weight[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool is_there = first + i < num_states;
      weight[i] = -INFINITY;
      v[i] = {};
      if (is_there) load_state(first + i, v[i], weight[i]);
    }
    const float top_before = top;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) top = fmaxf(top, weight[i]);  // the number, where one is NaN
    const float base = top == -INFINITY ? 0.0f : top;
    const float total_before = kMore ? total * exp2f(top_before - base) : 0.0f;
    total = total_before;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      weight[i] = exp2f(weight[i] - base);
      total += weight[i];
    }
    const float inverse = reciprocal(total);
    const float kept = total_before * inverse;
#pragma unroll
    for (int c = 0; c < kElements && kMore; ++c) mean[c] = kept == 0.0f ? 0.0f : mean[c] * kept;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float share = weight[i] * inverse;
      if (weight[i] == 0.0f) v[i] = {};  // may be NaN
      float values[kElements];
      decode<Element>(v[i], values);
#pragma unroll
      for (int c = 0; c < kElements; ++c) mean[c] = fmaf(share, values[c], mean[c]);
    }
    first += kAhead;
  } while (kMore && first < num_states);
  store<Element>(mean, to);
  return (top == -INFINITY ? 0.0f : top) + log2f(total);
}

}  // namespace cutlass_kernels
