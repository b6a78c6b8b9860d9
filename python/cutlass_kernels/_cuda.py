"""The compiled kernels: what they serve, and the way from a :class:`Problem` to a launch.

Importing this module raises ImportError where the installation has no compiled extension. Tensors become addresses and
strides here; nothing below synchronises or copies more than a few scales.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from . import _C, _prepare  # type: ignore[attr-defined]
from ._args import FP8_DTYPES, are_kept
from ._dispatch import Request
from ._problem import Offsets, PagedKv, Problem
from ._streams import PER_THREAD_STREAM
from ._streams import current_device as _current_device
from ._streams import stream_of as _stream_of

# What this module passes on, if the registry says that a kernel has it.
_SERVED = frozenset(
    {
        "causal",
        "window",
        "chunk",
        "custom_mask",
        "multi_item",
        "soft_cap",
        "alibi",
        "sinks",
        "paged",
        "short_queries",
        "stats",
        "head_scale",
        "tensor_scale",
    }
)
_DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
_WHY = {
    "unaligned": "addresses or strides that are no multiple of 16 bytes (8 in fp8)",
    "unsized": "multi-item scoring (prefix_len_ptr) without lengths on the CPU (offsets, or seq_lens and seq_lens_q), "
    "or under CUDA graphs without mask buffers,",
}


@functools.cache
def kernels() -> list[dict[str, Any]]:
    """The compiled kernels, in the order of instances.cmake."""
    return list(_C.list_kernels())


def reasons(backend: str, request: Request) -> list[str]:
    """Why no compiled kernel of ``backend`` serves ``request``; empty if one does."""
    if reads_as_is(backend, request):
        return []
    built = {kernel["backend"] for kernel in kernels()}
    if backend not in built:
        return [
            f"backend={backend!r} has no kernels in this build (it has {', '.join(sorted(built)) or 'none'}): "
            "use backend='auto'."
        ]
    found, prepared = [], _prepare.prepared_request(request)
    if prepared is not None:
        if prepared.o_dtype in FP8_DTYPES:
            found.append(
                f"o_dtype={request.o_dtype} is not written by {backend} for q_dtype={request.q_dtype}: use float16 or "
                "bfloat16, or backend='reference'."
            )
            prepared = dataclasses.replace(prepared, o_dtype=prepared.q_dtype)
        request = prepared
    found += [
        f"{_WHY.get(feature, feature)} has no {backend} kernel in this version: backend='reference' computes it."
        for feature in sorted(request.features - _SERVED)
    ]
    types = (request.q_dtype, request.kv_dtype, request.o_dtype)
    for dtype in dict.fromkeys(types):
        if dtype not in _DTYPE_NAMES:
            found.append(f"dtype {dtype} has no {backend} kernel: use float16 or bfloat16, or backend='reference'.")
    if all(dtype in _DTYPE_NAMES for dtype in types):
        found += _registry_reasons(backend, request)
    return found


def _registry_reasons(backend: str, request: Request) -> list[str]:
    """What the registry has against a request as it is, without copies."""
    features = request.features
    return list(
        _C.not_supported_reasons(
            backend,
            *(_DTYPE_NAMES[dtype] for dtype in (request.q_dtype, request.kv_dtype, request.o_dtype)),
            request.num_qo_heads,
            request.num_kv_heads,
            request.head_dim_qk,
            request.head_dim_vo,
            "soft_cap" in features,
            "sinks" in features,
            "paged" in features,
            not features.isdisjoint(("custom_mask", "multi_item")),
            "alibi" in features,
            not features.isdisjoint(("head_scale", "tensor_scale")),
            "stats" in features,
            request.compute_capability or 0,
            *(request.layout or ()),
        )
    )


def reads_as_is(backend: str, request: Request) -> bool:
    """Whether a kernel of ``backend`` is to read the fp8 tensors of ``request`` themselves, not copies."""
    return request.kv_dtype in FP8_DTYPES and _reads_fp8(backend, request)


@functools.lru_cache(maxsize=4096)
def _reads_fp8(backend: str, request: Request) -> bool:
    if not request.features <= _SERVED or request.o_dtype not in _DTYPE_NAMES:
        return False
    if request.q_dtype in FP8_DTYPES:
        fits = request.q_dtype == request.kv_dtype
    else:
        fits = "short_queries" in request.features and request.o_dtype == request.q_dtype
    return fits and not _registry_reasons(backend, request)


@functools.lru_cache(maxsize=256)
def _single(
    backend: str,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    o_dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
) -> Any:
    """The plan of one request, which depends on nothing but types and sizes."""
    names = (_DTYPE_NAMES[q_dtype], _DTYPE_NAMES[kv_dtype], _DTYPE_NAMES[o_dtype])
    return _C.Plan(backend, *names, *heads, *dims, 1, 0, 0, 0)


_counters_of: dict[tuple[int | None, int, int], torch.Tensor] = {}
_SHORT_ROWS, _LONG_KEYS = 4096, 128


def _counters(device: torch.device, stream: int) -> torch.Tensor:
    """The counters, all 0, with which the blocks of a kernel share out the tiles of a single request, or find out which
    of those that share a tile's keys is the last.

    A kernel leaves them at 0, so calls that follow one another share them: one set per device and stream. A graph may
    be replayed on any stream, beside others captured on the same. So a captured call gets a set in the memory pool of
    its graph, which lives as long as the graph, and every replay clears it. Hold the tensor until the call is enqueued,
    no longer: then later calls of the graph use its memory again, and a graph that dies gives it back.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(_C.call_counters, dtype=torch.int32, device=device)
    key = (device.index, stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0)
    counters = _counters_of.get(key)
    if counters is None:
        own = torch.zeros(_C.call_counters, dtype=torch.int32, device=device)
        counters = _counters_of.setdefault(key, own)
    return counters


