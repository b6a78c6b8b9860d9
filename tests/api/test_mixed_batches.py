"""Wrappers whose batches mix prompts and decode steps: BatchAttention, POD, and pages with sinks by position."""

from __future__ import annotations

import doctest
import inspect
import math
from typing import Any

import pytest
import torch
from captures import capture
from compare import assert_bitwise, assert_close, assert_lse_close
from plan_free_problems import Mask
from plan_free_problems import Options as SinkOptions
from plan_free_problems import expect as expect_sinks
from problems import Batch, Options, expect, graph_buffers, make_batch

import cutlass_kernels as ck

SIZES = (8, 2, 64, 16)  # heads, dimension, page


def close(results: Any, batch: Batch, options: Options | None = None) -> None:
    """Output, and LSE if there is one, are those of the oracle."""
    out, *lse = results if isinstance(results, tuple) else (results,)
    want = expect(batch, options or Options())
    assert_close(out, want.out, want.baseline)
    for x in lse:
        assert_lse_close(x, want.lse)


def batch_of(target: Any, qo_lens: list[int], kv_lens: list[int], seed: int = 0) -> Batch:
    return make_batch(qo_lens, kv_lens, *SIZES[:3], device=target.device, seed=seed)


# --- BatchAttention ----------------------------------------------------------------------------------------------


def mixed(target: Any, layout: str = "NHD", device: str = "cpu", **options: Any) -> tuple[Any, Batch, torch.Tensor]:
    batch = batch_of(target, [33, 1, 1, 20], [70, 300, 16, 20])
    paged, lens = batch.paged(16, layout), torch.tensor(batch.kv_lens, dtype=torch.int32)
    wrapper = ck.BatchAttention(layout, target.device)
    vectors = (x.to(device) for x in (batch.qo_indptr(), paged.indptr, paged.indices, lens))
    types = dict(q_data_type=batch.q.dtype, kv_data_type=batch.q.dtype)
    wrapper.plan(*vectors, 8, 2, 64, 64, 16, **types, **options)
    return wrapper, batch, paged.cache


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_mixed_batches(target, layout, causal):
    wrapper, batch, cache = mixed(target, layout, causal=causal, sm_scale=0.2)
    out, lse = wrapper.run(batch.q, cache)
    close((out, lse), batch, Options(causal=causal, sm_scale=0.2))
    places = torch.empty_like(out), torch.empty_like(lse)
    assert all(x is y for x, y in zip(wrapper.run(batch.q, cache, *places), places))
    assert_bitwise(places[0], out)
    assert repr(wrapper).startswith("BatchAttention(4 requests, 55 rows")


def test_vectors_on_the_device(target):
    wrapper, batch, cache = mixed(target, device=target.device, causal=True)
    close(wrapper.run(batch.q, cache)[0], batch, Options(causal=True))


@pytest.mark.parametrize("on", ["cpu", "device", "both"])
def test_requests_with_more_pages_than_their_keys_fill(target, on):
    """FlashInfer's engines allocate pages ahead: ``kv_len_arr`` alone tells the keys."""
    batch = batch_of(target, [3, 1, 2, 4], [20, 0, 32, 70])
    paged = batch.paged(16)
    indices, ends = [], [0]
    for begin, end, more in zip(paged.indptr[:-1].tolist(), paged.indptr[1:].tolist(), (3, 2, 0, 1)):
        indices += [*paged.indices[begin:end].tolist(), *[0] * more]
        ends.append(len(indices))
    vectors = [torch.tensor(x, dtype=torch.int32) for x in (ends, indices, batch.kv_lens)]
    moved = {"cpu": (), "device": (0, 1, 2), "both": (1,)}[on]
    vectors = [x.to(target.device) if i in moved else x for i, x in enumerate(vectors)]
    wrapper = ck.BatchAttention(device=target.device)
    types = dict(q_data_type=batch.q.dtype, kv_data_type=batch.q.dtype)
    wrapper.plan(batch.qo_indptr(), *vectors, 8, 2, 64, 64, 16, causal=True, **types)
    close(wrapper.run(batch.q, paged.cache), batch, Options(causal=True))


