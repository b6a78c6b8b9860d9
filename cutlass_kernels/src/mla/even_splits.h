// KV splits of a batch without a tile list, such that all CTAs get about the same amount of work.
//
// Where requests are about as long, each gets the same number of splits. Else all CTAs get equal shares of the work,
// and a share may begin and end within a request: requests are laid end to end, each as long as its cost, which is what
// it takes to start and to end one, and then its KV blocks; cuts at equal distances make the shares. What a share has
// of a request is a split. The split of request b in share s has the index s + b: within a request indices are
// consecutive, so that its partial results are, too; they increase from request to request, and stay below
// plan.num_splits, as there are at most num_splits - batch_size shares.
//
// Splits in proportion to keys, rounded down (common/batch_splits.h), take up to twice as long as the mean where
// lengths differ. 128 heads over 64 requests of 1 to 8k keys, H200: 157 us with equal shares, 219 us with those.
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

// Of a request, in KV blocks.
struct RequestCost {
  static constexpr int kBlockN = Tile<Schedule::kEven>::kBlockN;
  // The start and the end of a split. With 5, 256 requests take up to 5 % longer, with 2, 8 to 64 requests up to 7 %.
  static constexpr int kStart = 3;
  static constexpr int kMostBlocks = (1 << 20) - kStart;
  static_assert((kMostBlocks + kStart) * std::int64_t(kMostSearchedRequests) <= 1 << 30,
                "Ends of shares are numbers of 32 bits, whatever the lengths are.");

  int start;   // 0 where there are no rows: padding
  int blocks;  // at least 1

  CUTE_DEVICE RequestCost(const LaunchParams& p, int batch, const KeysOfRequest& keys) {
    const bool has_rows = rows_of_request(p, batch).length > 0;
    const int seen = has_rows ? min(max(keys.length, 0), p.plan.most_split_keys) : 0;
    start = has_rows ? kStart : 0;
    blocks = min(max(int(unsigned(seen + kBlockN - 1) / kBlockN), 1), kMostBlocks);
  }
  CUTE_DEVICE int all() const { return start + blocks; }
};

// KV blocks [begin, end) of `all` that a request has.
struct SplitRange {
  int begin;
  int end;
  int all;
};

