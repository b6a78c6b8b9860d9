"""Decode context parallelism: steps whose cache is spread over ranks, and the combination of states of ranks that each
attended to some of the keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from .. import attention, merge_states
from .._attend import checked_calls, latent_parts
from .._core import call_table, checks, hints
from .._core.call_table import Call
from . import _ops, _shards, _symmetric
from ._agreement import Facts, agree, form
from ._peers import Group, Message, Peers, exchange, grid_of, is_capturing, peers_of, wait

COMMS = ("auto", "symmetric", "a2a", "ag_rs")
Combined = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@_ops.traceable(_ops.own_heads)
def dcp_combine(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: Group,
    *,
    comm: str = "auto",
    scatter_heads: bool = True,
    lse_base: float = 2,
    return_lse: bool = False,
) -> Combined:
    r"""Attention over all keys from the states of ranks whose keys are disjoint (Juravsky et al., "Hydragen", 2024):

    .. math::
        o = \sum_r 2^{s_r - s} o_r, \qquad s = \log_2 \sum_r 2^{s_r}

    ===============  ===============================================================================================
    comm             what is sent
    ===============  ===============================================================================================
    ``"symmetric"``  one kernel writes outputs and LSEs into the memory of the rank that owns their heads, waits for
                     the others, and combines: 2 to 16 GPUs of one node, torch 2.8 or newer
    ``"a2a"``        the same by messages; the owner merges in fp32
    ``"ag_rs"``      all LSEs to all ranks; each scales its output, a reduce-scatter adds these in fp32
    ===============  ===============================================================================================

    Args:
        out: this rank's output ``[rows, heads, D]``, or ``[B, n, heads, D]``; where it saw no key, anything.
        lse: its LSE, fp32, shaped as out without D; -inf where it saw no key.
        group: a process group or a ``DeviceMesh`` of one dimension.
        comm: see the table; "auto" is "symmetric" for up to 4 MiB per rank where the group can, else "a2a".
        scatter_heads: whether each rank gets the heads that it owns, ``heads / W`` from ``rank * heads / W`` on. If
            not, all ranks get all heads.
        lse_base: of the LSE, 2 or ``math.e``.
        return_lse: whether to return the combined LSE, too.

    Returns:
        The output over the keys of all ranks, in the dtype of out; with ``return_lse`` the pair of it and its LSE. Rows
        without a key on any rank are 0, their LSE is -inf.

    Raises:
        ValueError: on every rank, where shapes or options differ between ranks, or ranks cannot share the heads.

    Examples:
        >>> out, lse = cutlass_kernels.attention(q, k_here, v_here, return_lse=True)
        >>> dcp_combine(out, lse, group).shape  # [rows, heads / W, D]
    """
    hints.tensors(out=out, lse=lse)
    peers = peers_of(group)
    options = (comm, scatter_heads, lse_base, return_lse)

    def prepare() -> tuple[Facts, None]:
        _shards.check_choice("comm", comm, COMMS)
        _check_states(out, lse, peers.world, scatter_heads)
        call_table.is_natural(lse_base)
        checks.flag("return_lse", return_lse)
        return {"the shape of out": tuple(out.shape), "its dtype": out.dtype, "options": options}, None

    agree(grid_of(group), ("dcp_combine", out.shape, out.dtype, lse.shape, lse.dtype, *options), prepare)
    state = _combine(out, lse if lse_base == 2 else lse * math.log2(math.e), peers, comm, scatter_heads)
    return _result(*state, return_lse, lse_base)


def _result(out: torch.Tensor, lse: torch.Tensor, return_lse: bool, lse_base: float) -> Combined:
    if not return_lse:
        return out
    return out, lse if lse_base == 2 else lse * math.log(2)


def _combine(
    out: torch.Tensor, lse: torch.Tensor, peers: Peers, comm: str, scatter_heads: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The combined state of checked arguments, LSEs in base 2."""
    states, lses = out.flatten(0, -3), lse.flatten(0, -2)
    state = _by_one_kernel(states, lses, peers, comm, scatter_heads)
    if state is None:
        state = (_scaled_sum if comm == "ag_rs" else _merged)(states, lses, peers, scatter_heads)
    combined, total = state
    return combined.view(*out.shape[:-2], *combined.shape[1:]), total.view(*lse.shape[:-1], total.size(-1))


