// Tickets 0, 1, 2, ... from a counter in global memory: which tile comes next, which thread block is the last.
//
// Between launches the counter is zero, but nothing relies on it: a caller's memory may never have been cleared, or
// others may have written to it. So it does not count in ones, but in steps of kTicketStep. Of 2^64 values only as many
// are counts as there are tickets, and whoever finds another one restarts the counter. That costs a multiplication per
// ticket; to clear it before each launch would cost 2 us, beside calls that take 7.
#pragma once

#include <cute/config.hpp>

namespace cutlass_kernels {

using TicketCounter = unsigned long long;

// The odd number next to 2^64 / golden ratio, whose multiples stay far apart: of the first n, none but 0 lies closer to
// 0 than 2^64 / (2.3 n). So small numbers of either sign are never taken for counts.
constexpr TicketCounter kTicketStep = 0x9e3779b97f4a7c15ull;

// 1 / odd modulo 2^64, by Newton's method: each round doubles the bits that are right, 3 at first.
constexpr TicketCounter inverse_of(TicketCounter odd) {
  TicketCounter inverse = odd;
  for (int i = 0; i < 5; ++i) inverse *= 2 - odd * inverse;
  return inverse;
}

// Takes a ticket by `Atomics` (common/ptx/atomic.h), of `tickets` that are taken in all; whoever has the last one
// leaves zero. `restarts`: false for a thread that has had a ticket of this count. If it finds none then, calls that
// overlap in time share the counter, against the contract; it returns `tickets`, since two calls could restart one
// another for ever.
template <class Atomics>
CUTE_DEVICE TicketCounter take_ticket(TicketCounter* counter, TicketCounter tickets, bool restarts = true) {
  constexpr TicketCounter kInverse = inverse_of(kTicketStep);
  static_assert(kTicketStep * kInverse == 1);
  TicketCounter held = Atomics::add(counter, kTicketStep);
  if (held * kInverse >= tickets) {
    if (!restarts) return tickets;
    // No count. One thread replaces what it and others have added to, and has ticket 0; the others then count on from
    // there.
    TicketCounter now = held + kTicketStep;
    while (true) {
      const TicketCounter found = Atomics::compare_and_swap(counter, now, kTicketStep);
      if (found == now) {
        held = 0;
        break;
      }
      if (found * kInverse < tickets) {
        held = Atomics::add(counter, kTicketStep);
        break;
      }
      now = found;
    }
  }
  const TicketCounter ticket = held * kInverse;
  // Nobody else writes it any more. Nobody waits for this to arrive, as for the result of an exchange.
  if (ticket == tickets - 1) *static_cast<volatile TicketCounter*>(counter) = 0;
  return ticket;
}

}  // namespace cutlass_kernels
