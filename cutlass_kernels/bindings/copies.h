// Copies of index vectors that a plan makes, from Python: (address to copy to, address to copy from, elements) each.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "copy_vectors.h"

namespace cutlass_kernels {

using Copies = std::vector<std::tuple<Address, Address, std::int64_t>>;

inline VectorCopies vector_copies(const Copies& copies) {
  VectorCopies result;
  for (const auto& [to, from, count] : copies) {
    if (result.count == VectorCopies::kMost) {
      throw pybind11::value_error("A batch has at most " + std::to_string(VectorCopies::kMost) +
                                  " index vectors, but " + std::to_string(copies.size()) + " copies are asked for.");
    }
    result.vectors[result.count++] = {pointer<std::int32_t>(to), pointer<const std::int32_t>(from), count};
  }
  return result;
}

}  // namespace cutlass_kernels
