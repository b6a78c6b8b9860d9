"""What a call of ``cp_prefill`` asks for, checked without communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import _args
from . import _heads, _shards
from ._gather_plan import Mask
from ._peers import Grid, Peers
from ._plans import Kind

COMMS = ("auto", "allgather", "ring", "ulysses", "hybrid")


class Roles(NamedTuple):
    """Ranks that gather keys, and ranks that exchange heads; None where there is but this one."""

    outer: Peers | None
    inner: Peers | None


def roles(grid: Grid, comm: str) -> Roles:
    if comm not in COMMS:
        raise ValueError(f"comm={comm!r} is not one of {', '.join(map(repr, COMMS))}.")
    if grid.inner is not None:
        if comm == "ulysses":
            raise ValueError("comm='ulysses' with a mesh of 2 dimensions: use 'hybrid', or a mesh of one.")
        return Roles(grid.outer, grid.inner)
    if comm == "hybrid":
        raise ValueError("comm='hybrid' needs a DeviceMesh of 2 dimensions: (nodes, ranks of a node).")
    return Roles(None, grid.outer) if comm == "ulysses" else Roles(grid.outer, None)


class Lengths(NamedTuple):
    q: tuple[int, ...]
    kv: tuple[int, ...]


def lengths(
    q: torch.Tensor,
    world: int,
    seqlens: Sequence[int] | torch.Tensor | None,
    kv_seqlens: Sequence[int] | torch.Tensor | None,
) -> Lengths:
    q_lens = (q.size(0) * world,) if seqlens is None else _shards.check_lengths("seqlens", seqlens)
    kv_lens = q_lens if kv_seqlens is None else _shards.check_lengths("kv_seqlens", kv_seqlens)
    if len(kv_lens) != len(q_lens):
        raise ValueError(
            f"kv_seqlens has {len(kv_lens)} requests and seqlens {len(q_lens)}: they must be the same ones."
        )
    return Lengths(q_lens, kv_lens)


def mask_of(causal: bool, window: tuple[int, int], chunk_size: int) -> Mask:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window={window!r} must be (left, right), -1 being no limit.")
    if chunk_size and not causal:
        raise ValueError(f"chunk_size={chunk_size} needs causal=True here.")
    left, right = (n if n >= 0 else -1 for n in window)
    return Mask(left, 0 if causal else right, chunk_size)


def check_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kind: Kind,
    rank: int,
    page_table: torch.Tensor | None,
    kv_layout: str,
) -> int:
    """Checks the tensors of this rank, and returns the number of KV heads."""
    paged = page_table is not None
    _args.kv_layout(kv_layout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        dims = 4 if paged and name != "q" else 3
        if x.dim() != dims:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must have {dims} dimensions.")
    q_rows, kv_rows = (
        _shards.count(_shards.split(kind.layout, n, kind.world, kind.block_size)[rank])
        for n in (kind.q_lens, kind.kv_lens)
    )
    if q.size(0) != q_rows:
        raise ValueError(
            f"q has {q.size(0)} rows, but rank {rank} of {kind.world} holds {q_rows} of seqlens={_told(kind.q_lens)} "
            f"in layout={kind.layout!r}: see cp_split()."
        )
    if not paged:
        for name, x in (("k", k), ("v", v)):
            if x.size(0) != kv_rows:
                raise ValueError(
                    f"{name} has {x.size(0)} keys, but rank {rank} of {kind.world} holds {kv_rows} of "
                    f"{_told(kind.kv_lens)} in layout={kind.layout!r}: see cp_split()."
                )
    heads_dim = 2 if paged and kv_layout == "NHD" else 1
    num_kv_heads = k.size(heads_dim)
    if num_kv_heads != v.size(heads_dim) or num_kv_heads == 0 or q.size(1) % num_kv_heads:
        raise ValueError(
            f"q has {q.size(1)} heads, k {num_kv_heads} and v {v.size(heads_dim)}: the last two must divide the first."
        )
    if page_table is not None:
        _check_pages(page_table, k.size(3 - heads_dim), kind, rank)
    if k.dtype != v.dtype or k.device != q.device or v.device != q.device:
        raise ValueError(
            f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}: k and v must have "
            "one dtype, and all one device."
        )
    return num_kv_heads


def _check_pages(page_table: torch.Tensor, page_size: int, kind: Kind, rank: int) -> None:
    requests = len(kind.kv_lens)
    most = max(
        (_shards.count(_shards.split(kind.layout, (n,), kind.world, kind.block_size)[rank]) for n in set(kind.kv_lens)),
        default=0,
    )
    if page_table.dim() != 2 or page_table.size(0) != requests or page_table.size(1) * page_size < most:
        raise ValueError(
            f"page_table has shape {tuple(page_table.shape)}: it must be [{requests}, pages of a request], "
            f"{-(-most // page_size)} or more for the {most} keys of a request that rank {rank} holds, in pages of "
            f"{page_size} tokens."
        )


def check_comm(num_qo_heads: int, num_kv_heads: int, kind: Kind, comm: str) -> None:
    fault = _heads.fault(num_qo_heads, num_kv_heads, kind.inner) if kind.inner > 1 else None
    if comm == "ring":
        if kind.q_lens != kind.kv_lens:
            fault = "comm='ring' needs as many keys as rows in every request: use comm='allgather'."
        elif kind.mask not in (Mask(), Mask(right=0)):
            fault = "comm='ring' serves causal masks and none: use comm='allgather', which sends a halo of a window."
    if fault is not None:
        raise ValueError(fault)


def check_base(lse_base: float) -> None:
    if lse_base not in (2, math.e):
        raise ValueError(f"lse_base={lse_base} is not served: use 2, or math.e for the natural logarithm.")


def _told(numbers: tuple[int, ...]) -> str:
    return str(list(numbers)) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:8]))}, ...]"
