// Tiles that a pair of CTAs, a cluster, computes together: for head dimensions beyond 256, whose O does not fit the
// registers of one CTA.
//
// Each CTA has half of the columns of Q, K, V and O, and the loads, products and stores of a tile of that head
// dimension. Only S = Q K^T is a sum over all columns: consumer warpgroup w of each CTA sends its partial sums of a KV
// block to warpgroup w of the other, through distributed shared memory, and adds those that it receives:
//
//   CTA 0, warpgroup w     partial S (64, BLK_N) --st.async-->  received (64, BLK_N)     CTA 1, warpgroup w
//                          received (64, BLK_N)  <--st.async--  partial S (64, BLK_N)
//
// A sum of two has the same bits in either order: both CTAs take the same maxima, P and row sums. CTA 0 writes LSE and
// statistics. While partial sums travel, O += P V of the block before runs.
//
// At head dimension 512, a KV block of 64 keys takes each CTA 2048 cycles of the tensor cores, in which 32 KB are sent
// and 32 KB received. One CTA with 64 rows would read K and V from L2 twice as often: 64 bytes per cycle and SM, more
// than L2 gives.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "fa3/tma.h"

namespace cutlass_kernels::fa3 {

// Of the CTA in its cluster: 0 or 1.
CUTE_DEVICE int rank_in_pair() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}

// First of the CTA's `columns` of a row.
template <class Tile>
CUTE_DEVICE int first_column(int columns) {
  if constexpr (Tile::kCtasPerTile == 1) return 0;
  return rank_in_pair() * columns;
}

// Whether the CTA writes what both of a pair have.
template <class Tile>
CUTE_DEVICE bool writes_row_results() {
  return Tile::kCtasPerTile == 1 || rank_in_pair() == 0;
}

// After the initialisation of barriers, before their first use: by all threads of both CTAs.
CUTE_DEVICE void sync_pair() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What an address of this CTA's shared memory is called in the other CTA's.
CUTE_DEVICE std::uint32_t address_in_peer(std::uint32_t address) {
  std::uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank_in_pair() ^ 1));
  return mapped;
}

// Stores in the peer's shared memory. What is stored counts as transferred bytes at its barrier.
CUTE_DEVICE void send(std::uint32_t to, std::uint32_t barrier, const int4& words) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, "
      "[%1];" ::"r"(to),
      "r"(barrier), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
      : "memory");
}
CUTE_DEVICE void send(std::uint32_t to, std::uint32_t barrier, std::uint32_t word) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %2, [%1];" ::"r"(to), "r"(barrier),
               "r"(word)
               : "memory");
}
CUTE_DEVICE void send(std::uint32_t to, std::uint32_t barrier, float a, float b, float c, float d) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, "
      "[%1];" ::"r"(to),
      "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}

}  // namespace cutlass_kernels::fa3
