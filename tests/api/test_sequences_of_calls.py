"""Runs and calls one after another: what one returns does not depend on those before it."""

from __future__ import annotations

import copy

import pytest
import torch
from compare import assert_bitwise
from problems import make_batch

import cutlass_kernels as ck
from cutlass_kernels._masks import mask_packing

E4M3 = torch.float8_e4m3fn


def planned(kind: str, target=None, batch=None, **options):
    """A wrapper, and a function that runs it on copies of its tensors at new addresses."""
    device = "cpu" if target is None else target.device
    batch = batch or make_batch([5, 3], [20, 33], 4, 2, 64, device=device)
    workspace = torch.zeros(1 << 20, dtype=torch.uint8) if target is None else target.workspace()
    backend = "reference" if target is None else target.backend
    if kind == "paged":
        paged = batch.paged(16)
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 16, **options)
        kv = (paged.cache,)
    else:
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **options)
        kv = (batch.k, batch.v)

    def run(q=None, **kwargs):
        return wrapper.run(batch.q.clone() if q is None else q, *(x.clone() for x in kv), **kwargs)

    run.table = paged.table if kind == "paged" else lambda device: (batch.kv_indptr(device),)
    return wrapper, batch, run


@pytest.fixture(params=["paged", "ragged"])
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("options", [dict(), dict(causal=True, logits_soft_cap=2.0), dict(pos_encoding_mode="ALIBI")])
def test_runs_follow_one_another(target, kind, options):
    _, batch, run = planned(kind, target, **options)
    sinks = torch.randn(4, device=target.device)
    for kwargs in (dict(), dict(return_lse=True), dict(k_scale=0.5, v_scale=2.0), dict(sinks=sinks, return_lse=True)):
        first, *others = [x if isinstance(x, tuple) else (x,) for x in (run(**kwargs) for _ in range(4))]
        for other in others:
            for a, b in zip(first, other):
                assert_bitwise(a, b)
        out = torch.full_like(batch.q, torch.nan)
        for _ in range(4):
            run(out=out.fill_(torch.nan), **kwargs)
            assert_bitwise(out, first[0])
    other = torch.randn(8, 4, 64).to(batch.q)
    assert_bitwise(run(other), planned(kind, target, batch, **options)[2](other))


def test_first_runs_of_later_plans_give_the_same(target, kind):
    wrapper, _, _ = planned(kind, target, causal=True)
    batches = [([5, 3], [20, 33]), ([8], [7]), ([1, 1, 6], [900, 0, 40]), ([4, 4], [20, 33]), ([5, 3], [20, 33])]
    for qo_lens, kv_lens in batches:
        batch = make_batch(qo_lens, kv_lens, 4, 2, 64, device=target.device)
        paged = batch.paged(16)
        if kind == "paged":
            cache = torch.zeros(64, *paged.cache.shape[1:]).to(paged.cache)  # the same for all of them
            cache[: paged.cache.size(0)] = paged.cache
            table, kv = (batch.qo_indptr(), *paged.table(), *batch.heads, 16), (cache,)
        else:
            table, kv = (batch.qo_indptr(), batch.kv_indptr(), *batch.heads), (batch.k, batch.v)
        fresh = type(wrapper)(target.workspace(), backend=target.backend)
        for plans in (wrapper, fresh):
            plans.plan(*table, causal=True)
        assert_bitwise(wrapper.run(batch.q, *kv), fresh.run(batch.q, *kv))


def test_later_plans_refuse(target):
    wrapper, batch, _ = planned("paged", target)
    paged = batch.paged(16)
    table = paged.table()
    wrapper.run(batch.q, paged.cache)
    indices = table[1].clone()
    indices[0] = paged.cache.size(0)
    wrapper.plan(batch.qo_indptr(), table[0], indices, table[2], *batch.heads, 16)
    with pytest.raises(ValueError, match="the cache has only"):
        wrapper.run(batch.q, paged.cache)
    wrapper.plan(torch.tensor([0, 5, 7]).int(), *table, *batch.heads, 16)
    with pytest.raises(ValueError, match="q has 8 rows"):
        wrapper.run(batch.q, paged.cache)


