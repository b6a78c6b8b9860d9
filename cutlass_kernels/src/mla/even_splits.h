// KV splits of a batch without a tile list, such that all thread blocks get about as much to compute.
//
// Where requests are about as long, each gets as many splits as fill the thread blocks. Else all thread blocks get
// equal shares of the keys, and a share may begin and end within a request. Requests lie on a line one after the other,
// each as long as its cost: what it takes to start and to end one, and then its KV blocks. Cuts at equal distances make
// shares of the line. What a share has of a request is a split; that of request b in share s is number s + b of all, as
// from each split to the next one of the two grows by one.
//
// Splits in proportion to keys, rounded down (common/batch_splits.h), take up to twice as long as the mean where
// lengths differ: 128 heads over 64 requests of 1 to 8k keys take 157 us with equal shares, and 219 us with those
// (H200).
#pragma once

#include <cute/config.hpp>

#include <cstdint>

#include "common/batch_splits.h"
#include "common/find_work.h"
#include "common/requests.h"
#include "mla/config.h"
#include "plan/launch_params.h"
#include "plan/tile_source.h"

namespace cutlass_kernels::mla {

// A request on the line, in KV blocks.
struct LinePart {
  static constexpr int kBlockN = Tile<Schedule::kEven>::kBlockN;
  static constexpr int kStart = 3;  // as long as the start and the end of a split take
  static constexpr int kMostBlocks = (1 << 20) - kStart;
  static_assert((kMostBlocks + kStart) * std::int64_t(kMostSearchedRequests) <= 1 << 30,
                "Ends of shares are numbers of 32 bits, whatever the lengths are.");

  int start;   // none of a request without rows, which is padding
  int blocks;  // at least 1

  CUTE_DEVICE LinePart(const LaunchParams& p, int batch, const KeysOfRequest& keys) {
    const int seen = min(max(keys.length, 0), p.plan.most_split_keys);
    start = seen > 0 || rows_of_request(p, batch).length > 0 ? kStart : 0;
    blocks = min(max(int(unsigned(seen + kBlockN - 1) / kBlockN), 1), kMostBlocks);
  }
  CUTE_DEVICE int cost() const { return start + blocks; }
};

// KV blocks [begin, end) of `all` that a request has.
struct BlocksOfSplit {
  int begin;
  int end;
  int all;
};

// In shared memory.
class EvenSplits {
 public:
  // Whether a problem is split so, whatever its lengths.
  static bool serve(const LaunchParams& p) {
    // All tiles of a request have the same splits, so all requests must have as many. What a caller asks for is dealt
    // out as it is.
    const bool same_tiles =
        tiles_of_longest(p, p.plan.tile_rows) == 1 ||
        (p.seqused_q == nullptr && p.total_q == std::int64_t(p.batch_size) * p.max_qo_len);
    return splits_batch(p) && p.batch_size > 1 && p.plan.least_split_keys > 1 && same_tiles;
  }

  // By all threads. A barrier follows.
  template <int kThreads>
  CUTE_DEVICE void load(const LaunchParams& p) {
    CUTE_NO_UNROLL
    for (int batch = int(threadIdx.x); batch < 32 * kGroups; batch += kThreads) {
      const int cost = cost_of(p, batch);
      const int sum = __reduce_add_sync(0xffffffffu, cost);
      const int most = __reduce_max_sync(0xffffffffu, cost);
      if (threadIdx.x % 32 == 0) {
        before_[batch / 32] = sum;
        most_[batch / 32] = most;
      }
    }
  }

  // By all lanes of the warp that finds splits afterwards. thread_blocks: that run at once, for each tile and head.
  CUTE_DEVICE void share(const LaunchParams& p, int thread_blocks) {
    const int lane = threadIdx.x % 32;
    const int sum = before_[lane];
    const int inclusive = inclusive_sum(sum);
    const int all = __shfl_sync(0xffffffffu, inclusive, 31);
    // Of the longest request.
    const int blocks = max(__reduce_max_sync(0xffffffffu, most_[lane]) - LinePart::kStart, 1);
    const int shares = min(max(thread_blocks, 1), SplitShares::splits_to_share(p));
    const int least = max(p.plan.least_split_keys / LinePart::kBlockN, 1);
    each_ = max(int(unsigned(all + shares - 1) / unsigned(shares)), least);
    splits_ = max(min(int(unsigned(shares) / unsigned(p.batch_size)),
                      int(unsigned(blocks) / unsigned(least))),
                  1);
    count_ = p.batch_size * splits_;
    // A share may have a start more, and leaves more to be combined.
    const int time_of_shares = each_ + each_ / 32 + LinePart::kStart;
    const int waves = int(unsigned(count_ + shares - 1) / unsigned(shares));
    const int of_split = int(unsigned(blocks + splits_ - 1) / unsigned(splits_));
    if (waves * (of_split + LinePart::kStart) > time_of_shares) {
      splits_ = 0;
      count_ = int(unsigned(all + each_ - 1) / unsigned(each_));
    }
    before_[lane] = inclusive - sum;
    __syncwarp();
  }

