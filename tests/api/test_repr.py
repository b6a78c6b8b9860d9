"""repr() of the wrappers: what is planned, with the options in effect."""

from __future__ import annotations

import copy

import pytest
import torch
from registry import HEADS, PAGE, ints

import cutlass_kernels as ck

pytestmark = pytest.mark.runs_nothing("calls are refused, or planned only")


def end(target, asked: str | None = None) -> str:
    backend = repr(target.backend) if asked is None else f"{target.backend!r} (of {asked!r})"
    return f"kv_layout='NHD', backend={backend}, device='{target.device}')"


def paged(target, **options):
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(ints(0, 5, 14), ints(0, 2, 3), ints(1, 2, 0), ints(4, 9), *HEADS, PAGE, **options)
    return wrapper


def test_nothing_is_planned(target):
    for cls in (ck.BatchPrefillWithPagedKVCacheWrapper, ck.BatchPrefillWithRaggedKVCacheWrapper):
        wrapper = cls(target.workspace(), backend=target.backend)
        assert repr(wrapper) == f"{cls.__name__}(not planned, {end(target)}"


def test_a_paged_plan(target):
    options = dict(causal=True, window_left=3, q_data_type="bfloat16", kv_data_type="float8_e4m3fn")
    assert repr(paged(target, **options)) == (
        "BatchPrefillWithPagedKVCacheWrapper(2 requests, 14 rows, num_qo_heads=4, num_kv_heads=2, head_dim=64, "
        "page_size=16, q_data_type=bfloat16, kv_data_type=float8_e4m3fn, o_data_type=bfloat16, causal=True, "
        "window_left=3, " + end(target)
    )


def test_a_ragged_plan_chosen_automatically(target, the_targets_backend):
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace())
    wrapper.plan(ints(0, 1), ints(0, 20), 4, 2, 128, head_dim_vo=64, sm_scale=0.5)
    text = "1 request, 1 row, num_qo_heads=4, num_kv_heads=2, head_dim_qk=128, head_dim_vo=64, q_data_type=float16"
    assert text in repr(wrapper) and "causal=False, sm_scale=0.5" in repr(wrapper)
    assert repr(wrapper).endswith(end(target, "auto"))


def test_options_in_effect(target):
    """forward() and engines change them after plan()."""
    wrapper = paged(target, causal=True)
    wrapper._logits_soft_cap = 2.0
    assert "causal=True, logits_soft_cap=2.0" in repr(wrapper)


def test_masks(target):
    mask = torch.ones(5 * 20 + 9 * 9, dtype=torch.bool, device=target.device)
    text = repr(paged(target, custom_mask=mask))
    assert "custom mask" in text and "causal" not in text


def test_a_plan_for_cuda_graphs(target):
    buffers = [torch.zeros(size, dtype=torch.int32, device=target.device) for size in (3, 8, 2)]
    wrapper = ck.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(target.workspace(), *buffers)
    assert repr(wrapper).endswith("use_cuda_graph=True)") and "not planned" in repr(wrapper)
    wrapper.plan(ints(0, 2, 3), ints(1, 2, 0), ints(4, 9), *HEADS, PAGE)
    assert "2 requests, 2 rows" in repr(wrapper)


def test_wrappers_of_several_wrappers(target, the_targets_backend):
    cascade = ck.MultiLevelCascadeAttentionWrapper(2, target.workspace())
    cascade.plan([ints(0, 5)] * 2, [ints(0, 1)] * 2, [ints(0), ints(1)], [ints(PAGE), ints(5)], *HEADS, PAGE)
    first, *lines = repr(cascade).splitlines()
    assert first == "MultiLevelCascadeAttentionWrapper("
    assert [line[: len("  level 0: BatchPrefill")] for line in lines] == [f"  level {i}: BatchPrefill" for i in (0, 1)]
    assert all("1 request, 5 rows" in line for line in lines)
    shared = ck.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(target.workspace())
    assert "keys of each request: BatchDecodeWithPagedKVCacheWrapper(not planned" in repr(shared)
    shared.begin_forward(ints(0, 2), ints(1, 2), ints(4), *HEADS, PAGE)
    assert "1 request, 1 row" in repr(shared)


def test_copies_and_half_made_wrappers(target):
    wrapper = paged(target)
    assert repr(copy.copy(wrapper)) == repr(wrapper)
    assert ("not planned" in repr(copy.deepcopy(wrapper))) == (not target.is_reference)
    for cls in (
        ck.BatchPrefillWithPagedKVCacheWrapper,
        ck.MultiLevelCascadeAttentionWrapper,
        ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    ):
        assert repr(object.__new__(cls)) == f"{cls.__name__}()"


def test_offsets_on_the_device_are_not_read(target):
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(ints(0, 5).to(target.device), ints(0, 20).to(target.device), *HEADS)
    assert ("rows known to the device" in repr(wrapper)) == target.device.startswith("cuda")
