// Registers the functions of _C, by the file that has them. Files that register no class do not include pybind11.h: it
// takes 8 seconds to compile, what they need of it 2.
#pragma once

#include <pybind11/pytypes.h>

namespace cutlass_kernels {

void add_append(const pybind11::object& module);
void add_batch(const pybind11::object& module);
void add_fused(const pybind11::object& module);
void add_indices(const pybind11::object& module);
void add_merge(const pybind11::object& module);
void add_prepare(const pybind11::object& module);
void add_quantized(const pybind11::object& module);
void add_rope(const pybind11::object& module);
void add_run(const pybind11::object& module);
void add_slots(const pybind11::object& module);
void add_torch(const pybind11::object& module);
void add_unplanned(const pybind11::object& module);

/// What attention needs.
inline void add_attention(const pybind11::object& module) {
  for (auto* add : {&add_batch, &add_fused, &add_indices, &add_run, &add_torch, &add_unplanned}) add(module);
}

}  // namespace cutlass_kernels
