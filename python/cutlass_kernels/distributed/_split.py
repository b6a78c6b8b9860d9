"""Tensors of all tokens, and what a rank holds of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .._core import checks, hints
from .._core.autocast import without_autocast
from . import _plans, _shards
from ._agreement import Facts, agree
from ._peers import Group, Message, Peers, exchange, grid_of, is_capturing, wait
from ._request import plain
from ._rows import Rows


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
    _shards.check_layout(layout, block_size)
    own = _shards.split(layout, lengths, grid.world, block_size)[grid.rank]
    ranges = Rows(_shards.rows_of(own, lengths)).ranges
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
        _shards.check_layout(layout, block_size)
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
        _plans.keep(grid.outer.group, places)
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
    shards = _shards.split(layout, lengths, world, block_size)
    return tuple(Rows(_shards.rows_of(segments, lengths)) for segments in shards)


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
    lengths = _shards.check_lengths("seqlens", seqlens)
    if check and sum(lengths) != tokens:
        raise ValueError(f"seqlens add up to {sum(lengths)} tokens, but x has {tokens}.")
    return lengths
