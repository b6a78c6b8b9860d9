"""Brings the keys of other ranks into a buffer, group of heads by group of heads.

A row of a buffer has K of all heads of the group, then V: one range of rows is one copy.
"""

from __future__ import annotations

import abc

import torch

from .. import append_paged_kv_cache_by_slot
from . import _symmetric
from ._peers import Message, Peers, exchange, wait
from ._plans import Gather
from ._rows import MOST_COPIES, Rows, copy_rows, taken
from ._symmetric import Workspace

Keys = tuple[torch.Tensor, torch.Tensor]


class Transport(abc.ABC):
    @abc.abstractmethod
    def arrived(self, group: int) -> Keys:
        """K and V of a group of heads, ``[rows, heads, dim]``; the current stream waits for them."""

    def close(self) -> None:  # noqa: B027
        """After the last use of what has arrived."""


def open_transport(groups: list[Keys], gather: Gather, peers: Peers | None) -> Transport:
    """Starts all transfers. ``groups``: this rank's K and V of each group of heads."""
    k = groups[0][0]
    if (peers is None or peers.world == 1) and gather.own.ranges in ((), ((0, k.size(0)),)):
        return Own(groups)
    widths = [k.size(1) * (k.size(2) + v.size(2)) for k, v in groups]
    row_bytes = sum(widths) * k.element_size()
    workspace = _symmetric.workspace(peers, gather.most_rows * row_bytes, k.device, "keys")
    if workspace is None:
        return Messages(groups, gather, peers)
    return Copies(groups, widths, gather, workspace)


def views_of(buffer: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Keys:
    """K and V as parts of a buffer ``[rows, width]``."""
    split = k.size(1) * k.size(2)
    return buffer[:, :split].unflatten(1, k.shape[1:]), buffer[:, split:].unflatten(1, v.shape[1:])


def _pages(keys: Keys) -> Keys:
    return keys[0].unsqueeze(1), keys[1].unsqueeze(1)


def _store(rows: Rows, keys: Keys, pages: Keys, k: torch.Tensor, v: torch.Tensor) -> None:
    """This rank's own keys: one kernel for K and V, as for a cache whose pages have one token."""
    if k.element_size() == 2:
        append_paged_kv_cache_by_slot(k, v, *pages, rows.index(k.device))
        return
    for room, own in zip(keys, (k, v), strict=True):
        rows.put(room, own)


class Own(Transport):
    """This rank has all keys, in order."""

    def __init__(self, groups: list[Keys]) -> None:
        self.groups = groups

    def arrived(self, group: int) -> Keys:
        return self.groups[group]


class Messages(Transport):
    """Sends and receives of the process group."""

    def __init__(self, groups: list[Keys], gather: Gather, peers: Peers | None) -> None:
        self.groups = []
        for k, v in groups:
            buffer = k.new_empty(gather.plan.buffer_rows, k.size(1) * k.size(2) + v.size(1) * v.size(2))
            keys = views_of(buffer, k, v)
            _store(gather.own, keys, _pages(keys), k, v)
            sent = [Message(peer, rows.take(buffer)) for peer, messages in gather.sent for rows in messages]
            received, packed = [], []
            for peer, messages in gather.received:
                for rows in messages:
                    in_place = len(rows.ranges) == 1
                    message = rows.take(buffer) if in_place else buffer.new_empty(rows.count, buffer.size(1))
                    received.append(Message(peer, message))
                    packed += [] if in_place else [(rows, message)]
            works = [] if peers is None or peers.world == 1 else exchange(peers, sent, received)
            self.groups.append((keys, buffer, works, packed))

    def arrived(self, group: int) -> Keys:
        keys, buffer, works, packed = self.groups[group]
        wait(works)
        for rows, message in packed:
            rows.put(buffer, message)
        return keys


class Copies(Transport):
    """Copies out of the buffers of other ranks, in symmetric memory.

    A first barrier says that all ranks have written their own keys, a second one that these may be overwritten. Of
    several groups of heads, copies are on a stream of their own, and the second barrier is behind them. A single one
    has nothing to hide behind: it stays on the current stream, which saves the host time.
    """

    def __init__(self, groups: list[Keys], widths: list[int], gather: Gather, workspace: Workspace) -> None:
        self.workspace, self.apart = workspace, len(groups) > 1
        self.current = torch.cuda.current_stream(workspace.device)
        rooms = gather.rooms.setdefault(workspace, {})
        self.rooms: list[_Room] = []
        begin = 0
        for (k, v), width in zip(groups, widths, strict=True):
            key = (begin, k.dtype, k.shape[1:], v.shape[1:])
            if key not in rooms:
                rooms[key] = _Room(workspace, gather, width, begin, k, v)
            self.rooms.append(rooms[key])
            _store(gather.own, self.rooms[-1].keys, self.rooms[-1].pages, k, v)
            begin += gather.most_rows * width * k.element_size()
        workspace.barrier(0)
        if not self.apart:
            self.rooms[0].pull()
            return
        workspace.started.record(self.current)
        workspace.stream.wait_event(workspace.started)
        with torch.cuda.device(workspace.device):
            torch.cuda.set_stream(workspace.stream)  # the context manager of streams takes three times as long
            try:
                for room in self.rooms:
                    room.pull()
                    room.here.record(workspace.stream)
                workspace.barrier(1)
            finally:
                torch.cuda.set_stream(self.current)
        workspace.read.record(workspace.stream)

    def arrived(self, group: int) -> Keys:
        room = self.rooms[group]
        if self.apart:
            self.current.wait_event(room.here)
        return room.keys

    def close(self) -> None:
        if self.apart:
            self.current.wait_event(self.workspace.read)
        else:
            self.workspace.barrier(1)


class _Room:
    """Of a group of heads: views of the buffers of all ranks. A call needs a dozen of them, each of which takes the
    host 3 to 8 us to make."""

    def __init__(
        self, workspace: Workspace, gather: Gather, width: int, begin: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        shape = (gather.most_rows, width)
        buffers = [workspace.of(rank, shape, k.dtype, begin) for rank in range(len(workspace.pointers))]
        own = buffers[workspace.rank]
        self.keys = views_of(own[: gather.plan.buffer_rows], k, v)
        self.pages = _pages(self.keys)
        self.here = torch.cuda.Event()  # when all that is pulled is
        self._ranges: list[Keys] = []
        self._rows: list[tuple[torch.Tensor, Rows, torch.Tensor, Rows]] = []
        for sender, theirs, here in gather.pulled:
            if len(here.ranges) > 4 * MOST_COPIES:
                self._rows.append((own, here, buffers[sender], theirs))
                continue
            for to, source in zip(here.ranges, theirs.ranges, strict=True):
                self._ranges.append((own[slice(*to)], buffers[sender][slice(*source)]))

    def pull(self) -> None:
        """Range by range, by copy engines; of many ranges, by a kernel that reads and writes rows."""
        for to, source in self._ranges:
            to.copy_(source)
        for own, here, buffer, theirs in self._rows:
            copy_rows(own, here.index(own.device), taken(buffer, theirs.index(own.device)))
