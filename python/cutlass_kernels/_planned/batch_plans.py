"""A planned batch: everything that plan() found out, and how it is run.

A run is direct (``native``), or it checks the tensors, makes the problem that they stand for and has that computed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from .._compute import half_precision, kernels, request_facts, selection
from .._compute.selection import KERNEL_BACKENDS
from .._core import checks, hints, native
from .._core.problems import FP8_DTYPES, Logits, Mask, MultiItem, Output, PagedKv, Problem, RaggedKv, Split
from .._core.run_options import Options, Result, RunArgs, Shape
from .batches import Batch

_LN2 = math.log(2.0)
_MOST_ROWS = 1 << 30


class Place(NamedTuple):
    """What a wrapper is, whatever it plans. ``graph``: its index data stay in the buffers of a CUDA graph."""

    device: torch.device
    kv_layout: str
    backend: str  # as asked for
    graph: bool


@dataclass(slots=True)
class Plan:
    """Everything plan() found out."""

    place: Place
    shape: Shape
    batch: Batch
    total_q: int | None
    options: Options
    bits: torch.Tensor | None
    bits_indptr: torch.Tensor | None
    multi_item: MultiItem | None
    mask_is_causal: bool  # the mask is not the user's, but stands for options.causal in the buffers of a CUDA graph
    request: request_facts.Request
    backend: str
    split: Split
    schedule: kernels.Schedule | None = None
    # By backend, is_general() and reads_as_is(), for runs whose arguments ask for another than the plan foresaw.
    other_schedules: dict[tuple[str, bool, bool], kernels.Schedule] = field(default_factory=dict)
    direct: Any = None  # makes direct runs, once there has been one

    def without_memory(self) -> Plan:
        """The same plan without what lies in device memory."""
        return replace(self, schedule=None, other_schedules={}, direct=None)

    @property
    def is_general(self) -> bool:
        """Whether its runs are expected to be so: those of fp8 tensors usually bring their scales as tensors."""
        shape = self.shape
        alibi = self.options.pos_encoding_mode == "ALIBI"
        return self.bits is not None or alibi or shape.q_dtype in FP8_DTYPES or shape.kv_dtype in FP8_DTYPES

    def place_vectors(self, workspace: torch.Tensor) -> int:
        """Gives vectors that are on the host alone a place at the end of an int workspace. Returns its bytes."""
        packed = self.batch.packed
        return packed.place(workspace) if packed is not None and self.total_q else 0

    # --- direct runs ---

    def direct_run(self, most_rows: int | None) -> Any:
        """What makes direct runs; None while there is no tile list.

        ``(q, k, v, q_scale, k_scale, v_scale, out, lse, sinks, return_lse, options in effect)`` give the results, or
        None. ``k`` may be a cache that holds the values too, or a pair, where ``v`` is None. ``most_rows`` are those of
        a CUDA graph.
        """
        if self.direct is None:
            self.direct = self._make_direct(most_rows)
        return self.direct

    def _make_direct(self, most_rows: int | None) -> Any:
        place, schedule, batch, shape = self.place, self.schedule, self.batch, self.shape
        if schedule is None or shape.cast is not None:
            return native.not_direct
        if half_precision.prepared_request(self.request) is not None and not schedule.as_is:
            return native.not_direct  # runs compute from copies
        if schedule.made is None:
            return None
        alibi = None
        if self.options.pos_encoding_mode == "ALIBI":
            alibi = checks.alibi_slopes(shape.num_qo_heads, place.device)
            if not checks.are_kept(alibi):
                return None
        partials = schedule.partials
        assert partials is not None
        return native.direct_run(
            schedule,
            schedule.made,
            schedule.workspace.device.index,
            place.kv_layout == "HND",
            -1 if self.total_q is None else self.total_q,
            _MOST_ROWS if most_rows is None else most_rows,
            batch.page_bound if batch.page_size is not None else batch.kv.last or 0,  # so many keys or pages at least
            self._has_other_rows,  # which are zeros in a new output
            schedule.offsets.total_q is None,  # then a run that is captured makes a tile list of its own
            self.options.pos_encoding_mode,
            self.mask_is_causal,
            self.options.causal,
            alibi,
            self.bits,
            self.bits_indptr,
            partials.data_ptr(),
            partials.nbytes,
        )

    # --- checks ---

    def check_q(self, q: torch.Tensor, most_rows: int | None) -> None:
        shape = self.shape
        checks.tensor("q", q, 3)
        checks.same_device(self.place.device, q=q)
        if q.dtype != shape.q_dtype:
            raise ValueError(f"q has dtype {q.dtype}, but the plan {shape.q_dtype}: say q_data_type in plan().")
        if tuple(q.shape[1:]) != (shape.num_qo_heads, shape.head_dim_qk):
            raise ValueError(
                f"q has shape {tuple(q.shape)}, but the plan num_qo_heads={shape.num_qo_heads} and "
                f"head_dim_qk={shape.head_dim_qk}."
            )
        if self.total_q is not None and q.size(0) != self.total_q:
            raise ValueError(f"q has {q.size(0)} rows, but the planned qo_indptr ends at {self.total_q}: plan again.")
        if most_rows is not None and q.size(0) > most_rows:
            raise ValueError(f"q has {q.size(0)} rows, but this wrapper was first used with {most_rows}: use no more.")

    def check_kv(self, k: torch.Tensor, v: torch.Tensor) -> None:
        shape, place = self.shape, self.place
        for name, x, dim in (("k", k, shape.head_dim_qk), ("v", v, shape.head_dim_vo)):
            if x.device != place.device:
                raise ValueError(f"{name} is on {x.device}, but the workspace of this wrapper on {place.device}.")
            if x.dtype != shape.kv_dtype:
                raise ValueError(
                    f"{name} has dtype {x.dtype}, but the plan {shape.kv_dtype}: pass kv_data_type={x.dtype} to plan()."
                )
            if tuple(x.shape[-2:]) != (shape.num_kv_heads, dim):
                raise ValueError(
                    f"{name} has {x.size(-2)} heads of dimension {x.size(-1)} in kv_layout={place.kv_layout!r}, but "
                    f"the plan {shape.num_kv_heads} of {dim}."
                    + hints.other_layout(place.kv_layout, x.size(-3) == shape.num_kv_heads, " to the constructor")
                )

    # --- runs ---

    def run(
        self, options: Options, qo_indptr: torch.Tensor, q: torch.Tensor, kv: RaggedKv | PagedKv, args: RunArgs
    ) -> Result:
        """Computes the plan on checked tensors with the options in effect."""
        problem = self._problem(options, qo_indptr, q, kv, args)
        backend, request, schedule = self.backend, self.request, self.schedule
        if options != self.options or not _is_plain(problem):
            request = request_facts.Request.from_problem(problem, self.split.alone)
            # What kernels may do for so few rows is the plan's word, also where a later one has fewer.
            other, own = (
                request.features - request_facts.ROW_FEATURES,
                self.request.features & request_facts.ROW_FEATURES,
            )
            request = request._replace(features=other if other == request.features else other | own)
            backend = selection.select(self.place.backend, request)
        if backend in KERNEL_BACKENDS:
            general = kernels.is_general(problem)
            if (
                schedule is None
                or backend != self.backend
                or (general and not schedule.general)
                or (request is not self.request and schedule.as_is != kernels.reads_as_is(backend, request))
            ):
                schedule = self._other_schedule(backend, general, request, problem)
        elif self.place.device.type == "cuda":
            self._use_host_indices(problem)
        selection.compute(problem, backend, schedule)
        out, lse = problem.output.out, problem.output.lse
        if lse is None:
            return out
        if args.lse_base == "ln":
            inside = None if args.lse is None else self.rows_of_requests(qo_indptr, q.size(0))
            if inside is None:
                lse.mul_(_LN2)
            else:
                lse.copy_(torch.where(inside[:, None], lse * _LN2, lse))
        return (out, lse.t() if args.lse_layout == "HN" else lse) if args.return_lse else out

    def _other_schedule(
        self, backend: str, general: bool, request: request_facts.Request, problem: Problem
    ) -> kernels.Schedule:
        """The schedule for a backend, or for tiles, that the plan did not choose. Captured runs make their own, as
        lengths change."""
        make_anew = self.place.graph or torch.cuda.is_current_stream_capturing()
        key = (backend, general, kernels.reads_as_is(backend, request))
        schedule = None if make_anew else self.other_schedules.get(key)
        if schedule is None:
            assert problem.qo_indptr is not None
            offsets = kernels.offsets_of(problem)
            offsets.split = self.split
            allocate = functools.partial(kernels.room, self.place.device, kept=not make_anew)
            schedule = kernels.Schedule(backend, request, offsets, allocate(), grow=allocate)
            if not make_anew:
                self.other_schedules[key] = schedule
        return schedule

    def _problem(
        self, options: Options, qo_indptr: torch.Tensor, q: torch.Tensor, kv: RaggedKv | PagedKv, args: RunArgs
    ) -> Problem:
        shape, device = self.shape, self.place.device
        if args.lse_base not in ("log2", "ln"):
            raise ValueError(f"lse_base={args.lse_base!r} is unknown: use 'log2' or 'ln'.")
        if args.lse_layout not in ("NH", "HN"):
            raise ValueError(f"lse_layout={args.lse_layout!r} is unknown: use 'NH' or 'HN'.")
        if self.mask_is_causal and options.causal != self.options.causal:
            raise ValueError(
                f"causal={options.causal}, but causal={self.options.causal} is planned, and the mask buffers of this "
                "wrapper hold a mask for that: pass causal to plan()."
            )
        scale_qk, head_scale, scale_v = checks.descale(*args.scales, shape.num_qo_heads, shape.num_kv_heads, device)
        alibi = options.pos_encoding_mode == "ALIBI"
        checks.rope_dim(options.pos_encoding_mode, shape.head_dim_qk)
        logits = Logits(
            sm_scale=checks.product(checks.sm_scale(options.sm_scale, shape.head_dim_qk), scale_qk),
            soft_cap=checks.soft_cap(options.logits_soft_cap),
            alibi=checks.alibi_slopes(shape.num_qo_heads, device) if alibi else None,
            rope=checks.rope(options.pos_encoding_mode, options.rope_scale, options.rope_theta),
            head_scale=head_scale,
            sinks=checks.sinks(args.sinks, shape.num_qo_heads, device),
        )
        mask = Mask(
            causal=options.causal,
            window_left=checks.window(options.window_left),
            bits=self.bits,
            bits_indptr=self.bits_indptr,
            multi_item=self.multi_item,
        )
        rows, heads = q.size(0), shape.num_qo_heads
        out_shape = (rows, heads, shape.head_dim_vo)
        out = checks.output(args.out, out_shape, shape.o_dtype, device, zero=self._has_other_rows)
        output = Output(out, lse=self._lse(args, rows, heads), scale=scale_v)
        return Problem(q, kv, logits, output, mask, qo_indptr, args.skip_softmax_factor)

    @property
    def _has_other_rows(self) -> bool:
        """Whether the host cannot exclude that q has rows of no request. These are not written: new results need
        something there."""
        return self.place.graph or self.total_q is None

    def rows_of_requests(self, qo_indptr: torch.Tensor, rows: int) -> torch.Tensor | None:
        """Which of so many rows belong to a request, bool ``[rows]``; None where the host knows that all do.

        What is done to a caller's tensor after the kernel is done to these rows alone.
        """
        if not self._has_other_rows:
            return None
        return torch.arange(rows, device=self.place.device) < qo_indptr[-1]

    def _lse(self, args: RunArgs, rows: int, heads: int) -> torch.Tensor | None:
        """The LSE tensor seen as ``[rows, heads]``, None where nobody wants it."""
        if args.lse is None and not args.return_lse:
            return None
        transposed = args.lse_layout == "HN"
        lse = checks.lse_output(args.lse, (heads, rows) if transposed else (rows, heads), self.place.device)
        if self._has_other_rows and args.lse is None:
            lse.fill_(-math.inf)
        if transposed and not lse.is_contiguous():
            raise ValueError(f"lse has strides {lse.stride()}: with lse_layout='HN' it must be contiguous.")
        return lse.t() if transposed else lse

    def _use_host_indices(self, problem: Problem) -> None:
        """Gives the reference, which reads lengths on the host, the copies that are there already."""
        batch = self.batch
        problem.qo_indptr, problem.kv.indptr = batch.qo.known, batch.kv.known
        if isinstance(problem.kv, PagedKv) and batch.last_page_len is not None:
            problem.kv.last_page_len = batch.last_page_len.known


def _is_plain(problem: Problem) -> bool:
    """Whether the arguments of a run ask for nothing that its plan did not know, so that the plan's choice stands."""
    kv, logits, output = problem.kv, problem.logits, problem.output
    k, v = (kv.k, kv.v) if isinstance(kv, RaggedKv) else (kv.k_cache, kv.v_cache)
    return (
        logits.sinks is None
        and logits.head_scale is None
        and isinstance(logits.sm_scale, float)
        and isinstance(output.scale, float)
        and request_facts.is_ordinary(problem.q, k, v, output.out)
        and not request_facts.copies_fp8(problem)
    )


