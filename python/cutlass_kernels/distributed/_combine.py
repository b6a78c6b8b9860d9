"""Combines the states of ranks that each attended to some of the keys."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from .. import merge_states
from .._core import checks, hints
from . import _exchange, _ops, _request
from ._agreement import Facts, agree
from ._peers import Group, Message, Peers, exchange, grid_of, peers_of, wait

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
        _check(out, lse, peers.world, comm, scatter_heads, lse_base)
        checks.flag("return_lse", return_lse)
        return {"the shape of out": tuple(out.shape), "its dtype": out.dtype, "options": options}, None

    agree(grid_of(group), ("dcp_combine", out.shape, out.dtype, lse.shape, lse.dtype, *options), prepare)
    state = combine(out, lse if lse_base == 2 else lse * math.log2(math.e), peers, comm, scatter_heads)
    if not return_lse:
        return state[0]
    return state if lse_base == 2 else (state[0], state[1] * math.log(2))


def combine(
    out: torch.Tensor, lse: torch.Tensor, peers: Peers, comm: str, scatter_heads: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The combined state of checked arguments, LSEs in base 2."""
    states, lses = out.flatten(0, -3), lse.flatten(0, -2)
    state = _by_one_kernel(states, lses, peers, comm, scatter_heads)
    if state is None:
        state = (_scaled_sum if comm == "ag_rs" else _merged)(states, lses, peers, scatter_heads)
    combined, total = state
    return combined.view(*out.shape[:-2], *combined.shape[1:]), total.view(*lse.shape[:-1], total.size(-1))


def _check(out: torch.Tensor, lse: torch.Tensor, world: int, comm: str, scatter_heads: bool, lse_base: float) -> None:
    if comm not in COMMS:
        raise ValueError(f"comm={comm!r} is not one of {', '.join(map(repr, COMMS))}.")
    if out.dim() < 3 or lse.shape != out.shape[:-1]:
        shapes = f"out has shape {tuple(out.shape)} and lse {tuple(lse.shape)}"
        raise ValueError(f"{shapes}: they must be [..., heads, D] and [..., heads].")
    if lse.dtype != torch.float32:
        raise ValueError(f"lse has dtype {lse.dtype}: it must be float32.")
    if scatter_heads and out.size(-2) % world:
        raise ValueError(f"{world} ranks cannot share {out.size(-2)} heads evenly: pass scatter_heads=False.")
    _request.check_base(lse_base)


def _by_one_kernel(
    out: torch.Tensor, lse: torch.Tensor, peers: Peers, comm: str, scatter: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """None where another method was asked for, or is better, or nothing else can serve the group."""
    sent = out.numel() * out.element_size() // (peers.world if scatter else 1)
    if comm not in ("auto", "symmetric") or (comm == "auto" and sent > _exchange.MOST_BYTES):
        return None
    state = _exchange.combine(out, lse, peers, scatter) if _exchange.serves(out, peers) else None
    if state is None and comm == "symmetric" and peers.world > 1:
        raise ValueError(
            f"comm='symmetric' needs 2 to {_exchange.MOST_RANKS} GPUs that reach one another's memory, torch 2.8, and "
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