@functools.cache
def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


def counters_of(index: int, stream: int) -> torch.Tensor:
    """:func:`_counters` of a device and a stream by their numbers."""
    return _counters(_device(index), stream)


Copies = Sequence[tuple[int, int, int]]  # of int32 vectors on the device: to and from an address, how many elements


class Schedule:
    """The tile list of a planned batch, and the counters with which the blocks of a running kernel share out its tiles.

    Runs must follow one another, as on one stream they do.

    Where the host does not know the number of rows (offsets on the device), the list is made by the first run, which
    knows it from q; a captured run makes its own. The constructor then refuses what has no room for a single row.

    ``copies`` to the vectors of ``offsets`` are made first: all of them, or none where the constructor raises.
    """

    def __init__(
        self, backend: str, request: Request, offsets: Offsets, workspace: torch.Tensor, copies: Copies = ()
    ) -> None:
        self.backend = backend
        self.request = request
        self.offsets = offsets  # kept alive: the device reads them after this returns
        self.workspace = workspace
        self.general = offsets.general
        self.as_is = reads_as_is(backend, request)  # fp8 tensors
        self.partials = offsets.partials
        self._plan: Any = None
        if offsets.total_q:
            self._plan = self._make(offsets.total_q, copies)
            return
        # Of a fixed size, the splits of a row are known, and more rows need more. Else long queries may need none.
        if offsets.total_q is None and offsets.split.fixed_size:
            self._check_room(*_sizes_of(backend, request, offsets, 1), "at least ")
        if copies:
            _copy(copies, workspace.device)

    def plan(self, rows: int) -> Any:
        """The compiled plan for q of ``rows`` rows."""
        if self.offsets.total_q is None and torch.cuda.is_current_stream_capturing():
            return self._make(rows)  # not kept: the list exists only once the graph has run
        if self._plan is None:
            self._plan = self._make(rows)
        return self._plan

    def _make(self, total_q: int, copies: Copies = ()) -> Any:
        device = self.workspace.device
        if device.index != _current_device():
            with torch.cuda.device(device):
                return self._make(total_q, copies)
        plan, list_bytes, partial_bytes = _plan_of(
            self.backend,
            self.request,
            self.offsets,
            total_q,
            self.workspace.data_ptr(),
            self.workspace.nbytes,
            _MOST_BYTES if self.partials is None else self.partials.nbytes,
            copies,
            _stream(device),
        )
        self._check_room(list_bytes, partial_bytes)
        if self.partials is None:
            self.partials = torch.empty(partial_bytes, dtype=torch.uint8, device=device)
        return plan

    def _check_room(self, list_bytes: int, partial_bytes: int, bound: str = "") -> None:
        """RuntimeError where the workspaces have no room for these."""
        if list_bytes > self.workspace.nbytes:
            raise RuntimeError(
                f"int_workspace_buffer has {self.workspace.nbytes} bytes, but the tile list of this batch needs "
                f"{bound}{list_bytes}: pass a larger one to reset_workspace_buffer()."
            )
        if self.partials is not None and partial_bytes > self.partials.nbytes:
            fixed = "a larger fixed_split_size or " if self.offsets.split.fixed_size else ""
            raise RuntimeError(
                f"float_workspace_buffer has {self.partials.nbytes} bytes, but the results of split keys need "
                f"{bound}{partial_bytes}: pass a larger one to reset_workspace_buffer(), or plan with "
                f"{fixed}disable_split_kv=True."
            )


