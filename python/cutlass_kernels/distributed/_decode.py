"""Decode steps whose cache is spread over ranks (decode context parallelism)."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import attention
from . import _exchange
from ._combine import Combined, dcp_combine
from ._peers import Group, Message, Peers, exchange, peers_of, wait


def dcp_local_lengths(lengths: torch.Tensor, rank: int, world: int, *, block_size: int = 1) -> torch.Tensor:
    """How many of the first tokens of a request a rank holds, where blocks go round: block i is rank ``i % world``'s.

    Args:
        lengths: tokens, any integer dtype and shape, on any device. Nothing is read back.
        rank, world: a rank, and how many there are.
        block_size: consecutive tokens of a block, as of a page, or 1.

    Returns:
        Tokens of that rank, of the dtype and shape of lengths.

    Example:
        >>> dcp_local_lengths(torch.tensor([9]), 0, 2, block_size=4)  # tokens 0 to 3, and 8
        tensor([5])
    """
    period = world * block_size
    rounds = lengths.div(period, rounding_mode="floor")
    return rounds * block_size + (lengths - rounds * period - rank * block_size).clamp(0, block_size)


def dcp_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    *,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    block_size: int = 1,
    gather_heads: bool = True,
    comm: str = "auto",
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    k_descale: float | torch.Tensor | None = None,
    v_descale: float | torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    lse_base: float = 2,
    backend: str = "auto",
) -> Combined:
    """Causal attention of the last n tokens of every request over a cache whose tokens are spread over ranks.

    Queries are gathered, each rank attends to the keys that it holds, and ``dcp_combine()`` puts the states together.
    Token ``g`` of a request lies on rank ``g // block_size % W``, there behind those of it that stand before.

    Args:
        q: this rank's heads of all requests, ``[B, n, Hq / W, D]``, from head ``rank * Hq / W`` on; with
            ``gather_heads=False`` all heads, ``[B, n, Hq, D]``.
        k, v: this rank's cache, ``[pages, P, Hkv, D]`` with ``page_table``, or ``[B, S, Hkv, D]``; with
            ``kv_layout="HND"`` heads before tokens. All ranks hold the same heads.
        group: a process group or a ``DeviceMesh`` of one dimension.
        seqused_k: int32 ``[B]``: tokens of every request on all ranks together, the n last among them.
        page_table: int32 ``[B, M]``: pages of this rank's tokens of a request, in order.
        block_size: see above: 1, or as many tokens as a page.
        gather_heads: whether q has this rank's heads only; the result has the same heads.
        comm: as of ``dcp_combine()``.
        sinks: fp32 ``[Hq]``, of all heads.
        logits_soft_cap, sm_scale, k_descale, v_descale, return_lse, lse_base, backend: as of
            ``cutlass_kernels.attention()``.
        max_seqlen_k: a bound of this rank's tokens of a request.

    Returns:
        The output, shaped as q with the head dimension of v; with ``return_lse`` the pair of it and the LSE.

    Raises:
        ValueError: shapes that do not fit together; on every rank, where they differ between ranks.

    Example:
        >>> out = dcp_decode(q, k_cache, v_cache, group, page_table=table, seqused_k=lens, block_size=16)
    """
    peers = peers_of(group)
    if q.dim() != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}: it must be [B, n, heads, D].")
    if gather_heads:
        q = _gather_heads(q, peers, comm)
    batch, rows = q.shape[:2]
    # A row sees all tokens up to its own; each is a request, so that its length says which of them this rank holds.
    lens = seqused_k
    if rows > 1:
        lens = (lens[:, None] + torch.arange(1 - rows, 1, dtype=lens.dtype, device=lens.device)).flatten()
        page_table = None if page_table is None else page_table.repeat_interleave(rows, 0)
        k, v = (x if page_table is not None else x.repeat_interleave(rows, 0) for x in (k, v))
    options: dict[str, Any] = dict(
        kv_layout=kv_layout,
        page_table=page_table,
        seqused_k=dcp_local_lengths(lens, peers.rank, peers.world, block_size=block_size),
        max_seqlen_k=max_seqlen_k,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        sinks=sinks if peers.rank == 0 else None,  # counts once
        k_descale=k_descale,
        v_descale=v_descale,
        backend=backend,
    )
    state = attention(q.reshape(batch * rows, 1, *q.shape[2:]), k, v, return_lse=True, **options)
    assert isinstance(state, tuple)
    out, lse = (x.view(batch, rows, *x.shape[2:]) for x in state)
    combined = dcp_combine(out, lse, group, comm=comm, scatter_heads=gather_heads, return_lse=return_lse)
    if lse_base == math.e and isinstance(combined, tuple):
        return combined[0], combined[1] * math.log(2)
    return combined


def _gather_heads(q: torch.Tensor, peers: Peers, comm: str) -> torch.Tensor:
    rows = q.flatten(0, 1)
    fits = comm in ("auto", "symmetric") and _exchange.serves(rows, peers)
    if fits and (whole := _exchange.gather_heads(rows, peers)) is not None:
        return whole.unflatten(0, q.shape[:2])
    q = q.contiguous()
    parts = [q if rank == peers.rank else torch.empty_like(q) for rank in range(peers.world)]
    others = [rank for rank in range(peers.world) if rank != peers.rank]
    wait(exchange(peers, [Message(r, q) for r in others], [Message(r, parts[r]) for r in others]))
    return torch.cat(parts, 2)
