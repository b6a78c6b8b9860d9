"""Block-sparse attention, and batches that mix prefill and decode."""

from __future__ import annotations

import torch

import cutlass_kernels as ck

from .data import Data, ints
from .entry import Call, Planned, no_attention, public


@public("BatchAttention")
def _mixed(x: Data) -> list[Planned]:
    half = {"q_data_type": torch.float16, "kv_data_type": torch.float16}

    def plan(w):
        w.plan(x.rows, *x.table[:2], x.sizes(20, 9), *x.heads, x.heads[2], x.page, causal=True, **half)

    def calls(w):
        options = dict(k_scale=0.5, v_scale=2.0, logits_soft_cap=2.0)
        scaled = lambda q, cache, **p: w.run(q, cache, **options, **p)  # noqa: E731
        return [Call(run, (x.q, x.cache), ("out", "lse")) for run in (w.run, scaled)]

    return [Planned(ck.BatchAttention(device=x.device), plan, calls)]


@public("PODWithPagedKVCacheWrapper")
def _pod(x: Data) -> list[Planned]:
    tensors = (*x.qkv, x.step, x.cache)
    other = dict(causal_p=True, sm_scale_p=0.2, v_scale=2.0)
    calls = lambda w: [Call(run, tensors, apart=True) for run in (w.run, lambda *t: w.run(*t, **other))]  # noqa: E731
    return [Planned(x.wrapper("PODWithPagedKVCacheWrapper"), lambda w: w.plan(*x.table, *x.heads, x.page), calls)]


@public("BatchPODWithPagedKVCacheWrapper")
def _batch_pod(x: Data) -> list[Planned]:
    tensors = (x.q, x.cache, x.step, x.cache)

    def plan(w):
        w.plan(x.rows, *x.table, ints(0, 1, 2), *x.table, *x.heads, x.page)

    def calls(w):
        pairs = lambda *t: [y for pair in w.run(*t, causal_p=True, return_lse=True) for y in pair]  # noqa: E731
        return [Call(run, tensors, apart=True) for run in (w.run, pairs)]

    return [Planned(x.wrapper("BatchPODWithPagedKVCacheWrapper"), plan, calls)]


@public("BlockSparseAttentionWrapper")
def _blocks(x: Data) -> list[Planned]:
    def planned(pattern: torch.Tensor | None) -> Planned:
        lists = (None, None) if pattern is not None else (ints(0, 1, 3), ints(int(x.blocks[1, 0, 1]), 0, 1))
        plan = lambda w: w.plan(*lists, x.n, x.m, 3 * x.size, 10 * x.size, *x.heads, block_mask=pattern)  # noqa: E731
        return Planned(
            x.wrapper("BlockSparseAttentionWrapper"),
            plan,
            lambda w: _runs(w, x.qkv, "" if pattern is None else "by head"),
        )

    return [planned(None), planned(x.blocks)]


def _runs(w, tensors: tuple[torch.Tensor, ...], label: str = "by head") -> list[Call]:
    lse = lambda *t, **p: w.run_return_lse(*t, **p)  # noqa: E731
    calls = ((w.run, ("out",)), (lse, ("out", "lse")), (w.forward, ()))
    return [Call(run, tensors, places, label=label) for run, places in calls]


@public("VariableBlockSparseAttentionWrapper")
def _blocks_of_heads(x: Data) -> list[Planned]:
    sizes = [torch.tensor([[2, 3], [1, 4]] * (x.heads[1] // 2)), torch.tensor([[8, 12], [10, 10]] * (x.heads[1] // 2))]
    tensors = tuple(y.transpose(0, 1).contiguous() for y in x.qkv)
    plan = lambda w: w.plan(x.blocks, *(y * x.size for y in sizes), *x.heads, logits_soft_cap=2.0)  # noqa: E731
    return [Planned(x.wrapper("VariableBlockSparseAttentionWrapper"), plan, lambda w: _runs(w, tensors))]


@no_attention("convert_bsr_mask_layout")
def _layout(x: Data) -> list[Call]:
    return [Call(lambda *t: ck.convert_bsr_mask_layout(*t), (x.rand(3, 2, 4) < 0.5, x.here(0, 1, 3)))]
