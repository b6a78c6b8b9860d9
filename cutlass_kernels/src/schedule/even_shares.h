// Even shares: the keys of a batch are split such that all CTAs get about the same amount of work.
//
// Where requests are about as long, each gets the same number of splits. Where there are enough of them, none is split:
// CTAs take one after another, the longest first. Else all CTAs get equal shares of the work, and a share may begin and
// end within a request: requests are laid end to end, each as long as its cost, which is what it takes to start and to
// end one, and then its KV blocks; cuts at equal distances make the shares. What a share has of a request is a split.
//
// Splits in proportion to keys, rounded down, take up to twice as long as the mean where lengths differ. 128 heads over
// 64 requests of 1 to 8k keys, H200: 157 us with equal shares, 219 us with those.
#pragma once

#include "plan/launch_params.h"

namespace cutlass_kernels {

struct EvenShares {
  static constexpr int kBlockKeys = 64;
  // The start and the end of a split, in blocks. With 5, 256 requests take up to 5 % longer, with 2, 8 to 64 requests
  // up to 7 %.
  static constexpr int kStart = 3;
  // What partial results cost, in blocks: those of two KV splits of a row of 64 heads are 256 KB, written and read.
  // Even shares of 256 such rows, with 205 to 2048 slots each, took 31 us longer than their blocks, the time of 11 more.
  static constexpr int kPartials = 8;
  static constexpr int kLeastBlocks = 2;      // of a split of a request that has more
  static constexpr int kMostRequests = 1024;  // a thread of the kernel that writes the list for each
  static constexpr int kMostBlocks = (1 << 20) - kStart;
  static_assert((kMostBlocks + kStart) * std::int64_t(kMostRequests) <= 1 << 30,
                "Ends of shares are numbers of 32 bits, whatever the lengths are.");

  int length = 1;       ///< of a share, in blocks
  int per_request = 0;  ///< > 0: each request has as many splits, and a share is one of them
  int count = 0;        ///< shares

  /// KV blocks of a request: at least 1.
  CK_HOST_DEVICE static int blocks_of(int keys) {
    if (keys < 1) return 1;
    const int blocks = int(unsigned(keys + kBlockKeys - 1) / kBlockKeys);
    return blocks < kMostBlocks ? blocks : kMostBlocks;
  }

  CK_HOST_DEVICE static int quotient_up(int a, int b) { return int(unsigned(a + b - 1) / unsigned(b)); }

  /// `shares` for as many CTAs, of requests that cost `all` together; the longest has `longest` blocks, `least`: blocks
  /// of the shortest split. `whole`: the cost of what one CTA has, at most, if no request is split.
  CK_HOST_DEVICE static EvenShares make(int shares, int requests, int all, int longest, int least, int whole) {
    if (requests == 0) return {};
    EvenShares made;
    made.length = quotient_up(all, shares);
    if (made.length < least) made.length = least;
    made.per_request = shares / requests;
    if (made.per_request > longest / least) made.per_request = longest / least;
    if (made.per_request < 1) made.per_request = 1;
    made.count = requests * made.per_request;
    // A share costs one more start, and 1/32 for what is to be combined.
    const int time_of_shares = made.length + made.length / 32 + kStart;
    const bool evens_out = made.per_request == 1 ? whole <= time_of_shares + kPartials
                                                 : quotient_up(longest, made.per_request) + kStart <= time_of_shares;
    if (!evens_out) {
      made.per_request = 0;
      made.count = quotient_up(all, made.length);
    }
    return made;
  }

  /// A request on the line.
  struct Request {
    int index;        ///< among those that have rows: SharedRequest
    int first_block;  ///< where its blocks begin
    int blocks;
  };

  /// Blocks of a request before the cut at which a share begins. A cut that would leave too few is moved.
  CK_HOST_DEVICE int cut(const Request& request, int share) const {
    if (per_request > 0) {
      const int split = share - request.index * per_request;
      return int(std::int64_t(request.blocks) * split / per_request);
    }
    const int blocks = share * length - request.first_block;
    if (blocks <= 0) return 0;
    if (blocks > request.blocks - kLeastBlocks) return request.blocks;
    return blocks < kLeastBlocks ? 0 : blocks;
  }

  /// The shares that have a split of a request: those of its first and its last block, unless the cut next to that
  /// block was moved.
  struct Range {
    int first, last;
  };
  CK_HOST_DEVICE Range shares_of(const Request& request) const {
    if (per_request > 0) {
      return {request.index * per_request, (request.index + 1) * per_request - 1};
    }
    Range range{request.first_block / length, (request.first_block + request.blocks - 1) / length};
    if (cut(request, range.first + 1) == 0) ++range.first;
    if (cut(request, range.last) == request.blocks) --range.last;
    return range;
  }
};

/// Where a list of even shares has what, for tiles of up to `tiles` per request. First the first item of each share,
/// then those that follow one another (WorkItem::next).
struct SharesLayout {
  int shares;  ///< SplitRule::shares
  int requests;
  int tiles;

  CK_HOST_DEVICE int most_shares() const { return shares > requests ? shares : requests; }
  CK_HOST_DEVICE int first_of_share(int share, int tile) const { return share * tiles + tile; }
  /// Of all splits of all requests, those of request i from its first share + i on: all differ.
  CK_HOST_DEVICE int following(int share, int request, int tile) const {
    return (most_shares() + share + request) * tiles + tile;
  }
  CK_HOST_DEVICE std::int64_t capacity() const { return (2 * std::int64_t(most_shares()) + requests) * tiles; }
  /// Splits of requests that have more than one: a cut makes one more of one, or two of one that had none.
  CK_HOST_DEVICE std::int64_t most_splits() const {
    return (shares + std::int64_t(shares < requests ? shares : requests)) * tiles;
  }
};

}  // namespace cutlass_kernels
