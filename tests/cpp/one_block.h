// In place of the CUDA runtime: launches of thread blocks one after the other, with a thread of the host for each of
// the block's own.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <thread>
#include <vector>

#define __CUDA_ARCH_LIST__ 900
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

typedef struct CUstream_st* cudaStream_t;
enum cudaError_t { cudaSuccess };
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1) : x(x_) {}
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream = nullptr;
};

static thread_local struct {
  unsigned x = 0;
} threadIdx;
static struct {
  unsigned x = 0;
} blockIdx;

namespace one_block {

inline pthread_barrier_t barrier, warp_barriers[32];
inline unsigned long long of_lanes[1024];

inline void wait(pthread_barrier_t& of) { pthread_barrier_wait(&of); }

}  // namespace one_block

inline void __syncthreads() { one_block::wait(one_block::barrier); }
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  pthread_barrier_t& warp = one_block::warp_barriers[threadIdx.x / 32];
  one_block::of_lanes[threadIdx.x] = value;
  one_block::wait(warp);
  const T other = T(one_block::of_lanes[threadIdx.x / 32 * 32 + unsigned(lane)]);
  one_block::wait(warp);
  return other;
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  const int lane = int(threadIdx.x % 32);
  return __shfl_sync(mask, value, lane < step ? lane : lane - step);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const unsigned first = threadIdx.x / 32 * 32;
  one_block::of_lanes[threadIdx.x] = value;
  one_block::wait(one_block::warp_barriers[first / 32]);
  unsigned lanes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) lanes |= unsigned(one_block::of_lanes[first + lane]) << lane;
  one_block::wait(one_block::warp_barriers[first / 32]);
  return lanes;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline int __reduce_max_sync(unsigned mask, int value) {
  int most = value;
  for (int lane = 0; lane < 32; ++lane) most = std::max(most, __shfl_sync(mask, value, lane));
  return most;
}
inline int __ffs(int word) { return __builtin_ffs(word); }
inline int __popc(unsigned word) { return __builtin_popcount(word); }
template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T atomicAdd(T* at, T value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
inline int atomicMax(int* at, int value) {
  int before = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (before < value &&
         !__atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}
using std::max;
using std::min;

template <class... Parameter, class... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameter...), const Given&... given) {
  const unsigned threads = config->blockDim.x;
  pthread_barrier_init(&one_block::barrier, nullptr, threads);
  for (pthread_barrier_t& warp : one_block::warp_barriers) pthread_barrier_init(&warp, nullptr, 32);
  for (blockIdx.x = 0; blockIdx.x < config->gridDim.x; ++blockIdx.x) {
    std::vector<std::thread> all;
    for (unsigned i = 0; i < threads; ++i) {
      all.emplace_back([&, i] {
        threadIdx.x = i;
        kernel(given...);
      });
    }
    for (std::thread& thread : all) thread.join();
  }
  return cudaSuccess;
}
