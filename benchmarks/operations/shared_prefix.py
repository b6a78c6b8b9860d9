"""`shared_prefix`: decoding requests that share the first keys of their caches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import api
import torch
from backend import ALL, Backend, Operation, Workload, module, needs_cuda, needs_module
from inputs import Inputs, make_inputs
from lengths import tokens
from problem import OfProblem, Problem
from timing import Timed


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


def _split(case: SharedPrefix, x: Inputs) -> tuple[list[torch.Tensor], ...]:
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


def _repeated(case: SharedPrefix, x: Inputs) -> torch.Tensor:
    """Page numbers with those of the first request's prefix in every request."""
    assert x.pages is not None
    indices, count = x.pages.indices.clone(), case.prefix // case.problem.page_size
    for begin in x.pages.indptr.tolist()[:-1]:
        indices[begin : begin + count] = indices[:count]
    return indices


def _planned(wrapper: Any, case: SharedPrefix, x: Inputs, indices: torch.Tensor) -> Any:
    """The decode wrapper, planned for these pages."""
    p, pages, dtype = case.problem, x.pages, getattr(torch, case.problem.dtype)
    assert pages is not None
    sizes = (p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.page_size)
    wrapper.plan(pages.indptr, indices, pages.last_page_len, *sizes, q_data_type=dtype, kv_data_type=dtype)
    return wrapper


# --- who attends -------------------------------------------------------------------------------------------------


def _levels(library: Any, case: SharedPrefix, x: Inputs) -> Timed:
    """The cascade: the prefix once for all requests, the rest of each, and the merge of both."""
    p, dtype = case.problem, getattr(torch, case.problem.dtype)
    assert x.pages is not None
    wrapper = library.MultiLevelCascadeAttentionWrapper(2, api.workspace(x.q.device), "NHD")
    sizes = (p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.page_size)
    wrapper.plan(*_split(case, x), *sizes, causal=False, q_data_type=dtype)
    return Timed(functools.partial(wrapper.run, x.q, x.pages.cache))


def _shared(library: Any, case: SharedPrefix, x: Inputs) -> Timed:
    """The wrapper for one shared prefix, which lies outside the pages."""
    p, dtype = case.problem, getattr(torch, case.problem.dtype)
    assert x.pages is not None
    _, offsets, indices, last = _split(case, x)
    wrapper = library.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(api.workspace(x.q.device), "NHD")
    sizes = (p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.page_size)
    wrapper.begin_forward(offsets[1], indices[1], last[1], *sizes, data_type=dtype)
    shared = (x.k[: case.prefix].contiguous(), x.v[: case.prefix].contiguous())
    return Timed(functools.partial(wrapper.forward, x.q, *shared, x.pages.cache))


def _plain(library: Any, case: SharedPrefix, x: Inputs, repeats: bool) -> Timed:
    """Decode that knows of no prefix: the same pages in every request, or copies of them."""
    assert x.pages is not None
    indices = _repeated(case, x) if repeats else x.pages.indices
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(api.workspace(x.q.device), "NHD")
    return Timed(functools.partial(_planned(wrapper, case, x, indices).run, x.q, x.pages.cache))


def ours(library: Any) -> list[Backend]:
    refuses = functools.partial(api.refused, library, "auto")
    return [
        Backend(name, True, ALL, needs_cuda, functools.partial(make, library), refuses)
        for name, make in (
            ("levels", _levels),
            ("shared", _shared),
            ("plain", functools.partial(_plain, repeats=True)),
            ("copies", functools.partial(_plain, repeats=False)),
        )
    ]


def _inputs(case: SharedPrefix, device: torch.device) -> Inputs:
    inputs = make_inputs(case.problem, device)
    share(case, inputs)
    return inputs


def shared_prefix(dtype: str) -> list[SharedPrefix]:
    """A token per request over a prefix that all share and 128 keys of their own, in pages of 16."""
    cases: list[SharedPrefix] = []
    for prefix, batch in ((8192, 64), (2048, 64), (32768, 16), (8192, 256)):
        keys = (prefix + 128,) * batch
        column = f"{tokens(prefix)} shared by {batch}"
        case = Problem("32/8 hd128", column, (1,) * batch, keys, 32, 8, 128, 128, dtype=dtype, page_size=16)
        cases.append(SharedPrefix(case, prefix))
    return cases


OPERATION = Operation(
    "decode over a shared prefix: in levels, by the wrapper for one prefix, and without knowing of it",
    ("us",),
    ours,
    [
        Backend(
            "flashinfer",
            False,
            ALL,
            needs_module("flashinfer"),
            lambda case, x: _levels(module("flashinfer"), case, x),
        )
    ],
    {"shared-prefix": Workload("2k to 32k keys shared by 16 to 256 decoding requests", shared_prefix)},
    "shared-prefix",
    ("levels", "shared", "plain", "copies", "flashinfer"),
    _inputs,
)
