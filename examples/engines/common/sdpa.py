"""Attention of paged caches by torch's ``scaled_dot_product_attention``, which knows no pages: they are gathered.

It stands for a machine that has PyTorch alone. The copies make it slow, most of all in decode steps, where a CUDA graph
needs shapes that do not depend on lengths: each request gathers as many keys as it may ever have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class Kept:
    """The last result of a function of a tensor: every layer of a step passes the same one."""

    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        self.compute, self.tensor, self.result = compute, torch.empty(0), None

    def __call__(self, tensor: Tensor) -> Any:
        if tensor is not self.tensor:
            self.tensor, self.result = tensor, self.compute(tensor)
        return self.result


def prefill(
    q: Tensor,
    rows: list[int],
    keys_of: Callable[[int], tuple[Tensor, Tensor]],
    scale: float | None,
    causal: bool = True,
) -> Tensor:
    """Causal attention, aligned to the last key, one request after the other.

    q ``[rows, heads, dim]``; ``rows``: indptr; ``keys_of(i)``: request i's keys and values ``[length, heads, dim]``.
    """
    from torch.nn.attention.bias import causal_lower_right

    out = torch.empty_like(q)
    for i, (begin, end) in enumerate(itertools.pairwise(rows)):
        if begin == end:
            continue
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q[begin:end], *keys_of(i)))
        mask: Any = causal_lower_right(query.size(2), key.size(2)) if causal else None
        seen = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
        out[begin:end] = seen[0].transpose(0, 1)
    return out


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, scale: float | None) -> Tensor:
    """One row per request.

    q ``[B, heads, dim]``, caches ``[pages, P, kv heads, dim]``, table ``[B, M]``, lengths ``[B]``.

    Shapes depend on shapes alone, so that a CUDA graph can hold it. Table entries behind a request's pages may be -1.
    """
    requests, room = q.size(0), table.size(1) * k_cache.size(1)
    pages = table.clamp(min=0).flatten()
    keys, values = (x.index_select(0, pages).view(requests, room, *x.shape[2:]) for x in (k_cache, v_cache))
    seen = torch.arange(room, device=q.device) < lengths.clamp(min=1)[:, None]  # [B, room]
    query = q.view(requests, keys.size(2), -1, q.size(2))  # the query heads of a key head are its rows
    mask = seen[:, None, None, :].expand(requests, 1, query.size(2), room)
    out = F.scaled_dot_product_attention(query, keys.transpose(1, 2), values.transpose(1, 2), mask, scale=scale)
    return out.reshape(q.shape)