def test_first_runs_of_later_plans_over_fp8_give_the_same(target, kind):
    wrapper, _, _ = planned(kind, target)
    types = dict(q_data_type=torch.float16, kv_data_type=E4M3)
    for qo_lens, kv_lens in [([100], [60]), ([60, 40], [28, 32]), ([40, 60], [30, 30]), ([100], [60])]:
        batch = make_batch(qo_lens, kv_lens, 4, 2, 64, dtype=torch.float16, kv_dtype=E4M3, device=target.device)
        paged = batch.paged(16)
        if kind == "paged":
            table, kv = (batch.qo_indptr(), *paged.table(), *batch.heads, 16), (paged.cache,)
        else:
            table, kv = (batch.qo_indptr(), batch.kv_indptr(), *batch.heads), (batch.k, batch.v)
        fresh = type(wrapper)(target.workspace(), backend=target.backend)
        for plans in (wrapper, fresh):
            plans.plan(*table, **types)
        assert wrapper._plan_info.request == fresh._plan_info.request
        assert_bitwise(wrapper.run(batch.q, *kv), fresh.run(batch.q, *kv))


def test_single_calls_give_the_same(target):
    for rows, keys in ((9, 20), (1, 5000), (200, 300)):
        batch = make_batch([rows], [keys], 4, 2, 64, device=target.device)
        call = lambda: ck.single_prefill_with_kv_cache(  # noqa: E731
            batch.q.clone(), batch.k.clone(), batch.v.clone(), causal=True, return_lse=True, backend=target.backend
        )
        first = call()
        for _ in range(3):
            for a, b in zip(first, call()):
                assert_bitwise(a, b)


@pytest.mark.gpu
def test_runs_with_rows_known_to_the_device_alone(target, kind):
    if target.is_reference:
        pytest.skip("the reference is tested on the CPU, which takes no CUDA offsets")
    batch = make_batch([5, 3], [20, 33], 4, 2, 64, device=target.device)
    wrapper, _, run = planned(kind, target, batch)
    want = run(return_lse=True)
    size = (16,) if kind == "paged" else ()
    wrapper.plan(batch.qo_indptr(target.device), *run.table(target.device), *batch.heads, *size)
    for _ in range(3):
        for a, b in zip(run(return_lse=True), want):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
def test_runs_in_a_graph_and_on_another_stream(target, kind):
    if target.is_reference:
        pytest.skip("the reference is tested on the CPU, where there are no CUDA graphs")
    wrapper, batch, _ = planned(kind, target)
    q, out = batch.q.clone(), torch.zeros_like(batch.q)
    kv = (batch.paged(16).cache,) if kind == "paged" else (batch.k, batch.v)
    for _ in range(2):
        wrapper.run(q, *kv, out=out)
    want = out.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out.zero_()
        wrapper.run(q, *kv, out=out)
    stream.synchronize()
    assert_bitwise(out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, *kv, out=out)
    out.zero_()
    graph.replay()
    assert_bitwise(out, want)


def test_a_copy_of_a_wrapper_is_another():
    wrapper, batch, _ = planned("ragged")
    other = copy.deepcopy(wrapper)
    assert other._number != wrapper._number
    assert_bitwise(other.run(batch.q, batch.k, batch.v), wrapper.run(batch.q, batch.k, batch.v))


def test_a_default_device_is_not_ours():
    # Sizes of masks are computed on the CPU, wherever tensors are made by default.
    q, k, v = (torch.randn(9, 2, 16) for _ in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool)
    with torch.device("meta"):
        bits, offsets = mask_packing.pack_mask(mask, [9], [9])
    assert bits.device.type == "cpu" and offsets.tolist() == [0, 11]
    assert_bitwise(ck.single_prefill_with_kv_cache(q, k, v, mask), ck.single_prefill_with_kv_cache(q, k, v))


def test_errors_do_not_depend_on_earlier_calls():
    batch = make_batch([5, 3], [20, 33], 4, 2, 64)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    offsets = (batch.qo_indptr(), batch.kv_indptr())
    for _ in range(2):
        wrapper.plan(*offsets, 4, 2, 64)
        with pytest.raises(TypeError, match=r"num_qo_heads=4\.0"):
            wrapper.plan(*offsets, 4.0, 2, 64)
        with pytest.raises(TypeError, match=r"window_left=3\.0"):
            wrapper.plan(*offsets, 4, 2, 64, window_left=3.0)
        wrapper.plan(*offsets, 4, 2, 64, window_left=3)
    with pytest.raises(TypeError, match="q is tuple"):
        wrapper.run((batch.q,), batch.k, batch.v)
