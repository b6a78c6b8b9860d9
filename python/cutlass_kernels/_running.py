"""How a planned batch is run: checks of the tensors, the problem they make, and calls that repeat an earlier one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from . import _args, _dispatch, _plan, _repeat
from ._autograd import written
from ._plan import KERNEL_BACKENDS, Options, Plan, Result, RunArgs
from ._problem import Logits, Mask, Output, PagedKv, Problem, RaggedKv

_LN2 = math.log(2.0)


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
                )

    def _run_tensors(self, k: torch.Tensor, v: torch.Tensor | None) -> tuple[Any, ...]:
        """The arguments of run() behind q, from those that an operator takes."""
        return k, v

    def _again(
        self,
        q: Any,
        k: Any,
        v: Any,
        q_scale: Any,
        k_scale: Any,
        v_scale: Any,
        out: Any,
        lse: Any,
        sinks: Any,
        return_lse: bool,
    ) -> Result | None:
        """The results of a run like one that :meth:`_repeat_run` has found, of this plan or as the first of a plan like
        that one; else None.

        ``k`` may be a cache that holds the values too, or a pair, where ``v`` is None.
        """
        plan = self._plan_info
        if plan is None:
            return None
        if sinks is None:
            sinks = self._sinks
        calls, others = plan.calls, (out, lse, sinks, return_lse, q_scale, k_scale, v_scale, self._options)
        result: Result | None = calls.again(q, k, v, *others)
        if result is None and not calls.has_found:
            known = plan.kind.calls.find(q, k, v, *others)
            repeat = None if known is None else self._resume(plan, known)
            if repeat is not None:
                if type(k) is tuple:
                    k, v = k
                result = repeat.found_in(calls, q, k, v, *others)
        if result is not None and (out is not None or lse is not None):
            written(out, lse)
        return result

    def _repeat_run(
        self,
        plan: Plan,
        q: Any,
        k: Any,
        v: Any,
        scales: tuple[Any, Any, Any],
        out: Any,
        lse: Any,
        sinks: Any,
        return_lse: bool,
    ) -> tuple[Any, Result | None]:
        """The key of a run, with all that it depends on beside its plan and addresses, and the results where an earlier
        one can be repeated.

        ``v`` is None where ``k`` is a cache that holds the values too. There is no key where arguments are not what
        they should be.
        """
        facts, options = _repeat.facts, self._options
        try:
            key = (
                facts(q),
                facts(k),
                None if v is None else facts(v),
                None if out is None else facts(out),
                None if lse is None else facts(lse),
                None if sinks is None else facts(sinks),
                return_lse,
                scales,
                options,
                type(options.window_left),  # a float that equals it is refused
            )
            repeat = plan.calls.get(key) if plan.calls else None
            known = plan.kind.calls.get(key) if repeat is None else None
        except (AttributeError, TypeError):  # no tensor, or no key: checks will say
            return None, None
        if known is not None and (repeat := self._resume(plan, known)) is not None:
            _repeat.remember(plan.calls, key, repeat)
            plan.kind.calls.found(known, None, q, k, v, out, lse, sinks, return_lse, *scales, options)
        if repeat is None:
            return key, None
        result = repeat.found_in(plan.calls, q, k, v, out, lse, sinks, return_lse, *scales, options)
        if result is not None:
            written(out, lse)
        return key, result

    def _resume(self, plan: Plan, known: _repeat.Resumable) -> _repeat.Repeat | None:
        """The run to repeat where that of an earlier plan of the same kind would be the same but for the batch."""
        if plan.schedule is None or not self._may_resume(plan):
            return None
        repeat, *wanted, rows, keys = known
        batch = plan.batch
        needed = batch.page_bound if batch.page_size is not None else batch.kv.last
        schedule = plan.schedule
        if wanted != [plan.backend, schedule.general, schedule.as_is, batch.page_size] or rows != plan.total_q:
            return None
        if needed is None or needed > keys:
            return None
        return repeat.with_call(repeat.call.resumed(schedule, rows))

    def _may_resume(self, plan: Plan) -> bool:
        """Whether runs depend on nothing of their plan but its kind and its batch, which the host knows."""
        known = plan.total_q is not None and plan.batch.kv.last is not None
        return known and not self._use_cuda_graph and plan.bits is None and plan.multi_item is None

    def _run(self, plan: Plan, q: torch.Tensor, kv: RaggedKv | PagedKv, args: RunArgs, key: Any) -> Result:
        """Runs ``plan`` on checked tensors with the options in effect; with a ``key``, remembers how."""
        values = self._options
        problem = self._problem(plan, q, kv, args, values)
        backend, request, schedule = plan.backend, plan.request, plan.schedule
        usual = values == plan.options and _is_plain(problem)
        if not usual:
            request = _dispatch.Request.from_problem(problem, plan.split.alone)
            if "short_queries" not in plan.request.features:  # the plan's word, also where a later one has fewer rows
                request = dataclasses.replace(request, features=request.features - {"short_queries"})
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
        call = _dispatch.compute(problem, backend, schedule)
        if call is not None and key is not None:
            self._remember(plan, problem, args, values, call, schedule, key, usual)
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

    def _remember(
        self,
        plan: Plan,
        problem: Problem,
        args: RunArgs,
        values: Options,
        call: Any,
        schedule: Any,
        key: Any,
        usual: bool,
    ) -> None:
        """Keeps a call, if one with an equal key would be the same; for later plans, too, if the plan's choice of a
        backend was the ``usual`` one."""
        planned = schedule is plan.schedule
        sinks = self._sinks if args.sinks is None else args.sinks
        if (
            plan.shape.cast is not None  # tensors are not the caller's, but copies; so are sinks of other types
            or problem.logits.sinks is not sinks
            or not (planned or not self._use_cuda_graph)
            or not _args.are_plain(*args.scales, values.causal, values.pos_encoding_mode, values.window_left)
            or not _args.are_plain(values.logits_soft_cap, values.sm_scale, values.rope_scale, values.rope_theta)
        ):
            return
        clear = self._use_cuda_graph or plan.total_q is None
        outside_graphs = not planned or plan.total_q is None
        if outside_graphs and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # its tile list exists only once the graph has run
        repeat = _repeat.Repeat(call, problem, clear, outside_graphs)
        _repeat.remember(plan.calls, key, repeat)
        if usual and planned and schedule is not None and self._may_resume(plan):
            kv, page_size = problem.kv, plan.batch.page_size
            keys = kv.k.size(0) if isinstance(kv, RaggedKv) else kv.k_cache.size(0)
            facts = (plan.backend, schedule.general, schedule.as_is, page_size, problem.q.size(0), keys)
            _repeat.remember(plan.kind.calls, key, _repeat.Resumable(repeat.with_call(call.model()), *facts))

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
