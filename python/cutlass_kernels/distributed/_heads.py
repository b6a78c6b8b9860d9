"""Exchanges heads for tokens among the ranks of a row (DeepSpeed-Ulysses, Jacobs et al., 2023).

Before attention a rank holds all heads of its own tokens, for attention some heads of the tokens of the whole row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._peers import Message, Peers, exchange, wait
from ._rows import Rows


class HeadShare(NamedTuple):
    """The heads of one rank of a row."""

    q: slice
    kv: slice


class HeadsOfRows(NamedTuple):
    """A tensor ``[rows, heads, ...]``, the heads of every rank, and where its rows stand among those of all ranks."""

    x: torch.Tensor
    heads: list[slice]
    places: list[Rows]


def shares(num_qo_heads: int, num_kv_heads: int, world: int) -> list[HeadShare]:
    """Key heads are repeated where there are fewer than ranks."""
    each, group = num_qo_heads // world, num_qo_heads // num_kv_heads
    begins = range(0, num_qo_heads, each)
    return [HeadShare(slice(i, i + each), slice(i // group, (i + each - 1) // group + 1)) for i in begins]


def fault(num_qo_heads: int, num_kv_heads: int, world: int) -> str | None:
    if num_qo_heads % world or (num_kv_heads % world and world % num_kv_heads):
        return (
            f"{world} ranks cannot share {num_qo_heads} query heads and {num_kv_heads} key heads evenly: "
            "use comm='allgather' or 'ring'."
        )
    return None


def to_heads(peers: Peers, tensors: list[HeadsOfRows]) -> list[torch.Tensor]:
    """Of each tensor this rank's heads of the rows of all ranks."""
    sent, parts, wholes = [], [], []
    for x, heads, places in tensors:
        own = heads[peers.rank]
        wholes.append(x.new_empty(sum(p.count for p in places), own.stop - own.start, *x.shape[2:]))
        for rank, place in enumerate(places):
            if rank == peers.rank:
                place.put(wholes[-1], x[:, own])
            else:
                sent.append(Message(rank, x[:, heads[rank]].contiguous()))
                room = x.new_empty(place.count, *wholes[-1].shape[1:])
                parts.append((wholes[-1], place, Message(rank, room)))
    wait(exchange(peers, sent, [message for _, _, message in parts]))
    for whole, place, (_, room) in parts:
        place.put(whole, room)
    return wholes


def to_tokens(peers: Peers, tensors: list[HeadsOfRows]) -> list[torch.Tensor]:
    """The way back: of each tensor, this rank's heads of all rows, all heads of this rank's rows."""
    sent, parts, results = [], [], []
    for x, heads, places in tensors:
        rows = places[peers.rank].count
        results.append(x.new_empty(rows, heads[-1].stop, *x.shape[2:]))
        for rank, of_rank in enumerate(heads):
            if rank == peers.rank:
                results[-1][:, of_rank] = places[rank].take(x)
            else:
                sent.append(Message(rank, places[rank].take(x).contiguous()))
                room = x.new_empty(rows, of_rank.stop - of_rank.start, *x.shape[2:])
                parts.append((results[-1], of_rank, Message(rank, room)))
    wait(exchange(peers, sent, [message for _, _, message in parts]))
    for result, of_rank, (_, room) in parts:
        result[:, of_rank] = room
    return results
