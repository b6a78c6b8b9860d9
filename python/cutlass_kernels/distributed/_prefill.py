"""Prefill whose tokens are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._core import checks, hints
from . import _cost, _gather, _heads, _ops, _request, _ring, _symmetric
from ._agreement import Facts, agree, form
from ._gather import Shard, State
from ._heads import HeadsOfRows
from ._peers import Grid, Group, Peers, grid_of, is_capturing
from ._plans import Kind, Plan, plan_of
from ._request import Roles
from ._rows import keep
from ._shards import plain


@_ops.traceable(_ops.like_queries, of_mesh=True)
def cp_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    *,
    seqlens: Sequence[int] | torch.Tensor | None = None,
    kv_seqlens: Sequence[int] | torch.Tensor | None = None,
    layout: str = "zigzag",
    block_size: int = 256,
    comm: str = "auto",
    page_table: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    q_descale: float | torch.Tensor | None = None,
    k_descale: float | torch.Tensor | None = None,
    v_descale: float | torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    lse_base: float = 2,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of requests whose tokens are spread over the ranks of a group: each computes its own rows.

    All ranks of the group call it with the same lengths and options. A rank holds the tokens that ``cp_split()``
    gives it:

    ================  ==============================================================================================
    layout            tokens of rank r of W, of a request of n tokens
    ================  ==============================================================================================
    ``"zigzag"``      parts r and 2 W - 1 - r of 2 W equal ones: as much work for every rank under a causal mask
    ``"contiguous"``  part r of W equal ones; part i of m is tokens ``[i n // m, (i + 1) n // m)``
    ``"interleaved"`` blocks r, r + W, r + 2 W... of ``block_size`` tokens
    ================  ==============================================================================================

    ================  ==============================================================================================
    comm              what is sent
    ================  ==============================================================================================
    ``"allgather"``   the keys that a rank's rows see, to where they stand in order; with a window only a halo
    ``"ring"``        the keys of each rank to all others, one rank at a time: room for keys of two ranks suffices
    ``"ulysses"``     heads for tokens, before and after: every rank has some heads of all tokens
    ``"hybrid"``      ``group`` is a ``DeviceMesh`` of two dimensions: heads for tokens among the ranks of the inner
                      one (of a node), keys among those of the outer one
    ================  ==============================================================================================

    Args:
        q: this rank's rows, ``[rows, Hq, D]``, requests one after another, each in order of its positions.
        k, v: this rank's keys and values, ``[keys, Hkv, D]`` alike; or pages, with ``page_table``.
        group: a process group (NCCL for CUDA tensors), or a ``DeviceMesh`` of one or two dimensions, whose ranks count
            row by row.
        seqlens: tokens of every request on all ranks together, on the host. None: one request, of as many tokens on
            every rank.
        kv_seqlens: keys of every request, where they are more: rows stand last among them. None: as many as rows.
        layout, block_size: see the table; of rows and keys alike.
        comm: see the table. "auto" is "hybrid" on a mesh of two dimensions, and else "allgather", unless the cost model
            expects another to be more than 6 % faster, or gathered keys to need more than 16 GB.
        page_table: int32 ``[B, M]``: k and v are ``[pages, P, Hkv, D]`` (``kv_layout="HND"``: heads before tokens), and
            this rank's keys of request b lie in pages ``page_table[b]``, in order.
        causal, window, chunk_size, logits_soft_cap, sm_scale: as in ``cutlass_kernels.attention()``.
        sinks: as in ``cutlass_kernels.attention()``; they count once, not once per rank.
        q_descale, k_descale, v_descale, o_dtype: as in ``cutlass_kernels.attention()``.
        return_lse, lse_base, batch_invariant, backend: as in ``cutlass_kernels.attention()``.

    Returns:
        This rank's rows of the output, and with ``return_lse`` their LSE, fp32 ``[rows, Hq]``.

    Raises:
        ValueError: on every rank, where ranks disagree on lengths or options or one of them has wrong shapes; found
            before the first call of its kind. A later difference ends the waiting ranks after the timeout of the
            group: gloo raises, NCCL ends the process.

    Examples:
        >>> q, k, v = (torch.randn(6, heads, 64) for heads in (4, 2, 2))
        >>> cp_prefill(q, k, v, torch.distributed.group.WORLD, causal=True).shape
        torch.Size([6, 4, 64])
    """
    hints.tensors(q=q, k=k, v=v)
    grid = group if isinstance(group, Grid) else grid_of(group)
    seqlens, kv_seqlens = plain(seqlens), plain(kv_seqlens)
    window = tuple(window) if isinstance(window, list) else window
    options = dict(
        logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, lse_base=lse_base, batch_invariant=batch_invariant
    )
    scales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)

    def prepare() -> tuple[Facts, tuple[Kind, str]]:
        # By all ranks, so first.
        per_node = _symmetric.ranks_per_node(grid.outer, q.device) if grid.inner is None else 1
        kind, num_kv_heads = _request.check(
            q, k, v, grid, comm, layout, block_size, seqlens, kv_seqlens, page_table, kv_layout
        )
        kind = kind._replace(mask=_request.mask_of(causal, window, chunk_size))
        checks.flag("return_lse", return_lse)
        if not is_capturing():
            call = dict(causal=causal, chunk_size=chunk_size, sinks=sinks, o_dtype=o_dtype, **scales, **options)
            _request.check_options(q, k, v, len(kind.q_lens), page_table, kv_layout, call)
        heads = q.size(1), num_kv_heads, q.size(2), v.size(-1)
        chosen = comm
        if comm == "auto" and grid.inner is None:
            problem = _cost.Problem(*kind[:5], *heads, k.element_size())
            chosen = _cost.choose(problem, grid.world, per_node)
            kind = kind._replace(outer=1, inner=grid.world) if chosen == "ulysses" else kind
        _request.check_comm(*heads[:2], kind, chosen)
        facts = {
            "dtypes": (q.dtype, k.dtype, v.dtype),
            "comm": comm,
            "layout": (layout, block_size),
            "the mask": (causal, window, chunk_size),
            "options": (*options.values(), sinks is not None, return_lse, o_dtype),
            "pages": kv_layout if page_table is not None else None,
            "seqlens": _request.Lengths(kind.q_lens, kind.kv_lens),
            "head counts and dimensions": heads,
        }
        return facts, (kind, chosen)

    of_keys = (k.shape, v.shape) if page_table is None else (k.shape[1:], v.shape[1:], page_table.shape[:1], kv_layout)
    of_tensors = (q.shape, *of_keys, q.dtype, k.dtype, v.dtype, form(sinks), *map(form, scales.values()))
    others = (layout, block_size, comm, causal, window, chunk_size, *options.values(), o_dtype, return_lse)
    kind, comm = agree(grid, ("cp_prefill", *of_tensors, seqlens, kv_seqlens, *others), prepare)
    plan = plan_of(kind)
    if is_capturing():
        keep(grid.outer.group, plan)
    if page_table is not None:
        _request.check_pages(k, page_table, kv_layout, kind, grid.rank)
        k, v = _from_pages(k, v, page_table, kv_layout, plan, grid.rank)
    o_dtype = o_dtype or (torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
    shard = Shard(q, k, v, causal, return_lse, o_dtype, sinks, scales, options | {"backend": backend})
    state = _attend(shard, plan, _request.roles(grid, comm), grid.rank // plan.kind.inner, comm)
    return state.out if state.lse is None else (state.out, state.lse)


def _attend(shard: Shard, plan: Plan, roles: Roles, grid_row: int, comm: str) -> State:
    if roles.inner is None:
        return _attend_column(shard, plan, roles.outer, grid_row, comm)
    shares = _heads.shares(shard.q.size(1), shard.k.size(1), roles.inner.world)
    q_heads, kv_heads = [s.q for s in shares], [s.kv for s in shares]
    q_places, kv_places = plan.q_grid_rows[grid_row].places, plan.kv_grid_rows[grid_row].places
    tensors = [(shard.q, q_heads, q_places), (shard.k, kv_heads, kv_places), (shard.v, kv_heads, kv_places)]
    q, k, v = _heads.to_heads(roles.inner, [HeadsOfRows(*x) for x in tensors])
    here = _gather.with_heads(shard, *shares[roles.inner.rank])._replace(q=q, k=k, v=v)
    state = _attend_column(here, plan, roles.outer, grid_row, comm)
    parts = [x for x in state if x is not None]
    out, *lse = _heads.to_tokens(roles.inner, [HeadsOfRows(x, q_heads, q_places) for x in parts])
    return State(out, lse[0] if lse else None)


def _attend_column(shard: Shard, plan: Plan, peers: Peers | None, grid_row: int, comm: str) -> State:
    if comm == "ring" and peers is not None:
        return _ring.attend(shard, plan, peers)
    head_dims = shard.k.size(2) + shard.v.size(2)
    row_bytes = shard.k.size(1) * head_dims * shard.k.element_size()
    head_groups = _cost.head_groups(plan, shard.q.size(1), row_bytes, head_dims, is_capturing())
    return _gather.attend(shard, plan.gathers[grid_row], peers, head_groups)


def _from_pages(
    k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, kv_layout: str, plan: Plan, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's keys, one request after another."""
    if kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    page_size = k.size(1)

    def places() -> list[torch.Tensor]:
        counts = [0] * len(plan.kind.kv_lens)
        for request, start, stop in plan.kv_shards[rank]:
            counts[request] += stop - start
        requests = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
        tokens = torch.cat([torch.empty(0, dtype=torch.int64), *map(torch.arange, counts)])
        return [requests, tokens.div(page_size, rounding_mode="floor"), tokens % page_size]

    requests, columns, slots = plan.indices.get(("pages", rank, page_size), k.device, places, torch.int64)
    pages = page_table[requests, columns].long()
    return k[pages, slots], v[pages, slots]
