"""Ring attention (Liu et al., 2023): keys go round, a rank merges what each of the others contributes.

Needs no room for the keys of the whole problem, but for those of two ranks. Under a causal mask a rank sees of
another's keys those that stand before its own segment, so a step is one call without a mask; the step of its own keys
is causal.
"""

from __future__ import annotations

import bisect
import math
from itertools import accumulate
from typing import Any

import torch

from .. import attention, merge_state_in_place
from ._gather import Shard, State, scales_of_segments
from ._peers import Message, Peers, exchange, wait
from ._plans import Plan
from ._transport import views_of


def attend(shard: Shard, plan: Plan, peers: Peers) -> State:
    """Attention of a rank's rows."""
    q, k, v = shard.q, shard.k, shard.v
    most = max(row.rows for row in plan.kv_grid_rows)
    width = k.size(1) * (k.size(2) + v.size(2))
    here, coming = (k.new_empty(most, width) for _ in range(2))
    for room, own in zip(views_of(here[: k.size(0)], k, v), (k, v), strict=True):
        room.copy_(own)
    out = torch.zeros(*q.shape[:2], v.size(2), dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    after, before = (peers.rank + 1) % peers.world, (peers.rank - 1) % peers.world
    for step in range(peers.world):
        works: list[Any] = []
        if step + 1 < peers.world:
            works = exchange(peers, [Message(after, here)], [Message(before, coming)])
        owner = (peers.rank - step) % peers.world
        _add(shard, plan, peers.rank, owner, here, out, lse)
        wait(works)
        here, coming = coming, here
    if shard.sinks is not None:
        log2_sinks = shard.sinks.float() * math.log2(math.e)
        total = torch.logaddexp2(lse, log2_sinks[None, :].expand_as(lse))
        out *= torch.exp2(lse - total)[..., None]
        lse = total
    if shard.options["lse_base"] != 2:
        lse *= math.log(2)
    return State(out.to(shard.o_dtype), lse if shard.return_lse else None)


def _add(
    shard: Shard, plan: Plan, rank: int, owner: int, buffer: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merges what the keys of ``owner`` contribute."""
    q, k, v = shard.q, shard.k, shard.v
    if (rank, owner) not in plan.ring_keys:
        plan.ring_keys[rank, owner] = _seen(plan, rank, owner, shard.causal)
    counts, begins = plan.ring_keys[rank, owner]
    rows = [s.stop - s.start for s in plan.queries[rank]]
    if q.size(0) == 0 or not any(counts):
        return
    cu_seqlens_q, cu_seqlens_k, seqused_k = plan.indices.get(
        ("ring", rank, owner),
        q.device,
        lambda: [[0, *accumulate(rows)], [*begins, buffer.size(0)], counts],
    )
    keys, values = views_of(buffer, k, v)
    state = attention(
        q,
        keys,
        values,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        max_seqlen_q=max(rows),  # those of segments that see no key count too: what they get is merged
        max_seqlen_k=max(counts),
        causal=shard.causal and owner == rank,
        o_dtype=shard.o_dtype,
        return_lse=True,
        **scales_of_segments(shard, plan.indices, rank, [q.request for q in plan.queries[rank]]),
        **(shard.options | {"lse_base": 2}),
    )
    assert isinstance(state, tuple)
    merge_state_in_place(out, lse, state[0].float(), state[1])


def _seen(plan: Plan, rank: int, owner: int, causal: bool) -> tuple[list[int], list[int]]:
    """How many keys of the owner each query segment sees, the first ones of its request, and where these begin."""
    # Of each request, its first row, where its segments end, and how many keys stand before that. Both ascend.
    of_request: dict[int, tuple[int, list[int], list[int]]] = {}
    row = 0
    for request, start, stop in plan.kv_grid_rows[owner].segments:
        _, stops, keys = of_request.setdefault(request, (row, [], [0]))
        stops.append(stop)
        keys.append(keys[-1] + stop - start)
        row += stop - start
    counts, begins = [], []
    for request, _, stop in plan.queries[rank]:
        begin, stops, keys = of_request.get(request, (0, [], [0]))
        counts.append(keys[bisect.bisect_right(stops, stop)] if causal else keys[-1])
        begins.append(begin)
    return counts, begins
