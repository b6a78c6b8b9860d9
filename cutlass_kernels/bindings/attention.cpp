// Registers the functions of attention (functions.h).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind.h"
#include "direct.h"
#include "functions.h"

namespace cutlass_kernels {

void bind_attention(py::module_& m) {
  // Positional: keywords would take 7 us, positions take 0.4.
  py::class_<BatchPlan>(m, "BatchPlan");
  py::class_<SharedSchedule>(m, "SharedSchedule", "A schedule that calls of attention share.")
      .def(py::init<bool>(), py::arg("strict"))
      .def("renew", &SharedSchedule::renew);
  m.def("plan_batch", &plan_batch,
        "A plan, and the bytes that its tile list and its scratch take. From: backend, Request, "
        "Offsets, rows of q, "
        "workspace and its bytes, room for scratch, uploads, copies, stream.");
  m.def("attend", &attend, "Computes a Problem: with a backend, and for a batch with its plan and scratch.",
        py::arg("problem"), py::arg("backend"), py::arg("plan") = nullptr, py::arg("scratch") = py::none());
  m.def("attend_fused", &attend_fused,
        "Computes a Problem whose indptrs and block tables kernels read on the device. From: "
        "problem, backend, block "
        "tables or None, the page number of the first value page, bounds of the lengths.");
  m.def("direct_run", &direct_run,
        "The function (q, k, v, q_scale, k_scale, v_scale, out, lse, sinks, return_lse, options) "
        "that makes direct "
        "runs of a plan: their results, or None where the call is one for Python.");
  m.def("ascend", &ascends,
        "Whether int32 offsets (address, count) never decrease, from a first that is not negative.");
  m.def("copy_vectors", &copy_index_vectors,
        "Copies int32 vectors to the device, (to, from, elements) each: from the host, from the "
        "device; stream.");
  m.def("use_torch", &use_torch,
        "Says how tensors are read and made. exchange_api: DLPack's capsule of torch.Tensor, or "
        "None, "
        "and then functions['facts'] reads a tensor.");
  m.def("counters", &counters_of, "The call counters of a device and a stream.");
  add_fused(m);
  add_indices(m);
  add_single(m);
  add_unplanned(m);
}

}  // namespace cutlass_kernels
