"""Calls of trtllm_fmha_v2_prefill for kernels, which read offsets and block tables on the device themselves.

Nothing is planned, and nothing copied but offsets and tables that are on the CPU. Memory for the results of split keys,
and for a tile list where lengths differ so much that one pays, is that of the caching allocator. A call that differs
from an earlier one in nothing but addresses, and whose offsets are on the device, where nobody checks them, goes past
all checks: see ``_repeat``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import _args, _autograd, _dispatch, _found, _plan, _prepare, _repeat, _streams
from ._problem import PagedKv, Problem

_MOST_KEYS = 1 << 30  # in pages: an estimate, which needs to go no further
_NUMBERS = 13  # of a call's options: those that may be tensors, whose values may change


class Tables(NamedTuple):
    """Block tables as they were given: ``[batch, M]``, or ``[batch, 2, M]``, whose entries for values count blocks from
    the key cache on: the first of the value cache is number ``v_offset``."""

    entries: torch.Tensor
    v_offset: int


class Tensors(NamedTuple):
    """The tensors of a call, as they came."""

    qkv: Any
    cum_seq_lens_q: torch.Tensor
    cum_seq_lens_kv: torch.Tensor
    block_tables: torch.Tensor | None
    out: torch.Tensor | None
    sinks: Any

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values: the one, two or three tensors that they lie in."""
        qkv = self.qkv
        if isinstance(qkv, torch.Tensor):
            return (qkv,)
        return (qkv[0], *qkv[1]) if isinstance(qkv[1], (tuple, list)) else tuple(qkv)


def needs_grad(qkv: Any, *others: Any) -> bool:
    """See ``_autograd.needs_grad``."""
    if isinstance(qkv, (tuple, list)) and len(qkv) == 3:
        return _autograd.needs_grad(*qkv, *others)
    q, k = qkv if isinstance(qkv, (tuple, list)) and len(qkv) == 2 else (qkv, qkv)
    return _autograd.needs_grad(q, k, None, *others)


def _kernels() -> Any:
    return _dispatch._kernels()


class Call:
    """A call that can be made again with other tensors of the same kind."""

    __slots__ = (
        "_counted",
        "_device",
        "_index",
        "_k_offset",
        "_keep",
        "_launch",
        "_like",
        "_out",
        "_stats",
        "_v_offset",
        "_workspace_bytes",
    )

    def __init__(self, launch: Any, problem: Problem, counted: bool, keep: Any) -> None:
        self._launch = launch
        self._device = problem.q.device
        self._index: int = problem.q.device.index
        self._workspace_bytes: int = launch.workspace_bytes(problem.output.stats is not None)
        self._counted = counted or self._workspace_bytes > 0
        self._keep = keep  # what the launch holds addresses of
        out = problem.output.out
        self._out = (tuple(out.shape), out.dtype)
        self._stats = None if problem.output.stats is None else tuple(problem.output.stats.shape)
        self._like = False
        self._k_offset = self._v_offset = 0

    def repeats(self, parts: tuple[torch.Tensor, ...], problem: Problem) -> None:
        """Notes where queries, keys and values lie in the tensors of the caller."""
        (k, v), q, (shape, dtype) = _matrices(problem), problem.q, self._out
        self._like = q is parts[0] and q.is_contiguous() and (tuple(q.shape), q.dtype) == (shape, dtype)
        self._k_offset = k.data_ptr() - parts[min(1, len(parts) - 1)].data_ptr()
        self._v_offset = v.data_ptr() - (parts[2].data_ptr() if len(parts) > 2 else k.data_ptr())

    def again(self, tensors: Tensors, options: tuple[Any, ...]) -> _plan.Result | None:
        """Makes the call, and returns what it returned before; the :func:`table` mostly has it from then on. Does
        nothing and returns None where it has to go the long way."""
        if _kernels()._current_device() != self._index:
            return None
        parts, out = tensors.parts(), tensors.out
        first = parts[0]
        q_at = first.data_ptr()
        k_at = (parts[1].data_ptr() if len(parts) > 1 else q_at) + self._k_offset
        v_at = (parts[2].data_ptr() if len(parts) > 2 else k_at) + self._v_offset
        if (q_at | k_at | v_at) & 15:
            return None
        if out is None:
            out = torch.empty_like(first) if self._like else self._new_output(first)
        elif out.data_ptr() & 15:
            return None
        offsets = (tensors.cum_seq_lens_q, tensors.cum_seq_lens_kv)
        stats = None if self._stats is None else first.new_empty(self._stats, dtype=torch.float32)
        self.run(q_at, k_at, v_at, out, offsets, tensors.block_tables, tensors.sinks, stats)
        if stats is not None:
            return out, stats
        make_output = torch.empty_like if self._like else self._new_output
        make_workspace = self._workspace if self._workspace_bytes else None
        own = (self, self._launch, make_output, self._index, self._counted, self._k_offset, self._v_offset)
        table()[1](*own, make_workspace, *tensors, *options)
        return out

    def _workspace(self) -> torch.Tensor:
        return torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self._device)

    def _new_output(self, first: torch.Tensor) -> torch.Tensor:
        shape, dtype = self._out
        return first.new_empty(shape, dtype=dtype)

    def run(
        self,
        q: int,
        k: int,
        v: int,
        out: torch.Tensor,
        offsets: tuple[torch.Tensor, torch.Tensor],
        tables: torch.Tensor | None,
        sinks: torch.Tensor | None,
        stats: torch.Tensor | None,
    ) -> None:
        """Enqueues the call on the current stream of the current device."""
        kernels = _kernels()
        workspace = self._workspace() if self._workspace_bytes else None
        stream = kernels._stream_of(self._index)
        counters = kernels._counters(self._device, stream) if self._counted else None
        self._launch(
            q,
            k,
            v,
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            0 if stats is None else stats.data_ptr(),
            offsets[0].data_ptr(),
            offsets[1].data_ptr(),
            0 if tables is None else tables.data_ptr(),
            0 if counters is None else counters.data_ptr(),
            stream,
            0 if workspace is None else workspace.data_ptr(),
            self._workspace_bytes,
        )