_MOST_BYTES = (1 << 63) - 1


def _plan_of(
    backend: str,
    request: Request,
    offsets: Offsets,
    total_q: int,
    workspace: int = 0,
    workspace_bytes: int = 0,
    partial_room: int = 0,
    copies: Copies = (),
    stream: int = 0,
) -> tuple[Any, int, int]:
    """A compiled plan, and the bytes that its tile list and the results of split keys take. The list is made where
    there is room for both, after ``copies``."""
    if not reads_as_is(backend, request):
        request = _prepare.prepared_request(request) or request
    qo, pages, split, mask = offsets.qo_indptr, offsets.pages, offsets.split, offsets.mask
    indices = v_indices = last_page_len = page_size = entries = 0
    if pages is not None:
        indices, entries = pages.indices.data_ptr(), pages.indices.numel()
        v_indices = 0 if pages.v_indices is None else pages.v_indices.data_ptr()
        last_page_len, page_size = pages.last_page_len.data_ptr(), pages.page_size
    planned: tuple[Any, int, int] = _C.Plan.of_batch(
        backend,
        _DTYPE_NAMES[request.q_dtype],
        _DTYPE_NAMES[request.kv_dtype],
        _DTYPE_NAMES[request.o_dtype],
        request.num_qo_heads,
        request.num_kv_heads,
        request.head_dim_qk,
        request.head_dim_vo,
        qo.numel() - 1,
        qo.data_ptr(),
        offsets.kv_indptr.data_ptr(),
        total_q,
        offsets.qo_indptr_host,
        offsets.total_kv,
        offsets.general,
        indices,
        v_indices,
        last_page_len,
        page_size,
        entries,
        split.fixed_size,
        split.disabled,
        split.max_kv_len,
        mask.causal,
        mask.window_left,
        mask.chunk_size,
        workspace,
        workspace_bytes,
        partial_room,
        copies,
        stream,
    )
    return planned


def _copy(copies: Copies, device: torch.device) -> None:
    if device.index != _current_device():
        with torch.cuda.device(device):
            _copy(copies, device)
    else:
        _C.copy_vectors(copies, _stream(device))


def workspace_size(backend: str, request: Request, offsets: Offsets) -> tuple[int, int]:
    """Bytes that the results of split keys and the tile list take; 0 where the number of rows is not known."""
    if not offsets.total_q:
        return 0, 0
    list_bytes, partial_bytes = _sizes_of(backend, request, offsets, offsets.total_q)
    return partial_bytes, list_bytes


def _sizes_of(backend: str, request: Request, offsets: Offsets, rows: int) -> tuple[int, int]:
    """Bytes that the tile list and the results of split keys take, of so many rows."""
    with torch.cuda.device(offsets.qo_indptr.device):
        _, list_bytes, partial_bytes = _plan_of(backend, request, offsets, rows)
    return list_bytes, partial_bytes


def upload(address: int, size: int, tensor: torch.Tensor) -> bool:
    """Copies bytes of pageable host memory to ``tensor`` on the current stream; they may change at once. False where
    another device is current, or a graph captured, which would read them when it is replayed."""
    device = tensor.device
    if device.index != _current_device() or torch.cuda.is_current_stream_capturing():
        return False
    _C.upload(address, size, tensor.data_ptr(), _stream(device))
    return True