// In shared memory.
class EvenSplits {
 public:
  // Whether a problem is split so, whatever its lengths. What a caller asks for is dealt out as it is.
  static bool serve(const LaunchParams& p) {
    // A share is computed for each tile of the longest request: CTAs whose requests have fewer tiles would be idle.
    const bool same_tiles =
        tiles_of_longest(p, p.plan.tile_rows) == 1 ||
        (p.seqused_q == nullptr && p.total_q == std::int64_t(p.batch_size) * p.max_qo_len);
    // So would be the CTAs that are left where few shares, times tiles and packs of heads, fill the device: an eighth.
    constexpr int kFewShares = 8;
    return splits_batch(p) && p.batch_size > 1 && p.num_splits <= 1 && same_tiles &&
           p.plan.num_splits - p.batch_size >= kFewShares;
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

  // By all lanes of the warp that finds splits afterwards. ctas: per tile and pack of heads.
  CUTE_DEVICE void divide(const LaunchParams& p, int ctas) {
    const int lane = threadIdx.x % 32;
    const int sum = before_[lane];
    const int inclusive = inclusive_sum(sum);
    const int all = __shfl_sync(0xffffffffu, inclusive, 31);
    // Of the longest request.
    const int blocks = max(__reduce_max_sync(0xffffffffu, most_[lane]) - RequestCost::kStart, 1);
    const int shares = min(max(ctas, 1), SplitShares::splits_to_share(p));
    const int least = max(p.plan.least_split_keys / RequestCost::kBlockN, 1);
    share_length_ = max(int(unsigned(all + shares - 1) / unsigned(shares)), least);
    splits_per_request_ = max(min(int(unsigned(shares) / unsigned(p.batch_size)),
                                  int(unsigned(blocks) / unsigned(least))),
                              1);
    count_ = p.batch_size * splits_per_request_;
    // A share costs one more start, and 1/32 for what is to be combined.
    const int time_of_shares = share_length_ + share_length_ / 32 + RequestCost::kStart;
    const int waves = int(unsigned(count_ + shares - 1) / unsigned(shares));
    const int of_split =
        int(unsigned(blocks + splits_per_request_ - 1) / unsigned(splits_per_request_));
    if (waves * (of_split + RequestCost::kStart) > time_of_shares) {
      splits_per_request_ = 0;
      count_ = int(unsigned(all + share_length_ - 1) / unsigned(share_length_));
    }
    before_[lane] = inclusive - sum;
    __syncwarp();
  }

  // How many walks there are: one per share, or per split where each request has the same number of them.
  CUTE_DEVICE int count() const { return count_; }

  // The splits of a share, in order; or one split.
  class Walk {
   public:
    // By all lanes of the warp, and the same share. Afterwards each of them may walk.
    CUTE_DEVICE Walk(const LaunchParams& p, const EvenSplits& splits, int share)
        : p_(p), splits_(splits), share_(share) {
      if (splits.splits_per_request_ > 0) {
        batch_ = int(unsigned(share) / unsigned(splits.splits_per_request_));
      } else {
        find_first();
      }
    }

    // The next split; false if there is none. Of `work` it sets the request, its keys, and the split, and as
    // partial_row the index of the request's first split.
    CUTE_DEVICE bool next(WorkItem& work, SplitRange& range) {
      while (batch_ < p_.batch_size) {
        const KeysOfRequest keys = keys_of_request(p_, batch_);
        const RequestCost cost(p_, batch_, keys);
        work.batch = batch_;
        work.kv_begin = keys.begin;
        work.kv_len = keys.length;
        range.all = cost.blocks;
        if (splits_.splits_per_request_ > 0) {
          const int count = splits_.splits_per_request_;
          const int index = share_ - batch_ * count;
          set_split(work, batch_ * count, index, count);
          range.begin = int(unsigned(cost.blocks * index) / unsigned(count));
          range.end = int(unsigned(cost.blocks * (index + 1)) / unsigned(count));
          batch_ = p_.batch_size;
          return true;
        }
        range.begin = cut(cost, share_);
        range.end = cut(cost, share_ + 1);
        if (range.end == 0) return false;  // the request begins in the next share
        if (range.begin < cost.blocks) set_split(cost, work);
        position_ += cost.all();
        ++batch_;
        if (range.begin < cost.blocks) return true;
      }
      return false;
    }

   private:
    // The first request that the share reaches into.
    CUTE_DEVICE void find_first() {
      const int lane = threadIdx.x % 32;
      const int begin = share_ * splits_.share_length_;
      // The last group that does not begin behind the start of the share: those behind the last request do.
      const unsigned reached = __ballot_sync(0xffffffffu, splits_.before_[lane] <= begin);
      const int group = 31 - __clz(int(reached));
      const int cost = cost_of(p_, 32 * group + lane);
      const int end = splits_.before_[group] + inclusive_sum(cost);
      const int source = __ffs(int(__ballot_sync(0xffffffffu, end > begin))) - 1;
      batch_ = source < 0 ? p_.batch_size : 32 * group + source;
      position_ = __shfl_sync(0xffffffffu, end - cost, max(source, 0));
    }

    // Blocks of the request before the cut at which a share begins. A cut that would leave too few is moved.
    CUTE_DEVICE int cut(const RequestCost& cost, int share) const {
      const int blocks = share * splits_.share_length_ - position_ - cost.start;
      if (blocks <= 0) return 0;
      if (blocks > cost.blocks - kLeastBlocks) return cost.blocks;
      return blocks < kLeastBlocks ? 0 : blocks;
    }

    CUTE_DEVICE static void set_split(WorkItem& work, int first, int index, int count) {
      work.partial_row = first;
      work.split = std::int16_t(index);
      work.num_splits = std::int16_t(count);
    }

    // From the shares of its first and its last block, unless the cut next to that block was moved. Lengths that change
    // meanwhile, against the contract, lead to other indices, but none without room for its partial results.
    CUTE_DEVICE void set_split(const RequestCost& cost, WorkItem& work) const {
      const int first_block = position_ + cost.start;
      int first = int(unsigned(first_block) / unsigned(splits_.share_length_));
      if (cut(cost, first + 1) == 0) ++first;
      int last = int(unsigned(first_block + cost.blocks - 1) / unsigned(splits_.share_length_));
      if (cut(cost, last) == cost.blocks) --last;
      first = min(max(first, 0), share_);
      last = min(max(last, share_), splits_.count_ - 1);
      set_split(work, first + batch_, share_ - first, last + 1 - first);
    }

    const LaunchParams& p_;
    const EvenSplits& splits_;
    const int share_;
    int batch_;
    int position_;  // what the requests before it cost
  };

 private:
  static constexpr int kGroups = 32;  // of 32 requests
  static_assert(32 * kGroups >= kMostSearchedRequests);
  static constexpr int kLeastBlocks = 2;  // of a split of a request that has more

  CUTE_DEVICE static int cost_of(const LaunchParams& p, int batch) {
    return batch < p.batch_size ? RequestCost(p, batch, keys_of_request(p, batch)).all() : 0;
  }

  int before_[kGroups];  // what the requests of earlier groups cost
  int most_[kGroups];    // what the longest request costs
  int share_length_;
  int splits_per_request_;  // 0: as shares have them
  int count_;
};

}  // namespace cutlass_kernels::mla