def test_caps_and_scales(target):
    wrapper, batch, cache = mixed(target, causal=True, logits_soft_cap=5.0)
    scales = dict(k_scale=2.0, v_scale=0.5, logits_soft_cap=5.0)
    for given in (scales, dict(logits_soft_cap=2.0)):
        close(wrapper.run(batch.q, cache, **given)[0], batch, Options(causal=True, **given))


@pytest.mark.runs_nothing("every call raises")
def test_wrong_calls(target):
    wrapper, batch, cache = mixed(target)
    lens = [70, 300, 16, 20]

    def plan(kv_lens: list[int] = lens, pages: int = 27, **options: Any) -> None:
        vectors = (batch.qo_indptr(), torch.tensor([0, 5, 24, 25, 27]), torch.arange(pages), torch.tensor(kv_lens))
        wrapper.plan(*vectors, 8, 2, 64, 64, 16, **options)

    words = r"kv_len_arr\[0\]=81, but the 5 pages of request 0 have room for 80 tokens"
    for error, match, call in (
        (ValueError, words, lambda: plan([81, *lens[1:]])),
        (ValueError, r"kv_len_arr\[1\]=-1", lambda: plan([70, -1, 16, 20])),
        (ValueError, "kv_indptr ends at 27, but kv_indices has 26 pages", lambda: plan(pages=26)),
        (NotImplementedError, "use_profiler", lambda: plan(use_profiler=True)),
        (NotImplementedError, "kv_cache_sf", lambda: wrapper.run(batch.q, cache, kv_cache_sf=batch.q)),
        (RuntimeError, "has no plan", lambda: ck.BatchAttention(device=target.device).run(batch.q, cache)),
        (KeyError, "DNH", lambda: ck.BatchAttention("DNH", target.device)),
    ):
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize("name", ["BatchAttention", "PODWithPagedKVCacheWrapper", "BatchPODWithPagedKVCacheWrapper"])
def test_examples_of_the_documentation(name):
    example = doctest.DocTestFinder(recurse=False).find(getattr(ck, name), name, globs={"torch": torch, **vars(ck)})
    results = [doctest.DocTestRunner().run(x) for x in example]
    assert sum(x.attempted for x in results) and not sum(x.failed for x in results)


# --- prompts beside decode steps ---------------------------------------------------------------------------------


def steps_of(target: Any, kv_lens: tuple[int, ...] = (300, 16, 7), seed: int = 1) -> Batch:
    return batch_of(target, [1, 1, 1], [*kv_lens], seed)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_prompt_beside_decode_steps(target, layout, masked):
    prompt, steps = batch_of(target, [40], [70]), steps_of(target)
    paged = steps.paged(16, layout)
    wrapper = ck.PODWithPagedKVCacheWrapper(target.workspace(), layout)
    wrapper.plan(*paged.table(), *SIZES, data_type=torch.float16)
    masks = prompt.random_masks() if masked else None
    k, v = (x.transpose(0, 1) if layout == "HND" else x for x in (prompt.k, prompt.v))
    tensors = (prompt.q, k, v, steps.q, paged.cache)
    options: dict[str, Any] = dict(custom_mask_p=masks[0]) if masks else dict(causal_p=True, window_left_p=9)
    found = wrapper.run(*tensors, kv_layout_p=layout, sm_scale_p=0.2, **options)
    of_prompt = Options(custom_masks=masks) if masks else Options(causal=True, window_left=9)
    of_prompt.sm_scale = 0.2
    close(found[0], prompt, of_prompt)
    close(found[1], steps)
    scales = dict(q_scale=0.5, k_scale=0.7, v_scale=3.0)
    _, found_d = wrapper.run(*tensors, kv_layout_p=layout, **scales)
    assert_close(found_d, expect(steps, Options(**scales)).out, atol=1e-2)
    assert "decode" in repr(wrapper) and not wrapper.is_cuda_graph_enabled


