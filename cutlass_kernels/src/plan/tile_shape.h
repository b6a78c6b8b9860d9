// What one thread block of a kernel computes, as plans see it. Backends fill it from their tile tables.
#pragma once

#include <array>
#include <cassert>
#include <cstddef>
#include <initializer_list>

namespace cutlass_kernels {

struct TileShape {
  int rows = 0;             ///< query rows of each head
  int kind = 0;             ///< which of the kernel's tiles
  int packed_heads = 0;     ///< query heads whose rows share a tile; 0: a tile is of one head
  int blocks_per_sm = 1;    ///< thread blocks that run at once on an SM
  int blocks_per_tile = 1;  ///< thread blocks that compute a tile together
  int most_waves = 2;       ///< waves of thread blocks that KV splits may add to fill the last one
  /// Keys of the smallest KV split: fewer cost more to start and to combine than they take.
  int least_split_keys = 256;
  /// The same as long as there is no more than a thread block per SM: where SMs are idle, shorter splits take less time
  /// although they cost more. 0: as many.
  int least_split_keys_of_few = 0;
  bool combines = false;             ///< whether its last thread block can combine partial results
  int combined_splits = 0;           ///< most splits that it combines; 0: combines_in_kernel() decides
  bool splits_without_list = false;  ///< whether a batch's keys can be split without a tile list
  bool has_shares = false;           ///< whether a thread block can compute entries of a list one after another
  bool needs_list = false;           ///< whether the kernel finds the tiles of a batch in a list alone
};

/// The time of a thread block on an H200 whose SMs are full: what estimates are made of (estimate.h).
struct TileTime {
  double start = 0;    ///< us beside what its keys take
  double per_key = 0;  ///< ns

  constexpr TileTime plus(double us, double times) const { return {start + us, per_key * times}; }
};

/// A tile that may compute a problem.
struct Candidate {
  const char* name;
  TileShape shape;
  TileTime time;
};

/// Those of a problem.
class Candidates {
 public:
  Candidates() = default;
  Candidates(std::initializer_list<Candidate> list) {
    for (const Candidate& candidate : list) add(candidate);
  }
  void add(const Candidate& candidate) {
    assert(count_ < kMost);
    all_[std::size_t(count_++)] = candidate;
  }
  const Candidate* begin() const { return all_.data(); }
  const Candidate* end() const { return all_.data() + count_; }
  int size() const { return count_; }

 private:
  static constexpr int kMost = 6;
  std::array<Candidate, kMost> all_{};
  int count_ = 0;
};

}  // namespace cutlass_kernels
