"""Rows, keys and values of each request of an ``attention()`` that PyTorch computes, from lengths on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import _kv_shard, _latent, _reference

if TYPE_CHECKING:
    from ._plan_free import Call


def requests(call: Call, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor | None) -> Any:
    """First row, number of rows, keys and values of every request; none of those whose lengths make no sense."""
    batch = call.q.size(0) if call.q.dim() == 4 else 1
    each = rows.size(0) // max(batch, 1)
    begins = [b * each for b in range(batch + 1)]
    if call.cu_seqlens_q is not None:
        begins = call.cu_seqlens_q.tolist()
        batch = len(begins) - 1
    used_q = None if call.seqused_q is None else call.seqused_q.tolist()
    keys_of = _KeysOf(call, k, v, k_rope, batch)
    for b in range(batch):
        count = begins[b + 1] - begins[b]
        if used_q is not None:
            count = min(count, used_q[b])
        found = keys_of(b)
        if found is None or begins[b] < 0 or count < 0 or begins[b] + count > rows.size(0):
            found, count = keys_of.none(), 0
        yield begins[b], count, *found


class _KeysOf:
    """Keys and values of a request, ``[tokens, heads, dim]``; None where its lengths make no sense."""

    def __init__(self, call: Call, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor | None, batch: int) -> None:
        self.k, self.v, self.k_rope, self.batch = k, v, k_rope, batch
        self.used = None if call.seqused_k is None else call.seqused_k.tolist()
        if self.used is not None and call.kv_shard is not None:
            self.used = [_kv_shard.keys_held(call.kv_shard, n) if n >= 0 else n for n in self.used]
        self.begins = None if call.cu_seqlens_k is None else call.cu_seqlens_k.tolist()
        self.table = None if call.page_table is None else call.page_table.to(torch.int64)
        self.indptr = None if call.kv_indptr is None else call.kv_indptr.tolist()
        self.indices = None if call.kv_indices is None else call.kv_indices.to(torch.int64)
        self.last = None if call.kv_last_page_len is None else call.kv_last_page_len.tolist()

    def __call__(self, b: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        found = self._parts(b)
        return None if found is None else self._joined(*found)

    def none(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (self.k, self.v, self.k_rope)
        return self._joined(*(None if x is None else x.flatten(0, -3)[:0] for x in parts))

    def _joined(self, k: Any, v: Any, rope: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return (k if rope is None else _latent.joined(k, rope)), v

    def _parts(self, b: int) -> tuple[torch.Tensor | None, ...] | None:
        used = None if self.used is None else self.used[b]
        if self.table is not None:
            return self._of_pages(self.table[b], self._length(b) if used is None else used)
        if self.indptr is not None and self.indices is not None:
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]]
            if used is None and self.last is not None:
                used = (pages.numel() - 1) * self.k.size(1) + self.last[b] if pages.numel() else 0
            return self._of_pages(pages, used)
        k = self.k
        parts: tuple[Any, ...] = (k, self.v, self.k_rope)
        if k.dim() == 4:
            parts, begin, length = tuple(None if x is None else x[b] for x in parts), 0, k.size(1)
        else:
            begin = 0 if self.begins is None else self.begins[b]
            length = k.size(0) if self.begins is None else self._length(b)
        length = length if used is None else used
        if begin < 0 or length < 0 or begin + length > parts[0].size(0):
            return None
        return tuple(None if x is None else x[begin : begin + length] for x in parts)

    def _length(self, b: int) -> int:
        assert self.begins is not None
        return int(self.begins[b + 1] - self.begins[b])

    def _of_pages(self, pages: torch.Tensor, length: int | None) -> tuple[torch.Tensor | None, ...] | None:
        page_size = self.k.size(1)
        if length is None or not 0 <= length <= pages.numel() * page_size:
            return None
        mine = pages[: (length + page_size - 1) // page_size]
        parts = (self.k, self.v, self.k_rope)
        return tuple(None if x is None else _reference.gather(x, mine).flatten(0, 1)[:length] for x in parts)
