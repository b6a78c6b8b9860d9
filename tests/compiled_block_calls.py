"""Calls for torch.compile (compiled_calls): block-sparse attention, and batches that mix prefill and decode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from compiled_data import HEADS, PAGE, Call, Data, ints

import cutlass_kernels as ck


def _mixed(x: Data) -> list[Call]:
    w = ck.BatchAttention(device=x.device)
    half = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
    w.plan(ints(0, 5), *x.table[:2], ints(20), *HEADS, 64, PAGE, causal=True, **half)
    return [
        (w.run, (x.q, x.cache)),
        (lambda q, cache: w.run(q, cache, k_scale=0.5, v_scale=2.0, logits_soft_cap=2.0), (x.q, x.cache)),
    ]


def _pod(x: Data) -> list[Call]:
    w = x.wrapper("PODWithPagedKVCacheWrapper")
    w.plan(*x.table, *HEADS, PAGE)
    tensors = (*x.qkv, x.randn(1, 4, 64).half(), x.cache)
    return [(w.run, tensors), (lambda *t: w.run(*t, causal_p=True, sm_scale_p=0.2, v_scale=2.0), tensors)]


def _batch_pod(x: Data) -> list[Call]:
    w = x.wrapper("BatchPODWithPagedKVCacheWrapper")
    w.plan(ints(0, 5), *x.table, ints(0, 1), *x.table, *HEADS, PAGE)
    tensors = (x.q, x.cache, x.randn(1, 4, 64).half(), x.cache)
    return [
        (w.run, tensors),
        (lambda *t: [y for pair in w.run(*t, causal_p=True, return_lse=True) for y in pair], tensors),
    ]


def _blocks(x: Data) -> list[Call]:
    calls: list[Call] = []
    for pattern in (None, torch.tensor([[[True, False], [True, True]], [[False, True], [True, False]]])):
        w = x.wrapper("BlockSparseAttentionWrapper")
        lists = (ints(0, 1, 3), ints(1, 0, 1)) if pattern is None else (None, None)
        w.plan(*lists, 5, 20, 3, 10, *HEADS, block_mask=pattern)
        calls += [
            (w.run, x.qkv),
            (lambda *t, w=w: w.run_return_lse(*t), x.qkv),
            (lambda *t, w=w: w.run(*t[:3], out=t[3]), (*x.qkv, torch.zeros_like(x.q))),
        ]
    return calls


def _blocks_of_heads(x: Data) -> list[Call]:
    w = x.wrapper("VariableBlockSparseAttentionWrapper")
    pattern = torch.tensor([[[True, False], [True, True]], [[False, True], [True, False]]])
    w.plan(pattern, torch.tensor([[2, 3], [1, 4]]), torch.tensor([[8, 12], [10, 10]]), *HEADS, logits_soft_cap=2.0)
    tensors = tuple(y.transpose(0, 1).contiguous() for y in x.qkv)
    return [
        (w.run, tensors),
        (lambda *t: w.run_return_lse(*t), tensors),
        (lambda *t: w.run(*t[:3], out=t[3]), (*tensors, torch.zeros_like(tensors[0]))),
    ]


CALLS: dict[str, Callable[[Data], list[Call]]] = {
    "BatchAttention": _mixed,
    "PODWithPagedKVCacheWrapper": _pod,
    "BatchPODWithPagedKVCacheWrapper": _batch_pod,
    "BlockSparseAttentionWrapper": _blocks,
    "VariableBlockSparseAttentionWrapper": _blocks_of_heads,
    "convert_bsr_mask_layout": lambda x: [(ck.convert_bsr_mask_layout, (x.randn(3, 2, 4), x.here(0, 1, 3)))],
}
