"""Checks of index vectors: lengths, offsets of requests, page numbers.

Values on a CUDA device are never read back, so nothing here synchronises.
"""

from __future__ import annotations

from typing import Any

import torch

from . import native
from .tracing import is_traced

INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)


def index_vector(name: str, tensor: Any, length: int | None = None, per: str = "request") -> torch.Tensor:
    """A 1-D integer tensor as int32, contiguous, on its own device; ValueError for another rank or dtype, or where it
    has not ``length`` elements, one per request (or what ``per`` says)."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}, not a tensor: pass a 1-D int32 tensor.")
    if tensor.dim() != 1 or tensor.dtype not in INTEGERS:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: it must be a 1-D int32 tensor."
        )
    if length is not None and tensor.size(0) != length:
        raise ValueError(f"{name} has {tensor.size(0)} elements, but this batch needs {length}: one per {per}.")
    if tensor.dtype == torch.int32 and tensor.is_contiguous():
        return tensor
    # The values of a traced tensor are not known.
    if tensor.dtype in (torch.int64, torch.uint32) and not tensor.is_cuda and not is_traced() and tensor.numel():
        for extreme in map(int, torch.aminmax(tensor.to(torch.int64))):
            if not INT32_MIN <= extreme <= INT32_MAX:
                raise ValueError(f"{name} holds {extreme}, which does not fit into int32: split the batch.")
    return tensor.to(torch.int32).contiguous()


def saturated(x: torch.Tensor) -> torch.Tensor:
    """``x`` as int32; what does not fit becomes the nearest number that does."""
    return x if x.dtype == torch.int32 else x.to(torch.int64).clamp(INT32_MIN, INT32_MAX).to(torch.int32)


def indptr(
    name: str, tensor: Any, batch: int | None = None, *, from_zero: bool = False, told_by: str = "qo_indptr"
) -> torch.Tensor:
    """Offsets ``[batch + 1]`` as int32 on their own device. ``told_by`` is the argument that tells ``batch``.

    ValueError for another rank, dtype or length; RuntimeError where a CPU tensor is negative or decreases, or with
    ``from_zero`` does not start at 0. (Offsets of keys may be a slice of those of a larger batch.)
    """
    offsets = index_vector(name, tensor)
    if batch is not None and offsets.size(0) != batch + 1:
        raise ValueError(
            f"{name} has {offsets.size(0)} elements, but this batch needs {batch + 1}: the start of each request and "
            f"the end of the last, so batch_size + 1, and {told_by} says batch_size={batch}."
        )
    if offsets.size(0) == 0:
        raise ValueError(f"{name} is empty: it needs batch_size + 1 elements, starting with 0.")
    quick = native._C is not None and offsets.is_cpu and type(offsets) is torch.Tensor
    if quick and native._C.ascend(offsets.data_ptr(), offsets.numel()) and not (from_zero and int(offsets[0])):
        return offsets
    if not offsets.is_cuda:
        first = int(offsets[0])
        if first < 0 or (from_zero and first != 0):
            raise RuntimeError(
                f"{name} starts at {first}: offsets start at 0. For lengths, pass 0 and then their cumulative sum."
            )
        steps = offsets[1:] < offsets[:-1]
        if bool(steps.any()):
            at = int(steps.nonzero()[0])
            raise RuntimeError(
                f"{name} decreases from {int(offsets[at])} to {int(offsets[at + 1])} at request {at}: "
                "offsets must not decrease."
            )
    return offsets


def lens(offsets: torch.Tensor) -> torch.Tensor:
    """Lengths (int64) of the requests that ``offsets`` delimits."""
    wide = offsets.to(torch.int64)
    return wide[1:] - wide[:-1]


def paged_kv_lens(offsets: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Keys (int64) of every request of a page table; a request without pages has none.

    CPU tensors are checked: RuntimeError where a request with pages has ``last_page_len`` outside [1, page_size].
    """
    pages = lens(offsets)
    last = last_page_len.to(device=pages.device, dtype=torch.int64)
    if not pages.is_cuda and not last_page_len.is_cuda:
        wrong = (pages > 0) & ((last < 1) | (last > page_size))
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise RuntimeError(
                f"paged_kv_last_page_len[{at}]={int(last[at])} is not in [1, page_size={page_size}], "
                f"although request {at} has {int(pages[at])} pages."
            )
    return torch.where(pages > 0, (pages - 1) * page_size + last, 0)


def page_bound(name: str, ids: torch.Tensor) -> int:
    """How many pages a cache needs for all of these page numbers to exist. ValueError where one is negative.

    0 for numbers on a CUDA device, which are not read.
    """
    if ids.is_cuda or ids.numel() == 0:
        return 0
    lowest, highest = (int(x) for x in torch.aminmax(ids))
    if lowest < 0:
        raise ValueError(f"{name} holds the page number {lowest}: page numbers start at 0.")
    return highest + 1


def enough_pages(name: str, bound: int, cache: torch.Tensor) -> None:
    """ValueError where ``cache`` ``[pages, ...]`` has fewer pages than ``bound``, which ``page_bound`` found."""
    if bound > cache.size(0):
        raise ValueError(
            f"{name} holds the page number {bound - 1}, but the cache has only {cache.size(0)} pages, numbered from 0."
        )


def enough_entries(indptr: torch.Tensor, indices: torch.Tensor) -> None:
    """ValueError where ``kv_indptr``, on the CPU, ends behind ``kv_indices``."""
    if int(indptr[-1]) > indices.numel():
        raise ValueError(f"kv_indptr ends at {int(indptr[-1])}, but kv_indices has {indices.numel()} pages.")


def enough_room(name: str, lens: torch.Tensor, pages: torch.Tensor, page_size: int) -> None:
    """ValueError where so many keys, on the CPU, have no room in their pages."""
    wrong = (lens > pages * page_size) | (lens < 0)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name}[{at}]={int(lens[at])}, but the {int(pages[at])} pages of request {at} have room for "
            f"{int(pages[at]) * page_size} tokens: lengths lie between 0 and that."
        )


def offsets(lens: torch.Tensor) -> torch.Tensor:
    """Where requests of these lengths start, int32 ``[batch + 1]``."""
    return starts(lens).to(torch.int32)


def side_by_side(rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """The first ``lens[i]`` numbers (int32) of each row ``[n, width]``, one row after the other. The result has as many
    elements as ``rows``: 0 behind the last. ``lens`` are int64."""
    column, unused = torch.arange(rows.size(1), device=rows.device), rows.numel()
    place = torch.where(column < lens[:, None], starts(lens)[:-1, None] + column, unused)
    result = torch.zeros(unused + 1, dtype=torch.int32, device=rows.device)
    return result.scatter_(0, place.reshape(-1), rows.reshape(-1))[:unused]


def starts(sizes: torch.Tensor) -> torch.Tensor:
    """Where segments of these sizes start, and the end of the last one: int64."""
    result = torch.zeros(sizes.numel() + 1, dtype=torch.int64, device=sizes.device)
    torch.cumsum(sizes, 0, out=result[1:])
    return result
