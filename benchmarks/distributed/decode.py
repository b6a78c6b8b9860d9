"""`decode`: caches whose pages go round the GPUs, a few tokens per request."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lengths import tokens
from timing import Timed

import cutlass_kernels as ck
from cutlass_kernels import distributed as cp

from . import kernels
from .columns import Operation, column
from .ranks import Ranks

PAGE_SIZE = 16


@dataclass(frozen=True)
class Case:
    """``batch`` requests of ``keys`` tokens, the last ``rows`` of them new. Heads: of queries, of keys, dimension."""

    batch: int
    keys: int
    rows: int
    heads: tuple[int, int, int] = (32, 8, 128)

    @property
    def column(self) -> str:
        return f"{self.batch} x {tokens(self.keys)}" + (f", {self.rows} rows" if self.rows > 1 else "")


@dataclass
class Cache:
    """All queries, ``[B, rows, Hq, D]``, all pages, ``[pages, page, Hkv, D]``, and the pages of this rank."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor  # int32 [B, pages of a request]
    own_k: torch.Tensor
    own_v: torch.Tensor
    own_table: torch.Tensor
    lens: torch.Tensor


def _cases() -> list[Case]:
    return [Case(batch, keys, rows) for rows in (1, 4) for batch, keys in ((1, 131072), (64, 8192))]


def _tiny() -> list[Case]:
    return [Case(batch, 4 * 32 * PAGE_SIZE, rows, (8, 2, 32)) for batch, rows in ((1, 1), (3, 4))]


def _inputs(ranks: Ranks, case: Case) -> Cache:
    """Pages lie in random order, those of the rank, too. Page i of a request is on rank i % W."""
    generator = torch.Generator(ranks.device).manual_seed(0)
    q_heads, kv_heads, dim = case.heads
    pages = case.keys // PAGE_SIZE
    assert pages % ranks.world == 0 and case.rows <= PAGE_SIZE  # new tokens are on the last rank: see _peer()

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=ranks.device, dtype=torch.bfloat16)

    def shuffled(count: int) -> torch.Tensor:
        return torch.randperm(count, generator=generator, device=ranks.device)

    q = randn(case.batch, case.rows, q_heads, dim)
    k, v = (randn(case.batch * pages, PAGE_SIZE, kv_heads, dim) for _ in range(2))
    table = shuffled(case.batch * pages).view(case.batch, pages)
    mine = table[:, ranks.rank :: ranks.world]
    places = shuffled(mine.numel())
    own = []
    for whole in (k, v):
        pool = whole.new_empty(mine.numel(), *whole.shape[1:])
        pool[places] = whole[mine.flatten()]
        own.append(pool)
    lens = torch.full((case.batch,), case.keys, dtype=torch.int32, device=ranks.device)
    return Cache(q, k, v, table.int(), own[0], own[1], places.view_as(mine).int(), lens)


def _heads(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's heads of ``[B, rows, heads, D]``."""
    return x.chunk(ranks.world, 2)[ranks.rank].contiguous()


def _one(ranks: Ranks, case: Case, x: Cache) -> Timed:
    options: dict[str, Any] = dict(page_table=x.table, seqused_k=x.lens, causal=True)
    call = functools.partial(ck.attention, x.q, x.k, x.v, **options)
    return Timed(call, output=lambda out: out.flatten(0, 1))


def _want(ranks: Ranks, case: Case, x: Cache, layout: str) -> torch.Tensor:
    timed = _one(ranks, case, x)
    out: torch.Tensor = timed.call()
    return _heads(out, ranks).flatten(0, 1)


def _ours(comm: str, ranks: Ranks, case: Case, x: Cache) -> Timed:
    options: dict[str, Any] = dict(page_table=x.own_table, seqused_k=x.lens, block_size=PAGE_SIZE, comm=comm)
    call = functools.partial(cp.dcp_decode, _heads(x.q, ranks), x.own_k, x.own_v, ranks.group, **options)
    return Timed(call, output=lambda out: out.flatten(0, 1))


def _peer(ranks: Ranks, case: Case, x: Cache) -> Timed:
    """FlashAttention-2 in torch and NCCL: queries are gathered, then LSEs; a reduce-scatter adds scaled outputs.

    Keys are contiguous, in order: its kernel has pages of 256 only. New tokens are the last ones of the last rank, so
    there FlashAttention's causal mask is exact, and the other ranks need none.
    """
    world = ranks.world
    q = _heads(x.q, ranks)
    k, v = (t[x.own_table.long()].flatten(1, 2) for t in (x.own_k, x.own_v))
    causal = ranks.rank == world - 1
    batch, rows, heads, dim = q.shape
    parts = q.new_empty(world, *q.shape)
    lses = q.new_empty(world, batch, rows, heads * world, dtype=torch.float32)
    mine = torch.empty_like(q)

    def call() -> torch.Tensor:
        dist.all_gather_into_tensor(parts.flatten(0, 1), q, group=ranks.group)
        whole = parts.permute(1, 2, 0, 3, 4).reshape(batch, rows, heads * world, dim)
        out, lse = kernels.fa2_dense(whole, k, v, causal)
        dist.all_gather_into_tensor(lses.flatten(0, 1), lse.contiguous(), group=ranks.group)
        scaled = (out * torch.exp(lse - lses.logsumexp(0))[..., None]).to(out.dtype)
        by_rank = scaled.view(batch, rows, world, heads, dim).permute(2, 0, 1, 3, 4).contiguous()
        dist.reduce_scatter_tensor(mine, by_rank.flatten(0, 1), group=ranks.group)
        return mine

    kernels.fa2_dense(x.q, k, v, causal)  # before anyone waits for this rank: it may fail
    return Timed(call, output=lambda out: out.flatten(0, 1))


def _needs_gpu(case: Case, ranks: Ranks) -> str | None:
    return None if ranks.on_gpu else "symmetric memory needs GPUs"


OPERATION = Operation(
    "decode",
    "us",
    {"decode": _cases, "tiny": _tiny},
    [
        column("symmetric", functools.partial(_ours, "symmetric"), ours=True, refuses=_needs_gpu),
        *(column(comm, functools.partial(_ours, comm), ours=True) for comm in ("a2a", "ag_rs")),
        column("fa2_ag_rs", _peer),
    ],
    _inputs,
    _want,
    _one,
    calls_per_graph=10,
    only_graphs=True,
    default=("decode",),
)
