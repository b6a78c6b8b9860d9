"""Wrappers of batches: ragged, paged, decode, cascade, shared prefixes."""

from __future__ import annotations

from typing import Any

import torch
from problems import graph_buffers

import cutlass_kernels as ck

from .data import Data, ints
from .entry import Call, Planned, public

BOTH = ("out", "lse")


@public("BatchPrefillWithPagedKVCacheWrapper")
def _paged(x: Data) -> list[Planned]:
    every = dict(k_scale=0.5, v_scale=2.0, return_lse=True, lse_layout="HN", lse_base="ln")
    pair = (x.q, *(y.contiguous() for y in x.cache.unbind(1)))
    tensors = (x.q, x.cache)

    def plan(w):
        w.plan(x.rows, *x.table, *x.heads, x.page, causal=True)

    def calls(w):
        return [
            Call(w.run, tensors, ("out",)),
            Call(lambda *t, **p: w.run(*t, return_lse=True, **p), tensors, BOTH),
            Call(lambda q, k, v, **p: w.run_return_lse(q, (k, v), **p), pair, BOTH),
            Call(lambda q, cache, sinks: w.run(q, cache, **every, sinks=sinks), (*tensors, x.sinks)),
            Call(lambda q, cache, **p: w.run(q, cache, 0.5, 2.0, **p), tensors, ("out",)),
            Call(lambda q, cache: w.forward(q, cache, causal=False, logits_soft_cap=2.0), tensors),
            Call(lambda q, cache: w.forward_return_lse(q, cache, causal=True), tensors),
        ]

    name = "BatchPrefillWithPagedKVCacheWrapper"
    buffers = graph_buffers(2, 4, x.device)
    return [
        Planned(x.wrapper(name), plan, calls),
        Planned(getattr(ck, name)(x.target.workspace(), **buffers), plan, lambda w: calls(w)[:1]),
    ]


@public("BatchAttentionWithAttentionSinkWrapper")
def _with_sinks(x: Data) -> list[Planned]:
    tensors = (x.q, x.cache, x.sinks)

    def plan(w):
        w.plan(x.rows, *x.table, *x.heads, x.page, causal=True)

    def calls(w):
        older = lambda run: lambda q, cache, sinks: run(q, cache, causal=True, sinks=sinks)  # noqa: E731
        return [
            Call(w.run, tensors, ("out",)),
            Call(lambda *t, **p: w.run(*t, 0.2, return_lse=True, **p), tensors, BOTH),
            Call(lambda *t: w.run_return_lse(*t, 0.2), tensors),
            *(Call(older(run), tensors) for run in (w.forward, w.forward_return_lse)),
        ]

    return [Planned(x.wrapper("BatchAttentionWithAttentionSinkWrapper"), plan, calls)]


@public("BatchPrefillWithRaggedKVCacheWrapper")
def _ragged(x: Data) -> list[Planned]:
    def plan(w):
        w.plan(x.rows, x.sizes(0, 11, 20), *x.heads, causal=True, pos_encoding_mode="ALIBI")

    def scaled(w):
        return lambda q, k, v, s: w.run(q, k, v, s, s[: x.heads[1]], s[: x.heads[1]], return_lse=True)

    def calls(w):
        forward = dict(logits_soft_cap=2.0, return_lse=True, lse_layout="HN")
        return [
            Call(w.run, x.qkv, ("out",)),
            Call(lambda *t, **p: w.run(*t, return_lse=True, **p), x.qkv, BOTH),
            Call(scaled(w), (*x.qkv, x.sinks.abs())),
            Call(lambda *t: w.run(*t[:3], sinks=t[3]), (*x.qkv, x.sinks)),
            Call(lambda *t, **p: w.forward(*t, **forward, **p), x.qkv, BOTH),
            Call(lambda q, k, v: w.forward(q, k, v, window_left=3, pos_encoding_mode="ALIBI"), x.qkv),
            *(Call(lambda *t, y=y: y(*t), x.qkv) for y in (w.run_return_lse, w.forward_return_lse)),
        ]

    return [Planned(x.wrapper("BatchPrefillWithRaggedKVCacheWrapper"), plan, calls)]


