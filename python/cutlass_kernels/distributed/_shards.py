"""Which tokens of a request a rank holds, and tensors of all tokens: what a rank has of them, and the way back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._core import checks, hints
from .._core.autograd import without_autocast
from ._agreement import Facts, agree
from ._peers import Group, Message, Peers, exchange, grid_of, is_capturing, wait
from ._rows import Rows, keep, numbers_of

LAYOUTS = ("zigzag", "contiguous", "interleaved")


class Segment(NamedTuple):
    """Tokens ``[start, stop)`` of a request, consecutive in the storage of a rank."""

    request: int
    start: int
    stop: int


# Of a rank, in the order in which it stores them: by request, then by position.
Segments = tuple[Segment, ...]


def joined(segments: Iterable[Segment]) -> Segments:
    """Those that touch or overlap are one; they ascend."""
    found: list[Segment] = []
    for segment in segments:
        last = found[-1] if found else None
        if last is not None and last.request == segment.request and segment.start <= last.stop:
            found[-1] = last._replace(stop=max(last.stop, segment.stop))
        else:
            found.append(segment)
    return tuple(found)


@functools.lru_cache(256)
def split(layout: str, lengths: tuple[int, ...], world: int, block_size: int) -> tuple[Segments, ...]:
    """The segments of every rank. Those of a rank that touch are one."""
    shards: list[list[Segment]] = [[] for _ in range(world)]
    for request, length in enumerate(lengths):
        for rank, start, stop in _spans(layout, length, world, block_size):
            if start < stop:
                shards[rank].append(Segment(request, start, stop))
    return tuple(map(joined, shards))


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


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.")


def check_block_size(block_size: int) -> None:
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size={block_size!r} must be a positive number of tokens.")


def check_layout(layout: str, block_size: int) -> None:
    check_choice("layout", layout, LAYOUTS)
    check_block_size(block_size)


def plain(lengths: Sequence[int] | torch.Tensor | None) -> Any:
    """Lengths that can be compared: a tuple, where they are a list or a tensor of the host."""
    if isinstance(lengths, torch.Tensor) and not lengths.is_cuda:
        lengths = lengths.tolist()
    return tuple(lengths) if isinstance(lengths, list) else lengths


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
    return numbers_of((s.start, s.stop) for s in mine).to(device)


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
    return numbers_of(rows_of(mine, tuple(lengths))).to(device)


def rows_of(segments: Segments, lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Segments as ranges of rows where all requests follow one another."""
    begins = [0, *itertools.accumulate(lengths)]
    return [(begins[s.request] + s.start, begins[s.request] + s.stop) for s in segments]


def _checked(lengths: Sequence[int], rank: int, world: int, layout: str, block_size: int) -> Segments:
    check_layout(layout, block_size)
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} is not one of the {world} ranks from 0 on.")
    return split(layout, check_lengths("lengths", lengths), world, block_size)[rank]


# --- tensors of all tokens ---


@without_autocast
def cp_split(
    x: torch.Tensor,
    group: Group,
    *,
    seqlens: Sequence[int] | torch.Tensor | None = None,
    layout: str = "zigzag",
    block_size: int = 256,
    dim: int = 0,
) -> torch.Tensor:
    """This rank's part of a tensor that every rank has whole. Sends nothing.

    Args:
        x: all tokens along ``dim``, requests one after another.
        group: as of ``cp_prefill()``.
        seqlens: tokens of every request; None: one request.
        layout, block_size: as of ``cp_prefill()``.

    Returns:
        This rank's tokens; a view where they are consecutive.

    Raises:
        ValueError: ``seqlens`` do not add up to the tokens of x, or an unknown layout.

    Examples:
        >>> hidden = cp_split(hidden, group)  # [tokens, hidden] -> [tokens / W, hidden]
    """
    _check(x, dim)
    grid = grid_of(group)
    lengths = _lengths(x.size(dim), seqlens)
    check_layout(layout, block_size)
    own = split(layout, lengths, grid.world, block_size)[grid.rank]
    ranges = Rows(rows_of(own, lengths)).ranges
    if len(ranges) == 1:
        return x.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0])
    parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def _check(x: torch.Tensor, dim: int) -> None:
    hints.tensors(x=x)
    if not -x.dim() <= checks.integer("dim", dim) < x.dim():
        raise ValueError(f"dim={dim} is no dimension of x, which has shape {tuple(x.shape)}.")


