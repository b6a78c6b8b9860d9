"""The tensors of a problem: queries, keys and values, contiguous and in pages, and what indexes them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from problem import Problem, random_mask

BEYOND_L2 = 256 << 20  # bytes


@dataclass
class Pages:
    """Keys and values in pages ``[pages, 2, page_size, heads, dim]``, or in a tuple of two; indices on the CPU.

    Of latent attention the cache is ``[pages, page_size, dim]``: values are the first columns of the keys.
    """

    cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    @functools.cached_property
    def copies(self) -> list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
        """The cache, and as many copies of it as no L2 cache holds together with it: for calls that take turns."""
        parts = self.cache if isinstance(self.cache, tuple) else (self.cache,)
        count = max(1, BEYOND_L2 // max(sum(x.nbytes for x in parts), 1))
        return [self.cache, *(_clone(self.cache) for _ in range(min(count, 64) - 1))]


@dataclass
class Inputs:
    """The tensors of a case: q ``[tokens, heads, dim]``, k and v alike; offsets on the CPU and on the device."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    sinks: torch.Tensor | None = None
    pages: Pages | None = None  # of the same k and v
    mask: torch.Tensor | None = None  # bool [rows, keys]
    qo_indptr_device: torch.Tensor = field(init=False)
    kv_indptr_device: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.qo_indptr_device = self.qo_indptr.to(self.q.device)
        self.kv_indptr_device = self.kv_indptr.to(self.q.device)

    def indices(self, on_device: bool) -> tuple[torch.Tensor, ...]:
        """The index tensors that plan() begins with."""
        pages = self.pages
        of_keys = (self.kv_indptr,) if pages is None else (pages.indptr, pages.indices, pages.last_page_len)
        return tuple(x.to(self.q.device) if on_device else x for x in (self.qo_indptr, *of_keys))

    @property
    def run_arguments(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v) if self.pages is None else (self.q, self.pages.cache)


def _clone(cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return cache.clone() if isinstance(cache, torch.Tensor) else (cache[0].clone(), cache[1].clone())


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return torch.tensor(total, dtype=torch.int32)


def make_inputs(case: Problem, device: torch.device, seed: int = 0) -> Inputs:
    """N(0, 1) in every element: on equal values a GPU draws less power, and so runs faster."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    rows, keys = sum(case.qo_lens), sum(case.kv_lens)
    q = randn(rows, case.num_qo_heads, case.head_dim_qk)
    k = randn(keys, case.num_kv_heads, case.head_dim_qk)
    v = randn(keys, case.num_kv_heads, case.head_dim_vo)
    sinks = None
    if case.sinks:
        sinks = torch.randn(case.num_qo_heads, generator=generator, device=device, dtype=torch.float32)
    pages = make_pages(case, k, v, seed) if case.page_size else None
    mask = None
    if case.custom_mask == "random":
        mask = random_mask(case.qo_lens[0], case.kv_lens[0]).to(device)
    elif case.custom_mask == "causal":
        mask = torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
    return Inputs(q, k, v, offsets(case.qo_lens), offsets(case.kv_lens), sinks, pages, mask)


def make_pages(case: Problem, k: torch.Tensor, v: torch.Tensor, seed: int = 0) -> Pages:
    """``k`` and ``v`` in pages that lie in random order; what is left of last pages is 0."""
    places = _places(case, k.device, seed)
    size, pages, dtype = case.page_size, places.indices.numel(), k.dtype
    page, slot = places.page, places.slot
    k, v = _storable(k), _storable(v)
    if k.shape[1:] == v.shape[1:]:
        stacked = k.new_zeros(pages, 2, size, *k.shape[1:])
        stacked[page, 0, slot], stacked[page, 1, slot] = k, v
        return Pages(stacked.view(dtype), *places.of_requests)
    keys, values = k.new_zeros(pages, size, *k.shape[1:]), v.new_zeros(pages, size, *v.shape[1:])
    keys[page, slot], values[page, slot] = k, v
    return Pages((keys.view(dtype), values.view(dtype)), *places.of_requests)


def make_latent_pages(case: Problem, k: torch.Tensor, seed: int = 0) -> Pages:
    """The same of keys ``[tokens, 1, dim]`` whose first columns are the values."""
    places = _places(case, k.device, seed)
    latent = _storable(k).squeeze(1)
    cache = latent.new_zeros(places.indices.numel(), case.page_size, latent.size(1))
    cache[places.page, places.slot] = latent
    return Pages(cache.view(k.dtype), *places.of_requests)


@dataclass
class _Places:
    """Which pages a request has, on the CPU; and the page and slot of every token, on the device."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    page: torch.Tensor
    slot: torch.Tensor

    @property
    def of_requests(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last_page_len


def _places(case: Problem, device: torch.device, seed: int) -> _Places:
    size, lengths = case.page_size, torch.tensor(case.kv_lens)
    counts = tuple(-(-length // size) for length in case.kv_lens)
    indptr = offsets(counts)
    indices = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).int()
    last = torch.tensor([length - size * max(count - 1, 0) for length, count in zip(case.kv_lens, counts)]).int()
    starts = offsets(case.kv_lens)
    token = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(lengths)  # of its request
    entry = indptr[:-1].repeat_interleave(lengths) + token // size
    return _Places(indptr, indices, last, indices[entry].long().to(device), (token % size).to(device))


def _storable(x: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: not every torch release indexes fp8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
