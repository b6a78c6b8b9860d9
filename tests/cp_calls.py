"""What ranks run in the tests of context parallelism: every rank makes the whole problem, and computes its part."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from problems import Batch, make_batch

from cutlass_kernels import attention, distributed

LATENT = [512, 64]  # columns of latent keys, the first of which are the values


def batch_of(problem: dict[str, Any]) -> Batch:
    given = {name: problem.get(name) for name in ("dtype", "kv_dtype", "head_dim_vo")}
    batch = make_batch(problem["q_lens"], problem["kv_lens"], *problem["heads"], **given)
    if "latent" in problem:
        batch.v = batch.k[..., : LATENT[0]]
    return batch


def on(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


# --- prefill -----------------------------------------------------------------------------------------------------


def prefill(group: Any, device: torch.device, problem: dict[str, Any], options: dict[str, Any], pages: int = 0) -> Any:
    """This rank's output, and its rows in the whole problem."""
    batch = batch_of(problem)
    grid = distributed._peers.grid_of(group)
    split = {name: options[name] for name in ("layout", "block_size") if name in options}
    kv_split = dict(seqlens=batch.kv_lens, **split)
    q = distributed.cp_split(batch.q, group, seqlens=batch.qo_lens, **split).to(device)
    k, v = (distributed.cp_split(x, group, **kv_split).to(device) for x in (batch.k, batch.v))
    given = on(device, options)
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


# --- decode steps ------------------------------------------------------------------------------------------------


