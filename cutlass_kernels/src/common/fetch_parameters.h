// Parameters of a kernel, brought into the constant cache.
#pragma once

#include <cute/config.hpp>

namespace cutlass_kernels {

// By all lanes of a warp, a line each: later reads, one behind the other, would each wait for a line of its own. Before
// await_previous_kernel() this takes no time.
template <class Parameters>
CUTE_DEVICE void fetch_parameters(const Parameters& params) {
  constexpr unsigned kLineBytes = 64;
  static_assert(sizeof(Parameters) <= 32 * kLineBytes);
  unsigned lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const unsigned at = min(lane * kLineBytes, unsigned(sizeof(Parameters)) - 4);
  const auto word = *reinterpret_cast<const unsigned*>(reinterpret_cast<const char*>(&params) + at);
  // Never taken: left without a use, the read would not be there.
  if (lane > 31 + word % 2) asm volatile("exit;");
}

}  // namespace cutlass_kernels