def test_what_a_pod_wrapper_refuses(target):
    prompt, steps = batch_of(target, [40], [70]), steps_of(target)
    wrapper, paged = ck.PODWithPagedKVCacheWrapper(target.workspace()), steps.paged(16)
    wrapper.plan(*paged.table(), *SIZES)
    tensors = (prompt.q, prompt.k, prompt.v, steps.q, paged.cache)
    wrapper.run(*tensors)
    for words, call in (
        ("custom_mask_d", lambda: wrapper.run(*tensors, custom_mask_d=torch.ones(3, dtype=torch.bool))),
        ("does not serve 1 further positional arguments", lambda: wrapper.run(*tensors, *[None] * 25, prompt.q)),
        ("jit_args", lambda: type(wrapper)(target.workspace(), jit_args=["x"])),
    ):
        with pytest.raises(NotImplementedError, match=words):
            call()


def test_a_captured_run_follows_plans(kernels):
    steps, other = steps_of(kernels), steps_of(kernels, (100, 200, 33), seed=2)
    prompt, buffers = batch_of(kernels, [40], [70]), graph_buffers(3, 64, kernels.device)
    names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    given = {f"{name}_buffer": buffers[f"{name}_buf"] for name in names}
    wrapper = ck.PODWithPagedKVCacheWrapper(kernels.workspace(32 << 20), use_cuda_graph=True, **given)
    assert wrapper.is_cuda_graph_enabled
    pages = [x.paged(16) for x in (steps, other)]
    cache = torch.zeros(64, 2, 16, 2, 64, dtype=torch.float16, device=kernels.device)
    q = steps.q.clone()
    wrapper.plan(*pages[0].table(), *SIZES)
    graph, found = capture(lambda: wrapper.run(prompt.q, prompt.k, prompt.v, q, cache))
    for batch, table in zip((steps, other), pages):
        wrapper.plan(*table.table(), *SIZES)
        cache[: table.cache.size(0)] = table.cache
        q.copy_(batch.q)
        graph.replay()
        close(found[0], prompt)
        close(found[1], batch)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_batches_of_prompts_beside_decode_steps(target, layout):
    prompts, steps = batch_of(target, [40, 9], [70, 9]), steps_of(target)
    paged = [x.paged(16, layout) for x in (prompts, steps)]
    wrapper = ck.BatchPODWithPagedKVCacheWrapper(target.workspace(), layout)
    vectors = [x for batch, table in zip((prompts, steps), paged) for x in (batch.qo_indptr(), *table.table())]
    wrapper.plan(*vectors, *SIZES)
    for x in vectors:  # a plan does not depend on what becomes of CPU tensors
        x.zero_()
    tensors = (prompts.q, paged[0].cache, steps.q, paged[1].cache)
    masks = prompts.random_masks()
    causal = (dict(causal_p=True), Options(causal=True))
    masked = (dict(custom_mask_p=torch.cat([x.flatten() for x in masks])), Options(custom_masks=masks))
    for given, options in (causal, masked, ({}, Options()), causal):
        found = wrapper.run(*tensors, return_lse=True, **given)
        for results, batch, of in zip(zip(*found), (prompts, steps), (options, Options())):
            close(results, batch, of)
    assert_bitwise(wrapper.run(*tensors, causal_p=True)[0], found[0][0])
    assert "prefill" in repr(wrapper) and not wrapper.is_cuda_graph_enabled
    with pytest.raises(RuntimeError, match="has no plan"):
        ck.BatchPODWithPagedKVCacheWrapper(target.workspace()).run(*tensors)


def test_a_failed_plan_leaves_none(target):
    """Not the new prompts beside the old steps."""
    prompts, steps = batch_of(target, [20, 5], [40, 33]), steps_of(target)
    tables = [x.paged(16, unused="zero") for x in (prompts, steps)]
    wrapper = ck.BatchPODWithPagedKVCacheWrapper(target.workspace())
    plans = (prompts.qo_indptr(), *tables[0].table()), (steps.qo_indptr(), *tables[1].table())
    run = lambda: wrapper.run(prompts.q, tables[0].cache, steps.q, tables[1].cache)  # noqa: E731
    wrapper.plan(*plans[0], *plans[1], *SIZES)
    want = run()
    for wrong in (0, 1):
        given = [list(plan) for plan in plans]
        given[wrong][3] = given[wrong][3] + 16
        with pytest.raises(RuntimeError, match="is not in"):
            wrapper.plan(*given[0], *given[1], *SIZES)
        with pytest.raises(RuntimeError, match="has no plan"):
            run()
    wrapper.plan(*plans[0], *plans[1], *SIZES)
    for a, b in zip(run(), want):
        assert_bitwise(a, b)


