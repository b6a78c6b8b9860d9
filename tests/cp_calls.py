"""What ranks run in the tests of context parallelism: every rank makes the whole problem, and computes its part."""

from __future__ import annotations

import contextlib
import math
from typing import Any
from unittest import mock

import torch
from problems import Batch, make_batch

from cutlass_kernels import attention, distributed


def mask_of(n: int, m: int, causal: bool, window: tuple[int, int], chunk_size: int) -> torch.Tensor:
    """As of ``attention()``: bool ``[n, m]``."""
    p = torch.arange(n)[:, None] + m - n
    j = torch.arange(m)[None, :]
    seen = torch.ones(n, m, dtype=torch.bool)
    right = 0 if causal else window[1]
    if window[0] >= 0:
        seen &= j >= p - window[0]
    if right >= 0:
        seen &= j <= p + right
    if chunk_size:
        seen &= j // chunk_size == p.div(chunk_size, rounding_mode="floor")
    return seen


def batch_of(problem: dict[str, Any]) -> Batch:
    given = {name: problem.get(name) for name in ("dtype", "kv_dtype", "head_dim_vo")}
    return make_batch(problem["q_lens"], problem["kv_lens"], *problem["heads"], **given)


def prefill(group: Any, device: torch.device, problem: dict[str, Any], options: dict[str, Any], pages: int = 0) -> Any:
    """This rank's output, and its rows in the whole problem."""
    batch = batch_of(problem)
    grid = distributed._peers.grid_of(group)
    split = {name: options[name] for name in ("layout", "block_size") if name in options}
    kv_split = dict(seqlens=batch.kv_lens, **split)
    q = distributed.cp_split(batch.q, group, seqlens=batch.qo_lens, **split).to(device)
    k, v = (distributed.cp_split(x, group, **kv_split).to(device) for x in (batch.k, batch.v))
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if pages:
        counts = [distributed.cp_positions([n], grid.rank, grid.world, **split).numel() for n in batch.kv_lens]
        k, v, given["page_table"] = _paged(k, v, counts, pages)
        k, v = _laid_out(given, k, v)
    given = {"lse_base": math.e} | given
    # For this call alone: in later ones, ranks that are not in this group would send messages of other sizes.
    with contextlib.ExitStack() as patches:
        for patch in _patches(problem):
            patches.enter_context(patch)
        out, lse = distributed.cp_prefill(
            q, k, v, group, seqlens=batch.qo_lens, kv_seqlens=batch.kv_lens, return_lse=True, **given
        )
    rows = distributed.cp_indices(batch.qo_lens, grid.rank, grid.world, **split)
    return out.cpu(), lse.cpu(), rows


def _patches(problem: dict[str, Any]) -> list[Any]:
    """What the cost model says, whether there is symmetric memory, and that bounds of lengths are true."""
    chosen = {"choose": lambda *_: problem["chosen"]} if "chosen" in problem else {}
    if chosen:  # not what was chosen before
        distributed._agreement._agreed.clear()
    cost = dict(head_groups=lambda *_: problem.get("head_groups", 1), **chosen)
    patches = [mock.patch.multiple(distributed._prefill._cost, **cost)]
    if problem.get("messages"):
        patches.append(mock.patch.object(distributed._symmetric, "workspace", lambda *_: None))
    return patches + [mock.patch.object(x, "attention", _bounded) for x in (distributed._ring, distributed._gather)]


def _bounded(*args: Any, **options: Any) -> Any:
    """``attention()``, which does not have to compute the rows beyond ``max_seqlen_q``: there must be none."""
    rows = options["cu_seqlens_q"].diff()
    if options.get("seqused_q") is not None:
        rows = rows.minimum(options["seqused_q"])
    assert options["max_seqlen_q"] >= int(rows.max())
    assert options["max_seqlen_k"] >= int(options["seqused_k"].max())
    return attention(*args, **options)


