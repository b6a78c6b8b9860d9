"""What a rank of a prefill computes and receives: counted from layout and mask, without planning the call."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from . import _gather_plan, _shards
from ._gather_plan import Mask
from ._plans import GridRow, Kind
from ._rows import MOST_COPIES
from ._shards import Segment, Segments


class Work(NamedTuple):
    """Of one rank. Its row of ranks, where heads are exchanged for tokens, counts as one."""

    rows: int
    pairs: int  # (row, key) pairs that the mask shows
    planned_pairs: int  # as ``Gather.pairs`` has them
    own_keys: int
    pulled: int  # keys of other ranks,
    pulled_near: int  # and of those of this node
    copies: int  # of keys that it pulls, or messages


def visible(mask: Mask, start: int, stop: int, kv_len: int) -> int:
    """Pairs of the rows at positions ``[start, stop)``: bounds are linear between the positions where one begins."""
    cuts = {start, stop, mask.left, kv_len - mask.right}
    if mask.chunk_size > 0:
        for begin in range(start // mask.chunk_size * mask.chunk_size, stop, mask.chunk_size):
            cuts |= {begin, begin + mask.left, begin + mask.chunk_size - mask.right}
    inside = sorted(c for c in cuts if start <= c <= stop)
    total = 0
    for a, b in itertools.pairwise(inside):
        ends = [hi - lo for lo, hi in (mask.keys_of(p, p + 1, kv_len) for p in (a, b - 1))]
        total += (b - a) * sum(ends) // 2
    return total


@functools.lru_cache(256)
def slowest(kind: Kind, per_node: int) -> Work:
    """Of the rank that computes most. Ranks wait for each other, so that the others do not count; ``pulled`` and
    ``own_keys`` are the most of any rank."""
    works = of_ranks(kind, per_node)
    return max(works, key=lambda w: w.pairs)._replace(
        rows=max(w.rows for w in works),
        planned_pairs=max(w.planned_pairs for w in works),
        own_keys=max(w.own_keys for w in works),
        pulled=max(w.pulled for w in works),
        pulled_near=min(w.pulled_near for w in works),
        copies=max(w.copies for w in works),
    )


def of_ranks(kind: Kind, per_node: int) -> list[Work]:
    """Of the ranks of a column. ``per_node``: consecutive ranks of it that share a node."""
    queries, keys = (_rows_of_ranks(kind, lens) for lens in (kind.q_lens, kind.kv_lens))
    before = [kv - q for q, kv in zip(kind.q_lens, kind.kv_lens, strict=True)]
    works = []
    for rank, (q, own) in enumerate(zip(queries, keys, strict=True)):
        at = [Segment(r, start + before[r], stop + before[r]) for r, start, stop in q]
        seen = [kind.mask.keys_of(s.start, s.stop, kind.kv_lens[s.request]) for s in at]
        wanted = {(s.request, lo, hi) for s, (lo, hi) in zip(at, seen, strict=True) if lo < hi}
        buffer = _gather_plan._storage_of(sorted(wanted | set(own)))
        first = rank // per_node * per_node
        near = [i for i in range(first, min(first + per_node, kind.outer)) if i != rank]
        near_copies = [_gather_plan._copies(i, _gather_plan._storage(keys[i]), buffer) for i in near]
        own_keys = _shards.count(own)
        total = sum(p.stop - p.start for p in buffer)
        causal = kind.mask.right == 0
        works.append(
            Work(
                rows=_shards.count(q),
                pairs=sum(visible(kind.mask, s.start, s.stop, kind.kv_lens[s.request]) for s in at),
                planned_pairs=sum(
                    (s.stop - s.start) * max(hi - lo - (s.stop - s.start) // 2 if causal else hi - lo, 0)
                    for s, (lo, hi) in zip(at, seen, strict=True)
                ),
                own_keys=own_keys,
                pulled=total - own_keys,
                pulled_near=sum(c.rows for copies in near_copies for c in copies),
                # Of many ranges, one gather and one scatter, or one message. Other nodes' ranks have as many segments.
                copies=sum(n if n <= 4 * MOST_COPIES else 2 for n in map(len, near_copies))
                if kind.outer <= per_node
                else (len(own) if len(own) <= MOST_COPIES else 1) * (kind.outer - 1),
            )
        )
    return works


def _rows_of_ranks(kind: Kind, lens: tuple[int, ...]) -> list[Segments]:
    shards = _shards.split(kind.layout, lens, kind.world, kind.block_size)
    if kind.inner == 1:
        return list(shards)
    return [GridRow(shards[i : i + kind.inner]).segments for i in range(0, kind.world, kind.inner)]
