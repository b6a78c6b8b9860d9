"""Runs and calls one after another: what one returns does not depend on those before it."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from captures import capture
from compare import assert_bitwise
from problems import Options, make_batch
from registry import several
from targets import Target
from wrapper_problems import Wrapped, batch_for

import cutlass_kernels as ck
from cutlass_kernels._masks import mask_packing

E4M3 = torch.float8_e4m3fn
CPU = Target("cpu", "reference")


def run_on_copies(w: Wrapped, **given):
    """At new addresses."""
    return several(w.wrapper.run(w.batch.q.clone(), *(x.clone() for x in w.kv), **given))


def small(kind: str, target=CPU) -> Wrapped:
    return Wrapped(target, kind, batch_for(kind, target, (5, 3), (20, 33)))


@pytest.fixture(params=["paged", "ragged"])
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("options", [dict(), dict(causal=True, logits_soft_cap=2.0), dict(pos_encoding_mode="ALIBI")])
def test_runs_follow_one_another(target, kind, options):
    w = small(kind, target).plan(Options(**options))
    sinks = torch.randn(4, device=target.device)
    for kwargs in (dict(), dict(return_lse=True), dict(k_scale=0.5, v_scale=2.0), dict(sinks=sinks, return_lse=True)):
        first, *others = [run_on_copies(w, **kwargs) for _ in range(4)]
        for other in others:
            for a, b in zip(first, other):
                assert_bitwise(a, b)
        out = torch.full_like(w.batch.q, torch.nan)
        for _ in range(4):
            run_on_copies(w, out=out.fill_(torch.nan), **kwargs)
            assert_bitwise(out, first[0])
    w.batch.q = torch.randn(8, 4, 64).to(w.batch.q)
    fresh = Wrapped(target, kind, w.batch)
    fresh.pages, fresh.kv = w.pages, w.kv
    assert_bitwise(w.run(), fresh.plan(Options(**options)).run())


BATCHES = [([5, 3], [20, 33]), ([8], [7]), ([1, 1, 6], [900, 0, 40]), ([4, 4], [20, 33]), ([5, 3], [20, 33])]
OF_FP8 = [([100], [60]), ([60, 40], [28, 32]), ([40, 60], [30, 30]), ([100], [60])]


@pytest.mark.parametrize("kv_dtype", [torch.float16, E4M3], ids=["fp16", "e4m3"])
def test_first_runs_of_later_plans_give_the_same(target, kind, kv_dtype):
    w = small(kind, target).plan(Options(causal=True))
    for qo_lens, kv_lens in BATCHES if kv_dtype == torch.float16 else OF_FP8:
        batch = batch_for(kind, target, qo_lens, kv_lens, kv_dtype=kv_dtype)
        mine, fresh = Wrapped(target, kind, batch, wrapper=w.wrapper), Wrapped(target, kind, batch)
        if kind == "paged" and kv_dtype == torch.float16:
            cache = torch.zeros(64, *mine.kv[0].shape[1:]).to(mine.kv[0])  # the same for all of them
            cache[: len(mine.kv[0])] = mine.kv[0]
            mine.kv = (cache,)
        fresh.pages, fresh.kv = mine.pages, mine.kv
        for x in (mine, fresh):
            x.plan(Options(causal=kv_dtype == torch.float16))
        assert mine.wrapper._plan_info.request == fresh.wrapper._plan_info.request
        assert_bitwise(mine.run(), fresh.run())


def test_later_plans_refuse(target):
    w = small("paged", target).plan()
    w.run()
    indices = w.pages.indices.clone()
    w.pages.indices[0] = w.kv[0].size(0)
    with pytest.raises(ValueError, match="the cache has only"):
        w.plan().run()
    w.pages.indices = indices
    w.wrapper.plan(torch.tensor([0, 5, 7]).int(), *w.vectors()[1:], *w.sizes)
    with pytest.raises(ValueError, match="q has 8 rows"):
        w.run()


def test_single_calls_give_the_same(target):
    for rows, keys in ((9, 20), (1, 5000), (200, 300)):
        batch, options = make_batch([rows], [keys], 4, 2, 64, device=target.device), dict(causal=True, return_lse=True)
        copies = lambda: (x.clone() for x in (batch.q, batch.k, batch.v))  # noqa: E731
        results = [ck.single_prefill_with_kv_cache(*copies(), backend=target.backend, **options) for _ in range(4)]
        for other in results[1:]:
            for a, b in zip(results[0], other):
                assert_bitwise(a, b)


def test_runs_with_rows_known_to_the_device_alone(kernels, kind):
    w = small(kind, kernels).plan()
    want = run_on_copies(w, return_lse=True)
    w.plan(where=kernels.device)
    for _ in range(3):
        for a, b in zip(run_on_copies(w, return_lse=True), want):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


def test_runs_in_a_graph_and_on_another_stream(kernels, kind):
    w = small(kind, kernels).plan()
    out = torch.zeros_like(w.batch.q)
    run = lambda: w.run(out=out)  # noqa: E731
    for _ in range(2):
        run()
    want = out.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out.zero_()
        run()
    stream.synchronize()
    assert_bitwise(out, want)
    graph, _ = capture(run, warm_up=0)
    out.zero_()
    graph.replay()
    assert_bitwise(out, want)


def test_a_copy_of_a_wrapper_is_another():
    w = small("ragged").plan()
    other = copy.deepcopy(w.wrapper)
    assert other._number != w.wrapper._number
    assert_bitwise(other.run(w.batch.q, *w.kv), w.run())


def test_a_default_device_is_not_ours():
    # Sizes of masks are computed on the CPU, wherever tensors are made by default.
    q, k, v = (torch.randn(9, 2, 16) for _ in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool)
    with torch.device("meta"):
        bits, offsets = mask_packing.pack_mask(mask, [9], [9])
    assert bits.device.type == "cpu" and offsets.tolist() == [0, 11]
    assert_bitwise(ck.single_prefill_with_kv_cache(q, k, v, mask), ck.single_prefill_with_kv_cache(q, k, v))


def test_errors_do_not_depend_on_earlier_calls():
    w = small("ragged")
    plan = functools.partial(w.wrapper.plan, *w.vectors())
    for _ in range(2):
        plan(4, 2, 64)
        with pytest.raises(TypeError, match=r"num_qo_heads=4\.0"):
            plan(4.0, 2, 64)
        with pytest.raises(TypeError, match=r"window_left=3\.0"):
            plan(4, 2, 64, window_left=3.0)
        plan(4, 2, 64, window_left=3)
    with pytest.raises(TypeError, match="q is tuple"):
        w.wrapper.run((w.batch.q,), *w.kv)
