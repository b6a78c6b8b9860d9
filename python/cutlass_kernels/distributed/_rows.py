"""Ranges of rows of a tensor: views where there is one range, else index tensors that are kept for each device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ._indices import kept_on

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
            parts = [torch.arange(start, stop) for start, stop in self.ranges]
            self._index[device] = kept_on(device, torch.cat(parts or [torch.empty(0, dtype=torch.int64)]))
        return self._index[device]


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
