// _C.plan_batch, _C.attend: plans of batches, and problems that Python has checked.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "batch_plan.h"
#include "copies.h"
#include "device.h"
#include "direct.h"
#include "enqueue.h"
#include "fields.h"
#include "functions.h"
#include "plan/plan.h"
#include "registry/validate.h"

namespace cutlass_kernels {
namespace {

void read_mask(const Fields& mask, AttentionParams* params) {
  params->causal = mask.as<bool>("causal");
  params->window_left = limited(mask.as<std::int64_t>("window_left"));
  params->chunk_size = limited(mask.as<std::int64_t>("chunk_size"));
}

/// Sizes and index vectors, from a Request and Offsets.
AttentionParams planned_params(const Fields& request, const Fields& offsets, std::int64_t total_q) {
  AttentionParams params;
  params.q_dtype = request.dtype("q_dtype");
  params.kv_dtype = request.dtype("kv_dtype");
  params.o_dtype = request.dtype("o_dtype");
  params.num_qo_heads = request.as<int>("num_qo_heads");
  params.num_kv_heads = request.as<int>("num_kv_heads");
  params.head_dim_qk = request.as<int>("head_dim_qk");
  params.head_dim_vo = request.as<int>("head_dim_vo");
  const IndexVector rows = offsets.vector("qo_indptr");
  params.batch_size = int(rows.count - 1);
  params.total_q = total_q;
  params.total_kv = offsets.as<std::int64_t>("total_kv");
  params.qo_indptr = rows.data;
  params.kv_indptr = offsets.vector("kv_indptr").data;
  params.qo_indptr_host = pointer<const std::int32_t>(offsets.as<Address>("qo_indptr_host"));
  if (const Fields pages = offsets.at("pages"); !pages.is_none()) {
    const IndexVector numbers = pages.vector("indices");
    params.pages.indices = numbers.data;
    params.pages.v_indices = pages.vector("v_indices").data;
    params.pages.last_page_len = pages.vector("last_page_len").data;
    params.pages.page_size = pages.as<int>("page_size");
    params.pages.num_indices = numbers.count;
  }
  const Fields split = offsets.at("split");
  params.fixed_split_size = split.as<int>("fixed_size");
  params.disable_split_kv = split.as<bool>("disabled");
  params.max_kv_len = split.as<int>("max_kv_len");
  read_mask(offsets.at("mask"), &params);
  return params;
}

// The plan of a batch, with the bytes of its schedule and of its scratch. The schedule is written if it fits into the
// workspace, and the scratch into `room`; else the caller says what is missing, or has asked for the sizes only. The
// mask, as far as it is known, decides the size of tiles; runs may have another. `uploads` of vectors on the host and
// `copies` of others are made before the schedule, which is made from what they write, and after all checks: a plan
// that cannot be made changes nothing.
py::object plan_batch(PyObject* const* given, Py_ssize_t count) {
  auto plan = std::make_unique<BatchPlan>();
  py::object request, offsets_object;
  py::sequence uploads, copies;
  std::int64_t total_q = 0;
  std::size_t workspace_bytes = 0, room = 0;
  cudaStream_t stream = nullptr;
  Positional(given, count)
      .read(plan->backend, request, offsets_object, total_q, plan->schedule, workspace_bytes, room, uploads, copies)
      .read(stream)
      .end();
  const Fields offsets(std::move(offsets_object));
  plan->params = planned_params(Fields(std::move(request)), offsets, total_q);
  plan->general = offsets.as<bool>("general");
  AttentionParams& params = plan->params;
  AttentionParams planned = params;
  if (plan->general) make_general(&planned);
  if (std::string fault = contradiction(planned, /*with_tensors=*/false); !fault.empty()) {
    throw py::value_error(fault);
  }
  Device device;
  raise_unless_ok(current_device(&device));
  PlanOptions options;
  options.masked_later = true;
  options.schedule_is_kept = true;
  if (room > 0) options.partial_bytes = std::clamp(room, kLeastPartialBytes, kMostPartialBytes);
  raise_unless_ok(make_plan(planned, plan->backend, device, options, &plan->state));
  const WorkspaceLayout& layout = plan->state.layout;
  if (layout.schedule_bytes <= workspace_bytes && layout.scratch_bytes <= room) {
    if (layout.schedule_bytes > 0) {
      raise_unless_ok(check_aligned("The workspace", plan->schedule));
    }
    const VectorCopies on_host = copies_of(uploads), on_device = copies_of(copies);
    enqueue([&] {
      Status status = copy_vectors(on_device, stream);
      if (!status.ok()) return status;
      return write_schedule(plan->state, planned, plan->schedule, stream, on_host);
    });
  }
  params.qo_indptr_host = nullptr;  // the caller's, only until here
  const std::size_t schedule_bytes = layout.schedule_bytes, scratch_bytes = layout.scratch_bytes;
  return py::make_tuple(std::move(plan), schedule_bytes, scratch_bytes);
}

// --- a problem ---

ConstTensorView view_of(const Tensor& tensor, int first) {
  return {pointer<const void>(tensor.data), tensor.strides[std::size_t(first)], tensor.strides[std::size_t(first + 1)]};
}

DType element_type(const Tensor& tensor, const char* name) {
  DType dtype{};
  if (!dtype_of(tensor, &dtype)) {
    throw py::value_error(std::string(name) + " has elements of a type that no kernel reads.");
  }
  return dtype;
}

/// A factor that is a number, or a tensor that only the device reads: fp32, of one element or one for each head.
void read_scale(const Fields& owner, const char* name, float* number, DeviceScale* scale) {
  const Fields field = owner.at(name);
  if (PyFloat_Check(field.ptr())) {
    *number = float(PyFloat_AS_DOUBLE(field.ptr()));
    return;
  }
  const Tensor tensor = owner.tensor(name);
  *number = 1.0f;
  *scale = {pointer<const float>(tensor.data), tensor.shape[0] > 1 ? 1 : 0};
}

void read_logits(const Fields& logits, AttentionParams* params) {
  read_scale(logits, "sm_scale", &params->sm_scale, &params->logits_scale);
  if (!logits.at("head_scale").is_none()) {
    params->logits_scale = {pointer<const float>(logits.address("head_scale")), 1};
  }
  params->logits_soft_cap = float(logits.as<double>("soft_cap"));
  params->alibi = {pointer<const float>(logits.address("alibi")), logits.as<bool>("alibi_relative"),
                   logits.as<bool>("alibi_after_cap")};
  params->sinks = pointer<const float>(logits.address("sinks"));
  if (!logits.at("rope").is_none()) throw py::value_error("Kernels rotate nothing: prepare copies.");
}

void read_output(const Fields& output, AttentionParams* params) {
  const Tensor out = output.tensor("out");
  params->o_dtype = element_type(out, "out");
  params->o = {pointer<void>(out.data), out.strides[0], out.strides[1]};
  if (!output.at("lse").is_none()) {
    const Tensor lse = output.tensor("lse");
    params->lse = pointer<float>(lse.data);
    params->lse_stride_token = lse.strides[0];
    params->lse_stride_head = lse.strides[1];
  }
  params->stats = pointer<float>(output.address("stats"));
  read_scale(output, "scale", &params->v_scale, &params->output_scale);
}

void read_keys(const Fields& kv, bool paged, AttentionParams* params) {
  const Tensor k = kv.tensor(paged ? "k_cache" : "k"), v = kv.tensor(paged ? "v_cache" : "v");
  params->kv_dtype = element_type(k, "k");
  params->num_kv_heads = int(k.shape[std::size_t(k.ndim - 2)]);
  params->head_dim_vo = int(v.shape[std::size_t(v.ndim - 1)]);
  params->k = view_of(k, paged);
  params->v = view_of(v, paged);
  if (!paged) {
    params->total_kv = k.shape[0];
    return;
  }
  PageTable& pages = params->pages;
  pages.page_size = int(k.shape[1]);
  pages.num_pages = std::max(k.shape[0], v.shape[0]);  // equal, but for copies, whose tables are known to be right
  pages.k_stride_page = k.strides[0];
  pages.v_stride_page = v.strides[0];
  if (!kv.at("v_indices").is_none()) {  // else they are the plan's
    pages.indices = pointer<const std::int32_t>(kv.address("indices"));
    pages.v_indices = pointer<const std::int32_t>(kv.address("v_indices"));
  }
}

// Computes a Problem that Python has checked, on the current stream of its device. A batch brings its plan, and its
// scratch.
py::object attend(PyObject* const* given, Py_ssize_t count) {
  const Torch& torch = Torch::get();
  py::object object, plan_object = py::none(), scratch = py::none();
  Backend backend{};
  Positional(given, count).read(object, backend).maybe(plan_object, scratch).end();
  const Fields problem(std::move(object));
  const int device = problem.tensor("q").device.device_id;
  const auto* plan = plan_object.cast<const BatchPlan*>();
  AttentionParams params = plan == nullptr ? AttentionParams() : plan->params;
  read_problem(problem, &params);
  if (plan == nullptr) {
    raise_unless_ok(launch_once(torch, params, backend, device));
    return py::none();
  }
  Tensor memory;
  if (!scratch.is_none() && !torch.read(scratch.ptr(), &memory)) {
    throw py::type_error("The scratch of a plan must be a tensor.");
  }
  auto bytes = std::size_t(memory.data == 0 ? 0 : memory.item_bytes());
  for (int d = 0; d < memory.ndim; ++d) bytes *= std::size_t(memory.shape[std::size_t(d)]);
  raise_unless_ok(run_batch(*plan, params, device, torch.stream(device), memory.data, bytes));
  return py::none();
}

}  // namespace

void read_problem(const Fields& problem, AttentionParams* params) {
  const Tensor q = problem.tensor("q");
  params->q_dtype = element_type(q, "q");
  params->total_q = q.shape[0];
  params->num_qo_heads = int(q.shape[1]);
  params->head_dim_qk = int(q.shape[2]);
  params->q = view_of(q, 0);
  const Fields kv = problem.at("kv");
  read_keys(kv, py::hasattr(py::handle(kv.ptr()), "k_cache"), params);
  read_logits(problem.at("logits"), params);
  read_output(problem.at("output"), params);
  const Fields mask = problem.at("mask");
  read_mask(mask, params);
  if (!mask.at("bits").is_none()) {
    const Tensor bits = mask.tensor("bits");
    params->mask.words = pointer<const std::uint32_t>(bits.data);
    params->mask.num_words = (bits.shape[0] + 3) / 4;
    // Of a single request they begin at the first.
    if (!problem.at("qo_indptr").is_none()) {
      params->mask.indptr = pointer<const std::int32_t>(mask.address("bits_indptr"));
    }
  }
  params->skip_softmax_factor = float(problem.as<double>("skip_softmax_factor"));
}

Status run_batch(const BatchPlan& plan, const AttentionParams& params, int device, Address stream, Address scratch,
                 std::size_t scratch_bytes) {
  const CurrentDevice current(device);
  if (plan.state.layout.scratch_bytes > scratch_bytes) {
    return workspace_too_small("Attention", params, plan.state.layout.scratch_bytes, scratch_bytes);
  }
  const Memory memory{plan.schedule, pointer<void>(scratch), nullptr};
  const auto work = [&] { return run(plan.state, params, memory, pointer<CUstream_st>(stream)); };
  return scratch == 0 ? without_gil(work) : without_gil_in_turn(stream, work);
}

void add_batch(const py::object& module) {
  py::class_<BatchPlan>(module, "BatchPlan");
  py::class_<SharedSchedule>(module, "SharedSchedule", "A schedule that calls of attention share.")
      .def(py::init<bool>(), py::arg("strict"))
      .def("renew", &SharedSchedule::renew);
  static PyMethodDef functions[] = {function<plan_batch>("plan_batch"), function<attend>("attend")};
  add_functions(module, functions);
}

}  // namespace cutlass_kernels