# --- sinks by position -------------------------------------------------------------------------------------------


def check_sinks(batch: Batch, out: torch.Tensor, mask: Mask | None = None, options: Any = None) -> torch.Tensor:
    """Checks an output, and returns the LSE that belongs to it."""
    want, lse, base = expect_sinks(batch, mask or Mask(causal=True), options or SinkOptions())
    assert_close(out, want, base.to(out.dtype))
    return lse


def sink_wrapper(batch: Batch, target: Any, layout: str = "NHD", **plan: Any) -> tuple[Any, Any]:
    paged, types = batch.paged(16, layout), dict(q_data_type=batch.q.dtype, kv_data_type=batch.k.dtype)
    of_constructor = dict(head_dim_qk=64, head_dim_vo=64, window_left=plan.get("window_left", -1), **types)
    make = ck.BatchAttentionWithAttentionSinkWrapper
    wrapper = make(target.workspace(), layout, backend=target.backend, **of_constructor)
    wrapper.plan(batch.qo_indptr(), *paged.table(), *SIZES, **types, **plan)
    return wrapper, paged.cache


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("window", [-1, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_wrapper_with_sinks(target, layout, window, causal):
    batch = batch_of(target, [20, 1, 33], [50, 70, 33])
    sinks, mask = torch.randn(8, device=target.device) * 3, Mask(causal, (window, -1))
    wrapper, cache = sink_wrapper(batch, target, layout, window_left=window, causal=causal)
    options = SinkOptions(sinks=sinks, descales=dict(q_descale=0.2 * math.sqrt(64)))
    out = torch.empty_like(batch.q)
    found, lse = wrapper.run(batch.q, cache, sinks, 0.2, out=out, return_lse=True)
    assert found is out
    assert_lse_close(lse, check_sinks(batch, out, mask, options))
    assert_bitwise(wrapper.run(batch.q, cache, sinks), out)  # the scale stays
    assert_bitwise(wrapper.run_return_lse(batch.q, cache, sinks, 0.2)[1], lse)
    found = wrapper.run(batch.q, cache, sinks=sinks, sm_scale=0.1, k_scale=2.0, window_left=window)
    check_sinks(batch, found, mask, options)
    check_sinks(batch, wrapper.run(batch.q, cache, None, 64**-0.5), mask)


def test_the_wrapper_with_sinks_is_a_paged_wrapper(target):
    assert issubclass(ck.BatchAttentionWithAttentionSinkWrapper, ck.BatchPrefillWithPagedKVCacheWrapper)
    batch = batch_of(target, [3], [40])
    wrapper, cache = sink_wrapper(batch, target, causal=True)
    check_sinks(batch, wrapper.forward(batch.q, cache, causal=True))
    with pytest.raises(TypeError, match="sinks is float"):
        wrapper.run(batch.q, cache, 0.2)


@pytest.mark.runs_nothing("the constructor raises")
def test_wrong_constructors_of_the_wrapper_with_sinks(target):
    wrapper = ck.BatchAttentionWithAttentionSinkWrapper
    for error, words, options in (
        (ValueError, "pos_encoding_mode='ALIBI' is given to the constructor: pass it to plan", "ALIBI"),
        (KeyError, "nonsense", "nonsense"),
    ):
        with pytest.raises(error, match=words):
            wrapper(target.workspace(), pos_encoding_mode=options)
    with pytest.raises(ValueError, match="backend='trtllm-gen' is unknown"):
        wrapper(target.workspace(), backend="trtllm-gen")


def test_the_wrapper_with_sinks_takes_the_arguments_of_flashinfer_by_position():
    names = list(inspect.signature(ck.BatchAttentionWithAttentionSinkWrapper).parameters)
    wanted = "custom_mask_buf mask_indptr_buf backend pos_encoding_mode use_fp16_qk_reduction q_data_type kv_data_type"
    assert names[7:] == [*wanted.split(), "head_dim_qk", "head_dim_vo", "window_left"]
