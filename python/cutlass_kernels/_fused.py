"""The fused prefill on kernels, which read indptrs and block tables on the device themselves.

Nothing is planned, and nothing copied but indptrs and tables that are on the CPU. Memory for the results of split keys,
and for a tile list where lengths differ so much that one pays, is that of the caching allocator.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from . import _autograd, _dispatch, _plan, _prepare
from ._problem import Problem


class Tables(NamedTuple):
    """Block tables as they were given: ``[batch, M]``, or ``[batch, 2, M]``, whose entries for values count blocks from
    the key cache on: the first of the value cache is number ``v_offset``."""

    entries: torch.Tensor
    v_offset: int


def needs_grad(qkv: Any, *others: Any) -> bool:
    """See ``_autograd.needs_grad``."""
    if isinstance(qkv, (tuple, list)) and len(qkv) == 3:
        return _autograd.needs_grad(*qkv, *others)
    q, k = qkv if isinstance(qkv, (tuple, list)) and len(qkv) == 2 else (qkv, qkv)
    return _autograd.needs_grad(q, k, None, *others)


def serves(problem: Problem, request: _dispatch.Request, backend: str) -> bool:
    """Whether a problem can be given to the ``backend`` that was selected for its facts as it is."""
    if backend not in _plan.KERNEL_BACKENDS:
        return False
    return not _prepare.is_needed(problem) or _plan.reads_as_is(backend, request)


def compute(problem: Problem, backend: str, tables: Tables | None, max_q_len: int, max_kv_len: int) -> None:
    """Computes a batch that :func:`serves` is true for, whose requests have at most so many rows and keys.

    Of a paged ``problem`` nothing is read but the caches and ``kv.indptr``, which counts tokens.
    """
    q, device = problem.q, problem.q.device
    qo_indptr, kv_indptr = problem.qo_indptr, problem.kv.indptr
    assert qo_indptr is not None and kv_indptr is not None
    if q.size(0) == 0 or qo_indptr.numel() == 1:  # no rows, or none that a request has
        return
    if max_q_len <= 0:
        raise ValueError(f"max_q_len={max_q_len} must be positive: there are {q.size(0)} query tokens.")
    kernels = _dispatch._kernels()
    entries = None if tables is None else _rows(tables.entries.to(device, non_blocking=True))
    qo_indptr, kv_indptr = _on_device(qo_indptr, kv_indptr, device)
    kv = dataclasses.replace(problem.kv, indptr=kv_indptr)
    problem = kernels.with_device_scales(dataclasses.replace(problem, qo_indptr=qo_indptr, kv=kv))
    v_offset = 0 if tables is None else tables.v_offset
    kernels._C.attend_fused(problem, backend, entries, v_offset, max_q_len, max_kv_len)


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