_calls: dict[Any, Call] = {}  # calls that may be repeated


@functools.cache
def table() -> tuple[Callable[..., Any], Callable[..., None]]:
    """What makes a call whose tensors and options :meth:`Call.again` has had before, or returns None where there was no
    such call; and what adds one. The compiled module finds calls in a fifth of the time that a key takes here."""
    functions = None
    if _args._C is not None and _found.API is not None:
        functions = _args._C.fmha_v2_calls(
            _found.API,
            torch.Tensor,
            _streams.current_device,
            _streams.stream_of,
            lambda device, stream: _kernels().counters_of(device, stream),
            _found.MOST,
        )
    return functions or (lambda *args: None, lambda *args: None)


def look_up(tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, Call | None]:
    """The key of a call, with all that it depends on beside addresses, and the call to repeat, if any.

    There is no key where arguments are not what they should be, nor for offsets and tables on the CPU, whose values are
    checked.
    """
    facts = _repeat.facts
    qkv, cum_q, cum_kv, tables, out, sinks = tensors
    try:
        parts = tensors.parts()
        if not (parts[0].is_cuda and cum_q.is_cuda and cum_kv.is_cuda and (tables is None or tables.is_cuda)):
            return None, None
        key = (
            tuple(map(facts, parts)),
            # Where the value cache begins is counted in blocks.
            parts[2].data_ptr() - parts[1].data_ptr() if len(parts) == 3 and len(qkv) == 2 else None,
            facts(cum_q),
            facts(cum_kv),
            None if tables is None else facts(tables),
            None if out is None else facts(out),
            None if sinks is None else facts(sinks),
            options,
        )
        return key, _calls.get(key)
    except (AttributeError, TypeError, LookupError):  # no tensor, or no key: checks will say
        return None, None


def remember(key: Any, call: Call, tensors: Tensors, problem: Problem) -> None:
    """Keeps a call whose tensors were used as they came, if one with an equal key would be the same."""
    *_, options = key
    if _args.are_plain(*options[:_NUMBERS]):
        call.repeats(tensors.parts(), problem)
        _repeat.remember(_calls, key, call)


def serves(problem: Problem, request: _dispatch.Request, backend: str) -> bool:
    """Whether a problem can be given to the ``backend`` that was selected for its facts as it is."""
    if backend not in _plan.KERNEL_BACKENDS:
        return False
    return not _prepare.is_needed(problem) or _plan.reads_as_is(backend, request)


def compute(problem: Problem, backend: str, tables: Tables | None, max_q_len: int, max_kv_len: int) -> Call | None:
    """Computes a batch that :func:`serves` is true for, whose requests have at most so many rows and keys.

    Of a paged ``problem`` nothing is read but the caches and ``kv.indptr``, which counts tokens. Returns the call, None
    where it cannot be repeated.
    """
    q, device, logits, output = problem.q, problem.q.device, problem.logits, problem.output
    qo_indptr, kv_indptr = problem.qo_indptr, problem.kv.indptr
    assert qo_indptr is not None and kv_indptr is not None
    if q.size(0) == 0 or qo_indptr.numel() == 1:  # no rows, or none that a request has
        return None
    if max_q_len <= 0:
        raise ValueError(f"max_q_len={max_q_len} must be positive: there are {q.size(0)} query tokens.")
    if device.index != _kernels()._current_device():
        with torch.cuda.device(device):
            return compute(problem, backend, tables, max_q_len, max_kv_len)
    entries = None if tables is None else _rows(tables.entries.to(device, non_blocking=True))
    offsets = _on_device(qo_indptr, kv_indptr, device)
    call = _make(problem, backend, tables, entries, max_q_len, max_kv_len)
    k, v = _matrices(problem)
    call.run(q.data_ptr(), k.data_ptr(), v.data_ptr(), output.out, offsets, entries, logits.sinks, output.stats)
    as_given = offsets[0] is qo_indptr and offsets[1] is kv_indptr and (tables is None or entries is tables.entries)
    scaled = isinstance(logits.sm_scale, torch.Tensor) or isinstance(output.scale, torch.Tensor)
    biased = logits.alibi is not None and not _args.are_kept(logits.alibi)  # by slopes of this call alone
    return call if as_given and not scaled and not biased else None


