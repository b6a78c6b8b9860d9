"""Plans of ``cp_prefill``: who holds what, what a rank needs of the keys of the others, and where it puts them.

A rank gathers keys into a buffer in which those of a request that it needs stand in their order. Then a query segment
is a request of one ordinary call of ``attention()``: its rows stand last among the keys ``[lo, hi)`` that it sees, as
the bottom-right alignment of masks has it. A window makes these ranges short, so that only a halo is sent.

Calls alike share a plan and its index tensors.
"""

from __future__ import annotations

import bisect
import functools
import weakref
from collections.abc import Hashable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ._rows import MOST_COPIES, Indices, Rows
from ._shards import Segment, Segments, joined, split


class Mask(NamedTuple):
    """As of ``attention()``; causal is ``right == 0``. -1 is no limit."""

    left: int = -1
    right: int = -1
    chunk_size: int = 0

    def keys_of(self, start: int, stop: int, kv_len: int) -> tuple[int, int]:
        """The keys ``[lo, hi)`` that rows at positions ``[start, stop)`` see together."""
        lo, hi = 0, kv_len
        if self.left >= 0:
            lo = max(start - self.left, 0)
        if self.right >= 0:
            hi = min(stop + self.right, kv_len)
        if self.chunk_size > 0:
            lo = max(lo, start // self.chunk_size * self.chunk_size)
            hi = min(hi, ((stop - 1) // self.chunk_size + 1) * self.chunk_size)
            lo = lo // self.chunk_size * self.chunk_size  # attention() counts chunks from the first key
        return lo, max(lo, hi)


class Copy(NamedTuple):
    """Rows ``[row, row + rows)`` of the sender's keys, as it stores them, become rows from ``to`` on of a buffer."""

    sender: int
    row: int
    to: int
    rows: int

    @property
    def place(self) -> tuple[int, int]:
        return self.to, self.to + self.rows


class Call(NamedTuple):
    """The query segments that have one mask: ``rows`` of each segment are used, of others none."""

    mask: Mask
    rows: tuple[int, ...]


class GatherPlan(NamedTuple):
    """Of one rank."""

    buffer_rows: int
    copies: tuple[Copy, ...]  # into its buffer, its own keys among them
    q_rows: tuple[int, ...]  # of its query segments,
    key_rows: tuple[int, ...]  # rows of the buffer where their keys begin,
    key_counts: tuple[int, ...]  # and how many these are
    calls: tuple[Call, ...]

    def copies_from(self, sender: int) -> list[Copy]:
        """In the order in which it stores them."""
        return [c for c in self.copies if c.sender == sender]


class StoredKeys(NamedTuple):
    """Keys ``[start, stop)`` of a request, from row ``row`` on of some storage."""

    request: int
    start: int
    stop: int
    row: int


def gather_plans(
    q_shards: tuple[Segments, ...], kv_shards: tuple[Segments, ...], kv_lens: tuple[int, ...], mask: Mask
) -> tuple[GatherPlan, ...]:
    """Plans of all ranks. Positions of ``q_shards`` are those of ``kv_shards``: rows stand among the keys."""
    held = [stored(segments) for segments in kv_shards]
    return tuple(_make_one(q_shards[rank], kv_shards[rank], rank, held, kv_lens, mask) for rank in range(len(q_shards)))


def _make_one(
    queries: Segments, own: Segments, rank: int, held: list[list[StoredKeys]], kv_lens: tuple[int, ...], mask: Mask
) -> GatherPlan:
    seen = [mask.keys_of(q.start, q.stop, kv_lens[q.request]) for q in queries]
    wanted = [Segment(q.request, lo, hi) for q, (lo, hi) in zip(queries, seen, strict=True) if lo < hi]
    buffer = buffer_of(wanted, own)
    copies: list[Copy] = []
    for sender, pieces in enumerate(held):
        copies += copies_of(sender, pieces, buffer)
    begins = []
    for q, (lo, hi) in zip(queries, seen, strict=True):
        piece = next((p for p in buffer if p.request == q.request and p.start <= lo and hi <= p.stop), None)
        begins.append(0 if lo == hi or piece is None else piece.row + lo - piece.start)
    return GatherPlan(
        buffer_rows=buffer[-1].row + buffer[-1].stop - buffer[-1].start if buffer else 0,
        copies=tuple(copies),
        q_rows=tuple(q.stop - q.start for q in queries),
        key_rows=tuple(begins),
        key_counts=tuple(hi - lo for lo, hi in seen),
        calls=_calls(queries, seen, mask),
    )


def _calls(queries: Segments, seen: list[tuple[int, int]], mask: Mask) -> tuple[Call, ...]:
    """``attention()`` counts positions from the last key. Where that is ``shift`` keys behind a segment's last row,
    windows are shifted, too."""
    rows: dict[Mask, list[int]] = {}
    for i, (q, (lo, hi)) in enumerate(zip(queries, seen, strict=True)):
        shift = hi - q.stop
        own = mask
        if lo < hi and shift != 0 and (mask.left >= 0 or mask.right >= 0):
            left = mask.left + shift if mask.left >= 0 else -1
            right = mask.right - shift if mask.right >= 0 else -1
            own = Mask(left, right, mask.chunk_size)
        rows.setdefault(own, [0] * len(queries))[i] = q.stop - q.start
    return tuple(Call(own, tuple(n)) for own, n in rows.items())


def stored(segments: Iterable[Segment]) -> list[StoredKeys]:
    """Segments, one after another."""
    pieces, row = [], 0
    for request, start, stop in segments:
        pieces.append(StoredKeys(request, start, stop, row))
        row += stop - start
    return pieces


def buffer_of(wanted: Iterable[Segment], own: Segments) -> list[StoredKeys]:
    """What a rank needs and what it has, one after another; those that touch or overlap are one."""
    return stored(joined(sorted({*wanted, *own})))


def copies_of(sender: int, pieces: list[StoredKeys], buffer: list[StoredKeys]) -> list[Copy]:
    """Both lists ascend, and neither overlaps itself."""
    copies, first = [], 0
    for piece in pieces:
        while first < len(buffer) and (buffer[first].request, buffer[first].stop) <= (piece.request, piece.start):
            first += 1
        for room in buffer[first:]:
            if (room.request, room.start) >= (piece.request, piece.stop):
                break
            start, stop = max(piece.start, room.start), min(piece.stop, room.stop)
            copies.append(Copy(sender, piece.row + start - piece.start, room.row + start - room.start, stop - start))
    return copies


class Kind(NamedTuple):
    """What decides a plan."""

    layout: str
    block_size: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    mask: Mask
    outer: int  # ranks in a column and in a row
    inner: int

    @property
    def world(self) -> int:
        return self.outer * self.inner

    def shards(self, lens: tuple[int, ...]) -> tuple[Segments, ...]:
        return split(self.layout, lens, self.world, self.block_size)

    def among_keys(self, queries: Segments) -> Segments:
        """Query segments at positions among the keys."""
        before = [kv - q for q, kv in zip(self.q_lens, self.kv_lens, strict=True)]
        return tuple(Segment(r, start + before[r], stop + before[r]) for r, start, stop in queries)


class GridRow:
    """Ranks that exchange heads for tokens: their segments together, in order, and where each rank's rows stand."""

    def __init__(self, shards: tuple[Segments, ...]) -> None:
        ranges: list[list[tuple[int, int]]] = [[] for _ in shards]
        self.rows = 0
        ordered = sorted((segment, i) for i, segments in enumerate(shards) for segment in segments)
        for segment, rank in ordered:
            stop = self.rows + segment.stop - segment.start
            ranges[rank].append((self.rows, stop))
            self.rows = stop
        self.places = [Rows(of_rank) for of_rank in ranges]
        self.segments = joined(segment for segment, _ in ordered)


def grid_rows(kind: Kind, lens: tuple[int, ...]) -> list[GridRow]:
    shards = kind.shards(lens)
    return [GridRow(shards[i : i + kind.inner]) for i in range(0, kind.world, kind.inner)]


class Plan:
    """Of all ranks."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.kv_shards = kind.shards(kind.kv_lens)
        self.q_grid_rows, self.kv_grid_rows = (grid_rows(kind, lens) for lens in (kind.q_lens, kind.kv_lens))
        self.queries = tuple(kind.among_keys(row.segments) for row in self.q_grid_rows)
        self.indices = Indices()
        self.ring_keys: dict[tuple[int, int], tuple[list[int], list[int]]] = {}  # of _ring

    @functools.cached_property
    def gathers(self) -> tuple[Gather, ...]:
        """Of each row of the grid: its ranks gather alike, each its heads."""
        keys = tuple(row.segments for row in self.kv_grid_rows)
        plans = gather_plans(self.queries, keys, self.kind.kv_lens, self.kind.mask)
        return tuple(Gather(rank, plans, self.queries[rank]) for rank in range(self.kind.outer))


class Gather:
    """What rank ``rank`` does. Rows are those of its buffer."""

    def __init__(self, rank: int, plans: tuple[GatherPlan, ...], queries: Segments) -> None:
        self.plan = plans[rank]
        own = self.plan.copies_from(rank)
        self.own = Rows(c.place for c in own)
        self.sent, self.received = list[tuple[int, list[Rows]]](), list[tuple[int, list[Rows]]]()
        self.pulled = list[tuple[int, Rows, Rows]]()  # of each sender, rows of its buffer and rows of this one
        for other, plan in enumerate(plans):
            if other == rank:
                continue
            self.sent.append((other, _messages([_in_buffer(own, c) for c in plan.copies_from(rank)])))
            copies, theirs = self.plan.copies_from(other), plan.copies_from(other)
            here, there = [c.place for c in copies], [_in_buffer(theirs, c) for c in copies]
            self.received.append((other, _messages(here)))
            self.pulled.append((other, Rows(there, merge=False), Rows(here, merge=False)))
        self.pulled_rows = sum(rows.count for _, _, rows in self.pulled)
        causal = bool(self.plan.calls) and self.plan.calls[0].mask.right == 0
        self.pairs = pairs_of(self.plan.q_rows, self.plan.key_counts, causal)
        self.most_rows = max(plan.buffer_rows for plan in plans)
        self.requests = [q.request for q in queries]
        self.indices = Indices()
        # Of _transport, for each of its workspaces.
        self.rooms: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()

    def vectors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """``cu_seqlens_q``, first rows of keys, numbers of keys, and for each call the rows used; int32."""
        plan = self.plan
        cu_seqlens_q, begins, counts, *used = self.indices.get(
            "vectors",
            device,
            lambda: [
                [0, *accumulate(plan.q_rows)],
                [*plan.key_rows, plan.buffer_rows],
                plan.key_counts,
                *(c.rows for c in plan.calls),
            ],
        )
        return cu_seqlens_q, begins, counts, used

    def call_of_rows(self, device: torch.device) -> torch.Tensor:
        """Which call computes a row: ``[rows]``."""

        def make() -> list[torch.Tensor]:
            plan = self.plan
            of_segment = [next((i for i, c in enumerate(plan.calls) if c.rows[s]), 0) for s in range(len(plan.q_rows))]
            return [torch.tensor(of_segment).repeat_interleave(torch.tensor(plan.q_rows))]

        return self.indices.get("calls", device, make)[0]


def pairs_of(row_counts: Iterable[int], key_counts: Iterable[int], causal: bool) -> int:
    """(row, key) pairs, about: of the keys that a segment sees together, its own rows see half."""
    sizes = zip(row_counts, key_counts, strict=True)
    return sum(rows * max(keys - rows // 2 if causal else keys, 0) for rows, keys in sizes)


def _in_buffer(own: list[Copy], copy: Copy) -> tuple[int, int]:
    """Rows that a rank sends, where its own copies have put them."""
    room = own[bisect.bisect_right(own, copy.row, key=lambda c: c.row) - 1]
    start = room.to + copy.row - room.row
    return start, start + copy.rows


def _messages(ranges: list[tuple[int, int]]) -> list[Rows]:
    """A message for each range, or one of all. Sender and receiver have as many ranges, so that they agree."""
    return [Rows([r]) for r in ranges] if len(ranges) <= MOST_COPIES else [Rows(ranges)]


@functools.lru_cache(64)
def plan_of(kind: Kind) -> Plan:
    return Plan(kind)