def _check_states(out: torch.Tensor, lse: torch.Tensor, world: int, scatter_heads: bool) -> None:
    if out.dim() < 3 or lse.shape != out.shape[:-1]:
        shapes = f"out has shape {tuple(out.shape)} and lse {tuple(lse.shape)}"
        raise ValueError(f"{shapes}: they must be [..., heads, D] and [..., heads].")
    if lse.dtype != torch.float32:
        raise ValueError(f"lse has dtype {lse.dtype}: it must be float32.")
    if scatter_heads and out.size(-2) % world:
        raise ValueError(f"{world} ranks cannot share {out.size(-2)} heads evenly: pass scatter_heads=False.")


def _by_one_kernel(
    out: torch.Tensor, lse: torch.Tensor, peers: Peers, comm: str, scatter: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """None where another method was asked for, or is better, or nothing else can serve the group."""
    sent = out.numel() * out.element_size() // (peers.world if scatter else 1)
    if comm not in ("auto", "symmetric") or (comm == "auto" and sent > _symmetric.MOST_BYTES):
        return None
    state = _symmetric.combine(out, lse, peers, scatter) if _symmetric.serves(out, peers) else None
    if state is None and comm == "symmetric" and peers.world > 1:
        raise ValueError(
            f"comm='symmetric' needs 2 to {_symmetric.MOST_RANKS} GPUs that reach one another's memory, torch 2.8, and "
            f"out in 16 bits or float32 (it is {out.dtype} on {out.device}): use comm='a2a'."
        )
    return state


def _merged(out: torch.Tensor, lse: torch.Tensor, peers: Peers, scatter: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = lse.shape
    each = heads // peers.world if scatter else heads
    states = out.new_empty(peers.world, rows, each, out.size(2))
    lses = lse.new_empty(peers.world, rows, each)
    sent, received = [], []
    for rank in range(peers.world):
        theirs = slice(rank * each, (rank + 1) * each) if scatter else slice(None)
        if rank == peers.rank:
            states[rank], lses[rank] = out[:, theirs], lse[:, theirs]
            continue
        sent += [Message(rank, x[:, theirs].contiguous()) for x in (out, lse)]
        received += [Message(rank, x[rank]) for x in (states, lses)]
    wait(exchange(peers, sent, received))
    return merge_states(states.transpose(0, 1), lses.transpose(0, 1))


def _scaled_sum(out: torch.Tensor, lse: torch.Tensor, peers: Peers, scatter: bool) -> tuple[torch.Tensor, torch.Tensor]:
    lses = [torch.empty_like(lse) for _ in range(peers.world)]
    dist.all_gather(lses, lse.contiguous(), group=peers.group)
    total = torch.logsumexp(torch.stack(lses) * math.log(2), 0) * math.log2(math.e)
    weight = torch.where(lse == -math.inf, 0.0, torch.exp2(lse - total))[..., None]
    scaled = torch.where(weight == 0, 0.0, out.float() * weight)
    if not scatter:
        dist.all_reduce(scaled, group=peers.group)
        return scaled.to(out.dtype), total
    rows, heads, dim = out.shape
    by_rank = scaled.view(rows, peers.world, heads // peers.world, dim).transpose(0, 1).contiguous()
    mine = torch.empty_like(by_rank[0])
    if dist.get_backend(peers.group) == "gloo":  # has no reduce-scatter
        dist.all_reduce(by_rank, group=peers.group)
        mine = by_rank[peers.rank]
    else:
        dist.reduce_scatter_tensor(mine, by_rank, group=peers.group)
    return mine.to(out.dtype), total.view(rows, peers.world, heads // peers.world)[:, peers.rank]


@_ops.traceable(_ops.like_queries)
def dcp_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    *,
    seqused_k: torch.Tensor | None = None,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_indices_per_token: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_k: torch.Tensor | None = None,
    extra_indices_per_token: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    kv_format: str | None = None,
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

    With ``kv_indices_per_token``, each row sees selected tokens of any rank (sparse attention). A rank passes those of
    its own cache: ``dcp_local_indices()`` makes such lists.

    Args:
        q: this rank's heads of all requests, ``[B, n, Hq / W, D]``, from head ``rank * Hq / W`` on; or, of unequal
            query lengths, ``[rows, Hq / W, D]`` with ``cu_seqlens_q``, or with lists. With ``gather_heads=False`` all
            heads.
        k, v: this rank's cache, ``[pages, P, Hkv, D]`` with ``page_table`` or lists, or ``[B, S, Hkv, D]``; with
            ``kv_layout="HND"`` heads before tokens. All ranks hold the same heads.
        group: a process group or a ``DeviceMesh`` of one dimension.
        seqused_k: int32 ``[B]``: tokens of every request on all ranks together, those of q the last among them.
            Required without lists.
        q_rope, k_rope: the last columns of q and k in latent attention, if they lie in tensors of their own; as of
            ``cutlass_kernels.attention()``. q_rope has the heads of q. With k_rope, v is k.
        cu_seqlens_q, max_seqlen_q: int32 ``[B + 1]``, offsets of requests in rows of q, and a bound of their lengths.
        page_table: int32 ``[B, M]``: pages of this rank's tokens of a request, in order.
        kv_indices_per_token, topk_length, extra_k, extra_indices_per_token, extra_topk_length, kv_format: as of
            ``cutlass_kernels.attention()``; lists are those of this rank. A row may have none here. List a token that
            several ranks store on one of them alone.
        block_size: see above: 1, as many tokens as a page, or any other number. Not with lists.
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

        Latent attention to selected tokens, ``positions`` of shape ``[rows, K]``:

        >>> given = dict(page_table=table, page_size=64, batch_indices=requests)
        >>> lists, counts = dcp_local_indices(positions, rank, world, **given)
        >>> lists = lists.unsqueeze(1)  # [rows, 1, K]
        >>> out = dcp_decode(q, cache, cache[..., :512], group, kv_indices_per_token=lists, topk_length=counts)
    """
    hints.tensors(q=q, k=k, v=v)
    by_lists = kv_indices_per_token is not None
    if not by_lists:
        hints.tensors(seqused_k=seqused_k)
    peers = peers_of(group)
    shard = (peers.world, peers.rank, block_size)
    heads_and_dim = slice(-3, None, 2) if kv_layout == "HND" else slice(-2, None)
    how_stored = (kv_layout, kv_format, page_table is not None, by_lists)
    of_cache = (k.dim(), k.shape[heads_and_dim], v.shape[-1:], _columns(k_rope), _columns(extra_k), how_stored)
    window = tuple(window) if isinstance(window, list) else window
    options = (block_size, gather_heads, comm, window, chunk_size, sm_scale, logits_soft_cap)
    of_result = (return_lse, lse_base)
    call: dict[str, Any] = dict(cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, page_table=page_table, k_rope=k_rope)
    call |= dict(window=window, chunk_size=chunk_size, kv_layout=kv_layout, kv_format=kv_format, extra_k=extra_k)
    call |= dict(kv_indices_per_token=kv_indices_per_token, topk_length=topk_length)
    call |= dict(extra_indices_per_token=extra_indices_per_token, extra_topk_length=extra_topk_length)
    call |= {} if by_lists else dict(causal=True, kv_shard=shard)
    call |= dict(sm_scale=sm_scale, logits_soft_cap=logits_soft_cap, k_descale=k_descale, v_descale=v_descale)
    call |= dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)

    def prepare() -> tuple[Facts, None]:
        _check_step(q, q_rope, cu_seqlens_q, by_lists)
        _shards.check_block_size(block_size)
        if by_lists and block_size != 1:
            raise ValueError(
                f"block_size={block_size} is given with kv_indices_per_token, which lists slots of this rank: pass it "
                "to dcp_local_indices(), which makes such lists."
            )
        _shards.check_choice("comm", comm, COMMS)
        call_table.is_natural(lse_base)
        checks.flag("return_lse", return_lse)
        if not is_capturing():
            ranks, left = peers.world if gather_heads else 1, call_table.window(window)[0]
            rope = None if q_rope is None else _of_all_heads(q_rope, ranks)
            more = dict(q_rope=rope, sinks=sinks, window=(left, -1))
            checked_calls.checked(Call(_of_all_heads(q, ranks), k, v, **(call | more)))
        facts = {
            "the shape of q": tuple(q.shape),
            "q_rope": _columns(q_rope),
            "dtypes": (q.dtype, k.dtype, v.dtype),
            "the cache": of_cache,
            "requests": None if seqused_k is None else seqused_k.numel(),
            "query lengths": (cu_seqlens_q is not None, max_seqlen_q),
            "options": (*options, sinks is not None),
            "the result": of_result,
        }
        return facts, None

    of_queries = (q.shape, q.dtype, form(q_rope), k.dtype, v.dtype)
    requests = (None if seqused_k is None else seqused_k.shape, form(cu_seqlens_q), max_seqlen_q)
    scales = (form(sinks), form(k_descale), form(v_descale))
    agree(grid_of(group), ("dcp_decode", *of_queries, *requests, of_cache, options, scales, of_result), prepare)
    if gather_heads:
        q, q_rope = _gather_heads(latent_parts.whole(q, q_rope), peers, comm), None
    own_sinks = sinks if peers.rank == 0 else None  # count once
    out, lse = attention(q, k, v, q_rope=q_rope, sinks=own_sinks, return_lse=True, backend=backend, **call)
    return _result(*_combine(out, lse, peers, comm, gather_heads), return_lse, lse_base)


def _check_step(
    q: torch.Tensor, q_rope: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None, by_lists: bool
) -> None:
    for name, x in (("q", q), ("q_rope", q_rope)):
        ranks = (3, 4) if by_lists else (4,) if cu_seqlens_q is None else (3,)
        if x is not None and x.dim() not in ranks:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: it must be [B, n, heads, D], or [rows, heads, D] with "
                "cu_seqlens_q or kv_indices_per_token."
            )


def _columns(x: torch.Tensor | None) -> Any:
    """What ranks have in common of q_rope, k_rope or extra_k."""
    return None if x is None else (x.dtype, x.shape[-1:])


def _of_all_heads(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Stands for the queries of so many ranks where arguments are checked. It takes no memory."""
    return x.new_empty(x.size(-1)).expand(*x.shape[:-2], x.size(-2) * ranks, x.size(-1))


def _gather_heads(q: torch.Tensor, peers: Peers, comm: str) -> torch.Tensor:
    rows = q.flatten(0, -3)
    fits = comm == "symmetric" or (comm == "auto" and rows.nbytes <= _symmetric.MOST_BYTES)
    if fits and _symmetric.serves(rows, peers) and (whole := _symmetric.gather_heads(rows, peers)) is not None:
        return whole.view(*q.shape[:-2], *whole.shape[1:])
    q = q.contiguous()
    parts = [q if rank == peers.rank else torch.empty_like(q) for rank in range(peers.world)]
    others = [rank for rank in range(peers.world) if rank != peers.rank]
    wait(exchange(peers, [Message(r, q) for r in others], [Message(r, parts[r]) for r in others]))
    return torch.cat(parts, -2)
