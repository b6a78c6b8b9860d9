// What module.cpp calls to register functions, by the file that has it.
#pragma once

#include <pybind11/pybind11.h>

namespace cutlass_kernels {

void bind_append(pybind11::module_& m);     // append.cpp
void bind_attention(pybind11::module_& m);  // attention.cpp
void bind_merge(pybind11::module_& m);      // merge.cpp
void bind_prepare(pybind11::module_& m);    // prepare.cpp

}  // namespace cutlass_kernels
