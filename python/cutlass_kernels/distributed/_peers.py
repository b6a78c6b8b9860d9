"""The ranks that a call communicates with, and messages between them."""

from __future__ import annotations

from typing import NamedTuple

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


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which a rank that waits for another ends with an error."""
    for device in ("cuda", "cpu"):
        try:
            return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return 600.0


def is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
