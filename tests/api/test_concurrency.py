"""Threads with streams and workspaces of their own do not disturb each other: every one gets the bits it gets alone."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable

import pytest
import torch
from problems import make_batch

import cutlass_kernels as ck

THREADS = 4
Job = Callable[[], torch.Tensor]


def tiles(target, seed: int) -> Job:
    """More tiles than thread blocks on a GPU: these take them from a counter of their stream."""
    rows = 40 if target.is_reference else 700
    batch = make_batch([rows], [rows], 16, 4, 64, device=target.device, seed=seed)
    return lambda: ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, backend=target.backend)


def split_keys(target, seed: int) -> Job:
    """Partial results and the counters that say which thread block combines them."""
    batch = make_batch([1], [200 if target.is_reference else 40000], 8, 2, 64, device=target.device, seed=seed)
    return lambda: ck.single_decode_with_kv_cache(batch.q[0], batch.k, batch.v, backend=target.backend)


def slopes(target, seed: int) -> Job:
    batch = make_batch([9], [300], 4, 2, 64, device=target.device, seed=seed)
    options = dict(pos_encoding_mode="ALIBI", causal=True, backend=target.backend)
    return lambda: ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, **options)


def rotated(target, seed: int) -> Job:
    """Kernels read copies of the keys, which are allocated on the stream."""
    batch = make_batch([9], [300], 4, 2, 64, device=target.device, seed=seed)
    options = dict(pos_encoding_mode="ROPE_LLAMA", causal=True, backend=target.backend)
    return lambda: ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, **options)


def planned(target, seed: int) -> Job:
    """A wrapper planned once."""
    batch = make_batch(
        [1, 1], [900, 200] if target.is_reference else [40000, 9000], 8, 2, 64, device=target.device, seed=seed
    )
    paged = batch.paged(16)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(*paged.table(), *batch.heads, 16)
    return lambda: wrapper.run(batch.q, paged.cache)


def replanned(target, seed: int) -> Job:
    """A wrapper planned before every run, as engines do in every step."""
    batch = make_batch([60, 1, 9], [90, 800, 9], 8, 2, 64, device=target.device, seed=seed)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)

    def job() -> torch.Tensor:
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
        return wrapper.run(batch.q, batch.k, batch.v)

    return job


def fused(target, seed: int) -> Job:
    batch = make_batch(
        [5, 3], [20, 33] if target.is_reference else [2500, 33], 8, 2, 64, device=target.device, seed=seed
    )
    offsets = batch.qo_indptr(target.device), batch.kv_indptr(target.device)
    workspace = target.workspace()
    numbers = (5, 2500, 0.1, 1.0, 2)
    return lambda: ck.trtllm_fmha_v2_prefill(
        [batch.q, batch.k, batch.v], "SEPARATE_Q_K_V", workspace, workspace, *numbers, *offsets
    )


def latent(target, seed: int) -> Job:
    """A batch of latent caches: each call writes a list of even shares, and keeps none."""
    pages, g = 2 if target.is_reference else 40, torch.Generator().manual_seed(seed)
    q = torch.randn(3, 1, 64, 576, generator=g).bfloat16().to(target.device)
    cache = torch.randn(3 * pages, 64, 1, 576, generator=g).bfloat16().to(target.device)
    table = torch.randperm(3 * pages, generator=g).int().view(3, pages).to(target.device)
    lens = torch.tensor([64 * pages, 20 * pages, 7], dtype=torch.int32, device=target.device)
    options = dict(page_table=table, seqused_k=lens, backend=target.backend)
    return lambda: ck.attention(q, cache, cache[..., :512], **options)


def states(target, seed: int) -> Job:
    """Attention over two halves of the keys, merged."""
    batch = make_batch([9], [300], 4, 2, 64, device=target.device, seed=seed)

    def job() -> torch.Tensor:
        halves = [
            ck.single_prefill_with_kv_cache(batch.q, k, v, return_lse=True, backend=target.backend)
            for k, v in zip(batch.k.split(150), batch.v.split(150))
        ]
        return ck.merge_state(*halves[0], *halves[1])[0]

    return job


JOBS = [tiles, split_keys, slopes, rotated, planned, replanned, fused, latent, states]


def stream_of(target) -> contextlib.AbstractContextManager[object]:
    """A stream of the calling thread; a CPU has none."""
    return contextlib.nullcontext() if target.is_reference else torch.cuda.stream(torch.cuda.Stream(target.device))


def at_once(target, jobs: list[Job], wanted: list[torch.Tensor], times: int) -> list[int]:
    """How many elements each thread computes wrong."""
    start = threading.Barrier(len(jobs))

    def work(number: int) -> int:
        with stream_of(target):
            wrong = torch.zeros((), dtype=torch.int64, device=target.device)
            start.wait(60)
            for _ in range(times):
                wrong += (jobs[number]() != wanted[number]).sum()
            return int(wrong)

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(work, range(len(jobs))))


def synchronize(target) -> None:
    if not target.is_reference:
        torch.cuda.synchronize(target.device)


@pytest.mark.parametrize("make", JOBS)
def test_threads_with_streams_of_their_own(target, make):
    jobs = [make(target, seed) for seed in range(THREADS)]
    wanted = [job().clone() for job in jobs]
    synchronize(target)
    assert not any(torch.equal(wanted[0], other) for other in wanted[1:])  # or mixed up results would not show
    assert at_once(target, jobs, wanted, 5 if target.is_reference else 300) == [0] * THREADS


def test_threads_that_do_different_things(target):
    jobs = [make(target, seed) for seed, make in enumerate(JOBS)]
    wanted = [job().clone() for job in jobs]
    synchronize(target)
    assert at_once(target, jobs, wanted, 5 if target.is_reference else 200) == [0] * len(JOBS)


@pytest.mark.parametrize("make", JOBS)
def test_first_calls_of_threads_at_the_same_time(target, make):
    """What a first call makes and keeps, for itself or for others, is made while others make it."""
    wanted = [make(target, seed)() for seed in range(THREADS)]
    synchronize(target)
    start = threading.Barrier(THREADS)

    def work(seed: int) -> torch.Tensor:
        with stream_of(target):
            start.wait(60)
            out = make(target, seed)()
            synchronize(target)
        return out

    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        for out, want in zip(threads.map(work, range(THREADS)), wanted):
            assert torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [tiles, split_keys, planned, fused])
def test_replays_beside_calls_of_other_threads(target, make):
    """A graph keeps what it needs; calls on other streams have their own."""
    if target.is_reference:
        pytest.skip("a CUDA graph needs CUDA kernels")
    captured, *others = jobs = [make(target, seed) for seed in range(THREADS)]
    wanted = [job().clone() for job in jobs]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    assert at_once(target, [replay, *others], wanted, 300) == [0] * THREADS