@without_autocast
def cp_restore(
    x: torch.Tensor,
    group: Group,
    *,
    seqlens: Sequence[int] | torch.Tensor | None = None,
    layout: str = "zigzag",
    block_size: int = 256,
    dim: int = 0,
) -> torch.Tensor:
    """The inverse of ``cp_split()``: gathers the parts of all ranks, on every rank.

    Args:
        x: this rank's tokens along ``dim``.
        group, seqlens, layout, block_size: as given to ``cp_split()``; without ``seqlens``, one request of as many
            tokens on every rank.

    Returns:
        All tokens, requests one after another.

    Raises:
        ValueError: x has another number of tokens than this rank holds, or an unknown layout; on every rank, where they
            differ between ranks.

    Examples:
        >>> hidden = cp_restore(hidden, group)  # [tokens / W, hidden] -> [tokens, hidden]
    """
    _check(x, dim)
    grid = grid_of(group)
    seqlens = plain(seqlens)

    def prepare() -> tuple[Facts, tuple[int, ...]]:
        check_layout(layout, block_size)
        lengths = _lengths(x.size(dim) * grid.world, seqlens, check=False)
        count = _places(layout, lengths, grid.world, block_size)[grid.rank].count
        if x.size(dim) != count:
            raise ValueError(f"x has {x.size(dim)} tokens, but rank {grid.rank} holds {count} of {lengths}.")
        of_token = tuple(x.movedim(dim, 0).shape[1:])
        facts = {"seqlens": lengths, "layout": (layout, block_size), "the shape of a token": of_token}
        return {**facts, "dtypes": x.dtype}, lengths

    kind = (x.shape, x.dtype, seqlens, layout, block_size, dim)
    lengths = agree(grid, ("cp_restore", *kind), prepare)
    places = _places(layout, lengths, grid.world, block_size)
    if is_capturing():
        keep(grid.outer.group, places)
    mine = x.movedim(dim, 0).contiguous()
    whole = mine.new_empty(sum(lengths), *mine.shape[1:])
    held = {grid.rank: mine}
    if grid.inner is not None:
        _gather_from(grid.inner, 1, held, places)
    _gather_from(grid.outer, 1 if grid.inner is None else grid.inner.world, held, places)
    for rank, part in held.items():
        places[rank].put(whole, part)
    return whole.movedim(0, dim)


@functools.lru_cache(64)
def _places(layout: str, lengths: tuple[int, ...], world: int, block_size: int) -> tuple[Rows, ...]:
    """Where the tokens of each rank stand among all of them."""
    shards = split(layout, lengths, world, block_size)
    return tuple(Rows(rows_of(segments, lengths)) for segments in shards)


def _gather_from(peers: Peers, distance: int, held: dict[int, torch.Tensor], places: tuple[Rows, ...]) -> None:
    """What the others hold: as much as this rank, ``distance`` ranks further on with each step in the group."""
    sent, received = [], {}
    for peer in (p for p in range(peers.world) if p != peers.rank):
        for rank, part in sorted(held.items()):
            sent.append(Message(peer, part))
            other = rank + (peer - peers.rank) * distance
            received[other] = Message(peer, part.new_empty(places[other].count, *part.shape[1:]))
    wait(exchange(peers, sent, list(received.values())))
    held.update({rank: message.tensor for rank, message in received.items()})


def _lengths(tokens: int, seqlens: Sequence[int] | torch.Tensor | None, check: bool = True) -> tuple[int, ...]:
    if seqlens is None:
        return (tokens,)
    lengths = check_lengths("seqlens", seqlens)
    if check and sum(lengths) != tokens:
        raise ValueError(f"seqlens add up to {sum(lengths)} tokens, but x has {tokens}.")
    return lengths
