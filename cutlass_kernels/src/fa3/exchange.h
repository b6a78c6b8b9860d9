// Consumer: partial sums of S go to the other CTA of a pair, and come from there (pair.h).
//
// The receive buffer is the memory through which O leaves. It is returned to the sender just before the next S is
// issued: the partial sums in it have been added, and O of a finished tile has left; and the sender learns of it while
// S is computed.
#pragma once

#include <cute/config.hpp>

#include "common/ptx/shared_address.h"
#include "fa3/consumer.h"
#include "fa3/pair.h"
#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::return_receive_buffer() const {
  if constexpr (Layout::kPair) {
    if (lane == 0) tma_store_wait();  // TMA has read O
    __syncwarp();
    if (lane == 0) {
      Barrier::arrive_in_peer(address_in_peer(shared.s_empty[warpgroup].address()));
    }
  }
}

// Completes S by the sums over the other CTA's columns.
template <class Element, class Tile, Logits kLogits>
CUTE_DEVICE void Consumer<Element, Tile, kLogits>::add_peer_scores(ScoreFragment& s) {
  if constexpr (Layout::kPair) {
    // A warp's memory for O: 16 rows of each panel. Four of a thread's values, of all lanes, are 512 bytes.
    const std::uint32_t buffer =
        shared_address(shared.o[warpgroup]) + threadIdx.x / 32 % 4 * (16 * 128) + lane * 16;
    constexpr int kPerPanel = 16 * 128 / 512;
    const auto offset = [](int i) {
      return i / kPerPanel * Layout::kPanelBytesQ + i % kPerPanel * 512;
    };
    const std::uint32_t to = address_in_peer(buffer);
    const std::uint32_t full = address_in_peer(shared.s_full[warpgroup].address());
    shared.s_empty[warpgroup].wait(exchange_phase);
    CUTE_UNROLL
    for (int i = 0; i < kN / 8; ++i) {
      send(to + offset(i), full, s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    }
    if (threadIdx.x % 128 == 0) shared.s_full[warpgroup].arrive_and_expect(Layout::kOBytes);
    shared.s_full[warpgroup].wait(exchange_phase);
    exchange_phase ^= 1;
    CUTE_UNROLL
    for (int i = 0; i < kN / 8; ++i) {
      float x[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                   : "r"(buffer + offset(i))
                   : "memory");
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) s[4 * i + j] += x[j];
    }
  }
}

}  // namespace cutlass_kernels::fa3
