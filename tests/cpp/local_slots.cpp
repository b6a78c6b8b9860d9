// local_slots.cu on the host, a thread for each of its thread block's: lists of slots are those that the layout says,
// in order, and what makes no sense is refused.
#include "local_slots.cu"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace ck = cutlass_kernels;

ck::Status ck::cuda_failure(const char*, cudaError_t) { return Status::invalid("a launch failed"); }

namespace {

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

std::mt19937 rng(1);

int any(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }

struct Problem {
  ck::LocalSlotsParams params;
  std::vector<int> positions, lengths, table, requests;
  bool has_lengths = any(0, 1) == 1, has_table = any(0, 3) > 0, has_requests = has_table && any(0, 1) == 1;

  Problem() {
    ck::LocalSlotsParams& p = params;
    p.num_requests = any(1, 3);
    p.num_rows = p.num_requests * any(1, 2);
    p.lists_per_row = any(1, 2);
    constexpr int kWidths[] = {0, 1, 33, ck::kThreads, 2 * ck::kThreads + 5};
    p.width = kWidths[any(0, 4)];
    p.shard = {any(1, 4), 0, 1 << any(0, 5)};
    p.shard.rank = any(0, p.shard.world - 1);
    p.page_size = any(1, 20);
    p.table_width = any(0, 9);
    p.table_stride = p.table_width + any(0, 3);
    const int most = p.shard.world * (p.table_width + 2) * p.page_size;
    for (std::int64_t i = 0; i < p.num_rows * p.lists_per_row * p.width; ++i) {
      constexpr int kOthers[] = {-1, -2147483647 - 1, 2147483647};
      positions.push_back(any(0, 9) == 0 ? kOthers[any(0, 2)] : any(0, most));
    }
    for (std::int64_t i = 0; i < p.num_requests * p.table_stride; ++i) table.push_back(any(-1, 50));
    for (int i = 0; i < p.num_rows; ++i) {
      lengths.push_back(any(0, p.width));
      requests.push_back(any(-1, p.num_requests));
    }
    p.positions = positions.data();
    if (has_lengths) p.lengths = lengths.data();
    if (has_table) p.page_table = table.data();
    if (has_requests) p.batch_indices = requests.data();
  }

  int slot(int row, int i, int position) const {
    const ck::LocalSlotsParams& p = params;
    const int block = p.shard.block, world = p.shard.world;
    if (position < 0 || (has_lengths && i >= lengths[std::size_t(row)])) return -1;
    if (position / block % world != p.shard.rank) return -1;
    const int local = position / (block * world) * block + position % block;
    if (!has_table) return local;
    const int request = has_requests ? requests[std::size_t(row)] : row / int(p.num_rows / p.num_requests);
    const int column = local / p.page_size;
    if (request < 0 || request >= p.num_requests || column >= p.table_width) return -1;
    const int page = table[std::size_t(request * p.table_stride + column)];
    return page < 0 ? -1 : page * p.page_size + local % p.page_size;
  }

  void check(bool compact) {
    ck::LocalSlotsParams& p = params;
    std::vector<int> slots(positions.size(), -7), counts(std::size_t(p.num_rows), -7);
    p.slots = slots.data();
    p.counts = compact ? counts.data() : nullptr;
    const ck::Status status = ck::find_local_slots(p, nullptr);
    require(status.ok(), status.message);
    std::size_t at = 0;
    for (int row = 0; row < p.num_rows; ++row) {
      int most = 0;
      for (int list = 0; list < p.lists_per_row; ++list) {
        std::vector<int> want, others;
        for (int i = 0; i < p.width; ++i) {
          const int found = slot(row, i, positions[at + std::size_t(i)]);
          (compact && found < 0 ? others : want).push_back(found);
        }
        most = std::max(most, int(want.size()));
        want.insert(want.end(), others.begin(), others.end());
        for (int i = 0; i < p.width; ++i) require(slots[at++] == want[std::size_t(i)], "a slot");
      }
      require(!compact || counts[std::size_t(row)] == most, "a count");
    }
  }
};

void check_refusals() {
  int memory[8] = {};
  ck::LocalSlotsParams fine;
  fine.num_rows = 2, fine.width = 4, fine.positions = memory, fine.slots = memory;
  require(ck::find_local_slots(fine, nullptr).ok(), "lists in place");
  const auto refuse = [&](auto change, const std::string& words) {
    ck::LocalSlotsParams params = fine;
    change(params);
    const ck::Status status = ck::find_local_slots(params, nullptr);
    require(!status.ok() && status.message.find(words) != std::string::npos, words + ", not: " + status.message);
  };
  refuse([](auto& p) { p.num_rows = -1; }, "num_rows=-1");
  refuse([](auto& p) { p.width = ck::kNotSet; }, "width=-1");
  refuse([](auto& p) { p.slots = nullptr; }, "one of them is null");
  refuse([&](auto& p) { p.counts = memory; }, "memory of their own");
  refuse([](auto& p) { p.shard.rank = 1; }, "rank=1");
  refuse([](auto& p) { p.shard = {1 << 20, 0, 1 << 10}; }, "world * block");
  refuse([&](auto& p) { p.batch_indices = memory; }, "without page_table");
  refuse([&](auto& p) { p.page_table = memory; }, "page_size=0");
  refuse([&](auto& p) { p.page_table = memory, p.page_size = 1, p.num_requests = 3; }, "num_requests=3");
}

}  // namespace

int main() {
  check_refusals();
  for (int i = 0; i < 40; ++i) {
    Problem problem;
    problem.check(true);
    problem.check(false);
  }
  std::printf("OK\n");
}
