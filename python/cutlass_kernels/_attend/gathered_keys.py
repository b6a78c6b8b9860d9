"""Rows, keys and values of each request of an ``attention()`` that PyTorch computes, from lengths on the host."""

from __future__ import annotations

from typing import Any

import torch

from .._caches import latent_formats
from .._compute import reference
from .._core.call_table import Call
from .._masks import mask_packing
from . import latent_parts, quantized_caches


def requests(call: Call, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor | None) -> Any:
    """First row, number of rows, keys and values of every request.

    ValueError where lengths, offsets or page numbers make no sense. On a CUDA device such a request has no rows, since
    kernels cannot say it either.
    """
    batch = call.q.size(0) if call.q.dim() == 4 else 1
    each = rows.size(0) // max(batch, 1)
    begins = [b * each for b in range(batch + 1)]
    if call.cu_seqlens_q is not None:
        begins = call.cu_seqlens_q.tolist()
        batch = len(begins) - 1
    used_q = None if call.seqused_q is None else call.seqused_q.tolist()
    keys_of = _KeysOf(call, k, v, k_rope, batch)
    found: list[tuple[int, _Place | None]] = []
    for b in range(batch):  # all of them, before results of the first are written
        try:
            count = _rows_of(b, begins[b], begins[b + 1], rows, used_q)
            found.append((count, keys_of.place(b) if count else None))
        except ValueError:
            if not rows.is_cuda:
                raise
            found.append((0, None))
    return ((begins[b], count, *keys_of.read(b, place)) for b, (count, place) in enumerate(found))


def _rows_of(b: int, begin: int, end: int, q: torch.Tensor, used: list[int] | None) -> int:
    if not 0 <= begin <= end <= q.size(0):
        raise ValueError(
            f"cu_seqlens_q goes from {begin} to {end} at request {b}, but q has {q.size(0)} rows: offsets start at 0, "
            "do not decrease, and end at the rows of q at most."
        )
    if used is not None and (used[b] < 0 or (used[b] > end - begin and not q.is_cuda)):  # kernels use what there is
        raise ValueError(
            f"seqused_q[{b}]={used[b]}, but request {b} has {end - begin} rows: it lies between 0 and that."
        )
    return end - begin if used is None else min(end - begin, used[b])


_Place = tuple[torch.Tensor | None, int, int]  # pages of a request; without, its first row of k; number of keys


class _KeysOf:
    """Keys and values of a request, ``[tokens, heads, dim]``."""

    def __init__(self, call: Call, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor | None, batch: int) -> None:
        self.k, self.v, self.k_rope, self.batch = k, v, k_rope, batch
        self.kind, self.dim = quantized_caches.kind_of(call), latent_parts.head_dim(call.q, call.q_rope)
        self.used = None if call.seqused_k is None else call.seqused_k.tolist()
        if self.used is not None and call.kv_shard is not None:
            self.used = [mask_packing.keys_held(call.kv_shard, n) if n >= 0 else n for n in self.used]
        self.begins = None if call.cu_seqlens_k is None else call.cu_seqlens_k.tolist()
        self.table = None if call.page_table is None else call.page_table.to(torch.int64)
        self.indptr = None if call.kv_indptr is None else call.kv_indptr.tolist()
        self.indices = None if call.kv_indices is None else call.kv_indices.to(torch.int64)
        self.last = None if call.kv_last_page_len is None else call.kv_last_page_len.tolist()

    def read(self, b: int, place: _Place | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What lies at ``place``; nothing, where that is None."""
        if self.kind is not None:
            found = [self._part(x, b, place) for x in latent_formats.parts(self.k, self.kind)]
            keys = latent_formats.decoded(found, self.kind)
            return keys[..., : self.dim], keys[..., : latent_formats.VALUES]
        k, v, rope = (None if x is None else self._part(x, b, place) for x in (self.k, self.v, self.k_rope))
        assert k is not None and v is not None
        return (k if rope is None else latent_parts.joined(k, rope)), v

    def _part(self, x: torch.Tensor, b: int, place: _Place | None) -> torch.Tensor:
        if place is None:
            return x.flatten(0, -3)[:0]
        pages, begin, length = place
        if pages is not None:
            return reference.gather(x, pages).flatten(0, 1)[:length]
        return (x[b] if x.dim() == 4 else x)[begin : begin + length]

    def place(self, b: int) -> _Place:
        """Where the keys of a request lie; ValueError where that makes no sense."""
        used = None if self.used is None else self.used[b]
        if self.table is not None:
            return self._of_pages(b, self.table[b], self._length(b) if used is None else used)
        if self.indptr is not None and self.indices is not None:
            return self._of_pages(b, *self._pages(b, used))
        begin, length, room = 0, self.k.size(-3), self.k.size(-3)
        if self.begins is not None:
            begin, length = self.begins[b], self._length(b)
        length = length if used is None else used
        if begin < 0 or length < 0 or begin + length > room:
            raise ValueError(
                f"request {b} has {length} keys from row {begin} on, but k has {room} rows for it: cu_seqlens_k and "
                "seqused_k must lie within k, and offsets not decrease."
            )
        return None, begin, length

    def _length(self, b: int) -> int:
        assert self.begins is not None
        return int(self.begins[b + 1] - self.begins[b])

    def _pages(self, b: int, used: int | None) -> tuple[torch.Tensor, int]:
        """The pages that ``kv_indptr`` gives a request, and its number of keys."""
        assert self.indptr is not None and self.indices is not None
        begin, end, page_size = self.indptr[b], self.indptr[b + 1], self.k.size(1)
        if not 0 <= begin <= end <= self.indices.numel():
            raise ValueError(
                f"kv_indptr goes from {begin} to {end} at request {b}, but kv_indices has {self.indices.numel()} "
                "pages: offsets do not decrease, and lie within it."
            )
        if used is None and begin < end:
            assert self.last is not None
            if not 1 <= self.last[b] <= page_size:
                raise ValueError(
                    f"kv_last_page_len[{b}]={self.last[b]}, but a page holds {page_size} tokens: it lies between 1 and "
                    "that."
                )
            used = (end - begin - 1) * page_size + self.last[b]
        return self.indices[begin:end], used or 0

    def _of_pages(self, b: int, pages: torch.Tensor, length: int) -> _Place:
        page_size = self.k.size(1)
        if not 0 <= length <= pages.numel() * page_size:
            raise ValueError(
                f"request {b} has {length} keys, but its {pages.numel()} pages have room for "
                f"{pages.numel() * page_size}: lengths lie between 0 and that."
            )
        mine = pages[: (length + page_size - 1) // page_size]
        if not mine.is_cuda:  # there, such pages are zeros, as for kernels
            wrong = mine[(mine < 0) | (mine >= self.k.size(0))]
            if wrong.numel():
                raise ValueError(
                    f"request {b} has the page number {int(wrong[0])}, but the cache has only {self.k.size(0)} pages, "
                    "numbered from 0."
                )
        return mine, 0, length
