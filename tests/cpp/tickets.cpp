// schedule/tickets.h on the host: whatever a counter holds at first, each ticket is taken once, and zero is left.
//
// Coroutines stand for thread blocks. Before each atomic operation, which of them goes on is drawn by lot.
#include <ucontext.h>

#include <cstdio>
#include <functional>
#include <random>
#include <vector>

namespace {

constexpr int kBlocks = 6;

class Lot {
 public:
  // Runs body(0) to body(kBlocks - 1).
  void run(const std::function<void(int)>& body) {
    body_ = &body;
    std::vector<std::vector<char>> stacks(kBlocks, std::vector<char>(1 << 16));
    waiting_.clear();
    for (int i = 0; i < kBlocks; ++i) {
      getcontext(&blocks_[i]);
      blocks_[i].uc_stack.ss_sp = stacks[i].data();
      blocks_[i].uc_stack.ss_size = stacks[i].size();
      blocks_[i].uc_link = &main_;
      makecontext(&blocks_[i], &Lot::start, 0);
      waiting_.push_back(i);
    }
    while (!waiting_.empty()) {
      const std::size_t drawn = random_() % waiting_.size();
      running_ = waiting_[drawn];
      ended_ = true;
      swapcontext(&main_, &blocks_[running_]);
      if (ended_) waiting_.erase(waiting_.begin() + std::ptrdiff_t(drawn));
    }
  }

  void draw() {
    ended_ = false;
    swapcontext(&blocks_[running_], &main_);
  }

 private:
  static void start();

  const std::function<void(int)>* body_ = nullptr;
  std::minstd_rand random_{1};
  std::vector<int> waiting_;
  int running_ = 0;
  bool ended_ = false;
  ucontext_t main_, blocks_[kBlocks];
};

Lot lot;

using TicketCounter = unsigned long long;

void Lot::start() { (*lot.body_)(lot.running_); }

}  // namespace

#include "schedule/tickets.h"

namespace {

struct DrawnAtomics {
  static TicketCounter add(TicketCounter* at, TicketCounter value) {
    lot.draw();
    const TicketCounter before = *at;
    *at += value;
    return before;
  }
  static TicketCounter compare_and_swap(TicketCounter* at, TicketCounter expected, TicketCounter value) {
    lot.draw();
    const TicketCounter before = *at;
    if (before == expected) *at = value;
    return before;
  }
};

TicketCounter take_ticket(TicketCounter* counter, TicketCounter tickets, bool is_first) {
  return cutlass_kernels::take_ticket<DrawnAtomics>(counter, tickets, is_first);
}

// Blocks that go on until they are refused, once each, as persistent ones do: by one of the last kBlocks tickets.
bool is_right(TicketCounter first, TicketCounter tickets) {
  TicketCounter counter = first;
  std::vector<TicketCounter> taken;
  lot.run([&](int) {
    TicketCounter ticket = 0;
    bool is_first = true;
    do {
      ticket = take_ticket(&counter, tickets, is_first);
      taken.push_back(ticket);
      is_first = false;
    } while (ticket < tickets - kBlocks);
  });
  std::vector<int> times(tickets, 0);
  bool right = counter == 0;
  for (const TicketCounter ticket : taken) {
    right = right && ticket < tickets;
    if (ticket < tickets) ++times[ticket];
  }
  for (const int count : times) right = right && count == 1;
  if (!right) {
    std::printf("%llu tickets, from %llx on: %llx is left\n", tickets, first, counter);
  }
  return right;
}

// Two launches that share a counter, which they must not: both come to an end.
bool ends(TicketCounter first, TicketCounter tickets, TicketCounter others) {
  TicketCounter counter = first;
  int taken = 0;
  lot.run([&](int block) {
    const TicketCounter own = block % 2 == 0 ? tickets : others;
    TicketCounter ticket = 0;
    bool is_first = true;
    do {
      ticket = take_ticket(&counter, own, is_first);
      is_first = false;
      if (++taken > 100000) return;
    } while (ticket < own - kBlocks / 2);
  });
  if (taken > 100000) std::printf("Calls of different sizes go on for ever\n");
  return taken <= 100000;
}

bool all_right() {
  constexpr TicketCounter kStep = cutlass_kernels::kTicketStep;
  std::mt19937_64 random(1);
  bool right = true;
  for (const TicketCounter tickets :
       {TicketCounter(kBlocks), TicketCounter(kBlocks + 1), TicketCounter(60), TicketCounter(500)}) {
    std::vector<TicketCounter> firsts = {0,
                                         1,
                                         2,
                                         3,
                                         TicketCounter(-1),
                                         TicketCounter(-2),
                                         TicketCounter(1) << 30,
                                         TicketCounter(-1) >> 1,
                                         TicketCounter(1) << 63};
    // Next to what is a count: what the steps of blocks that find no count lead to, or away from.
    for (TicketCounter i = 1; i <= 2 * kBlocks; ++i) {
      firsts.push_back(TicketCounter(0) - i * kStep);
      firsts.push_back((tickets + i - 1) * kStep);
    }
    for (int i = 0; i < 50; ++i) firsts.push_back(random());
    for (const TicketCounter first : firsts) {
      for (int order = 0; order < 4; ++order) {
        right = is_right(first, tickets) && ends(first, tickets, TicketCounter(7)) && right;
      }
    }
  }
  return right;
}

}  // namespace

int main() {
  const bool right = all_right();
  std::printf(right ? "OK\n" : "FAILED\n");
  return right ? 0 : 1;
}