def captured(name: str, x: Any, device: torch.device) -> Any:
    """An index tensor as a CUDA graph can read it that is being captured; what is no tensor is left to other checks.

    The graph copies from pinned memory at every replay. ValueError for pageable memory, which is free for other use by
    then.
    """
    if not isinstance(x, torch.Tensor) or not x.is_cpu:
        return x
    if not (x.is_pinned() and x.is_contiguous()):
        raise ValueError(
            f"{name} (shape {tuple(x.shape)}) lies in pageable CPU memory, from which a CUDA graph that is being "
            f"captured cannot copy: pass it on {device}, or contiguous in pinned memory that outlives the graph."
        )
    return x.to(device, non_blocking=True)


def _matrices(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    kv = problem.kv
    return (kv.k_cache, kv.v_cache) if isinstance(kv, PagedKv) else (kv.k, kv.v)


def _rows(entries: torch.Tensor) -> torch.Tensor:
    """Tables whose rows do not overlap, with their entries side by side."""
    apart = entries.stride(0) >= entries.size(-1) or entries.size(0) == 1
    return entries if entries.stride(-1) == 1 and apart else entries.contiguous()


def _on_device(
    qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both offsets on the device, by one copy where both are on the CPU."""
    if not (qo_indptr.is_cuda or kv_indptr.is_cuda):
        both = torch.cat([qo_indptr, kv_indptr]).to(device, non_blocking=True)
        return both[: qo_indptr.numel()], both[qo_indptr.numel() :]
    return qo_indptr.to(device, non_blocking=True), kv_indptr.to(device, non_blocking=True)


def _factor(scale: float | torch.Tensor, device: torch.device) -> tuple[float, torch.Tensor | None]:
    """A scale as the host knows it, and what only the device knows."""
    return (1.0, scale.to(device)) if isinstance(scale, torch.Tensor) else (scale, None)


def _make(
    problem: Problem,
    backend: str,
    tables: Tables | None,
    entries: torch.Tensor | None,
    max_q_len: int,
    max_kv_len: int,
) -> Call:
    """The compiled call, all but addresses."""
    kernels = _kernels()
    q, out, mask, logits = problem.q, problem.output.out, problem.mask, problem.logits
    k, v = _matrices(problem)
    assert problem.qo_indptr is not None
    batch = problem.qo_indptr.numel() - 1
    paged = isinstance(problem.kv, PagedKv)
    keys = min(batch * max_kv_len, k.size(0) * k.size(1), _MOST_KEYS) if paged else k.size(0)
    names = kernels._DTYPE_NAMES
    launch = kernels._C.FmhaV2(
        backend,
        names[q.dtype],
        names[out.dtype],
        batch,
        q.size(1),
        k.size(-2),
        q.size(2),
        v.size(-1),
        q.size(0),
        keys,
        max_q_len,
        max_kv_len,
        q.stride(0),
        q.stride(1),
        k.stride(-3),
        k.stride(-2),
        v.stride(-3),
        v.stride(-2),
        out.stride(0),
        out.stride(1),
    )
    if tables is not None:
        assert entries is not None
        width = entries.size(-1)
        row = max(entries.stride(0), width, 1)  # of a single row the stride may be anything
        v_entries = entries.stride(1) if entries.dim() == 3 else 0
        launch.set_pages(k.size(1), k.size(0), k.stride(0), v.stride(0), row, width, v_entries, tables.v_offset)
    sm_scale, logits_scale = _factor(logits.sm_scale, q.device)
    v_scale, output_scale = _factor(problem.output.scale, q.device)
    launch.set_options(
        mask.causal,
        mask.window_left,
        mask.chunk_size,
        sm_scale,
        logits.soft_cap,
        0 if logits.alibi is None else logits.alibi.data_ptr(),
        v_scale,
        0 if logits_scale is None else logits_scale.data_ptr(),
        0 if output_scale is None else output_scale.data_ptr(),
        problem.skip_softmax_factor,
    )
    return Call(launch, problem, backend == "fa3", (logits.alibi, logits_scale, output_scale))
