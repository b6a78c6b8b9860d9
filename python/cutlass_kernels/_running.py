"""How a planned batch is run: directly (_native), or by checks of the tensors and the problem that they make."""

from __future__ import annotations

import math
from typing import Any

import torch

from . import _args, _dispatch, _hints, _native, _plan, _prepare
from ._autograd import written
from ._plan import KERNEL_BACKENDS, Options, Plan, Result, RunArgs
from ._problem import Logits, Mask, Output, PagedKv, Problem, RaggedKv

_LN2 = math.log(2.0)
_MOST_ROWS = 1 << 30


class Option:
    """An attribute of a wrapper that is one of its options. Where an engine assigns it, the options are replaced: runs
    tell by the object whether they are the same."""

    def __init__(self, field: str = "") -> None:
        self._field = field

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = self._field or name.removeprefix("_")

    def __get__(self, wrapper: RunsPlans | None, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(wrapper._options, self._field)

    def __set__(self, wrapper: RunsPlans, value: Any) -> None:
        wrapper._options = wrapper._options.replaced(self._field, value)


class RunsPlans:
    """What the wrappers do in run(). Their constructor and plan() set the attributes."""

    device: torch.device
    _kv_layout: str
    _requested_backend: str
    _use_cuda_graph: bool
    _max_total_num_rows: int | None
    _plan_info: Plan | None
    _sinks: torch.Tensor | None
    _qo_indptr_buf: Any
    _options: Options  # in effect
    _causal = Option()
    _pos_encoding_mode = Option()
    _window_left = Option()
    _logits_soft_cap = Option()
    _sm_scale = Option()
    _rope_scale = Option()
    _rope_theta = Option()
    _use_fp16_qk_reduction = Option("fp16_qk_reduction")

    def _planned(self) -> Plan:
        if self._plan_info is None:
            raise RuntimeError(f"{type(self).__name__} has no plan: call plan() before run().")
        return self._plan_info

    def _check_window(self, window_left: int | None) -> None:
        if window_left is not None and _args.window(window_left) != _args.window(self._window_left):
            raise AssertionError(f"window_left={window_left}, but {self._window_left} is planned: pass it to plan().")

    def _check_q(self, q: torch.Tensor, plan: Plan) -> None:
        shape = plan.shape
        _args.tensor("q", q, 3)
        _args.same_device(self.device, q=q)
        if q.dtype != shape.q_dtype:
            raise ValueError(f"q has dtype {q.dtype}, but the plan {shape.q_dtype}: say q_data_type in plan().")
        if tuple(q.shape[1:]) != (shape.num_qo_heads, shape.head_dim_qk):
            raise ValueError(
                f"q has shape {tuple(q.shape)}, but the plan num_qo_heads={shape.num_qo_heads} and "
                f"head_dim_qk={shape.head_dim_qk}."
            )
        if plan.total_q is not None and q.size(0) != plan.total_q:
            raise ValueError(f"q has {q.size(0)} rows, but the planned qo_indptr ends at {plan.total_q}: plan again.")
        limit = self._max_total_num_rows
        if self._use_cuda_graph and limit is not None and q.size(0) > limit:
            raise ValueError(f"q has {q.size(0)} rows, but this wrapper was first used with {limit}: use no more.")

    def _check_kv(self, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        shape = plan.shape
        for name, x, dim in (("k", k, shape.head_dim_qk), ("v", v, shape.head_dim_vo)):
            if x.device != self.device:
                raise ValueError(f"{name} is on {x.device}, but the workspace of this wrapper on {self.device}.")
            if x.dtype != shape.kv_dtype:
                raise ValueError(
                    f"{name} has dtype {x.dtype}, but the plan {shape.kv_dtype}: pass kv_data_type={x.dtype} to plan()."
                )
            if tuple(x.shape[-2:]) != (shape.num_kv_heads, dim):
                raise ValueError(
                    f"{name} has {x.size(-2)} heads of dimension {x.size(-1)} in kv_layout={self._kv_layout!r}, but "
                    f"the plan {shape.num_kv_heads} of {dim}."
                    + _hints.other_layout(self._kv_layout, x.size(-3) == shape.num_kv_heads, " to the constructor")
                )

    def _run_tensors(self, k: torch.Tensor, v: torch.Tensor | None) -> tuple[Any, ...]:
        """The arguments of run() behind q, from those that an operator takes."""
        return k, v

    def _direct_run(
        self,
        plan: Plan,
        q: Any,
        k: Any,
        v: Any,
        scales: tuple[Any, Any, Any],
        out: Any,
        lse: Any,
        sinks: Any,
        return_lse: Any,
    ) -> Result | None:
        """The results of a direct run (``_native``), None where there is none.

        ``k`` may be a cache that holds the values too, or a pair, where ``v`` is None.
        """
        direct = plan.direct
        if direct is None:
            direct = self._make_direct(plan)
            if direct is None:
                return None
            plan.direct = direct
        result: Result | None = direct(q, k, v, *scales, out, lse, sinks, return_lse, self._options)
        if result is not None and (out is not None or lse is not None):
            written(out, lse)
        return result

    def _make_direct(self, plan: Plan) -> Any:
        """What makes direct runs of a plan; None while there is no tile list."""
        schedule, batch, shape = plan.schedule, plan.batch, plan.shape
        if schedule is None or shape.cast is not None:
            return _native.not_direct
        if _prepare.prepared_request(plan.request) is not None and not schedule.as_is:
            return _native.not_direct  # runs compute from copies
        if schedule.made is None:
            return None
        alibi = None
        if plan.options.pos_encoding_mode == "ALIBI":
            alibi = _args.alibi_slopes(shape.num_qo_heads, self.device)
            if not _args.are_kept(alibi):
                return None
        most_rows, partials = self._max_total_num_rows, schedule.partials
        description = _native.DirectRuns(
            schedule=schedule,
            plan=schedule.made,
            device=schedule.workspace.device.index,
            hnd=self._kv_layout == "HND",
            rows=-1 if plan.total_q is None else plan.total_q,
            most_rows=_MOST_ROWS if most_rows is None or not self._use_cuda_graph else most_rows,
            least_kv=batch.page_bound if batch.page_size is not None else batch.kv.last or 0,
            zero=self._use_cuda_graph or plan.total_q is None,
            captured=schedule.offsets.total_q is None,
            pos_encoding_mode=plan.options.pos_encoding_mode,
            mask_is_causal=plan.mask_is_causal,
            causal=plan.options.causal,
            alibi=alibi,
            bits=plan.bits,
            bits_indptr=plan.bits_indptr,
            scratch=partials.data_ptr(),
            scratch_bytes=partials.nbytes,
        )
        return _native.direct_run(description)

    def _run(self, plan: Plan, q: torch.Tensor, kv: RaggedKv | PagedKv, args: RunArgs) -> Result:
        """Runs ``plan`` on checked tensors with the options in effect."""
        values = self._options
        problem = self._problem(plan, q, kv, args, values)
        backend, request, schedule = plan.backend, plan.request, plan.schedule
        usual = values == plan.options and _is_plain(problem)
        if not usual:
            request = _dispatch.Request.from_problem(problem, plan.split.alone)
            if "short_queries" not in plan.request.features:  # the plan's word, also where a later one has fewer rows
                request = request._replace(features=request.features - {"short_queries"})
            backend = _dispatch.select(self._requested_backend, request)
        if backend in KERNEL_BACKENDS:
            general = _plan.is_general(problem)
            other = backend != plan.backend or (general and not schedule.general)
            if not other and request is not plan.request:
                other = schedule.as_is != _plan.reads_as_is(backend, request)
            if other:
                schedule = self._other_schedule(plan, backend, general, request, problem)
        if backend == "reference" and self.device.type == "cuda":
            _use_host_indices(problem, plan)
        _dispatch.compute(problem, backend, schedule)
        if self._use_cuda_graph and self._max_total_num_rows is None:  # planned from offsets on the device
            self._max_total_num_rows = q.size(0)
        out, lse = problem.output.out, problem.output.lse
        if lse is None:
            return out
        if args.lse_base == "ln":
            inside = None if args.lse is None else self._rows_of_requests(plan, q.size(0))
            if inside is None:
                lse.mul_(_LN2)
            else:
                lse.copy_(torch.where(inside[:, None], lse * _LN2, lse))
        return (out, lse.t() if args.lse_layout == "HN" else lse) if args.return_lse else out

    def _other_schedule(
        self, plan: Plan, backend: str, general: bool, request: _dispatch.Request, problem: Problem
    ) -> Any:
        """The schedule for a backend, or for tiles, that the plan did not choose. Captured runs make their own, as
        lengths change."""
        make_anew = self._use_cuda_graph or torch.cuda.is_current_stream_capturing()
        key = (backend, general, _plan.reads_as_is(backend, request))
        schedule = None if make_anew else plan.other_schedules.get(key)
        if schedule is None:
            assert problem.qo_indptr is not None
            workspace = _plan.int_workspace(self.device)
            offsets = _plan.offsets_of(problem)
            offsets.split = plan.split
            schedule = _plan.make_schedule(backend, request, offsets, workspace)
            if not make_anew:
                plan.other_schedules[key] = schedule
        return schedule

    def _problem(self, plan: Plan, q: torch.Tensor, kv: RaggedKv | PagedKv, args: RunArgs, values: Options) -> Problem:
        shape = plan.shape
        if args.lse_base not in ("log2", "ln"):
            raise ValueError(f"lse_base={args.lse_base!r} is unknown: use 'log2' or 'ln'.")
        if args.lse_layout not in ("NH", "HN"):
            raise ValueError(f"lse_layout={args.lse_layout!r} is unknown: use 'NH' or 'HN'.")
        if plan.mask_is_causal and values.causal != plan.options.causal:
            raise ValueError(
                f"causal={values.causal}, but causal={plan.options.causal} is planned, and the mask buffers of this "
                "wrapper hold a mask for that: pass causal to plan()."
            )
        scale_qk, head_scale, scale_v = _args.descale(*args.scales, shape.num_qo_heads, shape.num_kv_heads, self.device)
        alibi = values.pos_encoding_mode == "ALIBI"
        _args.rope_dim(values.pos_encoding_mode, shape.head_dim_qk)
        logits = Logits(
            sm_scale=_args.product(_args.sm_scale(values.sm_scale, shape.head_dim_qk), scale_qk),
            soft_cap=_args.soft_cap(values.logits_soft_cap),
            alibi=_args.alibi_slopes(shape.num_qo_heads, self.device) if alibi else None,
            rope=_args.rope(values.pos_encoding_mode, values.rope_scale, values.rope_theta),
            head_scale=head_scale,
            sinks=_args.sinks(self._sinks if args.sinks is None else args.sinks, shape.num_qo_heads, self.device),
        )
        mask = Mask(
            causal=values.causal,
            window_left=_args.window(values.window_left),
            bits=plan.bits,
            bits_indptr=plan.bits_indptr,
            multi_item=plan.multi_item,
        )
        # Rows outside every request are not written: clear them where the host cannot exclude that there are some.
        clear = self._use_cuda_graph or plan.total_q is None
        rows, heads = q.size(0), shape.num_qo_heads
        out = _args.output(args.out, (rows, heads, shape.head_dim_vo), shape.o_dtype, self.device, zero=clear)
        output = Output(out, lse=self._lse(args, rows, heads, clear), scale=scale_v)
        return Problem(q, kv, logits, output, mask, self._qo_indptr_buf, args.skip_softmax_factor)

    def _rows_of_requests(self, plan: Plan, rows: int) -> torch.Tensor | None:
        """Which of so many rows belong to a request, bool ``[rows]``; None where the host knows that all do.

        What is done to a caller's tensor after the kernel is done to these rows alone.
        """
        if not self._use_cuda_graph and plan.total_q is not None:
            return None
        return torch.arange(rows, device=self.device) < self._qo_indptr_buf[-1]

    def _lse(self, args: RunArgs, rows: int, heads: int, clear: bool) -> torch.Tensor | None:
        """The LSE tensor seen as ``[rows, heads]``, None where nobody wants it."""
        if args.lse is None and not args.return_lse:
            return None
        transposed = args.lse_layout == "HN"
        lse = _args.lse_output(args.lse, (heads, rows) if transposed else (rows, heads), self.device)
        if clear and args.lse is None:
            lse.fill_(-math.inf)
        if transposed and not lse.is_contiguous():
            raise ValueError(f"lse has strides {lse.stride()}: with lse_layout='HN' it must be contiguous.")
        return lse.t() if transposed else lse


def _is_plain(problem: Problem) -> bool:
    """Whether the arguments of a run ask for nothing that its plan did not know, so that the plan's choice stands."""
    kv, logits, output = problem.kv, problem.logits, problem.output
    k, v = (kv.k, kv.v) if isinstance(kv, RaggedKv) else (kv.k_cache, kv.v_cache)
    return (
        logits.sinks is None
        and logits.head_scale is None
        and isinstance(logits.sm_scale, float)
        and isinstance(output.scale, float)
        and _dispatch.is_ordinary(problem.q, k, v, output.out)
        and not _dispatch.copies_fp8(problem)
    )


def _use_host_indices(problem: Problem, plan: Plan) -> None:
    """Gives the reference, which reads lengths on the host, the copies that are there already."""
    problem.qo_indptr = plan.batch.qo.known
    problem.kv.indptr = plan.batch.kv.known
    if isinstance(problem.kv, PagedKv) and plan.batch.last_page_len is not None:
        problem.kv.last_page_len = plan.batch.last_page_len.known
