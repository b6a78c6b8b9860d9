"""Threads do not mix up their calls, and Python goes on while a call waits for the GPU.

Threads with streams and workspaces of their own get the bits that each gets alone; launches release the GIL.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import capture
from paths import TESTS
from problems import Options, graph_buffers, make_batch
from targets import Target
from wrapper_problems import Wrapped

import cutlass_kernels as ck
from cutlass_kernels._compute import selection

HERE = os.pathsep.join([os.path.dirname(__file__), str(TESTS)])  # of this module, and of what it imports
SECONDS = 120  # loading torch takes 10 of them, the calls 1 to 2
THREADS = 4
CAUSAL = Options(causal=True)
Job = Callable[[], Any]


def wrapped(
    target: Target, kind: str, qo_lens: list[int], kv_lens: list[int], heads=(8, 2), dim=64, seed=0, **more: Any
):
    batch = make_batch(qo_lens, kv_lens, *heads, dim, device=target.device, seed=seed)
    return Wrapped(target, kind, batch, **more)


def single(target: Target, seed: int = 0, **options: Any) -> Job:
    return wrapped(target, "single", [9], [300], (4, 2), seed=seed).plan(Options(causal=True, **options)).run


def slopes(target: Target, seed: int = 0) -> Job:
    return single(target, seed, pos_encoding_mode="ALIBI")


def rotated(target: Target, seed: int = 0) -> Job:
    """Kernels read copies of the keys, which are allocated on the stream."""
    return single(target, seed, pos_encoding_mode="ROPE_LLAMA")


def tiles(target: Target, seed: int = 0) -> Job:
    """More tiles than thread blocks on a GPU: these take them from a counter of their stream."""
    rows = 40 if target.is_reference else 700
    return wrapped(target, "single", [rows], [rows], (16, 4), seed=seed).plan(CAUSAL).run


def split_keys(target: Target, seed: int = 0) -> Job:
    """Partial results and the counters that say which thread block combines them."""
    batch = make_batch([1], [200 if target.is_reference else 40000], 8, 2, 64, device=target.device, seed=seed)
    return lambda: ck.single_decode_with_kv_cache(batch.q[0], batch.k, batch.v, backend=target.backend)


def planned(target: Target, seed: int = 0, kv_lens: tuple[int, int] = (40000, 9000)) -> Job:
    """A wrapper planned once."""
    lens = [900, 200] if target.is_reference else [*kv_lens]
    return wrapped(target, "decode", [1, 1], lens, seed=seed).plan().run


def replanned(target: Target, seed: int = 0) -> Job:
    """A wrapper planned before every run, as engines do in every step."""
    w = wrapped(target, "ragged", [60, 1, 9], [90, 800, 9], seed=seed)
    return lambda: w.plan(CAUSAL).run()


def fused(target: Target, seed: int = 0, longest: int = 2500) -> Job:
    lens = [20, 33] if target.is_reference else [longest, 33]
    batch = make_batch([5, 3], lens, 8, 2, 64, device=target.device, seed=seed)
    offsets, workspace = (batch.qo_indptr(target.device), batch.kv_indptr(target.device)), target.workspace()
    given = ([batch.q, batch.k, batch.v], "SEPARATE_Q_K_V", workspace, workspace, 5, 2500, 0.1, 1.0, 2, *offsets)
    return lambda: ck.trtllm_fmha_v2_prefill(*given)


def latent(target: Target, seed: int = 0) -> Job:
    """A batch of latent caches: each call writes a list of even shares, and keeps none."""
    pages, g = 2 if target.is_reference else 40, torch.Generator().manual_seed(seed)
    q = torch.randn(3, 1, 64, 576, generator=g).bfloat16().to(target.device)
    cache = torch.randn(3 * pages, 64, 1, 576, generator=g).bfloat16().to(target.device)
    table = torch.randperm(3 * pages, generator=g).int().view(3, pages).to(target.device)
    lens = torch.tensor([64 * pages, 20 * pages, 7], dtype=torch.int32, device=target.device)
    options = dict(page_table=table, seqused_k=lens, backend=target.backend)
    return lambda: ck.attention(q, cache, cache[..., :512], **options)


def states(target: Target, seed: int = 0) -> Job:
    """Attention over two halves of the keys, merged."""
    batch = make_batch([9], [300], 4, 2, 64, device=target.device, seed=seed)
    halves = list(zip(batch.k.split(150), batch.v.split(150)))
    half = lambda kv: ck.single_prefill_with_kv_cache(batch.q, *kv, return_lse=True, backend=target.backend)  # noqa: E731
    return lambda: ck.merge_state(*half(halves[0]), *half(halves[1]))[0]


JOBS = [tiles, split_keys, slopes, rotated, planned, replanned, fused, latent, states]


# --- streams and workspaces of their own -------------------------------------------------------------------------


def in_threads(target: Target, work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """``work(number)`` at the same time, each on a stream of its own; a CPU has none."""
    start = threading.Barrier(count)

    def started(number: int) -> Any:
        stream = None if target.is_reference else torch.cuda.Stream(target.device)
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            start.wait(60)
            result = work(number)
            synchronize(target)
            return result

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        return list(threads.map(started, range(count)))


def wrong_elements(target: Target, jobs: list[Job], wanted: list[torch.Tensor], times: int) -> list[int]:
    """How many each thread computes."""

    def work(number: int) -> int:
        wrong = torch.zeros((), dtype=torch.int64, device=target.device)
        for _ in range(times):
            wrong += (jobs[number]() != wanted[number]).sum()
        return int(wrong)

    return in_threads(target, work, len(jobs))


def synchronize(target: Target) -> None:
    if not target.is_reference:
        torch.cuda.synchronize(target.device)


@pytest.mark.parametrize(
    "makes", [*([make] * THREADS for make in JOBS), JOBS], ids=[*(x.__name__ for x in JOBS), "all"]
)
def test_threads_with_streams_of_their_own(target, makes):
    jobs = [make(target, seed) for seed, make in enumerate(makes)]
    wanted = [job().clone() for job in jobs]
    synchronize(target)
    if makes is not JOBS:  # or mixed up results would not show
        assert not any(torch.equal(wanted[0], other) for other in wanted[1:])
    times = 5 if target.is_reference else 200 if makes is JOBS else 300
    assert wrong_elements(target, jobs, wanted, times) == [0] * len(jobs)


@pytest.mark.parametrize("make", JOBS)
def test_first_calls_of_threads_at_the_same_time(target, make):
    """What a first call makes and keeps, for itself or for others, is made while others make it."""
    wanted = [make(target, seed)() for seed in range(THREADS)]
    synchronize(target)
    for out, want in zip(in_threads(target, lambda seed: make(target, seed)()), wanted):
        assert torch.equal(out, want)


@pytest.mark.parametrize("make", [tiles, split_keys, planned, fused])
def test_replays_beside_calls_of_other_threads(kernels, make):
    """A graph keeps what it needs; calls on other streams have their own."""
    captured, *others = jobs = [make(kernels, seed) for seed in range(THREADS)]
    wanted = [job().clone() for job in jobs]
    graph, out = capture(captured, warm_up=0)

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    assert wrong_elements(kernels, [replay, *others], wanted, 300) == [0] * THREADS


# --- the GIL, and what a thread finds ----------------------------------------------------------------------------


def scaled(target: Target) -> Job:
    """Not to be repeated: each goes through all checks."""
    w, scale = wrapped(target, "single", [20], [300], (4, 2)), torch.ones(1, device=target.device)
    return lambda: w.run(scale_k=scale)


def run(target: Target) -> Job:
    return planned(target, kv_lens=(3000, 20))


def plan(target: Target) -> Job:
    """From index tensors on the CPU."""
    return wrapped(target, "ragged", [5, 3], [20, 33]).plan


def plan_of_a_graph(target: Target) -> Job:
    """Copies index tensors to the buffers of the wrapper."""
    w = wrapped(target, "paged", [5, 3], [20, 33], **graph_buffers(2, 20, target.device))
    vectors = w.vectors(target.device)
    return lambda: w.wrapper.plan(*vectors, *w.sizes)


def fused_prefill(target: Target) -> Job:
    selection.environment = selection.Environment(auto=target.backend)
    return fused(target, longest=20)


def merge(target: Target) -> Job:
    v, s = torch.randn(7, 4, 64, device=target.device), torch.randn(7, 4, device=target.device)
    return lambda: (ck.merge_state(v, s, v, s), ck.merge_states(v[:, None], s[:, None]))


def append(target: Target) -> Job:
    device = target.device
    paged = make_batch([5, 3], [20, 33], 4, 2, 64, device=device).paged(16)
    new = torch.ones(8, 2, 64, dtype=torch.float16, device=device)
    offsets, lens = torch.tensor([0, 5, 8], device=device).int(), torch.tensor([20, 33], device=device).int()
    indptr, indices, last = paged.table(device)

    def call() -> None:
        places = ck.get_batch_indices_positions(offsets, lens, 8)
        ck.append_paged_kv_cache(new, new, *places, paged.cache, indices, indptr, last)

    return call


CALLS: list[Callable[..., Job]] = [single, scaled, rotated, run, plan, plan_of_a_graph, fused_prefill, merge, append]
WITHOUT_ATTENTION = ["plan", "plan_of_a_graph", "merge", "append"]


def fill_the_queue(name: str, backend: str) -> None:
    """Makes more calls than the queue of a stream has room for, behind a host function in Python, in a process of its
    own."""
    from cutlass_kernels import _C

    call = {x.__name__: x for x in CALLS}[name](Target("cuda:0", backend))
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    host_calls: list[int] = []
    host_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: host_calls.append(1))
    torch.cuda._sleep(1 << 31)  # a second, in which the queue fills
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream, host_function, None) == 0
    for _ in range(5000):
        call()
    torch.cuda.synchronize()
    assert host_calls == [1]
    launched = {x for x in _C.backends if _C.launch_count(x)}
    assert launched == (set() if name in WITHOUT_ATTENTION else {backend}), f"{launched} ran"


@pytest.mark.runs_nothing("calls in a process of its own, which counts them")
@pytest.mark.parametrize("name", [x.__name__ for x in CALLS])
def test_a_full_queue_does_not_keep_python_from_running(kernel_backend, name):
    code = f"import test_threads; test_threads.fill_the_queue({name!r}, {kernel_backend!r})"
    package = os.path.dirname(os.path.dirname(os.path.abspath(ck.__file__)))
    path = os.pathsep.join([package, HERE, os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=os.environ | {"PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"5000 calls of {name} behind a host function in Python hang: a launch waits with the GIL.")
    assert done.returncode == 0, done.stderr


def test_threads_that_share_a_workspace_get_their_own_results(kernels):
    """As they share the stream, too. Of keys that are split, one kernel leaves results there for another."""
    shared = kernels.workspace()
    jobs = [
        wrapped(kernels, "decode", [1, 1], [40000, 9000], (32, 4), 128, x, workspace=shared).plan() for x in range(2)
    ]
    wanted = [w.run().clone() for w in jobs]

    def work(number: int) -> int:
        wrong = torch.zeros((), dtype=torch.int64, device=kernels.device)
        for _ in range(2000):
            wrong += (jobs[number].run() != wanted[number]).sum()
        return int(wrong)

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as threads:
        assert list(threads.map(work, range(len(jobs)))) == [0, 0]


def test_a_kernel_is_the_first_cuda_call_of_its_thread(kernels):
    """The driver's functions for tensor maps fail in a thread to which no context belongs yet."""
    w = wrapped(kernels, "decode", [1, 1], [40000, 9000], (32, 4), 128).plan()
    out, want = torch.empty_like(w.batch.q), w.run()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(w.run, out=out).result()
    assert torch.equal(out, want)
