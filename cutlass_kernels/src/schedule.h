// The work list of a ragged batch: which query tile of which request a block computes, longest first.
//
// A tile's cost is the number of keys its last row sees under a causal mask. That order is right for
// causal and for windowed masks and harmless for full ones, so one list serves every mask and a plan
// need not know it. The list is a counting sort by cost, made by one block on the device; no length
// ever travels to the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"

namespace cutlass_kernels {

/// One entry of the list: a tile and what a block needs to find its rows and keys, so that it
/// waits for one load instead of three dependent ones. batch < 0 marks the entries past the last tile. kv_begin is the
/// request's first key, or the first entry of its page table; kv_len is -1 where the offsets on the device make no sense.
struct alignas(16) WorkItem {
  std::int32_t batch;
  std::int32_t tile;  ///< rows [tile * tile_rows, (tile + 1) * tile_rows) of the request
  std::int32_t q_begin;
  std::int32_t qo_len;
  std::int32_t kv_begin;
  std::int32_t kv_len;
  std::int32_t unused[2];
};

/// A workspace begins with the counters of Schedule::next_tile; the list follows. In front, they stay where they are when
/// another batch is planned into the same memory: captured kernels know their address.
constexpr std::size_t kCounterBytes = 16;

/// Upper bound of the tiles of `batch_size` requests with `total_q` rows in all.
inline std::int64_t schedule_capacity(std::int64_t total_q, std::int32_t batch_size,
                                      std::int32_t tile_rows) {
  // sum_b ceil(n_b / t) <= floor(total / t) + (number of non-empty requests)
  const std::int64_t requests = batch_size < total_q ? batch_size : total_q;
  return total_q / tile_rows + requests;
}

/// Enqueues the kernel that writes `capacity` entries at `list` and zeros to the two counters at `next_tile`, if given.
Status launch_schedule(const std::int32_t* qo_indptr, const std::int32_t* kv_indptr,
                       std::int32_t batch_size, std::int64_t total_q, std::int32_t tile_rows,
                       std::int32_t capacity, WorkItem* list, cudaStream_t stream,
                       std::int32_t* next_tile = nullptr, const PageTable& pages = {});

/// The same list computed on the host from host lengths (for tests and for reading).
std::vector<WorkItem> schedule_on_host(const std::vector<std::int32_t>& qo_indptr,
                                       const std::vector<std::int32_t>& kv_indptr,
                                       std::int32_t tile_rows);

}  // namespace cutlass_kernels
