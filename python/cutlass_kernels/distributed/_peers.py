"""The ranks that a call communicates with, and the check that they all make the same call."""

from __future__ import annotations

import datetime
import itertools
import json
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
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
    for device in ("cuda", "cpu"):
        try:
            return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return 600.0


# Of each group, numbers for the exchanges to come.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


def gather_facts(peers: Peers, fact: Any) -> list[Any]:
    """What each rank states, by rank: anything that JSON has.

    Over the store of the group, on the host. NCCL would wait for ever for a rank that has died before its first
    collective; here a rank that does not come ends the others with an error, after the timeout of the group.
    """
    store = distributed_c10d._get_process_group_store(peers.group)
    number = next(_numbers.setdefault(peers.group, itertools.count()))
    keys = [f"cutlass_kernels/{number}/{rank}" for rank in range(peers.world)]
    store.set(keys[peers.rank], json.dumps(fact))
    seconds = timeout_of(peers.group)
    try:
        store.wait(keys, datetime.timedelta(seconds=seconds))
    except RuntimeError as error:
        missing = [str(rank) for rank, key in zip(peers.ranks, keys, strict=True) if not store.check([key])]
        told = f"Rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not come within {seconds:g} s"
        raise RuntimeError(f"{told}, the timeout of the group: see what happened there.") from error
    every = [json.loads(text) for text in store.multi_get(keys)]
    if number > 0:  # all ranks have read it, as they have come to the exchange after it
        store.delete_key(f"cutlass_kernels/{number - 1}/{peers.rank}")
    return every


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _fault_among(peers: Peers, facts: dict[str, Any], fault: str | None) -> str | None:
    every = gather_facts(peers, ({name: str(value) for name, value in facts.items()}, fault))
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