def _stream(device: torch.device) -> int:
    return _stream_of(torch.cuda.current_device() if device.index is None else device.index)


class Call:
    """A kernel call that can be made again with tensors of the same kind at other addresses, multiples of 16 bytes."""

    __slots__ = ("_counted", "_device", "_index", "_keep", "_launch", "_partial_bytes", "_partials")

    def __init__(
        self, launch: Any, device: torch.device, counted: bool, partials: torch.Tensor | None, own: bool, keep: Any
    ) -> None:
        self._launch = launch
        self._device = device
        self._index: int = device.index
        self._counted = counted
        self._partial_bytes = 0 if partials is None else partials.nbytes
        self._partials = None if own else partials  # None: allocated by every call
        self._keep = keep  # what the launch holds addresses of

    def model(self) -> Call:
        """The call, for nothing but :meth:`resumed`: without the memory of its batch."""
        return Call(self._launch, self._device, self._counted, None, True, (None, None, self._keep[2], None))

    def resumed(self, schedule: Schedule, rows: int) -> Call:
        """The call with another batch of as many rows, for the same backend, ``general`` and ``as_is`` alike."""
        _, _, alibi, _ = self._keep
        launch = schedule.plan(rows).resume(self._launch)
        return Call(launch, self._device, self._counted, schedule.partials, False, (None, None, alibi, schedule))

    def is_possible(self, outside_graphs: bool) -> bool:
        """Whether the current device is the tensors', and with ``outside_graphs`` no CUDA graph is being captured."""
        return _current_device() == self._index and not (outside_graphs and torch.cuda.is_current_stream_capturing())

    def direct(self, out_is_like_q: bool, v_offset: int) -> tuple[Any, ...] | None:
        """What the compiled module needs to make the call by itself; None where it is not enough."""
        if self._counted or (self._partials is None and self._partial_bytes):
            return None
        return self._launch, self._partials, self._partial_bytes, self._index, out_is_like_q, v_offset

    def again(self, q: int, k: int, v: int, out: int, lse: int, sinks: int) -> None:
        """Makes the call on the current stream."""
        partials, stream = self._partials, _stream_of(self._index)
        if partials is None and self._partial_bytes:
            partials = torch.empty(self._partial_bytes, dtype=torch.uint8, device=self._device)
        counters = _counters(self._device, stream) if self._counted else None
        self._launch(
            q,
            k,
            v,
            out,
            lse,
            sinks,
            0 if counters is None else counters.data_ptr(),
            stream,
            0 if partials is None else partials.data_ptr(),
            self._partial_bytes,
        )


def _on_device(scale: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, int]:
    """A scale as kernels read it, and its stride from head to head."""
    scale = scale.to(device=device, dtype=torch.float32).contiguous()
    return scale, int(scale.numel() > 1)