def _paged(k: torch.Tensor, v: torch.Tensor, counts: list[int], page_size: int) -> Any:
    most = max(-(-n // page_size) for n in counts)
    table = torch.randperm(len(counts) * most).view(len(counts), most)
    caches = []
    for x in (k, v):
        cache = x.new_full((table.numel(), page_size, *x.shape[1:]), math.nan)
        for b, part in enumerate(x.split(counts)):
            for i, page in enumerate(part.split(page_size) if part.size(0) else ()):
                cache[table[b, i], : page.size(0)] = page
        caches.append(cache)
    return *caches, table.to(k.device, torch.int32)


def _laid_out(options: dict[str, Any], *caches: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2).contiguous() if options.get("kv_layout") == "HND" else x for x in caches]


def restored(group: Any, device: torch.device, seqlens: list[int], options: dict[str, Any]) -> bool:
    """Whether splitting and restoring gives the same, along either dimension."""
    whole = torch.arange(sum(seqlens) * 3, device=device).view(-1, 3)
    for x, dim in ((whole, 0), (whole.T, 1)):
        part = distributed.cp_split(x, group, seqlens=seqlens, dim=dim, **options)
        if not torch.equal(distributed.cp_restore(part, group, seqlens=seqlens, dim=dim, **options), x):
            return False
    return True


def disagreeing(group: Any, device: torch.device, who: int, what: str, options: dict[str, Any]) -> None:
    """A call in which one rank differs."""
    grid = distributed._peers.grid_of(group)
    q, k, v = (torch.zeros(8, 2, 64, device=device, dtype=torch.float16) for _ in range(3))
    given: dict[str, Any] = dict(options, sinks=torch.zeros(2, device=device))
    if grid.rank == who:
        if what == "rows":
            q = q[:7]
        elif what == "dimensions":
            q = q[0, 0, 0]
        elif what == "head_dim":
            k = k[..., :32]
        elif what == "causal":
            given["causal"] = True
        elif what == "dtype":
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        elif what == "seqlens":
            given["seqlens"] = [grid.world * 4] * 2
        elif what == "sinks":
            given["sinks"] = torch.zeros(3, device=device)
        elif what == "scales":
            given["k_descale"] = torch.ones(3, device=device)
    if grid.rank == who and what == "function":
        distributed.cp_restore(q, group, seqlens=given["seqlens"])
    else:
        distributed.cp_prefill(q, k, v, group, **given)


def disagreeing_decode(group: Any, device: torch.device, who: int, what: str) -> None:
    """A decode step in which one rank differs. A step of other sizes has come before."""
    for lens in ([5, 6, 7], [5, 6]):
        q = torch.zeros(len(lens), 1, 2, 64, device=device, dtype=torch.float16)
        k, v = torch.zeros(2, 8, 4, 2, 64, device=device, dtype=torch.float16)
        table = torch.zeros(len(lens), 2, dtype=torch.int32, device=device)
        given: dict[str, Any] = dict(seqused_k=torch.tensor(lens, dtype=torch.int32, device=device))
        given |= dict(sinks=torch.zeros(4, device=device), k_descale=torch.ones(2, device=device), block_size=4)
        if len(lens) == 2:
            given["logits_soft_cap"] = 5.0  # of another kind
        if len(lens) == 2 and torch.distributed.get_rank(group) == who:
            if what == "rows":
                q = q[:1]
            elif what == "head_dim":
                k = k[..., :32]
            elif what == "cache":
                k, v = k[0], v[0]
            elif what == "table":
                table = table[:1]
            elif what == "sinks":
                given["sinks"] = given["sinks"][:2]
            elif what == "scales":
                given["k_descale"] = torch.ones(3, device=device)
            elif what == "block_size":
                given["block_size"] = 2
        distributed.dcp_decode(q, k, v, group, page_table=table, **given)


def decode(group: Any, device: torch.device, problem: dict[str, Any], options: dict[str, Any], form: str) -> Any:
    """This rank's heads (or all) of a decode step over its tokens of every request."""
    batch = batch_of(problem)
    grid = distributed._peers.grid_of(group)
    block_size = options.get("block_size", 1)
    held = []
    for _, k, v in batch.requests():
        blocks = torch.arange(k.size(0)) // block_size
        held.append([x[blocks % grid.world == grid.rank].to(device) for x in (k, v)])
    counts = [k.size(0) for k, _ in held]
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=device)
    local = distributed.dcp_local_lengths(lens, grid.rank, grid.world, block_size=block_size)
    assert local.tolist() == counts
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    keys = [torch.cat([pair[i] for pair in held]) for i in (0, 1)]
    if form == "pages":
        k, v, given["page_table"] = _paged(*keys, counts, problem.get("page_size", 4))
    else:
        most = max(*counts, 1)
        k, v = (x.new_full((len(counts), most, *x.shape[1:]), math.nan) for x in keys)
        for b, (one_k, one_v) in enumerate(held):
            k[b, : counts[b]], v[b, : counts[b]] = one_k, one_v
    k, v = _laid_out(given, k, v)
    q = batch.q.to(device)
    if len(set(batch.qo_lens)) == 1:
        q = q.view(len(counts), -1, *q.shape[1:])
    else:
        given |= dict(cu_seqlens_q=batch.qo_indptr(device), max_seqlen_q=max(batch.qo_lens))
    if given.get("gather_heads", True):
        q = q.chunk(grid.world, -2)[grid.rank]
    out, lse = distributed.dcp_decode(q, k, v, group, seqused_k=lens, return_lse=True, **given)
    return out.cpu(), lse.cpu()


