"""Brings the keys of other ranks into a buffer, group of heads by group of heads.

A row of a buffer has K of all heads of the group, then V: one range of rows is one copy.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from .. import append_paged_kv_cache_by_slot
from . import _symmetric
from ._peers import Message, Peers, exchange, wait
from ._plans import Gather
from ._rows import MOST_COPIES, Rows, copy_rows, taken
from ._symmetric import Workspace

Keys = tuple[torch.Tensor, torch.Tensor]


class Transport(Protocol):
    def arrived(self, group: int) -> Keys:
        """K and V of a group of heads, ``[rows, heads, dim]``; the current stream waits for them."""

    def close(self) -> None:
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


def _views(buffer: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Keys:
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


class Own:
    """This rank has all keys, in order."""

    def __init__(self, groups: list[Keys]) -> None:
        self.groups = groups

    def arrived(self, group: int) -> Keys:
        return self.groups[group]

    def close(self) -> None:
        pass


class Messages:
    """Sends and receives of the process group."""

    def __init__(self, groups: list[Keys], gather: Gather, peers: Peers | None) -> None:
        self.groups = []
        for k, v in groups:
            buffer = k.new_empty(gather.plan.buffer_rows, k.size(1) * k.size(2) + v.size(1) * v.size(2))
            keys = _views(buffer, k, v)
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

    def close(self) -> None:
        pass


class Copies:
    """Copies out of the buffers of other ranks, in symmetric memory.

    A first barrier says that all ranks have written their own keys, a second one that these may be overwritten. Of
    several groups of heads, copies are on a stream of their own, and the second barrier is behind them. A single one
    has nothing to hide behind: it stays on the current stream, which saves the host 0.1 ms.
    """

    def __init__(self, groups: list[Keys], widths: list[int], gather: Gather, workspace: Workspace) -> None:
        self.workspace, self.gather = workspace, gather
        dtype = groups[0][0].dtype
        begins = [gather.most_rows * sum(widths[:i]) * dtype.itemsize for i in range(len(widths))]
        self.rooms = []
        for (k, v), width, begin in zip(groups, widths, begins, strict=True):
            shape = (gather.most_rows, width)
            key = (gather.plan.buffer_rows, shape, begin, dtype, k.shape[1:], v.shape[1:])
            make = functools.partial(_Room, workspace, gather.plan.buffer_rows, shape, begin, k, v)
            self.rooms.append(workspace.kept(key, make))
            _store(gather.own, self.rooms[-1].keys, self.rooms[-1].pages, k, v)
        workspace.barrier(0)
        self.events: list[torch.cuda.Event] = []
        if len(groups) == 1:
            self._pull(self.rooms[0])
            return
        workspace.stream.wait_stream(torch.cuda.current_stream(workspace.device))
        with torch.cuda.stream(workspace.stream):
            for room in self.rooms:
                self._pull(room)
                self.events.append(workspace.stream.record_event())
            workspace.barrier(1)

    def _pull(self, room: _Room) -> None:
        for sender, theirs, here in self.gather.pulled:
            _copy(room.buffers[self.workspace.rank], here, room.buffers[sender], theirs)

    def arrived(self, group: int) -> Keys:
        if self.events:
            torch.cuda.current_stream(self.workspace.device).wait_event(self.events[group])
        return self.rooms[group].keys

    def close(self) -> None:
        if self.events:
            torch.cuda.current_stream(self.workspace.device).wait_stream(self.workspace.stream)
        else:
            self.workspace.barrier(1)


class _Room:
    """Of a group of heads: the buffers of all ranks, and this rank's as keys and as pages of one token."""

    def __init__(
        self, workspace: Workspace, rows: int, shape: tuple[int, int], begin: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        ranks = range(len(workspace.pointers))
        self.buffers = [workspace.of(rank, shape, k.dtype, begin) for rank in ranks]
        self.keys = _views(self.buffers[workspace.rank][:rows], k, v)
        self.pages = _pages(self.keys)


def _copy(to: torch.Tensor, rows: Rows, source: torch.Tensor, source_rows: Rows) -> None:
    """Range by range, by copy engines; of many ranges, by a kernel that reads and writes rows."""
    if len(rows.ranges) > 4 * MOST_COPIES:
        copy_rows(to, rows.index(to.device), taken(source, source_rows.index(to.device)))
        return
    for (start, stop), (first, last) in zip(rows.ranges, source_rows.ranges, strict=True):
        to[start:stop].copy_(source[first:last])
