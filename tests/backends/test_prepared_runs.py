"""Runs that compute from copies of fp8 or rotated tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Batch, Options, expect, graph_buffers, make_batch

import cutlass_kernels as ck

DEVICE = "cuda:0"
HALF = [torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
E4M3 = torch.float8_e4m3fn
ROPE = (2.0, 1e4)


def check(out: torch.Tensor, lse: torch.Tensor, batch: Batch, options: Options) -> None:
    want = expect(batch, options)
    assert_close(out, want.out, atol=1e-2, rtol=1e-2)
    assert_lse_close(lse, want.lse, atol=5e-3)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("dims", [(40, 40), (72, 64), (96, 96), (192, 128), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
def test_fp8_keys_of_any_head_dim(kernel_backend, mode, dims, dtype):
    # Rows of 40 and 72 bytes are aligned to 8.
    batch = make_batch([20], [150], 4, 2, dims[0], head_dim_vo=dims[1], dtype=dtype, kv_dtype=E4M3, device=DEVICE)
    options = Options(causal=True, pos_encoding_mode=mode)
    call = ck.single_prefill_with_kv_cache
    out, lse = call(batch.q, batch.k, batch.v, backend=kernel_backend, return_lse=True, **options.plan_kwargs())
    check(out, lse, batch, options)


def paged_wrapper(backend: str, **graph: Any) -> ck.BatchPrefillWithPagedKVCacheWrapper:
    workspace = torch.zeros(16 << 20, dtype=torch.uint8, device=DEVICE)
    return ck.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend, **graph)


def test_rotation_may_change_from_run_to_run(kernel_backend):
    # The plan knows the page table of the cache; runs that rotate have another one.
    batch = make_batch([9, 20], [50, 70], 4, 2, 64, device=DEVICE)
    paged = batch.paged(8)
    wrapper = paged_wrapper(kernel_backend)
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, causal=True)
    for mode in ("NONE", "ROPE_LLAMA", "NONE", "ROPE_LLAMA"):
        out, lse = wrapper.forward(batch.q, paged.cache, causal=True, pos_encoding_mode=mode, return_lse=True)
        assert wrapper._backend == kernel_backend
        check(out, lse, batch, Options(causal=True, pos_encoding_mode=mode))


def test_shared_pages_turn_by_the_position_in_their_request(kernel_backend):
    cache = torch.randn(3, 2, 8, 2, 64, device=DEVICE).half()
    pages = ([0, 1, 2], [2, 0], [1, 1])
    kv_lens, qo_lens = [20, 16, 11], [5, 16, 2]
    keys, values = ([cache[p, i].flatten(0, 1)[:n] for p, n in zip(pages, kv_lens)] for i in range(2))
    q = torch.randn(sum(qo_lens), 4, 64, device=DEVICE).half()
    batch = Batch(qo_lens, kv_lens, q, torch.cat(keys), torch.cat(values))
    wrapper = paged_wrapper(kernel_backend)
    table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 5, 7], [0, 1, 2, 2, 0, 1, 1], [4, 8, 3])]
    options = Options(causal=True, pos_encoding_mode="ROPE_LLAMA", rope_theta=1e3)
    wrapper.plan(batch.qo_indptr(), *table, 4, 2, 64, 8, **options.plan_kwargs())
    out, lse = wrapper.run(q, cache, return_lse=True)
    check(out, lse, batch, options)


@pytest.mark.parametrize("kv_dtype", [torch.float16, E4M3], ids=str)
@pytest.mark.parametrize("page_size", [5, 16])
def test_pages_that_the_cache_does_not_have_count_as_zeros(kernel_backend, kv_dtype, page_size):
    batch = make_batch([4], [4 * page_size], 4, 2, 64, kv_dtype=kv_dtype, device=DEVICE)
    paged = batch.paged(page_size, spare=0)
    paged.indices[1], paged.indices[2] = -7, 4
    for x in (batch.k, batch.v):
        x[page_size : 3 * page_size].view(torch.uint8).zero_()
    wrapper = paged_wrapper(kernel_backend)
    options = Options(causal=True, pos_encoding_mode="ROPE_LLAMA")
    types = dict(kv_data_type=kv_dtype)
    wrapper.plan(batch.qo_indptr(), *paged.table(DEVICE), *batch.heads, page_size, **types, **options.plan_kwargs())
    out, lse = wrapper.run(batch.q, paged.cache, return_lse=True)
    check(out, lse, batch, options)


@pytest.mark.parametrize("kv_dtype", [torch.float16, E4M3], ids=str)
def test_captured_runs_follow_later_plans(kernel_backend, kv_dtype):
    # The table of the copies belongs to the graph: it is not a plan's, which a later one replaces.
    steps = [([4, 4], [40, 90]), ([1, 7], [150, 7]), ([8, 0], [33, 5]), ([4, 4], [40, 90])]
    batches = [make_batch(*step, 4, 2, 64, kv_dtype=kv_dtype, device=DEVICE, seed=n) for n, step in enumerate(steps)]
    options = Options(causal=True, pos_encoding_mode="ROPE_LLAMA")

    wrapper = paged_wrapper(kernel_backend, **graph_buffers(2, 64, DEVICE))
    q = torch.zeros(8, 4, 64, dtype=torch.float16, device=DEVICE)
    cache = torch.zeros(32, 2, 8, 2, 64, device=DEVICE).to(kv_dtype)

    def load(batch: Batch) -> None:
        paged = batch.paged(8)
        q[: len(batch.q)] = batch.q
        cache.view(torch.uint8)[: len(paged.cache)] = paged.cache.view(torch.uint8)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, kv_data_type=kv_dtype, **options.plan_kwargs())

    load(batches[0])
    wrapper.run(q, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run(q, cache, return_lse=True)
    for batch in batches[1:]:
        load(batch)
        garbage = [torch.randint(1 << 30, (1 << 18,), device=DEVICE) for _ in range(8)]  # where a temporary was freed
        graph.replay()
        check(out[: len(batch.q)], lse[: len(batch.q)], batch, options)
        del garbage


def test_nothing_synchronises(kernel_backend):
    batch = make_batch([5, 9], [20, 90], 4, 2, 64, kv_dtype=E4M3, device=DEVICE)
    paged = batch.paged(8)
    table = [batch.qo_indptr(DEVICE), *paged.table(DEVICE)]
    options = Options(causal=True, pos_encoding_mode="ROPE_LLAMA")
    wrapper = paged_wrapper(kernel_backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        wrapper.plan(*table, *batch.heads, 8, kv_data_type=E4M3, **options.plan_kwargs())
        out, lse = wrapper.run(batch.q, paged.cache, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(out, lse, batch, options)