def combine(group: Any, device: torch.device, shape: tuple[int, ...], options: dict[str, Any]) -> Any:
    """States of all ranks, some of which saw no key, and what becomes of them."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    generator = torch.Generator().manual_seed(3)
    out = torch.randn(world, *shape, generator=generator).half()
    lse = torch.randn(world, *shape[:-1], generator=generator) * 4
    empty = torch.rand(lse.shape, generator=generator) < 0.3
    empty[:, :1] = True
    lse[empty], out[empty] = -math.inf, math.nan
    own = distributed.dcp_combine(out[rank].to(device), lse[rank].to(device), group, return_lse=True, **options)
    return out, lse, own[0].cpu(), own[1].cpu()


def exchanges(group: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether calls by one kernel, of sizes in any order, give what messages give."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    generator = torch.Generator().manual_seed(5)
    problems = []
    for rows in torch.randint(1, 300, (40,), generator=generator).tolist():
        out = torch.randn(world, rows, 4 * world, 64, generator=generator)[rank].to(device, dtype)
        lse = torch.randn(world, rows, 4 * world, generator=generator)[rank].to(device)
        problems.append((out, lse, rows % 3 != 0))

    def results(comm: str) -> list[Any]:
        return [
            distributed.dcp_combine(out, lse, group, comm=comm, scatter_heads=scatter, return_lse=True)
            for out, lse, scatter in problems
        ]

    want, got, again = results("a2a"), results("symmetric"), results("symmetric")
    return all(
        torch.equal(a, b) and torch.equal(b, c)
        for states in zip(want, got, again, strict=True)
        for a, b, c in zip(*states, strict=True)
    )


def replayed_decode(group: Any, device: torch.device, captured: str) -> bool:
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    q = torch.zeros(5, 1, 4, 64, device=device, dtype=torch.float16)
    k, v = (torch.randn(5, 40, 2, 64, device=device, dtype=torch.float16) for _ in range(2))
    lens = torch.full((5,), 30, dtype=torch.int32, device=device)
    step = lambda comm: distributed.dcp_decode(q, k, v, group, seqused_k=lens, comm=comm)  # noqa: E731
    step(captured)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step(captured)
    good = True
    for turn in range(6):
        q.normal_(generator=torch.Generator(device).manual_seed(10 * turn + rank))
        lens.fill_(world * 10 + turn)
        graph.replay()
        again, *others = [step(comm) for comm in (captured, "a2a", "symmetric")]
        good = good and torch.equal(out, again) and torch.equal(*others)
        good = good and torch.allclose(out, others[0], atol=2e-3, rtol=2e-3)  # "ag_rs" adds in another order
    return good


def replayed_prefill(group: Any, device: torch.device, pages: int, options: dict[str, Any]) -> bool:
    """Whether a captured prefill follows its tensors, scales of requests and page table included."""
    grid = distributed._peers.grid_of(group)
    rank, world = grid.rank, grid.world
    seqlens = [300, 70, 0, 128]
    rows = distributed.cp_positions(seqlens, rank, world).numel()
    q = torch.zeros(rows, 8, 64, device=device, dtype=torch.float16)
    k, v = (torch.zeros(rows, 4, 64, device=device, dtype=torch.float16) for _ in range(2))
    scale = torch.ones(len(seqlens), 4, device=device)
    given: dict[str, Any] = dict(options, seqlens=seqlens, causal=True, k_descale=scale)
    if pages:
        counts = [distributed.cp_positions([n], rank, world).numel() for n in seqlens]
        k, v, given["page_table"] = _paged(k, v, counts, pages)
    call = lambda: distributed.cp_prefill(q, k, v, group, **given)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    distributed._plans.plan_of.cache_clear()  # as after many calls of other lengths: the graph's plan stays
    good = True
    for turn in range(4):
        generator = torch.Generator(device).manual_seed(10 * turn + rank)
        for x in (q, k, v):
            x.normal_(generator=generator)
        scale.fill_(0.5 + turn)
        graph.replay()
        again = call()
        good = good and bool(out.isfinite().all()) and torch.equal(out, again)
    return good
