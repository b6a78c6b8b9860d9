"""Plans of ``cp_prefill``: who holds what, and what a rank gathers. Calls alike share a plan and its index tensors."""

from __future__ import annotations

import bisect
import functools
import weakref
from collections.abc import Hashable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import _gather_plan, _shards
from ._gather_plan import Copy, GatherPlan, Mask
from ._indices import Indices
from ._rows import MOST_COPIES, Rows
from ._shards import Segment, Segments


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


class GridRow:
    """Ranks that exchange heads for tokens: their segments together, in order, and where each rank's rows stand."""

    def __init__(self, shards: tuple[Segments, ...]) -> None:
        ranges: list[list[tuple[int, int]]] = [[] for _ in shards]
        merged: list[Segment] = []
        self.rows = 0
        for segment, rank in sorted((segment, i) for i, segments in enumerate(shards) for segment in segments):
            stop = self.rows + segment.stop - segment.start
            ranges[rank].append((self.rows, stop))
            self.rows = stop
            if merged and merged[-1][::2] == (segment.request, segment.start):
                merged[-1] = merged[-1]._replace(stop=segment.stop)
            else:
                merged.append(segment)
        self.places = [Rows(of_rank) for of_rank in ranges]
        self.segments: Segments = tuple(merged)


class Plan:
    """Of all ranks."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.q_shards = _shards.split(kind.layout, kind.q_lens, kind.world, kind.block_size)
        self.kv_shards = _shards.split(kind.layout, kind.kv_lens, kind.world, kind.block_size)
        firsts = range(0, kind.world, kind.inner)
        self.q_grid_rows = [GridRow(self.q_shards[i : i + kind.inner]) for i in firsts]
        self.kv_grid_rows = [GridRow(self.kv_shards[i : i + kind.inner]) for i in firsts]
        before = [kv - q for q, kv in zip(kind.q_lens, kind.kv_lens, strict=True)]
        # At positions among the keys.
        self.queries: tuple[Segments, ...] = tuple(
            tuple(Segment(r, start + before[r], stop + before[r]) for r, start, stop in row.segments)
            for row in self.q_grid_rows
        )
        self.indices = Indices()
        self.ring_keys: dict[tuple[int, int], tuple[list[int], list[int]]] = {}  # of _ring

    @functools.cached_property
    def gathers(self) -> tuple[Gather, ...]:
        """Of each row of the grid: its ranks gather alike, each its heads."""
        keys = tuple(row.segments for row in self.kv_grid_rows)
        plans = _gather_plan.make(self.queries, keys, self.kind.kv_lens, self.kind.mask)
        return tuple(Gather(rank, plans, self.queries[rank]) for rank in range(self.kind.outer))


class Gather:
    """What rank ``rank`` does. Rows are those of its buffer."""

    def __init__(self, rank: int, plans: tuple[GatherPlan, ...], queries: Segments) -> None:
        self.plan = plans[rank]
        own = _own(self.plan, rank)
        self.own = Rows((c.to, c.to + c.rows) for c in own)
        self.sent = [
            (receiver, _messages([_in_buffer(own, c) for c in plan.copies if c.sender == rank]))
            for receiver, plan in enumerate(plans)
            if receiver != rank
        ]
        self.received = [
            (sender, _messages([(c.to, c.to + c.rows) for c in self.plan.copies if c.sender == sender]))
            for sender in range(len(plans))
            if sender != rank
        ]
        # Of each sender, rows of its buffer and rows of this one.
        self.pulled = [(s, *_pulled(self.plan, plans[s], s)) for s in range(len(plans)) if s != rank]
        self.pulled_rows = sum(rows.count for _, _, rows in self.pulled)
        # (row, key) pairs, about: of the keys that a segment sees together, its own rows see half.
        causal = self.plan.calls and self.plan.calls[0].mask.right == 0
        self.pairs = sum(
            rows * max(keys - rows // 2 if causal else keys, 0)
            for rows, keys in zip(self.plan.q_rows, self.plan.key_counts, strict=True)
        )
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


def _pulled(plan: GatherPlan, of_sender: GatherPlan, sender: int) -> tuple[Rows, Rows]:
    own, copies = _own(of_sender, sender), _own(plan, sender)
    there = Rows([_in_buffer(own, c) for c in copies], merge=False)
    return there, Rows([(c.to, c.to + c.rows) for c in copies], merge=False)


def _own(plan: GatherPlan, rank: int) -> list[Copy]:
    """Copies of this rank's keys, in the order in which it stores them."""
    return [c for c in plan.copies if c.sender == rank]


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


# Of each group, those whose index tensors a captured graph refers to.
_captured: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Hashable]] = weakref.WeakKeyDictionary()


def keep(group: dist.ProcessGroup, plan: Hashable) -> None:
    """A graph is captured with it: it stays for the life of the group."""
    _captured.setdefault(group, set()).add(plan)
