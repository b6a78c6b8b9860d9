// Tickets 0, 1, 2, ... from a counter in global memory: which tile comes next, which thread block is the last.
//
// Between launches the counter is zero, but nothing relies on it: a caller's memory may never have been cleared, or
// others may have written to it. So it does not count in ones, but in steps of kStep. Of 2^32 (or 2^64) values only as
// many are counts as there are tickets, and whoever finds another one restarts the counter. That costs a multiplication
// per ticket; to clear it before each launch would cost 2 us, beside calls that take 8.
#pragma once

#include <cute/config.hpp>

namespace cutlass_kernels {

// The odd number next to 2^bits / golden ratio, whose multiples stay far apart: of the first n, none but 0 lies closer
// to 0 than 2^bits / (2.3 n). So small numbers of either sign are never taken for counts: below 2^24 for 64 tickets of
// 32 bits, below 2^20 for 2048.
template <class Word>
struct TicketStep;
template <>
struct TicketStep<unsigned> {
  static constexpr unsigned kValue = 0x9e3779b9u;
};
template <>
struct TicketStep<unsigned long long> {
  static constexpr unsigned long long kValue = 0x9e3779b97f4a7c15ull;
};

// 1 / odd modulo 2^bits, by Newton's method: each round doubles the bits that are right, 3 at first.
template <class Word>
constexpr Word inverse_of(Word odd) {
  Word inverse = odd;
  for (int i = 0; i < 5; ++i) inverse *= 2 - odd * inverse;
  return inverse;
}

// atomicAdd() of a thread that calls alone. The compiler does not know that it does: it would first add up what the
// lanes of a warp add, by a vote and two shuffles, unless the values may differ (threadIdx.x >> 16 is 0).
template <class Word>
CUTE_DEVICE Word add_alone(Word* counter, Word value) {
  return atomicAdd(counter, value + (threadIdx.x >> 16));
}

// Takes a ticket, of `tickets` that are taken in all; whoever has the last one leaves zero. `restarts`: false for a
// thread that has had a ticket of this count. If it finds none then, calls that overlap in time share the counter,
// against the contract; it returns `tickets`, since two calls could restart one another for ever.
template <class Word>
CUTE_DEVICE Word take_ticket(Word* counter, Word tickets, bool restarts = true) {
  constexpr Word kStep = TicketStep<Word>::kValue;
  constexpr Word kInverse = inverse_of(kStep);
  static_assert(kStep * kInverse == 1);
  Word held = add_alone(counter, kStep);
  if (held * kInverse >= tickets) {
    if (!restarts) return tickets;
    // No count. One thread replaces what it and others have added to, and has ticket 0; the others then count on from
    // there.
    Word now = held + kStep;
    while (true) {
      const Word found = atomicCAS(counter, now, kStep);
      if (found == now) {
        held = 0;
        break;
      }
      if (found * kInverse < tickets) {
        held = add_alone(counter, kStep);
        break;
      }
      now = found;
    }
  }
  const Word ticket = held * kInverse;
  if (ticket == tickets - 1) atomicExch(counter, Word(0));
  return ticket;
}

}  // namespace cutlass_kernels
