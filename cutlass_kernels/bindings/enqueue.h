// How bindings give work to the GPU: without the GIL.
//
// A launch waits while the queue of its stream is full (of about 1000 launches). What the stream waits for may need
// Python: a host function in the queue, or another thread that has to launch first. A launch that waits with the GIL
// then waits for ever. Releasing it takes 0.1 us.
#pragma once

#include <pybind11/gil.h>

#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "arguments.h"
#include "device.h"

namespace cutlass_kernels {

/// Calls `work` without the GIL and returns its Status. `work` touches nothing of Python. The caller holds references
/// to all memory that `work` reads.
template <class Work>
Status without_gil(Work work) {
  py::gil_scoped_release released;
  return work();
}

/// The same, and raises the Status; what a function returns that returns nothing.
template <class Work>
py::object enqueue(Work work) {
  raise_unless_ok(without_gil(std::move(work)));
  return py::none();
}

/// The thread whose stream a handle means: cudaStreamPerThread is one handle, a stream for every thread.
inline std::thread::id thread_of(Address stream) {
  constexpr Address kPerThread = 2;
  return stream == kPerThread ? std::this_thread::get_id() : std::thread::id();
}

/// The lock of a stream of the current device. Call this with the GIL, which guards the table.
inline std::mutex& lock_of(Address stream) {
  thread_local std::mutex own;
  if (thread_of(stream) != std::thread::id()) return own;
  // Never destroyed: threads may run until the process ends. Stream handles are few and are used again.
  static auto& locks = *new std::map<std::pair<int, Address>, std::mutex>;
  // The default stream of every device has the handle 0.
  return locks[{current_device_index(), stream}];
}

/// without_gil() for kernels that pass results to each other through a workspace. Wrappers may share one, also those of
/// two threads on one stream: no kernel of another call comes between those of this one. Each stream has a lock of its
/// own, as one stream may wait for what another thread launches on a second.
template <class Work>
Status without_gil_in_turn(Address stream, Work work) {
  std::mutex& mutex = lock_of(stream);
  return without_gil([&] {
    const std::lock_guard lock(mutex);
    return work();
  });
}

}  // namespace cutlass_kernels