def compute(problem: Problem, backend: str, schedule: Schedule | None = None) -> Call | None:
    """Enqueues the kernel that computes ``problem`` on the current stream of its device.

    A schedule must be for this backend, ``general`` where the problem is (``_plan.is_general``), ``as_is`` where fp8
    keys and values are to be read so, and of keys that are not split where statistics are wanted. Returns the call,
    None where it cannot be repeated as it depends on copies or on more addresses than a :class:`Call` takes.
    """
    q, kv, out = problem.q, problem.kv, problem.output.out
    wanted = out
    mask, logits, lse, stats = problem.mask, problem.logits, problem.output.lse, problem.output.stats
    rows = q.size(0)
    if rows == 0:
        return None
    device = q.device
    if device.index != _current_device():
        with torch.cuda.device(device):
            return compute(problem, backend, schedule)
    stream = _stream(device)
    prepared = _prepare.is_needed(problem)
    keys = problem.kv.k_cache if isinstance(problem.kv, PagedKv) else problem.kv.k
    if prepared and keys.dtype in FP8_DTYPES:
        as_is = reads_as_is(backend, Request.from_problem(problem)) if schedule is None else schedule.as_is
        prepared = not as_is
    if prepared:
        offsets = None if schedule is None else schedule.offsets
        problem = _prepare.prepare(problem, offsets, _C, stream)
        q, kv, out = problem.q, problem.kv, problem.output.out
    sinks, bits, bits_indptr, alibi = logits.sinks, mask.bits, mask.bits_indptr, logits.alibi
    sm_scale, logits_scale, v_scale, output_scale = logits.sm_scale, logits.head_scale, problem.output.scale, None
    logits_stride = output_stride = 0
    if isinstance(sm_scale, torch.Tensor):
        logits_scale = sm_scale if logits_scale is None else sm_scale * logits_scale
        sm_scale = 1.0
    if logits_scale is not None:
        logits_scale, logits_stride = _on_device(logits_scale, device)
    if isinstance(v_scale, torch.Tensor):
        output_scale, output_stride = _on_device(v_scale, device)
        v_scale = 1.0
    if isinstance(kv, PagedKv):
        k, v = kv.k_cache, kv.v_cache
        (k_page, k_token, k_head, _), (v_page, v_token, v_head, _) = k.stride(), v.stride()
        num_pages, total_kv = max(k.size(0), v.size(0)), 0  # equal, but for copies, whose tables are known to be right
    else:
        k, v = kv.k, kv.v
        (k_token, k_head, _), (v_token, v_head, _) = k.stride(), v.stride()
        k_page = v_page = num_pages = 0
        total_kv = k.size(0)
    counters = partials = None
    if problem.qo_indptr is None:
        bits_indptr = None  # the bits begin at the first
        plan = _single(backend, q.dtype, k.dtype, out.dtype, (q.size(1), k.size(-2)), (q.size(2), v.size(-1)))
        if stats is not None:
            plan = plan.with_stats(stats.data_ptr())
        # The keys of a few rows are split where that pays: smaller problems need not ask.
        needed = plan.scratch_bytes(rows, total_kv) if rows <= _SHORT_ROWS and total_kv >= _LONG_KEYS else 0
        if backend == "fa3" or needed:
            counters = _counters(device, stream)
        if bits is not None:  # and for what the mask leaves to each tile: 16 bytes
            needed += max(16 * rows, 1 << 16)
        if needed:
            partials = torch.empty(needed, dtype=torch.uint8, device=device)
    else:
        assert schedule is not None
        plan = schedule.plan(rows)
        partials = schedule.partials
        if prepared and isinstance(kv, PagedKv):
            assert kv.v_indices is not None
            plan = plan.with_tables(kv.indices.data_ptr(), kv.v_indices.data_ptr())
        if stats is not None:
            plan = plan.with_stats(stats.data_ptr())
    launch = plan.run(
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        k.data_ptr(),
        k_token,
        k_head,
        k_page,
        v.data_ptr(),
        v_token,
        v_head,
        v_page,
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        0 if lse is None else lse.data_ptr(),
        0 if lse is None else lse.stride(0),
        0 if lse is None else lse.stride(1),
        rows,
        total_kv,
        num_pages,
        mask.causal,
        mask.window_left,
        mask.chunk_size,
        0 if bits is None else bits.data_ptr(),
        0 if bits_indptr is None else bits_indptr.data_ptr(),
        0 if bits is None else (bits.numel() + 3) // 4,
        sm_scale,
        logits.soft_cap,
        0 if alibi is None else alibi.data_ptr(),
        logits.alibi_relative,
        logits.alibi_after_cap,
        0 if sinks is None else sinks.data_ptr(),
        v_scale,
        0 if logits_scale is None else logits_scale.data_ptr(),
        logits_stride,
        0 if output_scale is None else output_scale.data_ptr(),
        output_stride,
        problem.skip_softmax_factor,
        0 if counters is None else counters.data_ptr(),
        stream,
        0 if partials is None else partials.data_ptr(),
        0 if partials is None else partials.nbytes,
    )
    if out is not wanted:
        _prepare.round_output(out, wanted, _C, stream)
    aligned = not (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) % 16
    if prepared or logits_scale is not None or output_scale is not None or stats is not None or not aligned:
        return None
    if alibi is not None and not are_kept(alibi):
        return None
    return Call(launch, device, counters is not None, partials, schedule is None, (bits, bits_indptr, alibi, schedule))