def held_by(kv_lens: list[int], rank: int, world: int, block_size: int) -> tuple[torch.Tensor, list[int]]:
    """Which keys of a batch a rank holds, and how many of each request."""
    places = []
    for begin, n in zip(itertools.accumulate(kv_lens, initial=0), kv_lens):
        at = torch.arange(n)
        places.append(at[at // block_size % world == rank] + begin)
    return torch.cat(places), [x.numel() for x in places]


def step(group: Any, device: torch.device, problem: dict[str, Any], options: dict[str, Any], form: str) -> Any:
    """Queries of all heads, this rank's keys and values, and the other arguments of ``dcp_decode()``.

    ``problem["latent"]``: of queries and keys those whose last columns are tensors of their own.
    """
    batch, (_, _, rank, world) = batch_of(problem), distributed._peers.grid_of(group)
    block_size = options.get("block_size", 1)
    at, counts = held_by(batch.kv_lens, rank, world, block_size)
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=device)
    assert distributed.dcp_local_lengths(lens, rank, world, block_size=block_size).tolist() == counts
    call = on(device, options) | dict(seqused_k=lens)
    keys = [x[at].to(device) for x in (batch.k, batch.v)]
    if form == "pages":
        k, v, call["page_table"] = _paged(*keys, counts, problem.get("page_size", 4))
    else:
        k, v = (x.new_full((len(counts), max(*counts, 1), *x.shape[1:]), math.nan) for x in keys)
        for cache, x in zip((k, v), keys):
            for b, part in enumerate(x.split(counts)):
                cache[b, : counts[b]] = part
    k, v = _laid_out(call, k, v)
    q = batch.q.to(device)
    if len(set(batch.qo_lens)) == 1:
        q = q.view(len(counts), -1, *q.shape[1:])
    else:
        call |= dict(cu_seqlens_q=batch.qo_indptr(device), max_seqlen_q=max(batch.qo_lens))
    if "latent" in problem:
        v = k[..., : LATENT[0]]
        if "q" in problem["latent"]:
            q, call["q_rope"] = (x.contiguous() for x in q.split(LATENT, -1))
        if "k" in problem["latent"]:
            k, call["k_rope"] = (x.contiguous() for x in k.split(LATENT, -1))
            v = k
    return q, k, v, call


def decode(group: Any, device: torch.device, problem: dict[str, Any], options: dict[str, Any], form: str) -> Any:
    """This rank's heads (or all) of a decode step over its tokens of every request."""
    q, k, v, call = step(group, device, problem, options, form)
    if options.get("gather_heads", True):
        grid = distributed._peers.grid_of(group)
        q = q.chunk(grid.world, -2)[grid.rank]
        if "q_rope" in call:
            call["q_rope"] = call["q_rope"].chunk(grid.world, -2)[grid.rank]
    out, lse = distributed.dcp_decode(q, k, v, group, return_lse=True, **call)
    return out.cpu(), lse.cpu()


def decode_in_two_calls(
    group: Any, device: torch.device, problem: dict[str, Any], options: dict[str, Any], form: str
) -> Any:
    """The same by ``attention()`` and ``dcp_combine()``, which ``options`` are of."""
    _, _, rank, world = distributed._peers.grid_of(group)
    options = dict(options)
    block_size = options.pop("block_size")
    q, k, v, call = step(group, device, problem, dict(block_size=block_size), form)
    del call["block_size"]
    call |= dict(causal=True, kv_shard=(world, rank, block_size), lse_base=options.get("lse_base", 2))
    state = attention(q, k, v, return_lse=True, **call)
    out, lse = distributed.dcp_combine(*state, group, return_lse=True, **options)
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


# --- captured calls ----------------------------------------------------------------------------------------------


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of the call, and its output."""
    call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        return graph, call()


def replayed_decode(group: Any, device: torch.device, captured: str) -> bool:
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    q = torch.zeros(5, 1, 4, 64, device=device, dtype=torch.float16)
    k, v = (torch.randn(5, 40, 2, 64, device=device, dtype=torch.float16) for _ in range(2))
    lens = torch.full((5,), 30, dtype=torch.int32, device=device)
    step = lambda comm: distributed.dcp_decode(q, k, v, group, seqused_k=lens, comm=comm)  # noqa: E731
    graph, out = captured(lambda: step(captured))
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
    _, _, rank, world = distributed._peers.grid_of(group)
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
    graph, out = captured(call)
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


# --- calls in which one rank differs -----------------------------------------------------------------------------

Call = dict[str, Any]


def _prefills(device: torch.device, world: int) -> list[Call]:
    q, k, v = (torch.zeros(8, 2, 64, device=device, dtype=torch.float16) for _ in range(3))
    return [dict(q=q, k=k, v=v, seqlens=[8 * world], sinks=torch.zeros(2, device=device))]


def _steps(device: torch.device, world: int) -> list[Call]:
    """A step of other sizes comes before."""
    calls = []
    for lens in ([5, 6, 7], [5, 6]):
        k, v = torch.zeros(2, 8, 4, 2, 64, device=device, dtype=torch.float16)
        call = dict(q=torch.zeros(len(lens), 1, 2, 64, device=device, dtype=torch.float16), k=k, v=v, block_size=4)
        call |= dict(page_table=torch.zeros(len(lens), 2, dtype=torch.int32, device=device))
        call |= dict(seqused_k=torch.tensor(lens, dtype=torch.int32, device=device))
        calls.append(call | dict(sinks=torch.zeros(4, device=device), k_descale=torch.ones(2, device=device)))
    return [calls[0], calls[1] | dict(logits_soft_cap=5.0)]  # of another kind


def _latent_steps(device: torch.device, world: int) -> list[Call]:
    q, q_rope = (torch.zeros(2, 1, 4, columns, device=device).bfloat16() for columns in LATENT)
    k, k_rope = (torch.zeros(8, 4, 1, columns, device=device).bfloat16() for columns in LATENT)
    lens = torch.tensor([9, 7], dtype=torch.int32, device=device)
    table = torch.zeros(2, 2, dtype=torch.int32, device=device)
    return [dict(q=q, k=k, v=k, seqused_k=lens, page_table=table, q_rope=q_rope, k_rope=k_rope)]


def _one_cache(call: Call) -> Call:
    k = torch.cat([call["k"], call["k_rope"]], -1)
    return dict(k=k, v=k[..., : LATENT[0]], k_rope=None)


# A function, its calls, and by name what one rank changes in the last of them.
DIFFERENCES: dict[str, tuple[Any, Callable[[torch.device, int], list[Call]], dict[str, Callable[[Call], Call]]]] = {
    "prefill": (
        distributed.cp_prefill,
        _prefills,
        {
            "rows": lambda c: dict(q=c["q"][:7]),
            "dimensions": lambda c: dict(q=c["q"][0, 0, 0]),
            "head_dim": lambda c: dict(k=c["k"][..., :32]),
            "causal": lambda c: dict(causal=True),
            "dtype": lambda c: {name: c[name].bfloat16() for name in "qkv"},
            "seqlens": lambda c: dict(seqlens=[c["seqlens"][0] // 2] * 2),
            "sinks": lambda c: dict(sinks=c["sinks"].new_zeros(3)),
            "scales": lambda c: dict(k_descale=c["sinks"].new_ones(3)),
        },
    ),
    "decode": (
        distributed.dcp_decode,
        _steps,
        {
            "rows": lambda c: dict(q=c["q"][:1]),
            "head_dim": lambda c: dict(k=c["k"][..., :32]),
            "cache": lambda c: dict(k=c["k"][0], v=c["v"][0]),
            "table": lambda c: dict(page_table=c["page_table"][:1]),
            "sinks": lambda c: dict(sinks=c["sinks"][:2]),
            "scales": lambda c: dict(k_descale=c["k_descale"].new_ones(3)),
            "block_size": lambda c: dict(block_size=2),
        },
    ),
    "latent": (
        distributed.dcp_decode,
        _latent_steps,
        {
            "values": lambda c: dict(v=c["k"].clone()),
            "heads": lambda c: dict(q_rope=c["q_rope"][..., :3, :]),
            "dimensions": lambda c: dict(q_rope=c["q_rope"][0]),
            "columns": lambda c: dict(q_rope=c["q_rope"][..., :32]),
            "keys": _one_cache,
        },
    ),
}


def disagreeing(group: Any, device: torch.device, name: str, who: int, what: str) -> None:
    """Calls in the last of which one rank differs, or calls another function."""
    _, _, rank, world = distributed._peers.grid_of(group)
    function, calls, changes = DIFFERENCES[name]
    *before, last = calls(device, world)
    for call in before:
        function(group=group, **call)
    if rank == who and what == "function":
        distributed.cp_restore(last["q"], group, seqlens=last["seqlens"])
    else:
        function(group=group, **(last | changes[what](last) if rank == who else last))
