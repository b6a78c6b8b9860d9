// common/tickets.h on the host: whatever a counter holds at first, each ticket is taken once, and zero is left.
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

void Lot::start() { (*lot.body_)(lot.running_); }

}  // namespace

struct {
  unsigned x = 5;
} constexpr threadIdx;

template <class Word>
Word atomicAdd(Word* at, Word value) {
  lot.draw();
  const Word before = *at;
  *at += value;
  return before;
}
template <class Word>
Word atomicCAS(Word* at, Word expected, Word value) {
  lot.draw();
  const Word before = *at;
  if (before == expected) *at = value;
  return before;
}
template <class Word>
Word atomicExch(Word* at, Word value) {
  lot.draw();
  const Word before = *at;
  *at = value;
  return before;
}

#include "common/tickets.h"

namespace {

// Blocks that go on until they are refused, once each, as persistent ones do: by one of the last kBlocks tickets.
template <class Word>
bool is_right(Word first, Word tickets) {
  Word counter = first;
  std::vector<Word> taken;
  lot.run([&](int) {
    Word ticket = 0;
    bool is_first = true;
    do {
      ticket = cutlass_kernels::take_ticket(&counter, tickets, is_first);
      taken.push_back(ticket);
      is_first = false;
    } while (ticket < tickets - kBlocks);
  });
  std::vector<int> times(tickets, 0);
  bool right = counter == 0;
  for (const Word ticket : taken) {
    right = right && ticket < tickets;
    if (ticket < tickets) ++times[ticket];
  }
  for (const int count : times) right = right && count == 1;
  if (!right) {
    std::printf("%zu bits, %llu tickets, from %llx on: %llx is left\n", 8 * sizeof(Word),
                (unsigned long long)tickets, (unsigned long long)first,
                (unsigned long long)counter);
  }
  return right;
}

// Two launches that share a counter, which they must not: both come to an end.
template <class Word>
bool ends(Word first, Word tickets, Word others) {
  Word counter = first;
  int taken = 0;
  lot.run([&](int block) {
    const Word own = block % 2 == 0 ? tickets : others;
    Word ticket = 0;
    bool is_first = true;
    do {
      ticket = cutlass_kernels::take_ticket(&counter, own, is_first);
      is_first = false;
      if (++taken > 100000) return;
    } while (ticket < own - kBlocks / 2);
  });
  if (taken > 100000) std::printf("Calls of different sizes go on for ever\n");
  return taken <= 100000;
}

template <class Word>
bool all_right() {
  constexpr Word kStep = cutlass_kernels::TicketStep<Word>::kValue;
  std::mt19937_64 random(1);
  bool right = true;
  for (const Word tickets : {Word(kBlocks), Word(kBlocks + 1), Word(60), Word(500)}) {
    std::vector<Word> firsts = {0,
                                1,
                                2,
                                3,
                                Word(-1),
                                Word(-2),
                                Word(1) << 30,
                                Word(-1) >> 1,
                                Word(1) << (8 * sizeof(Word) - 1)};
    // Next to what is a count: what the steps of blocks that find no count lead to, or away from.
    for (Word i = 1; i <= 2 * kBlocks; ++i) {
      firsts.push_back(Word(0) - i * kStep);
      firsts.push_back((tickets + i - 1) * kStep);
    }
    for (int i = 0; i < 50; ++i) firsts.push_back(Word(random()));
    for (const Word first : firsts) {
      for (int order = 0; order < 4; ++order) {
        right = is_right(first, tickets) && ends(first, tickets, Word(7)) && right;
      }
    }
  }
  return right;
}

}  // namespace

int main() {
  const bool narrow = all_right<unsigned>(), wide = all_right<unsigned long long>();
  std::printf(narrow && wide ? "OK\n" : "FAILED\n");
  return narrow && wide ? 0 : 1;
}