@functools.lru_cache(maxsize=4096)
def request_of(
    device: torch.device,
    shape: Shape,
    pos_encoding_mode: str,
    causal: bool,
    window: bool,
    soft_cap: bool,
    masked: bool,
    multi_item: bool,
    page_size: int | None,
    of_rows: str,
    layout: request_facts.Layout | None,
) -> request_facts.Request:
    """The facts that decide the backend of a plan. ``window`` and ``soft_cap``: whether there is one. ``of_rows``: see
    ``feature_of_rows``."""
    used = {
        "custom_mask": masked and not multi_item,
        "multi_item": multi_item,
        "unsized": multi_item and not masked and device.type == "cuda",
        "causal": causal and not masked and not multi_item,
        "window": window,
        "soft_cap": soft_cap,
        "alibi": pos_encoding_mode == "ALIBI",
        "rope": pos_encoding_mode == "ROPE_LLAMA",
        "paged": page_size is not None,
        "fp8_copies": shape.q_dtype in FP8_DTYPES
        and shape.head_dim_qk <= request_facts.MOST_SEPARATE_COLUMNS
        and (page_size or 0) % request_facts.FP8_PAGE > 0,
    }
    return request_facts.Request(
        device.type,
        request_facts.compute_capability(device),
        shape.cast or shape.q_dtype,
        shape.cast or shape.kv_dtype,
        shape.o_dtype,
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim_qk,
        shape.head_dim_vo,
        frozenset(name for name, is_used in used.items() if is_used) | {of_rows} - {""},
        layout,
    )
