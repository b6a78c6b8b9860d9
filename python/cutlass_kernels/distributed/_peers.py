"""The ranks that a call communicates with, and the check that they all make the same call."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh


class Peers(NamedTuple):
    """A process group, and this process in it."""

    group: dist.ProcessGroup
    rank: int
    ranks: tuple[int, ...]  # of the whole world, by rank in the group

    @property
    def world(self) -> int:
        return len(self.ranks)


class Grid(NamedTuple):
    """Ranks in rows: ``outer`` are those of this rank's column, ``inner`` those of its row. A group is one column."""

    outer: Peers
    inner: Peers | None
    rank: int
    world: int


class Message(NamedTuple):
    peer: int
    tensor: torch.Tensor


def grid_of(group: Group) -> Grid:
    """A group or a mesh of one dimension is a column; of two dimensions, the first is the outer one."""
    if not isinstance(group, DeviceMesh):
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group is {type(group).__name__}: pass a ProcessGroup or a DeviceMesh.")
        peers = _peers(group)
        return Grid(peers, None, peers.rank, peers.world)
    if group.ndim == 1:
        return grid_of(group.get_group())
    if group.ndim != 2:
        raise ValueError(f"group is a mesh of {group.ndim} dimensions: slice it to one or two.")
    return grid_with(_peers(group.get_group(0)), _peers(group.get_group(1)))


def grid_with(outer: Peers, inner: Peers) -> Grid:
    return Grid(outer, inner, outer.rank * inner.world + inner.rank, outer.world * inner.world)


def peers_of(group: Group) -> Peers:
    """Of functions that know one dimension."""
    grid = grid_of(group)
    if grid.inner is not None:
        raise ValueError("group is a mesh of 2 dimensions: slice it to one.")
    return grid.outer


def _peers(group: dist.ProcessGroup) -> Peers:
    return Peers(group, dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))


def exchange(peers: Peers, sent: list[Message], received: list[Message]) -> list[dist.Work]:
    """Starts all transfers at once. Between two ranks, messages arrive in the order of the lists."""
    operations = [
        dist.P2POp(way, m.tensor, peers.ranks[m.peer], peers.group)
        for way, messages in ((dist.isend, sent), (dist.irecv, received))
        for m in messages
        if m.tensor.numel() > 0
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def wait(works: list[dist.Work]) -> None:
    """On a GPU, the current stream waits, not the host."""
    for work in works:
        work.wait()


MOST_AGREED = 4096  # kinds of calls that a group remembers
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]] = weakref.WeakKeyDictionary()


def agree(grid: Grid, facts: dict[str, Any], fault: str | None) -> None:
    """Raises on every rank if facts differ between ranks, or if one of them has found a fault.

    Ranks exchange them before the first call of its kind; a rank whose later calls differ is found by the timeout of
    the group. A rank that finds a fault of its own in a later call raises it after that timeout.
    """
    key = hash(tuple(map(str, facts.values())))
    if fault is not None:
        fault = f"On rank {dist.get_rank()}: {fault}"
    groups = [peers for peers in (grid.inner, grid.outer) if peers is not None]
    for peers in groups:
        known = _agreed.setdefault(peers.group, set())
        if peers.world > 1 and (fault is not None or key not in known) and not is_capturing():
            try:
                fault = _fault_among(peers, facts, fault)
            except RuntimeError as error:  # the others are past this check, and in their call
                if fault is None:
                    raise
                raise ValueError(fault) from error
    if fault is not None:
        raise ValueError(fault)
    if is_capturing():
        return
    for peers in groups:
        known = _agreed[peers.group]
        if len(known) >= MOST_AGREED:
            known.clear()  # on all ranks at once: they add the same
        known.add(key)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which a rank that waits for another ends with an error."""
    try:
        return float(group._get_backend(torch.device("cuda")).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return 600.0


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _fault_among(peers: Peers, facts: dict[str, Any], fault: str | None) -> str | None:
    mine = ({name: str(value) for name, value in facts.items()}, fault)
    every: list[Any] = [None] * peers.world
    dist.all_gather_object(every, mine, peers.group)
    for _, found in every:
        if found is not None:
            return str(found)
    for name in facts:
        values: dict[str, list[int]] = defaultdict(list)
        for rank, (theirs, _) in zip(peers.ranks, every, strict=True):
            values[theirs.get(name, "not given")].append(rank)
        if len(values) > 1:
            told = "; ".join(
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for value, ranks in values.items()
            )
            return f"Ranks disagree on {name}: {told}. Pass the same on all of them."
    return None