@public("BatchDecodeWithPagedKVCacheWrapper")
def _decode(x: Data, w: Any = None) -> list[Planned]:
    tensors = (x.q[:2], x.cache)

    def calls(w):
        return [
            Call(w.run, tensors, ("out",)),
            Call(lambda *t, **p: w.run(*t, return_lse=True, **p), tensors, BOTH),
            Call(lambda q, cache: w.run(q, cache, 0.5, 0.5, 2.0, True), tensors),
            Call(lambda q, cache: w.run(q, cache, q_len_per_req=1, window_left=-1), tensors),
            Call(lambda q, cache: w.forward(q, cache, pos_encoding_mode="ALIBI"), tensors),
            *(Call(lambda *t, y=y: y(*t), tensors) for y in (w.run_return_lse, w.forward_return_lse)),
        ]

    if w is None:
        w = x.wrapper("BatchDecodeWithPagedKVCacheWrapper")
    return [Planned(w, lambda w: w.plan(*x.table, *x.heads, x.page), calls)]


@public("CUDAGraphBatchDecodeWithPagedKVCacheWrapper")
def _graph_decode(x: Data) -> list[Planned]:
    buffers = [torch.zeros(n, dtype=torch.int32, device=x.device) for n in (3, 4, 2)]
    return _decode(x, ck.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(x.target.workspace(), *buffers))


@public("fast_decode_plan", compiles="no")
def _fast_decode_plan(x: Data) -> list[Call]:
    w = x.wrapper("BatchDecodeWithPagedKVCacheWrapper")

    def call(q, cache, *table):
        ck.fast_decode_plan(w, *table, *x.heads, x.page)
        return w.run(q, cache)

    return [Call(call, (x.q[:2], x.cache, *x.table))]


@public("MultiLevelCascadeAttentionWrapper", merges=True)
def _cascade(x: Data) -> list[Planned]:
    tensors = (x.q, x.cache)

    def plan(w):
        levels = zip((x.sizes(0, 5), ints(0, 1), ints(0), ints(x.page)), (x.rows, *x.table))
        w.plan(*map(list, levels), *x.heads, x.page, causal=True)

    def calls(w):
        return [
            Call(lambda q, cache, **p: w.run(q, cache, return_lse=True, **p), tensors, ("out",)),
            Call(lambda q, cache, **p: w.run(q, cache, k_scale=0.5, **p), tensors, ("out",)),
            Call(w.forward, tensors),
        ]

    return [Planned(x.wrapper("MultiLevelCascadeAttentionWrapper", 2), plan, calls)]


@public("BatchDecodeWithSharedPrefixPagedKVCacheWrapper", merges=True)
def _shared_decode(x: Data) -> list[Planned]:
    tensors = (x.q[:2], x.k, x.v, x.cache)
    calls = lambda w: [Call(w.forward, tensors), *_scaled(w, tensors)]  # noqa: E731
    plan = lambda w: w.plan(*x.table, *x.heads, x.page)  # noqa: E731
    return [Planned(x.wrapper("BatchDecodeWithSharedPrefixPagedKVCacheWrapper"), plan, calls)]


def _scaled(w: Any, tensors: tuple[torch.Tensor, ...], **options: Any) -> list[Call]:
    return [Call(lambda *t: y(*t, sm_scale=0.2, **options), tensors) for y in (w.forward, w.run)]


@public("BatchPrefillWithSharedPrefixPagedKVCacheWrapper", merges=True)
def _shared_prefill(x: Data) -> list[Planned]:
    tensors = (x.q, x.k, x.v, x.cache)

    def plan(w):
        w.plan(x.rows, *x.table, *x.heads, x.page)

    def calls(w):
        w.forward(*tensors)  # which plans, where the page size and the dtypes are those of the tensors
        return [Call(w.forward, tensors), *_scaled(w, tensors, causal=False)]

    return [Planned(x.wrapper("BatchPrefillWithSharedPrefixPagedKVCacheWrapper"), plan, calls)]
