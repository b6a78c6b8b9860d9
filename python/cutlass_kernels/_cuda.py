"""The compiled kernels: what they serve, and the way from a :class:`Problem` to a launch.

Importing this module raises ImportError where the installation has no compiled extension. Tensors become addresses and
strides here; nothing below copies or synchronises.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from . import _C  # type: ignore[attr-defined]
from ._dispatch import Request
from ._problem import Offsets, PagedKv, Problem

_SERVED = frozenset({"causal", "window", "chunk", "soft_cap", "sinks", "paged"})
_DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
_WHY = {
    "custom_mask": "custom_mask",
    "multi_item": "multi-item scoring (prefix_len_ptr)",
    "alibi": "pos_encoding_mode='ALIBI'",
    "rope": "pos_encoding_mode='ROPE_LLAMA'",
    "stats": "save_softmax_stats",
    "head_scale": "per-head scales",
    "tensor_scale": "a scale given as a tensor",
    "unaligned": "addresses or strides that are no multiple of 16 bytes",
}


@functools.cache
def kernels() -> list[dict[str, Any]]:
    """The compiled kernels, in the order of instances.cmake."""
    return list(_C.list_kernels())


def reasons(backend: str, request: Request) -> list[str]:
    """Why no compiled kernel of ``backend`` serves ``request``; empty if one does."""
    built = {kernel["backend"] for kernel in kernels()}
    if backend not in built:
        return [
            f"backend={backend!r} has no kernels in this build (it has {', '.join(sorted(built)) or 'none'}): "
            "use backend='auto'."
        ]
    found = [
        f"{_WHY.get(feature, feature)} has no {backend} kernel in this version: backend='reference' computes it."
        for feature in sorted(request.features - _SERVED)
    ]
    types = (request.q_dtype, request.kv_dtype, request.o_dtype)
    for dtype in dict.fromkeys(types):
        if dtype not in _DTYPE_NAMES:
            found.append(f"dtype {dtype} has no {backend} kernel: use float16 or bfloat16, or backend='reference'.")
    if all(dtype in _DTYPE_NAMES for dtype in types):
        found += _C.not_supported_reasons(
            backend,
            *(_DTYPE_NAMES[dtype] for dtype in types),
            request.num_qo_heads,
            request.num_kv_heads,
            request.head_dim_qk,
            request.head_dim_vo,
            "soft_cap" in request.features,
            "sinks" in request.features,
            "paged" in request.features,
            request.compute_capability or 0,
            *(request.layout or ()),
        )
    return found


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
_captured: list[
    torch.Tensor
] = []  # 8 bytes a captured call, kept: their graph may outlive every other reference to them
_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, a stream for every thread


def _counters(device: torch.device, stream: int) -> torch.Tensor:
    """The counters with which the blocks of an fa3 kernel share out the tiles of a single request, both 0.

    A kernel leaves them at 0, so calls that follow one another share a pair: one per device and stream. A graph may be
    replayed on any stream, beside others captured on the same: it gets a pair of its own, cleared by every replay.
    """
    if torch.cuda.is_current_stream_capturing():
        _captured.append(torch.zeros(2, dtype=torch.int32, device=device))
        return _captured[-1]
    key = (device.index, stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0)
    counters = _counters_of.get(key)
    if counters is None:
        counters = _counters_of.setdefault(key, torch.zeros(2, dtype=torch.int32, device=device))
    return counters


class Schedule:
    """The work list of a planned batch, and the counters with which the blocks of a running kernel share out its tiles.

    Runs must follow one another, as on one stream they do.

    Where the host does not know the number of rows (offsets on the device), the list is made by the first run, which
    knows it from q; a captured run makes its own.
    """

    def __init__(self, backend: str, request: Request, offsets: Offsets, workspace: torch.Tensor) -> None:
        self.backend = backend
        self.request = request
        self.offsets = offsets  # kept alive: the device reads them after this returns
        self.workspace = workspace
        self._plan: Any = None
        if offsets.total_q:
            self._plan = self._make(offsets.total_q)

    def plan(self, rows: int) -> Any:
        """The compiled plan for q of ``rows`` rows."""
        if self.offsets.total_q is None and torch.cuda.is_current_stream_capturing():
            return self._make(rows)  # not kept: the list exists only once the graph has run
        if self._plan is None:
            self._plan = self._make(rows)
        return self._plan

    def _make(self, total_q: int) -> Any:
        request, offsets = self.request, self.offsets
        plan = _C.Plan(
            self.backend,
            *(_DTYPE_NAMES[dtype] for dtype in (request.q_dtype, request.kv_dtype, request.o_dtype)),
            request.num_qo_heads,
            request.num_kv_heads,
            request.head_dim_qk,
            request.head_dim_vo,
            offsets.qo_indptr.numel() - 1,
            offsets.qo_indptr.data_ptr(),
            offsets.kv_indptr.data_ptr(),
            total_q,
            0 if offsets.qo_indptr_host is None else offsets.qo_indptr_host.data_ptr(),
            offsets.total_kv,
        )
        if (pages := offsets.pages) is not None:
            plan.set_pages(
                pages.indices.data_ptr(),
                0 if pages.v_indices is None else pages.v_indices.data_ptr(),
                pages.last_page_len.data_ptr(),
                pages.page_size,
                pages.indices.numel(),
            )
        needed = plan.schedule_bytes
        if needed > self.workspace.nbytes:
            raise RuntimeError(
                f"int_workspace_buffer has {self.workspace.nbytes} bytes, but the work list of this batch takes "
                f"{needed}: pass a larger one to reset_workspace_buffer()."
            )
        device, mask = self.workspace.device, offsets.mask
        with torch.cuda.device(device):
            plan.make_schedule(
                self.workspace.data_ptr(),
                self.workspace.nbytes,
                _stream(device),
                mask.causal,
                mask.window_left,
                mask.chunk_size,
            )
        return plan


if hasattr(torch._C, "_cuda_getCurrentRawStream"):  # makes no Stream object, which takes longer than our launch

    def _stream(device: torch.device) -> int:
        index = torch.cuda.current_device() if device.index is None else device.index
        return int(torch._C._cuda_getCurrentRawStream(index))

else:

    def _stream(device: torch.device) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)


def compute(problem: Problem, backend: str, schedule: Schedule | None = None) -> None:
    """Enqueues the kernel that computes ``problem`` on the current stream of its device."""
    q, kv, out = problem.q, problem.kv, problem.output.out
    mask, logits, lse = problem.mask, problem.logits, problem.output.lse
    rows = q.size(0)
    if rows == 0:
        return None
    device = q.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return compute(problem, backend, schedule)
    sinks = logits.sinks
    if isinstance(kv, PagedKv):
        k, v = kv.k_cache, kv.v_cache
        (k_page, k_token, k_head, _), (v_page, v_token, v_head, _) = k.stride(), v.stride()
        num_pages, total_kv = k.size(0), 0
    else:
        k, v = kv.k, kv.v
        (k_token, k_head, _), (v_token, v_head, _) = k.stride(), v.stride()
        k_page = v_page = num_pages = 0
        total_kv = k.size(0)
    stream = _stream(device)
    counters = None
    if problem.qo_indptr is None:
        plan = _single(backend, q.dtype, k.dtype, out.dtype, (q.size(1), k.size(-2)), (q.size(2), v.size(-1)))
        if backend == "fa3":
            counters = _counters(device, stream)
    else:
        assert schedule is not None
        plan = schedule.plan(rows)
    plan.run(
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
        logits.sm_scale,
        logits.soft_cap,
        0 if sinks is None else sinks.data_ptr(),
        problem.output.scale,
        0 if counters is None else counters.data_ptr(),
        stream,
    )
    return None
