"""Numbers, types and tensors that make no sense are refused in a sentence of ours, not computed with."""

from __future__ import annotations

import re

import pytest
import torch
from refusals import refuse

import cutlass_kernels as ck

pytestmark = pytest.mark.runs_nothing("calls are refused before a backend computes")


@pytest.mark.parametrize("heads", [(0, 2), (-2, 2), (4, 0), (4, -2)])
def test_numbers_of_heads(calls, heads):
    for plan in calls.plans(heads=(*heads, 64)):
        refuse(RuntimeError, plan, f"num_qo_heads={heads[0]}", f"num_kv_heads={heads[1]}")


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["sm_scale", "logits_soft_cap"])
def test_numbers_that_are_not_finite(calls, name, value):
    words = (f"{name}={value}", "is not finite")
    refuse(ValueError, lambda: calls.single(**{name: value}), *words)
    for plan in calls.plans(**{name: value}):
        refuse(ValueError, plan, *words)


@pytest.mark.parametrize("name", ["sm_scale", "logits_soft_cap"])
def test_one_number_for_all(calls, name):
    words = (name, r"\(2,\)", "one number")
    refuse(ValueError, lambda: calls.single(**{name: torch.ones(2)}), *words)
    for plan in calls.plans(**{name: torch.ones(2)}):
        refuse(ValueError, plan, *words)


@pytest.mark.parametrize("name", ["rope_scale", "rope_theta"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_rope_of_no_size(calls, name, value):
    given = {"pos_encoding_mode": "ROPE_LLAMA", name: value}
    words = (f"{name}={value}", "must be positive")
    refuse(ValueError, lambda: calls.single(**given), *words)
    for plan in calls.plans(**given):
        refuse(ValueError, plan, *words)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_types_that_are_no_numbers_to_attend_to(calls, dtype):
    q, k, v = (torch.zeros(*x.shape, dtype=dtype, device=x.device) for x in calls.qkv)
    words = ("q has dtype", dtype, "not served")
    refuse(ValueError, lambda: ck.single_prefill_with_kv_cache(q, k, v), *words)
    refuse(ValueError, lambda: ck.single_decode_with_kv_cache(q[0], k, v), *words)


def test_two_types_of_fp8(calls):
    q, k, v = calls.qkv
    q, k, v = q.to(torch.float8_e4m3fn), k.to(torch.float8_e5m2), v.to(torch.float8_e5m2)
    words = ("float8_e4m3fn", "float8_e5m2", "must have the dtype of q")
    refuse(ValueError, lambda: ck.single_prefill_with_kv_cache(q, k, v, o_dtype=torch.float16), *words)
    for plan in calls.plans(q_data_type=torch.float8_e4m3fn, kv_data_type=torch.float8_e5m2, o_data_type=torch.float16):
        refuse(ValueError, plan, *words)


def runs(calls):
    """The run() of planned wrappers, with the tensors of a run."""
    ragged, paged = calls.ragged(), calls.paged()
    return [
        lambda **given: ragged.run(*calls.qkv, **given),
        lambda **given: paged.run(calls.batch.q, calls.data.cache, **given),
    ]


@pytest.mark.parametrize("shape,dtype", [((2,), torch.float32), ((4, 1), torch.float32), ((4,), torch.int32)])
def test_sinks_of_other_heads_or_types(calls, shape, dtype):
    sinks = torch.zeros(shape, dtype=dtype, device=calls.target.device)
    for run in runs(calls):
        refuse(ValueError, lambda: run(sinks=sinks), "sinks", dtype, "one per query head")


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_scales_of_other_heads(calls, name):
    three = torch.ones(3, device=calls.target.device)
    words = (f"scale_{name}|{name}_scale", r"\(3,\)", "one per head")
    refuse(ValueError, lambda: calls.single(**{f"scale_{name}": three}), *words)
    for run in runs(calls):
        refuse(ValueError, lambda: run(**{f"{name}_scale": three}), *words)


def test_tensors_of_another_device(calls):
    """On "meta" there is nothing to read."""
    q, k, v = calls.qkv
    words = ("is on meta", "move it there")
    refuse(ValueError, lambda: ck.single_prefill_with_kv_cache(q, k.to("meta"), v), "k", *words)
    refuse(ValueError, lambda: ck.single_prefill_with_kv_cache(q, k, v.to("meta")), "v", *words)
    for run in runs(calls):
        refuse(ValueError, lambda: run(sinks=torch.zeros(4, device="meta")), "sinks", *words)


def test_elements_that_lie_apart(calls):
    q, k, v = (torch.zeros(*x.shape[:-1], 128, dtype=x.dtype, device=x.device)[..., ::2] for x in calls.qkv)
    words = ("stride 2", "must be contiguous")
    for name, given in (("q", (q, *calls.qkv[1:])), ("k", (calls.qkv[0], k, v)), ("v", (*calls.qkv[:2], v))):
        refuse(ValueError, lambda: ck.single_prefill_with_kv_cache(*given), name, *words)
    halves = tuple(x.repeat_interleave(2, -1)[..., ::2] for x in (calls.data.k_cache, calls.data.v_cache))
    refuse(ValueError, lambda: calls.paged().run(calls.batch.q, halves), "k_cache", *words)
    out = torch.zeros(14, 4, 128, dtype=torch.float16, device=calls.target.device)[..., ::2]
    for run in runs(calls):
        refuse(ValueError, lambda: run(out=out), "out", *words)


def test_keys_and_values_of_other_shapes(calls):
    q, k, v = calls.qkv
    refuse(ValueError, lambda: ck.single_prefill_with_kv_cache(q, k[None], v), "3 dimensions")
    cache = calls.data.k_cache, calls.data.v_cache
    wrapper = calls.paged()
    for other in (cache[1][:-1], cache[1][:, :8], cache[1][:, :, :1], cache[1][:, 0]):
        shapes = [re.escape(str(tuple(x.shape))) for x in (cache[0], other)]
        refuse(ValueError, lambda: wrapper.run(q, (cache[0], other)), *shapes, "equal pages, page_size and heads")


def test_a_workspace_with_gaps(target):
    gaps = target.workspace()[::16]
    words = ("float_workspace_buffer", "not contiguous")
    refuse(ValueError, lambda: ck.BatchPrefillWithRaggedKVCacheWrapper(gaps), *words)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace())
    refuse(ValueError, lambda: wrapper.reset_workspace_buffer(gaps, target.workspace()), *words)
