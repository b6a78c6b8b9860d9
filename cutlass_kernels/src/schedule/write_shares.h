// The list of even shares (schedule/even_shares.h), by one thread block.
#pragma once

#include "schedule/even_shares.h"
#include "schedule/list_writer.h"

namespace cutlass_kernels {

// A request that has rows, by its index among these: in the order of the batch or, where none is split, of length.
struct SharedRequest {
  int batch;
  int first_block;  // where requests are split
  int blocks;
  int partial_row;  // -1: there is no room for it

  __device__ EvenShares::Request at(int index) const { return {index, first_block, blocks}; }
};

class SharesWriter {
 public:
  // By all threads; `requests` has those of the batch, `position` a zero for each thread.
  __device__ SharesWriter(const ListArgs& args, const RequestOfList* requests, SharedRequest* shared, int* position)
      : args_(args), requests_(requests), shared_(shared), position_(position) {}

  __device__ void write() {
    place_requests();
    __syncthreads();
    for (int share = int(threadIdx.x); share < shares_.count; share += kListThreads) {
      write_share(share);
    }
    if (threadIdx.x == 0) args_.header->num_items = shares_.count * args_.rule.share_tiles;
  }

 private:
  // A thread for each request: where it lies on the line, and what its splits take.
  __device__ void place_requests() {
    static_assert(EvenShares::kMostRequests <= kListThreads);
    __shared__ int longest;
    if (threadIdx.x == 0) longest = 0;
    __syncthreads();
    const int batch = int(threadIdx.x);
    RequestOfList of_batch{};
    EvenShares::Request request{};
    const bool is_there = batch < args_.batch_size && (of_batch = requests_[batch]).tiles(args_) > 0;
    if (is_there) {
      request.blocks = EvenShares::blocks_of(min(of_batch.kv_len, args_.rule.most_keys));
    }
    const int most = int(__reduce_max_sync(0xffffffffu, request.blocks));
    if (threadIdx.x % 32 == 0) atomicMax(&longest, most);
    // Requests in the upper half, what they cost in the lower one.
    constexpr std::uint64_t kOne = std::uint64_t(1) << 32;
    const BlockSum sum = block_sum(is_there ? kOne + unsigned(EvenShares::kStart + request.blocks) : 0);
    count_ = int(sum.all / kOne);
    request.index = int(sum.before / kOne);
    request.first_block = int(sum.before % kOne) + EvenShares::kStart;
    const int place = place_by_length(request.blocks, longest);
    shares_ = EvenShares::make(args_.rule.shares, count_, int(sum.all % kOne), longest,
                               max(args_.rule.least_split_keys / EvenShares::kBlockKeys, 1), cost_of_whole());
    if (shares_.per_request == 1) {  // nothing is split
      if (threadIdx.x == 0) SplitRoom{0, 0}.write_counts(args_);
      if (is_there) shared_[place] = {batch, request.first_block, request.blocks, 0};
      return;
    }
    int splits = 0, units = 0;
    const int rows = min(of_batch.qo_len, args_.max_qo_len);
    if (is_there) {
      const EvenShares::Range range = shares_.shares_of(request);
      splits = range.last + 1 - range.first;
    }
    const bool is_split = splits > 1;
    for (int row = 0; is_split && row < rows; row += args_.tile_rows) units += units_of(rows - row, splits);
    const int tiles = is_split ? (rows + args_.tile_rows - 1) / args_.tile_rows : 0;
    SplitRoom own = SplitRoom::of(tiles, units, is_split ? std::int64_t(rows) * splits : 0);
    const BlockSum before = block_sum(own.tiles_and_units), partial = block_sum(own.rows);
    if (threadIdx.x == 0) SplitRoom{before.all, 0}.write_counts(args_);
    if (!is_there) return;
    const bool fits = std::int64_t(partial.before + own.rows) <= args_.rule.partial_rows;
    const int partial_row = fits ? int(partial.before) : -1;
    shared_[request.index] = {batch, request.first_block, request.blocks, partial_row};
    if (is_split) describe(of_batch, batch, rows, splits, partial_row, {before.before, 0});
  }

  // By all threads: the place of a request among all, the longest first; where its blocks are, too, in shared_.
  __device__ int place_by_length(int blocks, int longest) {
    int shift = 0;
    while ((longest >> shift) >= kListThreads) ++shift;
    int& first = position_[kListThreads - 1 - (blocks >> shift)];
    const bool is_there = blocks > 0;
    if (is_there) atomicAdd(&first, 1);
    __syncthreads();
    const int longer = int(block_sum(unsigned(position_[threadIdx.x])).before);
    position_[threadIdx.x] = longer;
    __syncthreads();
    const int place = is_there ? atomicAdd(&first, 1) : 0;
    // As long as others of its place may be: which of them comes first is left to chance, what they cost is not.
    if (is_there) shared_[place].blocks = blocks >> shift << shift;
    __syncthreads();
    return place;
  }

