"""Decoding requests that share the first keys of their caches: a case of it, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from cases import OfProblem

if TYPE_CHECKING:
    from shapes import Inputs


@dataclass(frozen=True)
class SharedPrefix(OfProblem):
    """A token per request; the first ``prefix`` keys of every request are the same."""

    prefix: int

    @property
    def detail(self) -> str:
        return f"{self.prefix} keys shared, {self.problem.detail}"

    @property
    def bytes(self) -> float:
        """With the shared keys counted once."""
        p = self.problem
        again = (len(p.qo_lens) - 1) * self.prefix * p.num_kv_heads * (p.head_dim_qk + p.head_dim_vo)
        return p.bytes - again * getattr(torch, p.dtype).itemsize


def share(case: SharedPrefix, x: Inputs) -> None:
    """Makes the prefixes of all requests those of the first, in the tensors and in their pages."""
    assert x.pages is not None
    size, pages, cache = case.problem.page_size, x.pages, x.pages.cache
    assert isinstance(cache, torch.Tensor)
    for tensor in (x.k, x.v):
        for begin in x.kv_indptr.tolist()[1:-1]:
            tensor[begin : begin + case.prefix] = tensor[: case.prefix]
    first = pages.indices[: case.prefix // size].long()
    for begin in pages.indptr.tolist()[1:-1]:
        own = pages.indices[begin : begin + case.prefix // size].long()
        cache[own] = cache[first]


def levels(case: SharedPrefix, x: Inputs) -> tuple[list[torch.Tensor], ...]:
    """Of prefix and rest: offsets of queries and of pages, page numbers, lengths of last pages; on the CPU."""
    assert x.pages is not None
    pages, count, batch = x.pages, case.prefix // case.problem.page_size, len(case.problem.qo_lens)
    rest = torch.cat([x.pages.indices[b + count : e] for b, e in zip(pages.indptr[:-1], pages.indptr[1:])])
    shared = (
        torch.tensor([0, batch]),
        torch.tensor([0, count]),
        pages.indices[:count],
        torch.tensor([case.problem.page_size]),
    )
    own = (x.qo_indptr, pages.indptr - count * torch.arange(batch + 1), rest, pages.last_page_len)
    return tuple([a.int(), b.int()] for a, b in zip(shared, own))


def repeated(case: SharedPrefix, x: Inputs) -> torch.Tensor:
    """Page numbers with those of the first request's prefix in every request."""
    assert x.pages is not None
    indices, count = x.pages.indices.clone(), case.prefix // case.problem.page_size
    for begin in x.pages.indptr.tolist()[:-1]:
        indices[begin : begin + count] = indices[:count]
    return indices


def planned(wrapper: Any, case: SharedPrefix, x: Inputs, indices: torch.Tensor) -> Any:
    """The decode wrapper, planned for these pages."""
    p, pages, dtype = case.problem, x.pages, getattr(torch, case.problem.dtype)
    assert pages is not None
    sizes = (p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.page_size)
    wrapper.plan(pages.indptr, indices, pages.last_page_len, *sizes, q_data_type=dtype, kv_data_type=dtype)
    return wrapper
