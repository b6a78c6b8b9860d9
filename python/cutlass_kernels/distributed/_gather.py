"""Gathers the keys that a rank's rows see, then attends to them in one call (Llama 3's context parallelism).

Heads are gathered in groups: while the keys of one group are on their way, attention computes the groups before.
Nothing has to be merged, so sinks, LSEs and rounding are those of one GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import attention
from ._peers import Peers
from ._plans import Gather
from ._rows import Indices
from ._transport import open_transport


class Shard(NamedTuple):
    """What a rank of a column has: its rows and keys, ``[rows, heads, dim]``, and the options of ``attention()``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    return_lse: bool
    o_dtype: torch.dtype
    sinks: torch.Tensor | None
    scales: dict[str, Any]  # q_descale, k_descale, v_descale
    options: dict[str, Any]  # the others


class State(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor | None


def attend(shard: Shard, gather: Gather, peers: Peers | None, head_groups: int) -> State:
    """Attention of a rank's rows. ``head_groups``: how many groups of key heads are gathered one after another."""
    q, k, v = shard.q, shard.k, shard.v
    num_kv_heads = k.size(1)
    if peers is None or peers.world == 1:
        head_groups = 1
    bounds = _bounds(num_kv_heads, head_groups)
    # A slice takes the host 3 to 8 us, also of everything.
    groups = [(k, v)] if len(bounds) == 1 else [(k[:, a:b], v[:, a:b]) for a, b in bounds]
    keys = open_transport(groups, gather, peers)
    out = q.new_empty(*q.shape[:2], v.size(2), dtype=shard.o_dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if shard.return_lse else None
    group = q.size(1) // num_kv_heads
    try:
        for i, (a, b) in enumerate(bounds):
            k_here, v_here = keys.arrived(i)
            if q.size(0) == 0:
                continue
            if len(bounds) == 1:
                _call(shard, gather, k_here, v_here, out, lse)
                continue
            heads = slice(a * group, b * group)
            here = with_heads(shard, heads, slice(a, b))._replace(q=q[:, heads])
            _call(here, gather, k_here, v_here, out[:, heads], None if lse is None else lse[:, heads])
    finally:
        keys.close()
    return State(out, lse)


def _bounds(heads: int, count: int) -> list[tuple[int, int]]:
    """Of ``count`` groups. The first one is the smallest: nothing hides its transfer."""
    count = min(count, heads)
    first = max(heads // (2 * count), 1) if count > 1 else heads
    rest = [first + (heads - first) * i // (count - 1) for i in range(count)] if count > 1 else [heads]
    return list(zip([0, *rest], rest, strict=False))


def _call(
    shard: Shard, gather: Gather, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """One call, or more where windows differ: those of a mask that reaches behind the last row of a segment."""
    plan = gather.plan
    cu_seqlens_q, begins, counts, used = gather.vectors(k.device)
    for i, call in enumerate(plan.calls):
        result = attention(
            shard.q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=begins,
            seqused_q=used[i] if len(plan.calls) > 1 else None,
            seqused_k=counts,
            max_seqlen_q=max(call.rows),
            max_seqlen_k=max(plan.key_counts),
            causal=shard.causal,
            window=(call.mask.left, -1 if shard.causal else call.mask.right),
            chunk_size=call.mask.chunk_size,
            sinks=shard.sinks,
            out=out,
            return_lse=shard.return_lse,
            **scales_of_segments(shard, gather.indices, 0, gather.requests),
            **shard.options,
        )
        if lse is None:
            continue
        if len(plan.calls) == 1:
            lse.copy_(result[1])
        else:
            is_here = (gather.call_of_rows(k.device) == i)[:, None]
            lse.copy_(torch.where(is_here, result[1], lse))


def with_heads(shard: Shard, q_heads: slice, kv_heads: slice) -> Shard:
    """Sinks and scales of these heads."""
    scales = {}
    for name, scale in shard.scales.items():
        if isinstance(scale, torch.Tensor) and scale.numel() > 1:
            # q_descale has an entry for each query head, or as the others for each key head
            of_queries = name == "q_descale" and scale.size(-1) == shard.q.size(1)
            scale = scale[..., q_heads if of_queries else kv_heads]
        scales[name] = scale
    return shard._replace(sinks=None if shard.sinks is None else shard.sinks[q_heads], scales=scales)


def scales_of_segments(shard: Shard, indices: Indices, rank: int, requests: list[int]) -> dict[str, Any]:
    """Scales with a row for each query segment, where they have one for each request. ``rank``: whose segments."""
    return {
        name: scale[indices.get(("requests", rank), scale.device, lambda: [requests])[0]]
        if isinstance(scale, torch.Tensor) and scale.dim() == 2 and scale.size(0) > 1
        else scale
        for name, scale in shard.scales.items()
    }
