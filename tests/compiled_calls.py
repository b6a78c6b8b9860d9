"""Calls of every public function for torch.compile, in several combinations of arguments: functions of tensors only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import compiled_block_calls
import compiled_latent_calls
import torch
from compiled_data import HEADS, PAGE, Call, Data, ints

import cutlass_kernels as ck


def _single_prefill(x: Data, function: Any = ck.single_prefill_with_kv_cache) -> list[Call]:
    def call(*tensors: torch.Tensor, names: tuple[str, ...] = (), **options: Any) -> Any:
        given = dict(zip(names, tensors[3:]))
        return function(*tensors[:3], **given, **options, backend=x.target.backend)

    def case(tensors: tuple[torch.Tensor, ...] = x.qkv, **options: Any) -> Call:
        named = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
        rest = {name: value for name, value in options.items() if name not in named}
        return lambda *t: call(*t, names=tuple(named), **rest), (*tensors, *named.values())

    mask = torch.rand(5, 20).to(x.device) < 0.5
    every = dict(k_scale=2.0, v_scale=0.7, window_left=3, logits_soft_cap=2.0, sm_scale=0.2, return_lse=True)
    return [
        case(),
        case(**every, causal=True, pos_encoding_mode="ALIBI"),
        case((x.q, x.k.transpose(0, 1), x.v.transpose(0, 1)), kv_layout="HND", pos_encoding_mode="ROPE_LLAMA"),
        case(custom_mask=mask, sinks=x.sinks, o_dtype="float16"),
        case(packed_custom_mask=ck.packbits(mask.flatten(), "little")),
        case(scale_q=x.sinks.abs(), scale_k=x.sinks[:2].abs(), scale_v=x.sinks[:2].abs()),
        case(out=torch.zeros_like(x.q), lse=x.randn(5, 4), return_lse=True),
    ]


def _single_decode(x: Data) -> list[Call]:
    function = ck.single_decode_with_kv_cache
    q, tensors = x.q[0], (x.q[0], x.k, x.v)
    every = dict(q_scale=0.5, k_scale=2.0, v_scale=0.7, window_left=3, logits_soft_cap=2.0, return_lse=True)
    swapped = (q, x.k.transpose(0, 1), x.v.transpose(0, 1))
    return [
        (function, tensors),
        (lambda *t: function(*t, **every, pos_encoding_mode="ALIBI", backend=x.target.backend), tensors),
        (lambda *t: function(*t, "HND", "ROPE_LLAMA", rope_theta=5e3), swapped),
        (lambda *t: function(*t[:3], q_scale=t[3], k_scale=t[3], v_scale=t[3]), (*tensors, x.one)),
        (lambda *t: function(*t[:3], sinks=t[3], out=t[4]), (*tensors, x.sinks, torch.zeros_like(q))),
    ]


def _fused(x: Data) -> list[Call]:
    unread = x.target.workspace(16)
    offsets = (x.here(0, 5), x.here(0, 20))

    def call(qkv: Any, layout: str, q_len: int, kv_len: int, cum_q: Any, cum_kv: Any, *scales: Any, **more: Any) -> Any:
        lengths = cum_kv[1:] - cum_kv[:-1]
        scales = scales or (0.1, 1.0)
        return ck.trtllm_fmha_v2_prefill(
            qkv, layout, unread, lengths, q_len, kv_len, *scales, cum_q.numel() - 1, cum_q, cum_kv, **more
        )

    def contiguous(**options: Any) -> Call:
        return lambda q, kv, *t: call((q, kv), "CONTIGUOUS_Q_KV", 5, 20, *t, **options), (x.q, x.kv, *offsets)

    def separate(q, k, v, *t):
        return call((q, k, v), "SEPARATE_Q_K_V", len(q), len(k), *t)

    def scaled(q, kv, cum_q, cum_kv, scale, sinks):
        return call((q, kv), "CONTIGUOUS_Q_KV", 5, 20, cum_q, cum_kv, scale, scale, sinks=[sinks])

    def to_place(q, kv, cum_q, cum_kv, out):
        return call((q, kv), "CONTIGUOUS_Q_KV", 5, 20, cum_q, cum_kv, out=out)

    def paged(q, cache, cum_q, cum_kv, table):
        return call((q, cache), "Q_PAGED_KV_NHD", 5, 20, cum_q, cum_kv, block_tables=table)

    return [
        contiguous(),
        contiguous(save_softmax_stats=True, mask_mode="padding", pos_encoding_mode="alibi"),
        contiguous(mask_mode="sliding_window", window_left=4, logits_soft_cap_scale=3.0, out_dtype="float16"),
        contiguous(mask_mode="chunked", chunked_attention_size=8, skip_softmax_threshold_scale_factor=1e-3),
        (lambda qkv, *t: call(qkv, "PACKED_QKV", 5, 5, *t), (torch.stack([x.q] * 3, 1), *[x.here(0, 5)] * 2)),
        (separate, (*x.qkv, *offsets)),
        (scaled, (x.q, x.kv, *offsets, x.one, x.sinks)),
        (to_place, (x.q, x.kv, *offsets, torch.zeros_like(x.q))),
        (paged, (x.q, x.cache, *offsets, x.here(1, 2)[None])),
    ]


def _attention(x: Data) -> list[Call]:
    every = dict(window=(3, 2), logits_soft_cap=2.0, sm_scale=0.2, return_lse=True, lse_base=math.e)
    dense = tuple(y.unsqueeze(0) for y in x.qkv)

    def varlen(q, k, v, cum_q, cum_kv, **options):
        return ck.attention(q, k, v, cu_seqlens_q=cum_q, cu_seqlens_k=cum_kv, max_seqlen_q=5, **options)

    def paged(q, cache, used, table, sinks, out):
        k, v = cache.unbind(1)
        return ck.attention(q, k, v, seqused_k=used, page_table=table, causal=True, sinks=sinks, out=out)

    return [
        (lambda *t: ck.attention(*t, causal=True), dense),
        (lambda *t: ck.attention(*t[:3], sinks=[t[3]], o_dtype="float16"), (*dense, x.sinks)),
        (lambda *t: varlen(*t, **every), (*x.qkv, x.here(0, 5), x.here(0, 20))),
        (paged, (dense[0], x.cache, x.here(20), x.here(1, 2)[None], x.sinks, torch.zeros_like(dense[0]))),
    ]


def _trtllm_decode(x: Data) -> list[Call]:
    function, unread = ck.trtllm_batch_decode_with_kv_cache, x.target.workspace(16)
    tensors = (x.q, x.cache, x.here(1, 2)[None], x.here(20))

    def call(q, cache, table, used, *scales, **options):
        scales = scales or (0.2,)
        return function(q, cache, unread, table, used, 20, *scales, q_len_per_req=5, kv_layout="NHD", **options)

    def to_place(q, cache, table, used, sinks, out):
        return call(q, cache, table, used, sinks=[sinks], out=out)

    def of_offsets(q, cache, table, used, cum_q):
        return call(q, cache, table, used, cum_seq_lens_q=cum_q, max_q_len=5, out_dtype="bfloat16")

    return [
        (call, tensors),
        (lambda *t: call(*t, 0.5, window_left=3, return_lse=True), (*tensors, x.one)),
        (to_place, (*tensors, x.sinks, torch.zeros_like(x.q))),
        (of_offsets, (*tensors, x.here(0, 5))),
    ]


def _xqa_decode(x: Data) -> list[Call]:
    function, unread = ck.xqa_batch_decode_with_kv_cache, x.target.workspace(16)
    tensors = (x.q, x.cache, x.here(1, 2)[None], x.here(20))

    def call(q, cache, table, used, mask=None, **options):
        return function(q, cache, unread, table, used, 20, 0.2, 0.5, q_len_per_req=5, mask=mask, **options)

    return [(call, tensors), (call, (*tensors, torch.randint(0, 32, (1, 5, 4)).to(torch.uint8).to(x.device)))]


def _trtllm_context(x: Data) -> list[Call]:
    function, unread = ck.trtllm_batch_context_with_kv_cache, x.target.workspace(16)
    tensors = (x.q, x.cache, x.here(1, 2)[None], x.here(20), x.here(0, 5), x.here(0, 20))

    def call(q, cache, table, used, cum_q, cum_kv, bmm1=0.2, out=None, **options):
        lengths = (5, 20, bmm1, 1.0, 1, cum_q, cum_kv)
        return function(q, cache, unread, table, used, *lengths, out=out, kv_layout="NHD", **options)

    return [
        (call, tensors),
        (lambda *t: call(*t, causal=False, window_left=3, return_lse=True), (*tensors, x.one)),
        (lambda *t: call(*t[:6], 0.2, t[6]), (*tensors, torch.zeros_like(x.q))),
    ]


def _padded(x: Data) -> list[Call]:
    function = ck.batch_decode_with_shared_prefix_padded_kv_cache
    own = [torch.stack([y] * 5) for y in (x.k, x.v)]
    swapped = [y.transpose(-3, -2) for y in (x.k, x.v, *own)]
    return [
        (function, (x.q, x.k, x.v, *own)),
        (lambda *t: function(*t, "HND", sm_scale=0.2), (x.q, *swapped)),
    ]


def _paged(x: Data) -> list[Call]:
    w = x.wrapper("BatchPrefillWithPagedKVCacheWrapper")
    w.plan(ints(0, 5), *x.table, *HEADS, PAGE, causal=True)
    every = dict(k_scale=0.5, v_scale=2.0, return_lse=True, lse_layout="HN", lse_base="ln")
    return [
        (w.run, (x.q, x.cache)),
        (lambda q, k, v: w.run_return_lse(q, (k, v)), (x.q, *(y.contiguous() for y in x.cache.unbind(1)))),
        (lambda q, cache, sinks: w.run(q, cache, **every, sinks=sinks), (x.q, x.cache, x.sinks)),
        (lambda q, cache, out: w.run(q, cache, 0.5, 2.0, out=out), (x.q, x.cache, torch.zeros_like(x.q))),
        (lambda q, cache: w.forward(q, cache, causal=False, logits_soft_cap=2.0), (x.q, x.cache)),
        (lambda q, cache: w.forward_return_lse(q, cache, causal=True), (x.q, x.cache)),
    ]


def _with_sinks(x: Data) -> list[Call]:
    w = x.wrapper("BatchAttentionWithAttentionSinkWrapper")
    w.plan(ints(0, 5), *x.table, *HEADS, PAGE, causal=True)
    tensors = (x.q, x.cache, x.sinks)
    return [
        (w.run, tensors),
        (lambda *t: w.run(*t, 0.2, return_lse=True), tensors),
        (lambda *t: w.run(*t[:3], out=t[3]), (*tensors, torch.zeros_like(x.q))),
    ]


def _ragged(x: Data) -> list[Call]:
    w = x.wrapper("BatchPrefillWithRaggedKVCacheWrapper")
    w.plan(ints(0, 5), ints(0, 20), *HEADS, causal=True)
    return [
        (w.run, x.qkv),
        (lambda q, k, v, s: w.run(q, k, v, s, s[:2], s[:2], return_lse=True), (*x.qkv, x.sinks.abs())),
        (lambda q, k, v, lse: w.run(q, k, v, lse=lse, return_lse=True), (*x.qkv, x.randn(5, 4))),
        (lambda q, k, v: w.forward(q, k, v, window_left=3, pos_encoding_mode="ALIBI"), x.qkv),
    ]


def _decode(x: Data, w: Any = None) -> list[Call]:
    if w is None:
        w = x.wrapper("BatchDecodeWithPagedKVCacheWrapper")
    w.plan(*x.table, *HEADS, PAGE)
    tensors = (x.q[:1], x.cache)
    return [
        (w.run, tensors),
        (lambda q, cache: w.run(q, cache, 0.5, 0.5, 2.0, True), tensors),
        (lambda q, cache: w.run(q, cache, q_len_per_req=1, window_left=-1), tensors),
        (lambda q, cache: w.forward(q, cache, pos_encoding_mode="ALIBI"), tensors),
    ]


def _graph_decode(x: Data) -> list[Call]:
    buffers = [torch.zeros(n, dtype=torch.int32, device=x.device) for n in (2, 4, 1)]
    return _decode(x, ck.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(x.target.workspace(), *buffers))


def _cascade(x: Data) -> list[Call]:
    w = x.wrapper("MultiLevelCascadeAttentionWrapper", 2)
    levels = zip((ints(0, 5), ints(0, 1), ints(0), ints(PAGE)), (ints(0, 5), *x.table))
    w.plan(*map(list, levels), *HEADS, PAGE, causal=True)
    return [
        (lambda q, cache: w.run(q, cache, return_lse=True), (x.q, x.cache)),
        (lambda q, cache, out: w.run(q, cache, out=out, k_scale=0.5), (x.q, x.cache, torch.zeros_like(x.q))),
    ]


def _shared_decode(x: Data) -> list[Call]:
    w = x.wrapper("BatchDecodeWithSharedPrefixPagedKVCacheWrapper")
    w.begin_forward(*x.table, *HEADS, PAGE)
    return [
        (w.forward, (x.q[:1], x.k, x.v, x.cache)),
        (lambda *t: w.forward(*t, sm_scale=0.2), (x.q[:1], x.k, x.v, x.cache)),
    ]


def _shared_prefill(x: Data) -> list[Call]:
    w = x.wrapper("BatchPrefillWithSharedPrefixPagedKVCacheWrapper")
    w.begin_forward(ints(0, 5), *x.table, *HEADS, PAGE)
    tensors = (x.q, x.k, x.v, x.cache)
    w.forward(*tensors)
    return [(w.forward, tensors), (lambda *t: w.forward(*t, causal=False, sm_scale=0.2), tensors)]


def _append(x: Data) -> list[Call]:
    places = (x.here(0, 0, -1), x.here(3, 17, 4))
    table = (x.here(1, 2), x.here(0, 2), x.here(4))
    new = (x.k[:3], x.v[:3])

    def stacked(key, value, owner, position, cache, *table):
        cache = cache.clone()
        ck.append_paged_kv_cache(key, value, owner, position, cache, *table)
        return cache

    def swapped(key, value, owner, position, cache, *table):
        ck.append_paged_kv_cache(key, value, owner, position, cache, *table, "HND")
        return cache * 2

    def pair(key, value, owner, position, cache, *table):
        k_cache, v_cache = cache.unbind(1)  # two views, which the graph has to write to in place
        ck.append_paged_kv_cache(key, value, owner, position, (k_cache, v_cache), *table)
        return cache.clone()

    wide = tuple(y.long() for y in places)
    return [
        (stacked, (*new, *places, x.cache, *table)),
        (stacked, (*new, *wide, x.cache.float(), *table)),
        (stacked, (*new, *places, x.cache.to(torch.float8_e4m3fn), *table)),
        (swapped, (*new, *places, x.cache.transpose(2, 3).contiguous(), *table)),
        (pair, (*new, *places, x.cache, *table)),
    ]


def _append_by_slot(x: Data) -> list[Call]:
    function, slots = ck.append_paged_kv_cache_by_slot, x.here(35, -1, 18)
    new, scales = (x.k[:3], x.v[:3]), (x.one + 1, x.randn(2).abs() + 1)

    def halves(key, value, cache, slots):
        function(key, value * 2, *cache.unbind(1), slots, 0.5)
        return cache.clone()

    def side_by_side(key, value, cache, slots, k_scale, v_scale):
        function(key, value, *cache.transpose(1, 2).chunk(2, -1), slots, k_scale, v_scale, "HND")
        return cache * 2

    separate = (x.cache[:, 0].clone(), x.cache[:, 1].clone())
    return [
        (halves, (*new, x.cache, slots)),
        (halves, (*new, x.cache.to(torch.float8_e4m3fn), slots)),
        (side_by_side, (*new, torch.cat(separate, -1), slots.long(), *scales)),
        (lambda *t: several_written(function, *t), (*new, *separate, slots)),
    ]


def _table(x: Data) -> torch.Tensor:
    angles = x.here(*range(10))[:, None] * (torch.arange(32, device=x.one.device) + 1) / 32
    return torch.cat([angles.cos(), angles.sin()], -1)


def _rope(x: Data) -> list[Call]:
    tensors = x.here(3, 0, 9), x.q[:3], x.k[:3]
    flat = tensors[0], x.q[:3].flatten(1), x.k[:3].flatten(1)

    def rotate(positions, q, k, table):
        return ck.apply_rope_with_cos_sin_cache(positions, q, k, 64, table)

    return [(rotate, (*tensors, _table(x))), (rotate, (*flat, _table(x)))]


def _rope_in_place(x: Data) -> list[Call]:
    def rotate(positions, q, k, table):
        ck.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 64, table, False)
        return q + 1, k * 2

    return [(rotate, (x.here(3, 0, 9), x.q[:3].clone(), x.k[:3].clone(), _table(x)))]


def _rope_append(x: Data) -> list[Call]:
    def step(q, k, v, positions, table, cache, slots, scale):
        ck.rope_append_paged_kv_cache_by_slot(q, k, v, positions, table, *cache.unbind(1), slots, 0.5, scale)
        return q, cache.clone()

    new = x.q[:3].clone(), x.k[:3], x.v[:3], x.here(3, 0, 9), _table(x)
    slots, scale = x.here(35, -1, 18), x.randn(2).abs() + 1
    return [(step, (*new, cache, slots, scale)) for cache in (x.cache.clone(), x.cache.to(torch.float8_e4m3fn))]


def several_written(function: Callable[..., None], key: Any, value: Any, *rest: torch.Tensor) -> torch.Tensor:
    function(key, value, *rest)
    return rest[0] + rest[1]


def _positions(x: Data) -> list[Call]:
    function, offsets, lengths = ck.get_batch_indices_positions, x.here(0, 2, 5), x.here(7, 9)
    places = (x.here(*range(6)), x.here(*range(6)))
    return [
        (lambda *t: function(*t, 5), (offsets, lengths)),
        (lambda cum, lens, q: function(cum, lens, q.shape[0]), (offsets.long(), lengths.long(), x.q)),
        (lambda cum, lens, *given: function(cum, lens, 6, *given), (offsets, lengths, *places)),
    ]


def _seq_lens(x: Data) -> list[Call]:
    tensors = (x.here(0, 2, 5), x.here(7, 9))
    return [(lambda *t: ck.get_seq_lens(*t, PAGE), y) for y in (tensors, tuple(z.long() for z in tensors))]


def _merge_in_place(x: Data) -> list[Call]:
    def call(v, s, *others):
        ck.merge_state_in_place(v, s, *others)
        return v.clone(), s.clone()

    return [(call, (*x.state, *x.state)), (call, (*x.state, *x.state, x.sinks.new_tensor([1, 0, 1, 0, 1]).bool()))]


def _stats(x: Data) -> list[Call]:
    function, stats = ck.fmha_v2_stats_to_lse, torch.rand(5, 4, 2).to(x.device)
    return [
        (lambda stats: function(stats, 64, 0.1), (stats,)),
        (lambda stats: function(stats, 64, 0, 2.0), (stats,)),
        (lambda stats, scale: function(stats, 64, scale), (stats, x.one)),
    ]


def _packbits(x: Data) -> list[Call]:
    bits = torch.rand(100).to(x.device) < 0.5
    return [
        (ck.packbits, (bits,)),
        (lambda y: ck.packbits(y, "little"), (bits,)),
        (ck.packbits, (x.here(*range(13)),)),
    ]


def _list_kernels(x: Data) -> list[Call]:
    return [(lambda q: q + len(ck.list_kernels()), (x.q,))]


def _explain(x: Data) -> list[Call]:
    return [(lambda q: q + 1 if ck.explain(q).selected else q, (x.q,))]


def _segment_packbits(x: Data) -> list[Call]:
    return [(lambda y, z: ck.segment_packbits(y, z)[0] + 1, (torch.rand(100).to(x.device) < 0.5, ints(0, 3, 100)))]


def _fast_decode_plan(x: Data) -> list[Call]:
    w = x.wrapper("BatchDecodeWithPagedKVCacheWrapper")

    def call(q, cache, *table):
        ck.fast_decode_plan(w, *table, *HEADS, PAGE)
        return w.run(q, cache)

    return [(call, (x.q[:1], x.cache, *x.table))]


def _return_lse(x: Data) -> list[Call]:
    return _single_prefill(x, ck.single_prefill_with_kv_cache_return_lse)


CALLS: dict[str, Callable[[Data], list[Call]]] = {
    **compiled_block_calls.CALLS,
    **compiled_latent_calls.CALLS,
    "single_prefill_with_kv_cache": _single_prefill,
    "single_prefill_with_kv_cache_return_lse": _return_lse,
    "single_decode_with_kv_cache": _single_decode,
    "trtllm_fmha_v2_prefill": _fused,
    "attention": _attention,
    "trtllm_batch_decode_with_kv_cache": _trtllm_decode,
    "xqa_batch_decode_with_kv_cache": _xqa_decode,
    "trtllm_batch_context_with_kv_cache": _trtllm_context,
    "batch_decode_with_shared_prefix_padded_kv_cache": _padded,
    "BatchPrefillWithPagedKVCacheWrapper": _paged,
    "BatchAttentionWithAttentionSinkWrapper": _with_sinks,
    "BatchPrefillWithRaggedKVCacheWrapper": _ragged,
    "BatchDecodeWithPagedKVCacheWrapper": _decode,
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": _graph_decode,
    "MultiLevelCascadeAttentionWrapper": _cascade,
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": _shared_decode,
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": _shared_prefill,
    "append_paged_kv_cache": _append,
    "append_paged_kv_cache_by_slot": _append_by_slot,
    "apply_rope_with_cos_sin_cache": _rope,
    "apply_rope_with_cos_sin_cache_inplace": _rope_in_place,
    "rope_append_paged_kv_cache_by_slot": _rope_append,
    "get_batch_indices_positions": _positions,
    "get_seq_lens": _seq_lens,
    "merge_state": lambda x: [(ck.merge_state, (*x.state, *x.state))],
    "merge_state_in_place": _merge_in_place,
    "merge_states": lambda x: [(ck.merge_states, (x.randn(5, 3, 4, 64), x.randn(5, 3, 4)))],
    "fmha_v2_stats_to_lse": _stats,
    "packbits": _packbits,
    "segment_packbits": _segment_packbits,
    "fast_decode_plan": _fast_decode_plan,
    "explain": _explain,
    "list_kernels": _list_kernels,
}
