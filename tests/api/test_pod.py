"""The wrappers for prompts beside decode steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from problems import Options, expect, graph_buffers, make_batch

import cutlass_kernels as ck


@pytest.fixture(autouse=True)
def backend_of_the_target(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrappers take no backend."""
    if "target" in request.fixturenames:
        monkeypatch.setenv("CUTLASS_KERNELS_BACKEND", request.getfixturevalue("target").backend)


def batches(target: Any, prompts: tuple[list[int], list[int]]) -> tuple[Any, Any]:
    steps = make_batch([1, 1, 1], [300, 16, 7], 8, 2, 64, device=target.device, seed=1)
    return make_batch(*prompts, 8, 2, 64, device=target.device), steps


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_prompt_beside_decode_steps(target, layout, masked):
    prompt, steps = batches(target, ([40], [70]))
    paged = steps.paged(16, layout)
    wrapper = ck.PODWithPagedKVCacheWrapper(target.workspace(), layout)
    wrapper.plan(*paged.table(), 8, 2, 64, 16, data_type=torch.float16)
    masks = prompt.random_masks() if masked else None
    k, v = (x.transpose(0, 1) if layout == "HND" else x for x in (prompt.k, prompt.v))
    options: dict[str, Any] = dict(custom_mask_p=masks[0]) if masks else dict(causal_p=True, window_left_p=9)
    found = wrapper.run(prompt.q, k, v, steps.q, paged.cache, kv_layout_p=layout, sm_scale_p=0.2, **options)
    of_prompt = Options(custom_masks=masks) if masks else Options(causal=True, window_left=9)
    of_prompt.sm_scale = 0.2
    for out, batch, given in zip(found, (prompt, steps), (of_prompt, Options())):
        want = expect(batch, given)
        assert_close(out, want.out, want.baseline)
    scales = dict(q_scale=0.5, k_scale=0.7, v_scale=3.0)
    _, found_d = wrapper.run(prompt.q, k, v, steps.q, paged.cache, kv_layout_p=layout, **scales)
    assert_close(found_d, expect(steps, Options(**scales)).out, atol=1e-2)
    assert "decode" in repr(wrapper) and not wrapper.is_cuda_graph_enabled


def test_what_a_pod_wrapper_refuses(target):
    prompt, steps = batches(target, ([40], [70]))
    wrapper = ck.PODWithPagedKVCacheWrapper(target.workspace())
    paged = steps.paged(16)
    wrapper.plan(*paged.table(), 8, 2, 64, 16)
    tensors = (prompt.q, prompt.k, prompt.v, steps.q, paged.cache)
    wrapper.run(*tensors)
    with pytest.raises(NotImplementedError, match="custom_mask_d"):
        wrapper.run(*tensors, custom_mask_d=torch.ones(3, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="does not serve 1 further positional arguments"):
        wrapper.run(*tensors, *[None] * 25, prompt.q)
    with pytest.raises(NotImplementedError, match="jit_args"):
        ck.PODWithPagedKVCacheWrapper(target.workspace(), jit_args=["x"])


@pytest.mark.gpu
def test_a_captured_run_follows_plans():
    steps = make_batch([1, 1, 1], [300, 16, 7], 8, 2, 64, device="cuda", seed=1)
    other = make_batch([1, 1, 1], [100, 200, 33], 8, 2, 64, device="cuda", seed=2)
    prompt = make_batch([40], [70], 8, 2, 64, device="cuda")
    buffers = graph_buffers(3, 64, "cuda")
    names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    given = {f"{name}_buffer": buffers[f"{name}_buf"] for name in names}
    workspace = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    wrapper = ck.PODWithPagedKVCacheWrapper(workspace, use_cuda_graph=True, **given)
    assert wrapper.is_cuda_graph_enabled
    paged, later = steps.paged(16), other.paged(16)
    cache = torch.zeros(64, 2, 16, 2, 64, dtype=torch.float16, device="cuda")
    q = steps.q.clone()
    wrapper.plan(*paged.table(), 8, 2, 64, 16)
    wrapper.run(prompt.q, prompt.k, prompt.v, q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = wrapper.run(prompt.q, prompt.k, prompt.v, q, cache)
    for batch, table in ((steps, paged), (other, later)):
        wrapper.plan(*table.table(), 8, 2, 64, 16)
        cache[: table.cache.size(0)] = table.cache
        q.copy_(batch.q)
        graph.replay()
        for out, of in zip(found, (prompt, batch)):
            want = expect(of, Options())
            assert_close(out, want.out, want.baseline)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_batches_of_prompts_beside_decode_steps(target, layout):
    prompts, steps = batches(target, ([40, 9], [70, 9]))
    paged = [x.paged(16, layout) for x in (prompts, steps)]
    wrapper = ck.BatchPODWithPagedKVCacheWrapper(target.workspace(), layout)
    tables = [(x.qo_indptr(), *table.table()) for x, table in zip((prompts, steps), paged)]
    wrapper.plan(*tables[0], *tables[1], 8, 2, 64, 16)
    for x in (*tables[0], *tables[1]):  # a plan does not depend on what becomes of CPU tensors
        x.zero_()
    tensors = (prompts.q, paged[0].cache, steps.q, paged[1].cache)
    masks = prompts.random_masks()
    flat = torch.cat([x.flatten() for x in masks])
    runs: list[tuple[dict[str, Any], Options]] = [
        (dict(causal_p=True), Options(causal=True)),
        (dict(custom_mask_p=flat), Options(custom_masks=masks)),
        ({}, Options()),
        (dict(causal_p=True), Options(causal=True)),
    ]
    for given, options in runs:
        found = wrapper.run(*tensors, return_lse=True, **given)
        for out, lse, batch, of in zip(*found, (prompts, steps), (options, Options())):
            want = expect(batch, of)
            assert_close(out, want.out, want.baseline)
            assert_lse_close(lse, want.lse)
    assert_bitwise(wrapper.run(*tensors, causal_p=True)[0], found[0][0])
    assert "prefill" in repr(wrapper) and not wrapper.is_cuda_graph_enabled
    with pytest.raises(RuntimeError, match="has no plan"):
        ck.BatchPODWithPagedKVCacheWrapper(target.workspace()).run(*tensors)


def test_a_failed_plan_leaves_none(target):
    """Not the new prompts beside the old steps."""
    prompts, steps = batches(target, ([20, 5], [40, 33]))
    tables = [x.paged(16, unused="zero") for x in (prompts, steps)]
    wrapper = ck.BatchPODWithPagedKVCacheWrapper(target.workspace())
    plans = (prompts.qo_indptr(), *tables[0].table()), (steps.qo_indptr(), *tables[1].table())
    run = lambda: wrapper.run(prompts.q, tables[0].cache, steps.q, tables[1].cache)  # noqa: E731
    wrapper.plan(*plans[0], *plans[1], *prompts.heads, 16)
    want = run()
    for wrong in (0, 1):
        given = [list(plan) for plan in plans]
        given[wrong][3] = given[wrong][3] + 16
        with pytest.raises(RuntimeError, match="is not in"):
            wrapper.plan(*given[0], *given[1], *prompts.heads, 16)
        with pytest.raises(RuntimeError, match="has no plan"):
            run()
    wrapper.plan(*plans[0], *plans[1], *prompts.heads, 16)
    for a, b in zip(run(), want):
        assert_bitwise(a, b)
