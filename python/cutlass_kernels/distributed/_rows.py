"""Ranges of rows of a tensor, and index tensors, which are made once for each device.

Rows are views where there is one range, else an index tensor takes and puts them. A captured call finds the index
tensors that a call before it has made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
import torch.distributed as dist

from .._core import native
from ._peers import is_capturing

# Above so many ranges, one indexed copy instead of a copy for each.
MOST_COPIES = 4


class Rows:
    """Rows ``[start, stop)`` of each range, one after another; ranges that touch are one, if they may be merged."""

    def __init__(self, ranges: Iterable[tuple[int, int]], merge: bool = True) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in ranges:
            if merge and merged and merged[-1][1] == start:
                merged[-1] = merged[-1][0], stop
            elif start < stop:
                merged.append((start, stop))
        self.ranges = tuple(merged)
        self.count = sum(stop - start for start, stop in merged)
        self._index: dict[torch.device, torch.Tensor] = {}

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """These rows of x; a view where there is one range."""
        if len(self.ranges) == 1:
            return x[slice(*self.ranges[0])]
        return taken(x, self.index(x.device)) if self.ranges else x[:0]

    def put(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes these rows of x."""
        if len(self.ranges) > MOST_COPIES:
            copy_rows(x, self.index(x.device), rows)
            return
        at = 0
        for start, stop in self.ranges:
            x[start:stop] = rows[at : at + stop - start]
            at += stop - start

    def index(self, device: torch.device) -> torch.Tensor:
        """int64 ``[count]``."""
        if device not in self._index:
            self._index[device] = kept_on(device, numbers_of(self.ranges))
        return self._index[device]


def numbers_of(ranges: Iterable[tuple[int, int]]) -> torch.Tensor:
    """int64 ``[count]``, on the host."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(start, stop) for start, stop in ranges)])


def copy_rows(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """``x[index] = rows``. torch copies no rows of fp8, but their bytes."""
    if x.element_size() == 1:
        x, rows = x.view(torch.uint8), rows.view(torch.uint8)
    x.index_copy_(0, index, rows)


def taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x[index]``, of fp8 too."""
    if x.element_size() == 1:
        return x.view(torch.uint8).index_select(0, index).view(x.dtype)
    return x.index_select(0, index)


# --- index tensors of a plan ---

Numbers = Sequence[int] | torch.Tensor


class Indices:
    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, torch.device], list[torch.Tensor]] = {}

    def get(
        self,
        name: Hashable,
        device: torch.device,
        make: Callable[[], Sequence[Numbers]],
        dtype: torch.dtype = torch.int32,
    ) -> list[torch.Tensor]:
        """The vectors of this name on a device; ``make()`` gives their numbers."""
        key = (name, device)
        if key not in self._kept:
            self._kept[key] = [kept_on(device, torch.as_tensor(numbers, dtype=dtype)) for numbers in make()]
        return self._kept[key]


def kept_on(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """A copy outside of the memory pools of compiled graphs."""
    if device.type == "cuda" and is_capturing():
        raise RuntimeError("The first call with its lengths makes index vectors: make it before capturing a graph.")
    made = native.kept_empty(x.shape, x.dtype, device).copy_(x)
    if made.is_cuda:  # allocated on the default stream
        made.record_stream(torch.cuda.current_stream(device))
    return made


# Of each group, plans and rows whose index tensors a captured graph refers to.
_captured: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Hashable]] = weakref.WeakKeyDictionary()


def keep(group: dist.ProcessGroup, used: Hashable) -> None:
    """A graph is captured with it: it stays for the life of the group."""
    _captured.setdefault(group, set()).add(used)
