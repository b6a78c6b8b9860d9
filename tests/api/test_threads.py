"""Python goes on while a call waits for the GPU: launches release the GIL, and threads do not mix up their calls."""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from paths import TESTS
from problems import graph_buffers, make_batch

import cutlass_kernels as ck
from cutlass_kernels._compute import selection

HERE = os.pathsep.join([os.path.dirname(__file__), str(TESTS)])  # of this module, and of what it imports
SECONDS = 120  # loading torch takes 10 of them, the calls 1 to 2
Call = Callable[[], object]


def single(device: str, backend: str) -> Call:
    batch = make_batch([20], [300], 4, 2, 64, device=device)
    return lambda: ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, backend=backend)


def scaled(device: str, backend: str) -> Call:
    """Not to be repeated: each goes through all checks."""
    batch = make_batch([20], [300], 4, 2, 64, device=device)
    scale = torch.ones(1, device=device)
    return lambda: ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, scale_k=scale, backend=backend)


def rotated(device: str, backend: str) -> Call:
    batch = make_batch([20], [300], 4, 2, 64, device=device)
    options = dict(pos_encoding_mode="ROPE_LLAMA", backend=backend)
    return lambda: ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, **options)


def run(device: str, backend: str) -> Call:
    batch = make_batch([1, 1], [3000, 20], 8, 2, 64, device=device)
    paged = batch.paged(16)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
    wrapper.plan(*paged.table(), *batch.heads, 16)
    return lambda: wrapper.run(batch.q, paged.cache)


def plan(device: str, backend: str) -> Call:
    """From index tensors on the CPU."""
    batch = make_batch([5, 3], [20, 33], 4, 2, 64, device=device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend)
    return lambda: wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads)


def plan_of_a_graph(device: str, backend: str) -> Call:
    """Copies index tensors to the buffers of the wrapper."""
    batch = make_batch([5, 3], [20, 33], 4, 2, 64, device=device)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, **graph_buffers(2, 20, device))
    tensors = (batch.qo_indptr(device), *batch.paged(16).table(device))
    return lambda: wrapper.plan(*tensors, *batch.heads, 16)


def fused(device: str, backend: str) -> Call:
    selection.environment = selection.Environment(auto=backend)
    batch = make_batch([5, 3], [20, 33], 4, 2, 64, device=device)
    offsets = batch.qo_indptr(device), batch.kv_indptr(device)
    unread = torch.zeros(16, dtype=torch.uint8, device=device)
    numbers = (5, 33, 0.1, 1.0, 2)
    return lambda: ck.trtllm_fmha_v2_prefill(
        [batch.q, batch.k, batch.v], "SEPARATE_Q_K_V", unread, unread, *numbers, *offsets
    )


def merge(device: str, backend: str) -> Call:
    v, s = torch.randn(7, 4, 64, device=device), torch.randn(7, 4, device=device)
    return lambda: (ck.merge_state(v, s, v, s), ck.merge_states(v[:, None], s[:, None]))


def append(device: str, backend: str) -> Call:
    paged = make_batch([5, 3], [20, 33], 4, 2, 64, device=device).paged(16)
    new = torch.ones(8, 2, 64, dtype=torch.float16, device=device)
    offsets, lens = torch.tensor([0, 5, 8], device=device).int(), torch.tensor([20, 33], device=device).int()
    indptr, indices, last = paged.table(device)

    def call() -> None:
        places = ck.get_batch_indices_positions(offsets, lens, 8)
        ck.append_paged_kv_cache(new, new, *places, paged.cache, indices, indptr, last)

    return call


CALLS = [single, scaled, rotated, run, plan, plan_of_a_graph, fused, merge, append]
WITHOUT_ATTENTION = ["plan", "plan_of_a_graph", "merge", "append"]


def workspace(device: str) -> torch.Tensor:
    return torch.zeros(32 << 20, dtype=torch.uint8, device=device)


def fill_the_queue(name: str, backend: str) -> None:
    """Makes more calls than the queue of a stream has room for, behind a host function in Python, in a process of its
    own."""
    from cutlass_kernels import _C

    call = {x.__name__: x for x in CALLS}[name]("cuda:0", backend)
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


def test_threads_that_share_a_workspace_get_their_own_results(kernel_backend):
    """As they share the stream, too. Of keys that are split, one kernel leaves results there for another."""
    shared = workspace("cuda:0")
    jobs = []
    for seed in range(2):
        batch = make_batch([1, 1], [40000, 9000], 32, 4, 128, device="cuda:0", seed=seed)
        paged = batch.paged(16)
        wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(shared, backend=kernel_backend)
        wrapper.plan(*paged.table(), *batch.heads, 16)
        jobs.append((wrapper, batch.q, paged.cache, wrapper.run(batch.q, paged.cache).clone()))

    def work(number: int) -> int:
        wrapper, q, cache, want = jobs[number]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda:0")
        for _ in range(2000):
            wrong += (wrapper.run(q, cache) != want).sum()
        return int(wrong)

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as threads:
        assert list(threads.map(work, range(len(jobs)))) == [0, 0]


def test_a_kernel_is_the_first_cuda_call_of_its_thread(kernel_backend):
    """The driver's functions for tensor maps fail in a thread to which no context belongs yet."""
    batch = make_batch([1, 1], [40000, 9000], 32, 4, 128, device="cuda:0")
    paged = batch.paged(16)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(workspace("cuda:0"), backend=kernel_backend)
    wrapper.plan(*paged.table(), *batch.heads, 16)
    out, want = torch.empty_like(batch.q), wrapper.run(batch.q, paged.cache)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(wrapper.run, batch.q, paged.cache, out=out).result()
    assert torch.equal(out, want)
