"""Decode steps whose cache is spread over ranks (decode context parallelism)."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import attention
from .._attend import checked_calls, latent_parts
from .._core import call_table, checks, hints
from .._core.call_table import Call
from . import _exchange, _ops, _request
from ._agreement import Facts, agree, form
from ._combine import COMMS, Combined, combine
from ._peers import Group, Message, Peers, exchange, grid_of, is_capturing, peers_of, wait


def dcp_local_lengths(
    lengths: torch.Tensor, rank: int | torch.Tensor, world: int, *, block_size: int = 1
) -> torch.Tensor:
    """Number of a request's first ``lengths`` tokens that a rank stores, if block i is on rank ``i % world``.

    Args:
        lengths: tokens, any integer dtype and shape, on any device. Nothing is read back.
        rank, world: a rank, or a tensor of ranks, and how many there are.
        block_size: consecutive tokens of a block, as of a page, or 1.

    Returns:
        Tokens of that rank, of the dtype and shape of lengths; 0 of negative lengths.

    Raises:
        TypeError: lengths that are no integers.

    Examples:
        >>> dcp_local_lengths(torch.tensor([9]), 0, 2, block_size=4)  # tokens 0 to 3, and 8
        tensor([5])
    """
    hints.tensors(lengths=lengths)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths have dtype {lengths.dtype}: they are integers.")
    period, lengths = world * block_size, lengths.clamp(min=0)
    rounds = lengths.div(period, rounding_mode="floor")
    return rounds * block_size + (lengths - rounds * period - rank * block_size).clamp(0, block_size)


@_ops.traceable(_ops.like_queries)
def dcp_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    *,
    seqused_k: torch.Tensor,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    block_size: int = 1,
    gather_heads: bool = True,
    comm: str = "auto",
    window: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
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
    """Causal attention of the last tokens of every request over a cache whose tokens are spread over ranks.

    Queries are gathered, each rank attends to the keys that it holds, and ``dcp_combine()`` combines the partial
    results. Token ``g`` of a request lies on rank ``g // block_size % W``. A rank stores its tokens in order of
    position.

    Args:
        q: this rank's heads of all requests, ``[B, n, Hq / W, D]``, from head ``rank * Hq / W`` on; or, of unequal
            query lengths, ``[rows, Hq / W, D]`` with ``cu_seqlens_q``. With ``gather_heads=False`` all heads.
        k, v: this rank's cache, ``[pages, P, Hkv, D]`` with ``page_table``, or ``[B, S, Hkv, D]``; with
            ``kv_layout="HND"`` heads before tokens. All ranks hold the same heads.
        group: a process group or a ``DeviceMesh`` of one dimension.
        seqused_k: int32 ``[B]``: tokens of every request on all ranks together, those of q the last among them.
        q_rope, k_rope: the last columns of q and k in latent attention, if they lie in tensors of their own; as of
            ``cutlass_kernels.attention()``. q_rope has the heads of q. With k_rope, v is k.
        cu_seqlens_q, max_seqlen_q: int32 ``[B + 1]``, offsets of requests in rows of q, and a bound of their lengths.
        page_table: int32 ``[B, M]``: pages of this rank's tokens of a request, in order.
        block_size: see above: 1, as many tokens as a page, or any other number.
        gather_heads: whether q has this rank's heads only; the result has the same heads.
        comm: as of ``dcp_combine()``.
        sinks: fp32 ``[Hq]``, of all heads.
        window, chunk_size, logits_soft_cap, sm_scale, k_descale, v_descale, return_lse, lse_base, backend: as of
            ``cutlass_kernels.attention()``.
        max_seqlen_k: a bound of this rank's tokens of a request.

    Returns:
        The output, shaped as q with the head dimension of v; with ``return_lse`` the pair of it and the LSE.

    Raises:
        ValueError: shapes that do not fit together; on every rank, where they differ between ranks.

    Examples:
        >>> out = dcp_decode(q, k_cache, v_cache, group, page_table=table, seqused_k=lens, block_size=16)
    """
    hints.tensors(q=q, k=k, v=v, seqused_k=seqused_k)
    peers = peers_of(group)
    shard = (peers.world, peers.rank, block_size)
    heads_and_dim = slice(-3, None, 2) if kv_layout == "HND" else slice(-2, None)
    of_cache = (k.dim(), k.shape[heads_and_dim], v.shape[-1:], _columns(k_rope), kv_layout, page_table is not None)
    window = tuple(window) if isinstance(window, list) else window
    options = (block_size, gather_heads, comm, window, chunk_size, sm_scale, logits_soft_cap)
    of_result = (return_lse, lse_base)

    def prepare() -> tuple[Facts, None]:
        _check(q, q_rope, cu_seqlens_q, block_size, comm, lse_base)
        checks.flag("return_lse", return_lse)
        if not is_capturing():
            ranks = peers.world if gather_heads else 1
            call: dict[str, Any] = dict(cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, page_table=page_table)
            call |= dict(window=(call_table.window(window)[0], -1), chunk_size=chunk_size, kv_layout=kv_layout)
            call |= dict(sm_scale=sm_scale, sinks=sinks, k_descale=k_descale, v_descale=v_descale, kv_shard=shard)
            call |= dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, logits_soft_cap=logits_soft_cap)
            call |= dict(q_rope=None if q_rope is None else _of_all_heads(q_rope, ranks), k_rope=k_rope)
            checked_calls.checked(Call(_of_all_heads(q, ranks), k, v, causal=True, **call))
        facts = {
            "the shape of q": tuple(q.shape),
            "q_rope": _columns(q_rope),
            "dtypes": (q.dtype, k.dtype, v.dtype),
            "the cache": of_cache,
            "requests": seqused_k.numel(),
            "query lengths": (cu_seqlens_q is not None, max_seqlen_q),
            "options": (*options, sinks is not None),
            "the result": of_result,
        }
        return facts, None

    of_queries = (q.shape, q.dtype, form(q_rope), k.dtype, v.dtype)
    requests = (seqused_k.shape, form(cu_seqlens_q), max_seqlen_q)
    scales = (form(sinks), form(k_descale), form(v_descale))
    agree(grid_of(group), ("dcp_decode", *of_queries, *requests, of_cache, options, scales, of_result), prepare)
    if gather_heads:
        q, q_rope = _gather_heads(latent_parts.whole(q, q_rope), peers, comm), None
    state = attention(
        q,
        k,
        v,
        q_rope=q_rope,
        k_rope=k_rope,
        kv_layout=kv_layout,
        page_table=page_table,
        seqused_k=seqused_k,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        kv_shard=shard,
        max_seqlen_k=max_seqlen_k,
        causal=True,
        window=window,
        chunk_size=chunk_size,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        sinks=sinks if peers.rank == 0 else None,  # counts once
        k_descale=k_descale,
        v_descale=v_descale,
        return_lse=True,
        backend=backend,
    )
    out, lse = combine(*state, peers, comm, gather_heads)
    if not return_lse:
        return out
    return out, lse if lse_base == 2 else lse * math.log(2)


def _check(
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    block_size: int,
    comm: str,
    lse_base: float,
) -> None:
    for name, x in (("q", q), ("q_rope", q_rope)):
        if x is not None and x.dim() != (4 if cu_seqlens_q is None else 3):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: it must be [B, n, heads, D], or [rows, heads, D] with "
                "cu_seqlens_q."
            )
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size={block_size!r} must be a positive number of tokens.")
    if comm not in COMMS:
        raise ValueError(f"comm={comm!r} is not one of {', '.join(map(repr, COMMS))}.")
    _request.check_base(lse_base)


def _columns(rope: torch.Tensor | None) -> Any:
    """What ranks have in common of q_rope or k_rope."""
    return None if rope is None else (rope.dtype, rope.shape[-1:])


def _of_all_heads(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Stands for the queries of so many ranks where arguments are checked. It takes no memory."""
    return x.new_empty(x.size(-1)).expand(*x.shape[:-2], x.size(-2) * ranks, x.size(-1))


def _gather_heads(q: torch.Tensor, peers: Peers, comm: str) -> torch.Tensor:
    rows = q.flatten(0, -3)
    fits = comm == "symmetric" or (comm == "auto" and rows.nbytes <= _exchange.MOST_BYTES)
    if fits and _exchange.serves(rows, peers) and (whole := _exchange.gather_heads(rows, peers)) is not None:
        return whole.view(*q.shape[:-2], *whole.shape[1:])
    q = q.contiguous()
    parts = [q if rank == peers.rank else torch.empty_like(q) for rank in range(peers.world)]
    others = [rank for rank in range(peers.world) if rank != peers.rank]
    wait(exchange(peers, [Message(r, q) for r in others], [Message(r, parts[r]) for r in others]))
    return torch.cat(parts, -2)
