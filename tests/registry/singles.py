"""Single requests, the shared prefix of padded caches, and the fused prefill."""

from __future__ import annotations

from typing import Any

import torch

import cutlass_kernels as ck

from .data import Data
from .entry import Call, no_attention, public


def _prefill(x: Data, function: Any, returns_lse: bool) -> list[Call]:
    def call(*tensors: torch.Tensor, names: tuple[str, ...] = (), **options: Any) -> Any:
        given = dict(zip(names, tensors[3:]))
        return function(*tensors[:3], **given, **options, backend=x.target.backend)

    def case(tensors: tuple[torch.Tensor, ...] = x.qkv, **options: Any) -> Call:
        named = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
        rest = {name: value for name, value in options.items() if name not in named}
        places = ("out", "lse") if returns_lse or options.get("return_lse") else ("out",)
        run = lambda *t, **p: call(*t, names=tuple(named), **rest, **p)  # noqa: E731
        return Call(run, (*tensors, *named.values()), places)

    mask = x.rand(x.n, x.m) < 0.5
    every = dict(k_scale=2.0, v_scale=0.7, window_left=3, logits_soft_cap=2.0, sm_scale=0.2)
    every |= {} if returns_lse else {"return_lse": True}
    return [
        case(),
        case(**every, causal=True, pos_encoding_mode="ALIBI"),
        case((x.q, x.k.transpose(0, 1), x.v.transpose(0, 1)), kv_layout="HND", pos_encoding_mode="ROPE_LLAMA"),
        case(custom_mask=mask, sinks=x.sinks, o_dtype="float16"),
        case(packed_custom_mask=ck.packbits(mask.flatten(), "little")),
        case(scale_q=x.sinks.abs(), scale_k=x.sinks[: x.heads[1]].abs(), scale_v=x.sinks[: x.heads[1]].abs()),
    ]


@public("single_prefill_with_kv_cache")
def _prefill_without_lse(x: Data) -> list[Call]:
    return _prefill(x, ck.single_prefill_with_kv_cache, False)


@public("single_prefill_with_kv_cache_return_lse")
def _prefill_with_lse(x: Data) -> list[Call]:
    return _prefill(x, ck.single_prefill_with_kv_cache_return_lse, True)


@public("single_decode_with_kv_cache")
def _decode(x: Data) -> list[Call]:
    function = ck.single_decode_with_kv_cache
    q, tensors = x.q[0], (x.q[0], x.k, x.v)
    every = dict(q_scale=0.5, k_scale=2.0, v_scale=0.7, window_left=3, logits_soft_cap=2.0, return_lse=True)
    alibi = dict(pos_encoding_mode="ALIBI", backend=x.target.backend)
    swapped = (q, x.k.transpose(0, 1), x.v.transpose(0, 1))
    return [
        Call(function, tensors, ("out",)),
        Call(lambda *t, **p: function(*t, **every, **alibi, **p), tensors, ("out", "lse")),
        Call(lambda *t: function(*t, "HND", "ROPE_LLAMA", rope_theta=5e3), swapped),
        Call(lambda *t: function(*t[:3], q_scale=t[3], k_scale=t[3], v_scale=t[3]), (*tensors, x.one)),
        Call(lambda *t, **p: function(*t[:3], sinks=t[3], **p), (*tensors, x.sinks), ("out",)),
    ]


@public("batch_decode_with_shared_prefix_padded_kv_cache")
def _padded(x: Data) -> list[Call]:
    function = ck.batch_decode_with_shared_prefix_padded_kv_cache
    own = [torch.stack([y] * x.n) for y in (x.k, x.v)]
    swapped = [y.transpose(-3, -2) for y in (x.k, x.v, *own)]
    return [
        Call(function, (x.q, x.k, x.v, *own)),
        Call(lambda *t: function(*t, "HND", sm_scale=0.2), (x.q, *swapped)),
    ]


@public("trtllm_fmha_v2_prefill")
def _fused(x: Data) -> list[Call]:
    unread = x.target.workspace(16)
    offsets = (x.sizes_here(0, 5), x.sizes_here(0, 20))
    several = (x.sizes_here(0, 2, 5), x.sizes_here(0, 11, 20))

    def call(qkv: Any, layout: str, q_len: int, kv_len: int, cum_q: Any, cum_kv: Any, *scales: Any, **more: Any) -> Any:
        lengths = cum_kv[1:] - cum_kv[:-1]
        scales = scales or (0.1, 1.0)
        return ck.trtllm_fmha_v2_prefill(
            qkv, layout, unread, lengths, q_len, kv_len, *scales, cum_q.numel() - 1, cum_q, cum_kv, **more
        )

    def contiguous(offsets: Any = offsets, **options: Any) -> Call:
        run = lambda q, kv, *t, **p: call((q, kv), "CONTIGUOUS_Q_KV", x.n, x.m, *t, **options, **p)  # noqa: E731
        return Call(run, (x.q, x.kv, *offsets), ("out",))

    def separate(q, k, v, *t):
        return call((q, k, v), "SEPARATE_Q_K_V", len(q), len(k), *t)

    def scaled(q, kv, cum_q, cum_kv, scale, sinks):
        return call((q, kv), "CONTIGUOUS_Q_KV", x.n, x.m, cum_q, cum_kv, scale, scale, sinks=[sinks])

    def paged(q, cache, cum_q, cum_kv, table, **more):
        return call((q, cache), "Q_PAGED_KV_NHD", x.n, x.m, cum_q, cum_kv, block_tables=table, **more)

    def capped(*tensors):
        window = dict(mask_mode="sliding_window", window_left=2 * x.size)
        return paged(*tensors, logits_soft_cap_scale=10.0, **window)

    def heads_first(q, cache, cum_q, cum_kv, table, **p):
        given = dict(block_tables=table, pos_encoding_mode="alibi")
        return call((q, cache), "Q_PAGED_KV_HND", x.n, x.m, cum_q, cum_kv, **given, **p)

    return [
        contiguous(),
        contiguous(several, save_softmax_stats=True, pos_encoding_mode="alibi"),
        contiguous(save_softmax_stats=True, mask_mode="padding", pos_encoding_mode="alibi"),
        contiguous(mask_mode="sliding_window", window_left=4, logits_soft_cap_scale=3.0, out_dtype="float16"),
        contiguous(mask_mode="chunked", chunked_attention_size=8, skip_softmax_threshold_scale_factor=1e-3),
        Call(lambda qkv, cum: call(qkv, "PACKED_QKV", x.n, x.n, cum, cum), (torch.stack([x.q] * 3, 1), offsets[0])),
        Call(separate, (*x.qkv, *offsets)),
        Call(scaled, (x.q, x.kv, *offsets, x.one, x.sinks), label="scales"),
        Call(paged, (x.q, x.cache, *offsets, x.here(1, 2)[None]), ("out",)),
        Call(capped, (x.q, x.cache, *offsets, x.here(1, 2)[None])),
        Call(
            heads_first,
            (x.q, x.cache.transpose(2, 3).contiguous(), *several, torch.stack([x.here(1, 2), x.here(3, 0)])),
            ("out",),
        ),
    ]


@no_attention("fmha_v2_stats_to_lse", gradients="computed")
def _stats(x: Data) -> list[Call]:
    function, stats = ck.fmha_v2_stats_to_lse, x.rand(5, 4, 2)
    return [
        Call(lambda stats: function(stats, 64, 0.1), (stats,)),
        Call(lambda stats: function(stats, 64, 0, 2.0), (stats,)),
        Call(lambda stats, scale: function(stats, 64, scale), (stats, x.one), inputs=(0,)),
    ]
