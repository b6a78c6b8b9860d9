"""`prefill`: prompts whose tokens are spread over the GPUs."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from inputs import Inputs, make_inputs
from lengths import tokens
from problem import Problem
from timing import Timed

import cutlass_kernels as ck
from cutlass_kernels import distributed as cp

from . import context_parallel, gather, ring
from .columns import Attempt, Column, Make, Operation, column
from .ranks import Ranks

# --- cases -------------------------------------------------------------------------------------------------------


def _case(name: str, lens: tuple[int, ...], window: int = 0, heads: tuple[int, int, int] = (32, 8, 128)) -> Problem:
    q_heads, kv_heads, dim = heads
    window_left = window - 1 if window else -1  # a row sees itself, too
    return Problem("prefill", name, lens, lens, q_heads, kv_heads, dim, dim, window_left=window_left)


def unequal(total: int, least: int, most: int) -> tuple[int, ...]:
    """Lengths drawn with a fixed seed: nine requests for 128k tokens of 512 to 32k each."""
    rnd = random.Random(1)
    lens: list[int] = []
    while sum(lens) < total:
        lens.append(min(rnd.randint(least, most), total - sum(lens)))
    return tuple(lens)


def _one_request() -> list[Problem]:
    return [_case(f"1 x {tokens(n)}", (n,)) for n in (8192, 16384, 65536, 131072)]


def _unequal() -> list[Problem]:
    lens = unequal(131072, 512, 32768)
    return [_case(f"{len(lens)} unequal, 128k", lens)]


def _batch() -> list[Problem]:
    return [_case("8 x 16k", (16384,) * 8)]


def _window() -> list[Problem]:
    return [_case("1 x 128k, window 4k", (131072,), window=4096)]


def _tiny() -> list[Problem]:
    """Of a dry run: lengths that are no multiple of twice the ranks among them."""
    heads = (4, 2, 32)
    return [
        _case("1 x 256", (256,), heads=heads),
        _case("unequal", (90, 41, 41, 64), heads=heads),
        _case("2 x 64", (64, 64), heads=heads),
        _case("1 x 256, window 32", (256,), window=32, heads=heads),
    ]


# --- ours --------------------------------------------------------------------------------------------------------


def _inputs(ranks: Ranks, case: Problem) -> Inputs:
    """The same on all ranks: the whole problem."""
    return make_inputs(case, ranks.device)


def _shard(ranks: Ranks, case: Problem, x: Inputs, layout: str) -> Inputs:
    q, k, v = (cp.cp_split(t, ranks.group, seqlens=case.qo_lens, layout=layout).contiguous() for t in (x.q, x.k, x.v))
    return Inputs(q, k, v, x.qo_indptr, x.kv_indptr)


def _want(ranks: Ranks, case: Problem, x: Inputs, layout: str) -> torch.Tensor:
    whole = _one(ranks, case, x).call()
    return cp.cp_split(whole, ranks.group, seqlens=case.qo_lens, layout=layout).contiguous()


def _one(ranks: Ranks, case: Problem, x: Inputs) -> Timed:
    options: dict[str, Any] = dict(
        cu_seqlens_q=x.qo_indptr_device,
        cu_seqlens_k=x.kv_indptr_device,
        max_seqlen_q=max(case.qo_lens),
        max_seqlen_k=max(case.kv_lens),
        causal=True,
        window=(case.window_left, -1),
    )
    return Timed(functools.partial(ck.attention, x.q, x.k, x.v, **options))


def _ours(comm: str, ranks: Ranks, case: Problem, x: Inputs) -> Timed:
    mine = _shard(ranks, case, x, "zigzag")
    options: dict[str, Any] = dict(seqlens=list(case.qo_lens), causal=True, window=(case.window_left, -1), comm=comm)
    return Timed(functools.partial(cp.cp_prefill, mine.q, mine.k, mine.v, ranks.group, **options))


# --- peers -------------------------------------------------------------------------------------------------------


def _on_shard(make: Make, layout: str = "zigzag") -> Make:
    return lambda ranks, case, x: make(ranks, case, _shard(ranks, case, x, layout))


def _no_window(case: Problem, ranks: Ranks) -> str | None:
    return "a ring has no windows" if case.window_left >= 0 else None


def _no_ulysses(case: Problem, ranks: Ranks) -> str | None:
    shared = case.num_qo_heads % ranks.world == 0
    return None if shared else f"{ranks.world} ranks cannot share {case.num_qo_heads} heads evenly"


def _no_halo(case: Problem, ranks: Ranks) -> str | None:
    if case.window_left < 0 or not case.single or case.qo_lens[0] // ranks.world < case.window_left:
        return "it serves one request with a window, and a halo of one rank"
    return None


def _no_context_parallel(case: Problem, ranks: Ranks) -> str | None:
    if not ranks.on_gpu:
        return "context_parallel has no kernel for the CPU"
    if case.window_left >= 0 or not case.dense:
        return "context_parallel serves neither windows nor unequal lengths"
    if case.qo_lens[0] % (2 * ranks.world):
        return "context_parallel splits into equal parts only"
    return None


def _ring(name: str, engine: type[ring.Dense] | type[ring.Varlen]) -> Column:
    return column(name, _on_shard(functools.partial(ring.make, engine)), refuses=_no_window)


def _torch(name: str, kernel: str, rotate: str) -> Column:
    """Where it fails with fewer key heads, with repeated ones."""
    attempts = tuple(
        Attempt(_on_shard(functools.partial(context_parallel.make, kernel, rotate, repeat)), note)
        for repeat, note in ((False, ""), (True, "key heads repeated beforehand"))
    )
    return Column(name, False, attempts, _no_context_parallel, captures=False)


OPERATION = Operation(
    "prefill",
    "ms",
    {"one": _one_request, "unequal": _unequal, "batch": _batch, "window": _window, "tiny": _tiny},
    [
        column("allgather", functools.partial(_ours, "allgather"), ours=True),
        column("ring", functools.partial(_ours, "ring"), ours=True, refuses=_no_window),
        column("ulysses", functools.partial(_ours, "ulysses"), ours=True, refuses=_no_ulysses),
        _torch("torch_cp", "CUDNN_ATTENTION", "allgather"),
        _torch("torch_cp_a2a", "CUDNN_ATTENTION", "alltoall"),
        _torch("torch_cp_fa2", "FLASH_ATTENTION", "allgather"),
        _ring("ring_sdpa", ring.Dense),
        _ring("ring_fa2", ring.Varlen),
        column("gather_fa2", _on_shard(gather.gather_fa2)),
        column("halo_fa2", _on_shard(gather.halo_fa2, "contiguous"), refuses=_no_halo, layout="contiguous"),
    ],
    _inputs,
    _want,
    _one,
    default=("one", "unequal", "batch", "window"),
)
