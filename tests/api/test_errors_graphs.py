"""Refusals of wrappers for CUDA graphs, whose buffers and numbers of rows stay as they were made."""

from __future__ import annotations

import pytest
import torch
from refusals import refuse

import cutlass_kernels as ck

pytestmark = pytest.mark.runs_nothing("calls are refused before a backend computes")


class GraphBuffers:
    def __init__(self, device: str, batch: int = 2, indices: int = 8):
        def zeros(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int32, device=device)

        self.ragged = dict(qo_indptr_buf=zeros(batch + 1), kv_indptr_buf=zeros(batch + 1))
        self.paged = dict(
            qo_indptr_buf=zeros(batch + 1),
            paged_kv_indptr_buf=zeros(batch + 1),
            paged_kv_indices_buf=zeros(indices),
            paged_kv_last_page_len_buf=zeros(batch),
        )


def test_graph_wrappers_need_all_buffers(target):
    buffers = GraphBuffers(target.device)
    for cls, given in (
        (ck.BatchPrefillWithRaggedKVCacheWrapper, buffers.ragged),
        (ck.BatchPrefillWithPagedKVCacheWrapper, buffers.paged),
    ):
        cls(target.workspace(), use_cuda_graph=True, **given)
        for name in given:
            rest = {k: v for k, v in given.items() if k != name}
            refuse(ValueError, lambda: cls(target.workspace(), use_cuda_graph=True, **rest), name)
        for name in given:
            if name != "paged_kv_indices_buf":
                wrong = given | {name: given[name][:1]}
                refuse(
                    ValueError, lambda: cls(target.workspace(), use_cuda_graph=True, **wrong), f"{name}.* 1|1.*{name}"
                )
        for name in given:
            wide = given | {name: given[name].long()}
            refuse(ValueError, lambda: cls(target.workspace(), use_cuda_graph=True, **wide), name, "int64")
        mask, offsets = torch.zeros(64, dtype=torch.uint8, device=target.device), given["qo_indptr_buf"]
        for of_mask, words in (
            (dict(custom_mask_buf=mask), ("custom_mask_buf", "mask_indptr_buf", "both or none")),
            (dict(custom_mask_buf=mask, mask_indptr_buf=offsets[:2]), ("mask_indptr_buf has 2 elements", 3)),
        ):
            refuse(ValueError, lambda: cls(target.workspace(), use_cuda_graph=True, **given, **of_mask), *words)


def test_graph_plans_stay_in_bounds(target, calls):
    table = calls.data.table()

    def fresh(**extra):
        given = GraphBuffers(target.device).paged | extra
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), use_cuda_graph=True, **given)
        assert wrapper.is_cuda_graph_enabled
        wrapper.plan(calls.batch.qo_indptr(), *table, *calls.batch.heads, 16)
        return wrapper

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    rest, other_size = (*calls.batch.heads, 16), ("batch_size=2", "1 requests")
    refuse(ValueError, lambda: fresh().plan(ints(0, 5), ints(0, 2), table[1], ints(4), *rest), *other_size)
    refuse(
        ValueError,
        lambda: fresh().plan(ints(0, 5, 14), ints(0, 2, 9), torch.arange(9).int(), ints(1, 1), *rest),
        "paged_kv_indices_buf",
        9,
        8,
    )
    refuse(
        ValueError, lambda: fresh().plan(ints(0, 5, 15), *table, *rest), "total number of rows cannot exceed", 15, 14
    )
    mask = torch.ones(5 * 20 + 81, dtype=torch.bool, device=target.device)
    refuse(
        ValueError, lambda: fresh().plan(calls.batch.qo_indptr(), *table, *rest, custom_mask=mask), "custom_mask_buf"
    )
    fresh().plan(ints(0, 3, 7), *table, *rest)


def test_ragged_graph_plans_stay_in_bounds(target, calls):
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(
        target.workspace(), use_cuda_graph=True, **GraphBuffers(target.device).ragged
    )
    wrapper.plan(calls.batch.qo_indptr(), calls.batch.kv_indptr(), *calls.batch.heads)
    one = torch.tensor([0, 5], dtype=torch.int32)
    refuse(ValueError, lambda: wrapper.plan(one, one, *calls.batch.heads), "batch_size=2", "1 requests")


def test_the_mask_of_a_graph_wrapper_is_planned(target, calls):
    buffers = dict(
        custom_mask_buf=torch.zeros(64, dtype=torch.uint8, device=target.device),
        qk_indptr_buf=torch.zeros(3, dtype=torch.int32, device=target.device),
    )
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(
        target.workspace(), use_cuda_graph=True, **GraphBuffers(target.device).ragged, **buffers
    )
    bounds = (calls.batch.qo_indptr(), calls.batch.kv_indptr())
    wrapper.plan(*bounds, *calls.batch.heads, causal=True)
    before = wrapper.run(*calls.qkv)
    refuse(ValueError, lambda: wrapper.forward(*calls.qkv, causal=False), "causal=False", "plan()")
    assert torch.equal(wrapper.forward(*calls.qkv, causal=True), before)
    # A mask of the caller's wins over causal, as always.
    mask = torch.ones(5 * 20 + 9 * 9, dtype=torch.bool, device=target.device)
    wrapper.plan(*bounds, *calls.batch.heads, custom_mask=mask)
    assert torch.equal(wrapper.forward(*calls.qkv, causal=True), wrapper.forward(*calls.qkv, causal=False))
