"""What a call of ``cp_prefill`` asks for, checked without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._attend import checked_calls
from .._core import call_table, checks
from .._core.call_table import Call
from . import _heads, _shards
from ._peers import Grid, Peers
from ._plans import Kind, Mask

COMMS = ("auto", "allgather", "ring", "ulysses", "hybrid")


class Roles(NamedTuple):
    """Ranks that gather keys, and ranks that exchange heads; None where there is but this one."""

    outer: Peers | None
    inner: Peers | None


def roles(grid: Grid, comm: str) -> Roles:
    _shards.check_choice("comm", comm, COMMS)
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


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid: Grid,
    comm: str,
    layout: str,
    block_size: int,
    seqlens: Sequence[int] | torch.Tensor | None,
    kv_seqlens: Sequence[int] | torch.Tensor | None,
    page_table: torch.Tensor | None,
    kv_layout: str,
) -> tuple[Kind, int]:
    """Checks the tensors of this rank. Returns what decides the plan, but for the mask, and the number of KV heads."""
    paged = page_table is not None
    checks.kv_layout(kv_layout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        dims = 4 if paged and name != "q" else 3
        if x.dim() != dims:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must have {dims} dimensions.")
    outer, inner = (1 if peers is None else peers.world for peers in roles(grid, comm))
    _shards.check_layout(layout, block_size)
    kind = Kind(layout, block_size, *lengths(q, grid.world, seqlens, kv_seqlens), Mask(), outer, inner)
    told = f"rank {grid.rank} of {grid.world} holds"
    q_rows, kv_rows = (_rows(kind, lens, grid.rank) for lens in (kind.q_lens, kind.kv_lens))
    if q.size(0) != q_rows:
        raise ValueError(
            f"q has {q.size(0)} rows, but {told} {q_rows} of seqlens={_told(kind.q_lens)} in layout={layout!r}: "
            "see cp_split()."
        )
    for name, x in (("k", k), ("v", v)):
        if not paged and x.size(0) != kv_rows:
            raise ValueError(
                f"{name} has {x.size(0)} keys, but {told} {kv_rows} of {_told(kind.kv_lens)} in layout={layout!r}: "
                "see cp_split()."
            )
    heads_dim = 2 if paged and kv_layout == "NHD" else 1
    num_kv_heads = k.size(heads_dim)
    if num_kv_heads != v.size(heads_dim) or num_kv_heads == 0 or q.size(1) % num_kv_heads:
        raise ValueError(
            f"q has {q.size(1)} heads, k {num_kv_heads} and v {v.size(heads_dim)}: the last two must divide the first."
        )
    if page_table is not None:
        check_pages(k, page_table, kv_layout, kind, grid.rank)
    if k.dtype != v.dtype or k.device != q.device or v.device != q.device:
        raise ValueError(
            f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}: k and v must have "
            "one dtype, and all one device."
        )
    return kind, num_kv_heads


def _rows(kind: Kind, lens: tuple[int, ...], rank: int) -> int:
    return _shards.count(kind.shards(lens)[rank])


def check_pages(k: torch.Tensor, page_table: torch.Tensor, kv_layout: str, kind: Kind, rank: int) -> None:
    """Of every call: kernels read where the table says."""
    requests, page_size = len(kind.kv_lens), k.size(1 if kv_layout == "NHD" else 2)
    most = max((_rows(kind, (n,), rank) for n in set(kind.kv_lens)), default=0)
    if page_table.dim() != 2 or page_table.size(0) != requests or page_table.size(1) * page_size < most:
        raise ValueError(
            f"page_table has shape {tuple(page_table.shape)}: it must be [{requests}, pages of a request], "
            f"{-(-most // page_size)} or more for the {most} keys of a request that rank {rank} holds, in pages of "
            f"{page_size} tokens."
        )


def check_options(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    requests: int,
    page_table: torch.Tensor | None,
    kv_layout: str,
    options: dict[str, Any],
) -> None:
    """Checks the other arguments as ``attention()`` does, with the rows and keys of this rank."""
    lse_base = options.pop("lse_base")
    call_table.is_natural(lse_base)
    offsets = torch.zeros(requests + 1, dtype=torch.int32)
    if page_table is None:
        options["cu_seqlens_k"] = offsets
    else:
        options |= dict(page_table=page_table, kv_layout=kv_layout, seqused_k=offsets[:-1])
    checked_calls.checked(Call(q, k, v, cu_seqlens_q=offsets, **options))


def check_comm(num_qo_heads: int, num_kv_heads: int, kind: Kind, comm: str) -> None:
    fault = _heads.fault(num_qo_heads, num_kv_heads, kind.inner) if kind.inner > 1 else None
    if comm == "ring":
        if kind.q_lens != kind.kv_lens:
            fault = "comm='ring' needs as many keys as rows in every request: use comm='allgather'."
        elif kind.mask not in (Mask(), Mask(right=0)):
            fault = "comm='ring' serves causal masks and none: use comm='allgather', which sends a halo of a window."
    if fault is not None:
        raise ValueError(fault)


def _told(numbers: tuple[int, ...]) -> str:
    return str(list(numbers)) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:8]))}, ...]"
