"""FlashAttention's functions."""

from __future__ import annotations

import torch

from cutlass_kernels import flash_attn

from .data import Data
from .entry import Call, no_attention, public


@public("flash_attn.flash_attn_func")
def _func(x: Data) -> list[Call]:
    dense = tuple(y.unsqueeze(0) for y in x.qkv)
    every = dict(window_size=(3, 2), softcap=2.0, softmax_scale=0.2, return_attn_probs=True)

    def scaled(q, k, v, q_scale, k_scale, v_scale, slopes):
        scales = dict(q_descale=q_scale, k_descale=k_scale, v_descale=v_scale)
        return flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, **scales)

    scales = (x.rand(1, x.heads[0]), x.rand(1, x.heads[1]), x.rand(1, x.heads[1]))
    return [
        Call(lambda *t, **p: flash_attn.flash_attn_func(*t, causal=True, **p), dense, ("out",)),
        Call(lambda *t, **p: flash_attn.flash_attn_func(*t, **every, **p), dense, ("out",), label="returns LSE"),
        Call(scaled, (*dense, *scales, x.sinks.abs()), label="scales"),
    ]


@public("flash_attn.flash_attn_qkvpacked_func")
def _packed(x: Data) -> list[Call]:
    function = lambda *t, **o: flash_attn.flash_attn_qkvpacked_func(*t, **o)  # noqa: E731
    keys = [y[None, : x.n] for y in (x.k, x.v)]
    return [
        Call(lambda qkv: function(qkv, causal=True), (torch.stack([x.q[None]] * 3, 2),)),
        Call(lambda qkv: function(qkv, num_heads_q=x.heads[0]), (torch.cat([x.q[None], *keys], 2),)),
    ]


@public("flash_attn.flash_attn_varlen_func")
def _varlen(x: Data) -> list[Call]:
    function = lambda *t, **o: flash_attn.flash_attn_varlen_func(*t, **o)  # noqa: E731

    def paged(q, cache, cum_q, used, table, sinks, **p):
        given = dict(seqused_k=used, block_table=table, s_aux=sinks, causal=True, return_softmax_lse=True)
        return function(q, *cache.unbind(1), cum_q, None, x.n, x.m, **given, **p)

    offsets = (x.sizes_here(0, 5), x.sizes_here(0, 20))
    pages = (x.q, x.cache, offsets[0], x.sizes_here(20), x.here(1, 2)[None], x.sinks.bfloat16())
    return [
        Call(lambda *t, **p: function(*t, x.n, x.m, causal=True, **p), (*x.qkv, *offsets), ("out",)),
        Call(paged, pages, ("out",), label="returns LSE"),
    ]


@public("flash_attn.flash_attn_with_kvcache")
def _with_cache(x: Data) -> list[Call]:
    function = lambda *t, **o: flash_attn.flash_attn_with_kvcache(*t, **o)  # noqa: E731
    caches = tuple(y.clone() for y in x.cache.unbind(1))
    new = (x.k[None, : x.n], x.v[None, : x.n])

    def seen(q, k_cache, v_cache, used, table, **p):
        return function(q, k_cache, v_cache, cache_seqlens=used, page_table=table, causal=True, **p)

    def appends(q, k_cache, v_cache, k, v, used, table, cos, sin):
        given = dict(cache_seqlens=used, page_table=table, rotary_cos=cos, rotary_sin=sin, causal=True)
        return function(q, k_cache, v_cache, k, v, **given, return_softmax_lse=True)

    angles, table = x.rand(40 * x.size, 16), x.here(1, 2)[None]
    turns = (angles.cos().half(), angles.sin().half())
    q = x.q[None]
    return [
        Call(seen, (q, *caches, x.sizes_here(20), table), ("out",)),
        Call(appends, (q, *caches, *new, x.sizes_here(20), table, *turns), writes=True, inputs=(0,), label="appends"),
    ]


@no_attention("flash_attn.flash_attn_combine", gradients="computed")
def _combine(x: Data) -> list[Call]:
    tensors = (x.randn(3, 1, 5, 4, 64), x.randn(3, 1, 5, 4))
    return [Call(lambda *t: flash_attn.flash_attn_combine(*t), tensors)]


@no_attention("flash_attn.get_scheduler_metadata")
def _metadata(x: Data) -> list[Call]:
    sizes = (1, x.n, x.m, *x.heads)
    return [Call(lambda lens: flash_attn.get_scheduler_metadata(*sizes, lens, causal=True), (x.sizes_here(20),))]
