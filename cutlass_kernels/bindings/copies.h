// Copies of index vectors that a plan makes, from Python: (address to copy to, address to copy from, elements) each.
#pragma once

#include <string>

#include "arguments.h"
#include "copy_vectors.h"

namespace cutlass_kernels {

inline VectorCopies copies_of(const py::sequence& copies) {
  VectorCopies result;
  if (copies.size() > VectorCopies::kMost) {
    throw py::value_error("A batch has at most " + std::to_string(VectorCopies::kMost) + " index vectors, but " +
                          std::to_string(copies.size()) + " copies are asked for.");
  }
  for (const py::handle copy : copies) {
    VectorCopy& vector = result.vectors[result.count++];
    Positional(PySequence_Fast_ITEMS(copy.ptr()), PySequence_Fast_GET_SIZE(copy.ptr()))
        .read(vector.to, vector.from, vector.count)
        .end();
  }
  return result;
}

}  // namespace cutlass_kernels
