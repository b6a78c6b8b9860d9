"""BatchAttentionWithAttentionSinkWrapper: the paged wrapper that takes sinks by position."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from plan_free_problems import Mask, Options, expect
from problems import Batch, make_batch

import cutlass_kernels as ck


def compare(batch: Batch, out: torch.Tensor, mask: Mask | None = None, options: Options | None = None) -> torch.Tensor:
    """Checks an output, and returns the LSE that belongs to it."""
    want, lse, base = expect(batch, mask or Mask(causal=True), options or Options())
    assert_close(out, want, base.to(out.dtype))
    return lse


def sink_wrapper(batch: Batch, target, layout: str, backend: str, **plan: Any) -> tuple[Any, Any]:
    paged = batch.paged(16, layout)
    wrapper = ck.BatchAttentionWithAttentionSinkWrapper(
        target.workspace(),
        layout,
        backend=backend,
        q_data_type=batch.q.dtype,
        kv_data_type=batch.k.dtype,
        head_dim_qk=64,
        head_dim_vo=64,
        window_left=plan.get("window_left", -1),
    )
    given = dict(q_data_type=batch.q.dtype, kv_data_type=batch.k.dtype, **plan)
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 16, **given)
    return wrapper, paged.cache


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("window", [-1, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_wrapper_with_sinks(target, layout, window, causal):
    batch = make_batch([20, 1, 33], [50, 70, 33], 8, 2, 64, device=target.device)
    sinks = torch.randn(8, device=target.device) * 3
    wrapper, cache = sink_wrapper(batch, target, layout, target.backend, window_left=window, causal=causal)
    options = Options(sinks=sinks, descales=dict(q_descale=0.2 * math.sqrt(64)))
    out = torch.empty_like(batch.q)
    found, lse = wrapper.run(batch.q, cache, sinks, 0.2, out=out, return_lse=True)
    assert found is out
    assert_lse_close(lse, compare(batch, out, Mask(causal, (window, -1)), options))
    assert_bitwise(wrapper.run(batch.q, cache, sinks), out)  # the scale stays
    assert_bitwise(wrapper.run_return_lse(batch.q, cache, sinks, 0.2)[1], lse)
    found = wrapper.run(batch.q, cache, sinks=sinks, sm_scale=0.1, k_scale=2.0, window_left=window)
    compare(batch, found, Mask(causal, (window, -1)), options)
    plain = wrapper.run(batch.q, cache, None, 64**-0.5)
    compare(batch, plain, Mask(causal, (window, -1)))


def test_the_wrapper_is_a_paged_wrapper(target):
    assert issubclass(ck.BatchAttentionWithAttentionSinkWrapper, ck.BatchPrefillWithPagedKVCacheWrapper)
    batch = make_batch([3], [40], 8, 2, 64, device=target.device)
    wrapper, cache = sink_wrapper(batch, target, "NHD", target.backend, causal=True)
    compare(batch, wrapper.forward(batch.q, cache, causal=True))
    with pytest.raises(TypeError, match="sinks is float"):
        wrapper.run(batch.q, cache, 0.2)


@pytest.mark.runs_nothing("the constructor raises")
def test_wrong_constructors_of_the_wrapper(target):
    wrapper = ck.BatchAttentionWithAttentionSinkWrapper
    with pytest.raises(ValueError, match="pos_encoding_mode='ALIBI' is given to the constructor: pass it to plan"):
        wrapper(target.workspace(), pos_encoding_mode="ALIBI")
    with pytest.raises(KeyError):
        wrapper(target.workspace(), pos_encoding_mode="nonsense")
    with pytest.raises(ValueError, match="backend='trtllm-gen' is unknown"):
        wrapper(target.workspace(), backend="trtllm-gen")


def test_the_wrapper_takes_the_arguments_of_flashinfer_by_position():
    names = list(inspect.signature(ck.BatchAttentionWithAttentionSinkWrapper).parameters)
    assert names[7:] == [
        "custom_mask_buf",
        "mask_indptr_buf",
        "backend",
        "pos_encoding_mode",
        "use_fp16_qk_reduction",
        "q_data_type",
        "kv_data_type",
        "head_dim_qk",
        "head_dim_vo",
        "window_left",
    ]
