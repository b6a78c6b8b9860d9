#include "mask_extents.h"

#include <cuda_runtime.h>

#include "common/bit_mask.h"
#include "common/mask.h"
#include "cuda_failure.h"
#include "schedule/find_work.h"

namespace cutlass_kernels {
namespace {

constexpr int kWarps = 32;
constexpr int kWords = 32 * kWarps;  // of 32 keys, looked at together: one per thread
// Rows whose words a thread reads at once. The loads are what takes the time: 64 rows over 16k keys 28 -> 14 us, where
// a warp read words of one row after another, four at once.
constexpr int kRowsAhead = 8;
constexpr int kNone = 0x7fffffff;  // behind all keys

// The longest run of ones in a sequence of bits that comes in words.
struct LongestRun {
  int begin = 0, length = 0;  // of the longest that has ended
  int current = 0;            // length of the run that ends where the sequence does, so far
  int at = 0;                 // bits so far

  CUTE_DEVICE void end_run() {
    if (current > length) {
      length = current;
      begin = at - current;
    }
    current = 0;
  }
  CUTE_DEVICE void append(std::uint32_t bits) {
    for (int rest = 32; rest > 0;) {
      const int ones = bits == ~0u ? 32 : __ffs(~bits) - 1;  // of a shifted word, never past its end
      current += ones;
      at += ones;
      rest -= ones;
      if (rest == 0) return;
      end_run();
      const int zeros = min(bits >> ones == 0 ? 32 : __ffs(bits >> ones) - 1, rest);
      at += zeros;
      rest -= zeros;
      bits = rest == 0 ? 0 : bits >> (ones + zeros);
    }
  }
};

// A block per tile. Of each chunk of keys: which of them some row sees, and which all rows, a warp taking 32 words and
// some of the rows; then a thread per word.
__global__ void __launch_bounds__(32 * kWarps)
    mask_extents_kernel(__grid_constant__ const LaunchParams p, const MaskDivisors divisors, const RowTiles rows,
                        MaskExtent* extents) {
  __shared__ std::uint32_t by_some[kWords], by_all[kWords];
  __shared__ std::uint32_t full_words[kWords / 32];  // a bit per word of by_all: no zero in it
  __shared__ int begin, end, count;
  __shared__ SplitTable splits;
  if (threadIdx.x == 0) {
    begin = kNone;
    end = count = 0;
  }
  LongestRun seen_by_all;  // in words; thread 0's
  WorkItem work;
  if (splits_batch(p)) {
    if (threadIdx.x < 32) splits.fill(p);
    __syncthreads();
  }
  const auto find_split = [&](int split) { return splits.find(p, split); };
  const bool found =
      find_work<true, true, true>(p, rows, find_split, blockIdx.x, work) && int(blockIdx.x) < num_ranks(p.plan);
  if (found) {
    const int first_row = work.tile * p.plan.tile_rows;
    const int end_row = min(first_row + p.plan.tile_rows, work.qo_len);
    const IntervalMask window = IntervalMask::make<false>(p, divisors, work.batch, work.qo_len, work.kv_len);
    const std::int64_t first_bit = p.mask.indptr == nullptr ? 0 : std::int64_t(p.mask.indptr[work.batch]) * 8;
    const std::uint32_t kv_len = std::uint32_t(work.kv_len);
    // Unsigned: behind the last chunk of 2^31 - 1 keys lies no signed number.
    for (std::uint32_t chunk = 0; chunk < kv_len; chunk += 32 * kWords) {
      by_some[threadIdx.x] = 0;
      by_all[threadIdx.x] = ~0u;
      __syncthreads();
      // Warps that share 32 words take rows in turn.
      const int groups = int(min((kv_len - chunk + 1023) / 1024, unsigned(kWarps)));
      const int sharers = kWarps / groups;
      const int share = int(threadIdx.x) / 32 / groups;
      const int word = int(threadIdx.x) / 32 % groups * 32 + int(threadIdx.x) % 32;
      if (share < sharers && chunk + 32 * word < kv_len) {
        const int key = int(chunk) + 32 * word;
        std::uint32_t some = 0, all = ~0u;
        for (int row0 = first_row + share; row0 < end_row; row0 += sharers * kRowsAhead) {
          std::uint32_t bits[kRowsAhead];
          CUTE_UNROLL
          for (int i = 0; i < kRowsAhead; ++i) {  // past the last row, the last row again
            const int row = min(row0 + i * sharers, end_row - 1);
            bits[i] = bits_at(p.mask, first_bit + std::int64_t(row) * work.kv_len + key);
          }
          CUTE_UNROLL
          for (int i = 0; i < kRowsAhead; ++i) {
            all &= bits[i];
            if (window.hides_keys()) {
              const int row = min(row0 + i * sharers, end_row - 1);
              bits[i] &= bits_between(window.begin_of_all(row) - key, window.end_of_all<true>(row) - key);
            }
            some |= bits[i];
          }
        }
        atomicOr(&by_some[word], some & bits_between(0, work.kv_len - key));
        atomicAnd(&by_all[word], all);
      }
      __syncthreads();
      const bool is_key = chunk + 32 * threadIdx.x < kv_len;
      const int key = is_key ? int(chunk + 32 * threadIdx.x) : 0;
      const std::uint32_t some = by_some[threadIdx.x];
      if (__any_sync(0xffffffffu, some != 0)) {
        const int first = __reduce_min_sync(0xffffffffu, some ? key + __ffs(some) - 1 : kNone);
        const int last = __reduce_max_sync(0xffffffffu, some ? key + (32 - __clz(some)) : 0);
        const int seen = __reduce_add_sync(0xffffffffu, __popc(some));
        if (threadIdx.x % 32 == 0) {
          atomicMin(&begin, first);
          atomicMax(&end, last);
          atomicAdd(&count, seen);
        }
      }
      // Keys behind the last one do not count.
      const bool full = is_key && (by_all[threadIdx.x] | ~bits_between(0, work.kv_len - key)) == ~0u;
      const std::uint32_t words = __ballot_sync(0xffffffffu, full);
      if (threadIdx.x % 32 == 0) full_words[threadIdx.x / 32] = words;
      __syncthreads();
      if (threadIdx.x == 0) {
        CUTE_NO_UNROLL  // a kernel of this size takes most of its time to be fetched
            for (const std::uint32_t words : full_words) seen_by_all.append(words);
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    seen_by_all.end_run();
    MaskExtent extent{};
    if (end != 0) {
      extent = {begin, end, 32 * seen_by_all.begin,
                int(min(32u * std::uint32_t(seen_by_all.begin + seen_by_all.length), std::uint32_t(work.kv_len))),
                count < end - begin};
    }
    extents[blockIdx.x] = extent;
  }
}

}  // namespace

Status launch_mask_extents(const LaunchParams& params, MaskExtent* extents, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.plan.tile_indices);
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  const cudaError_t error =
      cudaLaunchKernelEx(&config, mask_extents_kernel, params, MaskDivisors(params), RowTiles::make(params), extents);
  return error == cudaSuccess ? Status::success() : cuda_failure("Launching the mask kernel", error);
}

}  // namespace cutlass_kernels
