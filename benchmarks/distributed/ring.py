"""Ring attention in zigzag order, written with torch: the peer that the literature describes.

Rank r of W holds parts r and 2 W - 1 - r of every request. Keys go round: in step s a rank has those of rank r - s,
and the next ones arrive meanwhile, on NCCL's stream. Own keys are causal; of a rank before this one all rows see the
first part; of a rank behind it the rows of the second part see everything. So every step is as much work on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from inputs import Inputs
from problem import Problem
from timing import Timed

from . import kernels
from .kernels import State
from .ranks import Ranks

Keys = tuple[torch.Tensor, torch.Tensor]  # and values


class Halves(NamedTuple):
    """Tokens of the two parts of a request that a rank holds."""

    first: int
    second: int

    @property
    def both(self) -> int:
        return self.first + self.second


def halves_of(lens: tuple[int, ...], rank: int, world: int) -> list[Halves]:
    """By request; part i of n tokens begins at token ``i n // 2 W``."""
    bounds = [[i * n // (2 * world) for i in range(2 * world + 1)] for n in lens]
    last = 2 * world - 1 - rank
    return [Halves(b[rank + 1] - b[rank], b[last + 1] - b[last]) for b in bounds]


class Engine(Protocol):
    """The attention of a step. States of an engine are lists, one per call of a kernel."""

    def own(self, k: torch.Tensor, v: torch.Tensor) -> list[State]: ...
    def first_keys(self, k: torch.Tensor, v: torch.Tensor, source: int) -> list[State]: ...
    def second_rows(self, k: torch.Tensor, v: torch.Tensor, source: int) -> list[State]: ...
    def merge_second_rows(self, states: list[State], others: list[State]) -> None: ...
    def rows(self, states: list[State]) -> torch.Tensor: ...


class Dense:
    """With SDPA: a call for each run of requests of equal lengths."""

    def __init__(self, ranks: Ranks, case: Problem, q: torch.Tensor) -> None:
        runs = [len(list(run)) for _, run in itertools.groupby(case.qo_lens)]
        lens = [length for length, _ in itertools.groupby(case.qo_lens)]
        self.groups = [list(zip(runs, halves_of(tuple(lens), rank, ranks.world))) for rank in range(ranks.world)]
        self.rank = ranks.rank
        self.q = self._blocks(q, ranks.rank)

    def _blocks(self, x: torch.Tensor, source: int) -> list[torch.Tensor]:
        """``[B, H, L, D]`` of every group, views."""
        counts = [batch * halves.both for batch, halves in self.groups[source]]
        blocks = x[: sum(counts)].split(counts)
        return [
            block.view(batch, halves.both, *x.shape[1:]).transpose(1, 2)
            for block, (batch, halves) in zip(blocks, self.groups[source])
        ]

    def own(self, k: torch.Tensor, v: torch.Tensor) -> list[State]:
        blocks = zip(self.q, self._blocks(k, self.rank), self._blocks(v, self.rank))
        return [kernels.sdpa(*block, True) for block in blocks]

    def first_keys(self, k: torch.Tensor, v: torch.Tensor, source: int) -> list[State]:
        blocks = zip(self.q, self._blocks(k, source), self._blocks(v, source), self.groups[source])
        return [kernels.sdpa(q, k[:, :, : h.first], v[:, :, : h.first], False) for q, k, v, (_, h) in blocks]

    def second_rows(self, k: torch.Tensor, v: torch.Tensor, source: int) -> list[State]:
        blocks = zip(self.q, self._blocks(k, source), self._blocks(v, source), self.groups[self.rank])
        return [kernels.sdpa(q[:, :, h.first :], k, v, False) for q, k, v, (_, h) in blocks]

    def merge_second_rows(self, states: list[State], others: list[State]) -> None:
        for state, other, (_, h) in zip(states, others, self.groups[self.rank]):
            kernels.merge(State(*(x[:, :, h.first :] for x in state)), other)

    def rows(self, states: list[State]) -> torch.Tensor:
        return torch.cat([state.out.transpose(1, 2).flatten(0, 1) for state in states])


class Varlen:
    """With FlashAttention-2: a call of all requests."""

    def __init__(self, ranks: Ranks, case: Problem, q: torch.Tensor) -> None:
        halves = [halves_of(case.qo_lens, rank, ranks.world) for rank in range(ranks.world)]
        mine, device = halves[ranks.rank], q.device
        self.q = q
        self.both = [kernels.lengths([h.both for h in source], device) for source in halves]
        self.first = [kernels.lengths([h.first for h in source], device) for source in halves]
        self.used = [torch.tensor([h.first for h in s], dtype=torch.int32, device=device) for s in halves]
        self.mine = self.both[ranks.rank]
        self.second = kernels.lengths([h.second for h in mine], device)
        starts = self.mine.starts.tolist()
        places = [torch.arange(start + h.first, start + h.both) for start, h in zip(starts, mine)]
        # Of one request they are a slice: no copy.
        self.places = slice(mine[0].first, None) if len(mine) == 1 else torch.cat(places).to(device)

    def own(self, k: torch.Tensor, v: torch.Tensor) -> list[State]:
        return [kernels.fa2(self.q, k, v, self.mine, self.mine, True)]

    def first_keys(self, k: torch.Tensor, v: torch.Tensor, source: int) -> list[State]:
        keys = self.both[source]._replace(longest=self.first[source].longest)
        return [kernels.fa2(self.q, k, v, self.mine, keys, False, self.used[source])]

    def second_rows(self, k: torch.Tensor, v: torch.Tensor, source: int) -> list[State]:
        return [kernels.fa2(self.q[self.places], k, v, self.second, self.both[source], False)]

    def merge_second_rows(self, states: list[State], others: list[State]) -> None:
        state = State(*(x[self.places] for x in states[0]))  # copies, where places are not a slice
        kernels.merge(state, others[0])
        if not isinstance(self.places, slice):
            for whole, part in zip(states[0], state):
                whole[self.places] = part

    def rows(self, states: list[State]) -> torch.Tensor:
        return states[0].out


def make(engine_of: Callable[[Ranks, Problem, torch.Tensor], Engine], ranks: Ranks, case: Problem, x: Inputs) -> Timed:
    """A call of the ring on this rank's shard ``x``."""
    world, rank = ranks.world, ranks.rank
    engine = engine_of(ranks, case, x.q)
    tokens = [sum(h.both for h in halves_of(case.qo_lens, source, world)) for source in range(world)]
    buffers = [[t.new_empty(max(tokens), *t.shape[1:]) for t in (x.k, x.v)] for _ in range(2)]  # take turns
    after, before = (rank + 1) % world, (rank - 1) % world

    def exchange(held: Keys, arriving: Keys) -> list[dist.Work]:
        sent = [dist.P2POp(dist.isend, t, after, ranks.group) for t in held]
        return dist.batch_isend_irecv([*sent, *(dist.P2POp(dist.irecv, t, before, ranks.group) for t in arriving)])

    def call() -> list[State]:
        held: Keys = (x.k, x.v)
        states: list[State] = []
        for step in range(world):
            arriving, works = held, list[dist.Work]()
            if step + 1 < world:
                k, v = (t[: tokens[(rank - step - 1) % world]] for t in buffers[step % 2])
                arriving = (k, v)
                works = exchange(held, arriving)
            source = (rank - step) % world
            if step == 0:
                states = engine.own(*held)
                if world > 2:  # more than one merge: round once, at the end
                    states = [State(s.out.float(), s.lse) for s in states]
            elif source < rank:
                for state, other in zip(states, engine.first_keys(*held, source)):
                    kernels.merge(state, other)
            else:
                engine.merge_second_rows(states, engine.second_rows(*held, source))
            for work in works:
                work.wait()
            held = arriving
        return [State(s.out.to(x.q.dtype), s.lse) for s in states]

    # Ranks call different kernels. Each runs all of them here, where a failure leaves nobody waiting for a message.
    engine.first_keys(x.k, x.v, rank)
    engine.merge_second_rows(engine.own(x.k, x.v), engine.second_rows(x.k, x.v, rank))
    return Timed(call, output=engine.rows)
