"""The fused prefill on kernels, which read indptrs and block tables on the device themselves.

Nothing is planned, and nothing copied but indptrs and tables that are on the CPU. Memory for the results of split keys,
and for a tile list where lengths differ so much that one pays, is that of the caching allocator.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from .._core import autograd, index_vectors, native
from .._core.problems import PagedKv, Problem
from . import half_precision, kernels, request_facts, selection


class Tables(NamedTuple):
    """Block tables as they were given: ``[batch, M]``, or ``[batch, 2, M]``, whose entries for values count blocks from
    the key cache on: the first of the value cache is number ``v_offset``."""

    entries: torch.Tensor
    v_offset: int


def needs_grad(qkv: Any, *others: Any) -> bool:
    """See ``autograd.needs_grad``."""
    if isinstance(qkv, (tuple, list)) and len(qkv) == 3:
        return autograd.needs_grad(*qkv, *others)
    q, k = qkv if isinstance(qkv, (tuple, list)) and len(qkv) == 2 else (qkv, qkv)
    return autograd.needs_grad(q, k, None, *others)


def serves(problem: Problem, request: request_facts.Request, backend: str) -> bool:
    """Whether a problem can be given to the ``backend`` that was selected for its facts as it is."""
    if backend not in selection.KERNEL_BACKENDS:
        return False
    return not half_precision.is_needed(problem) or kernels.reads_as_is(backend, request)


def compute(problem: Problem, backend: str, tables: Tables | None, max_q_len: int, max_kv_len: int) -> None:
    """Computes a batch that ``serves`` is true for, whose requests have at most so many rows and keys.

    Of a paged ``problem`` nothing is read but the caches and ``kv.indptr``, which counts tokens.
    """
    q, device = problem.q, problem.q.device
    qo_indptr, kv_indptr = problem.qo_indptr, problem.kv.indptr
    assert qo_indptr is not None and kv_indptr is not None
    if q.size(0) == 0 or qo_indptr.numel() == 1:  # no rows, or none that a request has
        return
    if max_q_len <= 0:
        raise ValueError(f"max_q_len={max_q_len} must be positive: there are {q.size(0)} query tokens.")
    entries = None if tables is None else _rows(tables.entries.to(device, non_blocking=True))
    qo_indptr, kv_indptr = _on_device(qo_indptr, kv_indptr, device)
    kv = dataclasses.replace(problem.kv, indptr=kv_indptr)
    problem = kernels.with_device_scales(dataclasses.replace(problem, qo_indptr=qo_indptr, kv=kv))
    v_offset = 0 if tables is None else tables.v_offset
    native._C.attend_fused(problem, backend, entries, v_offset, max_q_len, max_kv_len)


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


# --- page tables ---


def check_room(table: torch.Tensor, page_size: int, kv_indptr: torch.Tensor) -> None:
    """ValueError where a request is known to have more keys than its row of the table has room for."""
    if kv_indptr.is_cuda or kv_indptr.numel() < 2:
        return
    longest = int(index_vectors.lens(kv_indptr).max())
    if longest > table.size(-1) * page_size:
        raise ValueError(f"a request has {longest} keys, but block_tables only {table.size(-1)} columns.")


def paged(k: torch.Tensor, v: torch.Tensor, tables: Tables, kv_indptr: torch.Tensor) -> PagedKv:
    """The page table of a batch from its block tables, made on their device."""
    table, v_offset = tables
    separate, page_size = table.dim() == 3, k.size(1)
    kv_lens = index_vectors.lens(kv_indptr)
    if kv_lens.device != table.device:  # meet on the CUDA device: reading it back would synchronise
        device = kv_lens.device if kv_lens.is_cuda else table.device
        kv_lens, table = kv_lens.to(device), table.to(device)
    check_room(table, page_size, kv_indptr)
    pages = (kv_lens + page_size - 1).div(page_size, rounding_mode="floor").clamp(0, table.size(-1))
    last = torch.where(pages > 0, kv_lens - (pages - 1) * page_size, 0).clamp(max=page_size)
    indptr = index_vectors.starts(pages)
    indices = index_vectors.side_by_side(table[:, 0] if separate else table, pages)
    v_indices = index_vectors.side_by_side(table[:, 1] - v_offset, pages) if separate else None
    if not table.is_cuda:
        for what, cache, ids in (("keys", k, indices), ("values", v, v_indices)):
            if ids is not None:
                name = f"block_tables ({what}, counted from their own cache)" if separate else "block_tables"
                index_vectors.enough_pages(name, index_vectors.page_bound(name, ids[: int(indptr[-1])]), cache)
    return PagedKv(k, v, indptr.to(torch.int32), indices, last.to(torch.int32), v_indices)