  // By all threads: about what the CTA with most to do has, where CTAs take requests in that order: of each round as
  // many as there are CTAs, those that got the longest of one get the shortest of the next.
  __device__ int cost_of_whole() const {
    __shared__ int most;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    const int shares = args_.rule.shares;
    int cost = 0;
    for (int begin = 0; begin < count_ && int(threadIdx.x) < shares; begin += 2 * shares) {
      const int there = begin + int(threadIdx.x), back = begin + 2 * shares - 1 - int(threadIdx.x);
      if (there < count_) cost += EvenShares::kStart + shared_[there].blocks;
      if (back < count_) cost += EvenShares::kStart + shared_[back].blocks;
    }
    atomicMax(&most, int(__reduce_max_sync(0xffffffffu, cost)));
    __syncthreads();
    return most;
  }

  // The split tiles of a request.
  __device__ void describe(const RequestOfList& of_batch, int batch, int rows, int splits, int partial_row,
                           SplitRoom before) const {
    int index = before.tiles(), first_unit = before.units();
    for (int row = 0; row < rows; row += args_.tile_rows, ++index) {
      const bool fits = partial_row >= 0;
      args_.split_tiles[index] = {of_batch.q_begin + row,
                                  fits ? min(args_.tile_rows, rows - row) : 0,
                                  fits ? partial_row + row * splits : 0,
                                  splits,
                                  of_batch.q_begin + rows,
                                  of_batch.kv_begin,
                                  fits ? of_batch.kv_len : -1,
                                  batch,
                                  first_unit};
      first_unit += units_of(rows - row, splits);
    }
  }

  __device__ int units_of(int rows_left, int splits) const {
    return CombineUnits{args_.splits_of_warp}.of_rows(min(args_.tile_rows, rows_left) * args_.num_qo_heads, splits);
  }

  // What a share has of each request that it reaches into.
  __device__ void write_share(int share) const {
    const int tiles = args_.rule.share_tiles;
    const SharesLayout layout{args_.rule.shares, args_.batch_size, tiles};
    // The last request that begins before the share does.
    int index = 0;
    if (shares_.per_request > 0) {
      index = int(unsigned(share) / unsigned(shares_.per_request));
    } else {
      for (int end = count_; end - index > 1;) {
        const int middle = index + (end - index) / 2;
        const bool begins = shared_[middle].first_block - EvenShares::kStart <= share * shares_.length;
        (begins ? index : end) = middle;
      }
    }
    bool is_first = true;
    for (bool more = true; more && index < count_; ++index) {
      const SharedRequest& shared = shared_[index];
      const EvenShares::Request request = shared.at(index);
      const EvenShares::Range range = shares_.shares_of(request);
      if (share < range.first) break;
      more = index + 1 < count_ && shares_.shares_of(shared_[index + 1].at(index + 1)).first <= share;
      if (share > range.last) continue;
      const RequestOfList of_batch = requests_[shared.batch];
      WorkItem item{};
      item.batch = shared.batch;
      item.q_begin = of_batch.q_begin;
      item.qo_len = min(of_batch.qo_len, args_.max_qo_len);
      item.kv_begin = of_batch.kv_begin;
      item.split = std::int16_t(share - range.first);
      item.num_splits = std::int16_t(range.last + 1 - range.first);
      item.cut_begin = shares_.cut(request, share);
      item.cut_end = shares_.cut(request, share + 1);
      item.cut_all = request.blocks;
      const bool fits = item.num_splits == 1 || shared.partial_row >= 0;
      for (int tile = 0; tile < tiles; ++tile) {
        const int row = tile * args_.tile_rows;
        item.tile = tile;
        item.kv_len = fits && row < item.qo_len ? of_batch.kv_len : -1;
        item.partial_row = item.num_splits > 1 && fits ? shared.partial_row + row * item.num_splits : 0;
        item.next = more ? layout.following(share, index + 1, tile) : 0;
        args_.list[is_first ? layout.first_of_share(share, tile) : layout.following(share, index, tile)] = item;
      }
      is_first = false;
    }
    if (!is_first) return;
    // A share whose cuts were moved may have nothing.
    WorkItem none{};
    none.batch = -1;
    for (int tile = 0; tile < tiles; ++tile) args_.list[layout.first_of_share(share, tile)] = none;
  }

  const ListArgs& args_;
  const RequestOfList* const requests_;
  SharedRequest* const shared_;
  int* const position_;
  EvenShares shares_;
  int count_ = 0;  // requests that have rows
};

}  // namespace cutlass_kernels
