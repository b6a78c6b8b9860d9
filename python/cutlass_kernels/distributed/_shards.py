"""Which tokens of a request a rank holds: layouts, and what follows from them alone, without communication."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

LAYOUTS = ("zigzag", "contiguous", "interleaved")


class Segment(NamedTuple):
    """Tokens ``[start, stop)`` of a request, consecutive in the storage of a rank."""

    request: int
    start: int
    stop: int


# Of a rank, in the order in which it stores them: by request, then by position.
Segments = tuple[Segment, ...]


@functools.lru_cache(256)
def split(layout: str, lengths: tuple[int, ...], world: int, block_size: int) -> tuple[Segments, ...]:
    """The segments of every rank. Those of a rank that touch are one."""
    shards: list[list[Segment]] = [[] for _ in range(world)]
    for request, length in enumerate(lengths):
        for rank, start, stop in _spans(layout, length, world, block_size):
            last = shards[rank][-1] if shards[rank] else None
            if last is not None and last.request == request and last.stop == start:
                shards[rank][-1] = last._replace(stop=stop)
            elif start < stop:
                shards[rank].append(Segment(request, start, stop))
    return tuple(map(tuple, shards))


def _spans(layout: str, length: int, world: int, block_size: int) -> list[tuple[int, int, int]]:
    """``(rank, start, stop)`` in ascending order; some may be empty."""
    if layout == "interleaved":
        starts = range(0, length, block_size)
        return [(i % world, start, min(start + block_size, length)) for i, start in enumerate(starts)]
    count = 2 * world if layout == "zigzag" else world
    bounds = [i * length // count for i in range(count + 1)]
    return [(min(i, 2 * world - 1 - i), bounds[i], bounds[i + 1]) for i in range(count)]


def count(segments: Segments) -> int:
    """Tokens in segments."""
    return sum(s.stop - s.start for s in segments)


def check_layout(layout: str, block_size: int) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(map(repr, LAYOUTS))}.")
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size={block_size!r} must be a positive number of tokens.")


def check_lengths(name: str, lengths: Sequence[int] | torch.Tensor) -> tuple[int, ...]:
    if isinstance(lengths, torch.Tensor):
        if lengths.is_cuda:
            raise ValueError(f"{name} is on {lengths.device}: transfers are planned on the host, pass numbers.")
        lengths = lengths.tolist()
    if not isinstance(lengths, Sequence) or any(not isinstance(n, int) or n < 0 for n in lengths):
        raise ValueError(f"{name}={lengths!r} must be the length of every request, a sequence of numbers >= 0.")
    return tuple(lengths)


def positions(
    lengths: Sequence[int],
    rank: int,
    world: int,
    *,
    layout: str = "zigzag",
    block_size: int = 256,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Positions of this rank's tokens, for rotary embeddings: int64 ``[rows]``, each counted in its request.

    Args:
        lengths: tokens of every request.
        rank, world: this rank, and how many there are.
        layout, block_size: as of ``cp_split()``.
        device: of the result.

    Raises:
        ValueError: an unknown layout, a rank outside the world, a negative length.

    Examples:
        >>> cp_positions([8], 0, 2)
        tensor([0, 1, 6, 7])
    """
    mine = _checked(lengths, rank, world, layout, block_size)
    return _ranges([(s.start, s.stop) for s in mine], device)


def indices(
    lengths: Sequence[int],
    rank: int,
    world: int,
    *,
    layout: str = "zigzag",
    block_size: int = 256,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Rows of this rank's tokens in the tensor of all tokens, requests one after another: int64 ``[rows]``.

    Arguments, errors and order are those of ``cp_positions()``.

    Examples:
        >>> cp_indices([4, 8], 1, 2)
        tensor([ 1,  2,  6,  7,  8,  9])
    """
    mine = _checked(lengths, rank, world, layout, block_size)
    return _ranges(rows_of(mine, tuple(lengths)), device)


def rows_of(segments: Segments, lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Segments as ranges of rows where all requests follow one another."""
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length)
    return [(begins[s.request] + s.start, begins[s.request] + s.stop) for s in segments]


def _checked(lengths: Sequence[int], rank: int, world: int, layout: str, block_size: int) -> Segments:
    check_layout(layout, block_size)
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} is not one of the {world} ranks from 0 on.")
    return split(layout, check_lengths("lengths", lengths), world, block_size)[rank]


def _ranges(ranges: list[tuple[int, int]], device: torch.device | str | None) -> torch.Tensor:
    parts = [torch.arange(start, stop) for start, stop in ranges]
    return torch.cat(parts or [torch.empty(0, dtype=torch.int64)]).to(device)