  // How often there are splits to walk: once per share, or per split.
  CUTE_DEVICE int count() const { return count_; }

  // The splits of a share, in order; or one split.
  class Walk {
   public:
    // By all lanes of the warp, and the same share. Afterwards each of them may walk.
    CUTE_DEVICE Walk(const LaunchParams& p, const EvenSplits& splits, int share)
        : p_(p), splits_(splits), share_(share) {
      if (splits.splits_ > 0) {
        batch_ = int(unsigned(share) / unsigned(splits.splits_));
      } else {
        find_first();
      }
    }

    // The next split; false if there is none. Of `work` it sets the request, its keys, and the split, and as
    // partial_row the number of the request's first split among all.
    CUTE_DEVICE bool next(WorkItem& work, BlocksOfSplit& blocks) {
      while (batch_ < p_.batch_size) {
        const KeysOfRequest keys = keys_of_request(p_, batch_);
        const LinePart part(p_, batch_, keys);
        work.batch = batch_;
        work.kv_begin = keys.begin;
        work.kv_len = keys.length;
        blocks.all = part.blocks;
        if (splits_.splits_ > 0) {
          const int count = splits_.splits_;
          const int index = share_ - batch_ * count;
          number(work, batch_ * count, index, count);
          blocks.begin = int(unsigned(part.blocks * index) / unsigned(count));
          blocks.end = int(unsigned(part.blocks * (index + 1)) / unsigned(count));
          batch_ = p_.batch_size;
          return true;
        }
        blocks.begin = cut(part, share_);
        blocks.end = cut(part, share_ + 1);
        if (blocks.end == 0) return false;  // the request begins in the next share
        if (blocks.begin < part.blocks) number(part, work);
        position_ += part.cost();
        ++batch_;
        if (blocks.begin < part.blocks) return true;
      }
      return false;
    }

   private:
    // The first request of which the share has a part.
    CUTE_DEVICE void find_first() {
      const int lane = threadIdx.x % 32;
      const int begin = share_ * splits_.each_;
      // The last group that does not begin behind the share: groups without requests do.
      const unsigned reached = __ballot_sync(0xffffffffu, splits_.before_[lane] <= begin);
      const int group = 31 - __clz(int(reached));
      const int cost = cost_of(p_, 32 * group + lane);
      const int end = splits_.before_[group] + inclusive_sum(cost);
      const int source = __ffs(int(__ballot_sync(0xffffffffu, end > begin))) - 1;
      batch_ = source < 0 ? p_.batch_size : 32 * group + source;
      position_ = __shfl_sync(0xffffffffu, end - cost, max(source, 0));
    }

    // Blocks of the request before the cut at which a share begins. A cut that would leave too few is moved.
    CUTE_DEVICE int cut(const LinePart& part, int share) const {
      const int blocks = share * splits_.each_ - position_ - part.start;
      if (blocks <= 0) return 0;
      if (blocks > part.blocks - kLeastBlocks) return part.blocks;
      return blocks < kLeastBlocks ? 0 : blocks;
    }

    CUTE_DEVICE static void number(WorkItem& work, int first, int index, int count) {
      work.partial_row = first;
      work.split = std::int16_t(index);
      work.num_splits = std::int16_t(count);
    }

    // From the shares of its first and its last block, unless the cut next to that block was moved. Lengths that change
    // meanwhile, against the contract, lead to other numbers, but none without room for its partial results.
    CUTE_DEVICE void number(const LinePart& part, WorkItem& work) const {
      const int first_block = position_ + part.start;
      int first = int(unsigned(first_block) / unsigned(splits_.each_));
      if (cut(part, first + 1) == 0) ++first;
      int last = int(unsigned(first_block + part.blocks - 1) / unsigned(splits_.each_));
      if (cut(part, last) == part.blocks) --last;
      first = min(max(first, 0), share_);
      last = min(max(last, share_), splits_.count_ - 1);
      number(work, first + batch_, share_ - first, last + 1 - first);
    }

    const LaunchParams& p_;
    const EvenSplits& splits_;
    const int share_;
    int batch_;
    int position_;  // of the request on the line
  };

 private:
  static constexpr int kGroups = 32;  // of 32 requests
  static_assert(32 * kGroups >= kMostSearchedRequests);
  static constexpr int kLeastBlocks = 2;  // of a split of a request that has more

  CUTE_DEVICE static int cost_of(const LaunchParams& p, int batch) {
    return batch < p.batch_size ? LinePart(p, batch, keys_of_request(p, batch)).cost() : 0;
  }

  int before_[kGroups];  // what the requests of earlier groups cost
  int most_[kGroups];    // what the longest request costs
  int each_;             // length of a share
  int splits_;           // of each request; 0: as shares have them
  int count_;
};

}  // namespace cutlass_kernels::mla
