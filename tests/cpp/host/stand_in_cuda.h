// A stand-in for the CUDA runtime, for machines without a GPU: answers questions about a device that a test describes,
// and records what is enqueued instead of running it. So a test sees which kernels a call starts, with which
// parameters.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

namespace stand_in {

struct Device {
  int compute_capability = 90;  ///< 10 * major + minor
  int multiprocessors = 132;
  int shared_memory_per_block = 227 << 10;
  int l2_bytes = 50 << 20;
};
extern Device device;

/// 64 as long as nobody sets it: beyond those whose facts the library remembers, as tests change them.
extern int current_device;

/// A kernel launch, or what is enqueued beside kernels: "memset", "memcpy".
struct Launch {
  std::string kernel;  ///< mangled name
  unsigned blocks = 0;
  std::vector<char> params;  ///< the first bytes of the first argument: kernels take one struct
  void* destination = nullptr;
  std::size_t bytes = 0;

  bool is(const char* name) const { return kernel.find(name) != std::string::npos; }

  /// The kernel's argument, or what it begins with.
  template <class T>
  T argument() const {
    static_assert(sizeof(T) <= kParamBytes);
    T value;
    std::memcpy(static_cast<void*>(&value), params.data(), sizeof(T));
    return value;
  }
  static constexpr std::size_t kParamBytes = 2048;
};
extern std::vector<Launch> launches;

/// How many launches and memsets succeed until one fails; negative: none fails.
extern int launches_until_failure;

/// Driver functions cannot be found until this is set again: a driver that is being loaded, say.
extern bool has_driver;

/// Of every stream.
extern bool is_capturing;

/// As cudaDriverGetVersion() tells it; the runtime is 13000.
extern int driver_version;

}  // namespace stand_in
