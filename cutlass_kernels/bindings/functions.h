// The functions that attention.cpp and module.cpp register, by the file that has them. Files that make no object of a
// registered class do not include pybind11.h: it takes 8 seconds to compile, what they need of it 2.
#pragma once

#include <pybind11/pytypes.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "arguments.h"
#include "batch_plan.h"
#include "copies.h"

namespace cutlass_kernels {

namespace py = pybind11;

// batch.cpp
py::tuple plan_batch(const std::string& backend, py::object request, py::object offsets_object, std::int64_t total_q,
                     Address workspace, std::size_t workspace_bytes, std::size_t room, const Copies& uploads,
                     const Copies& copies, Address stream);
void attend(py::object object, const std::string& backend, const BatchPlan* plan, py::object scratch);

// fused.cpp
void attend_fused(py::object object, const std::string& backend, const py::object& tables, std::int64_t v_offset,
                  std::int64_t max_q_len, std::int64_t max_kv_len);
void add_fused(const py::object& module);

// indices.cpp
bool ascends(Address offsets, std::int64_t count);
void copy_index_vectors(const Copies& uploads, const Copies& copies, Address stream);
void add_indices(const py::object& module);

// rope.cpp
void add_rope(const py::object& module);

// run.cpp
py::object direct_run(py::object description);

// single.cpp
void add_single(const py::object& module);

// slots.cpp
void add_slots(const py::object& module);

// unplanned.cpp
void add_unplanned(const py::object& module);

// torch.cpp
void use_torch(const py::object& exchange_api, const py::dict& functions);
py::object counters_of(int device, Address stream);

}  // namespace cutlass_kernels
