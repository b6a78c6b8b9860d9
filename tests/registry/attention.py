"""Calls without a plan: attention(), and TensorRT-LLM's functions of FlashInfer."""

from __future__ import annotations

import math

import torch

import cutlass_kernels as ck

from .data import Data
from .entry import Call, public


@public("attention")
def _attention(x: Data) -> list[Call]:
    every = dict(window=(3, 2), logits_soft_cap=2.0, sm_scale=0.2, return_lse=True, lse_base=math.e)
    dense = tuple(y.unsqueeze(0) for y in x.qkv)
    out = ("out",)

    def varlen(q, k, v, cum_q, cum_kv, **options):
        return ck.attention(q, k, v, cu_seqlens_q=cum_q, cu_seqlens_k=cum_kv, max_seqlen_q=x.n, **options)

    def paged(q, cache, used, table, sinks, **p):
        k, v = cache.unbind(1)
        return ck.attention(q, k, v, seqused_k=used, page_table=table, causal=True, sinks=sinks, **p)

    def listed(q, cache, indptr, indices, last, **p):
        k, v = cache.unbind(1)
        pages = dict(kv_indptr=indptr, kv_indices=indices, kv_last_page_len=last)
        return ck.attention(q, k, v, **pages, causal=True, batch_invariant=True, return_lse=True, **p)

    def scaled(q, k, v, slopes, q_scale, k_scale, v_scale):
        scales = dict(q_descale=q_scale, k_descale=k_scale, v_descale=v_scale)
        return ck.attention(q, k, v, alibi_slopes=slopes, **scales)

    def masked(q, k, v, cum_q, cum_kv, mask, starts):
        return varlen(q, k, v, cum_q, cum_kv, packed_custom_mask=mask, mask_indptr=starts)

    def rotated(q, q_rope, k, k_rope):
        return ck.attention(q, k, k, q_rope=q_rope, k_rope=k_rope, causal=True)

    def selected(q, cache, indices, lengths, sinks, out=None, max_logits=None):
        rows = q.flatten(0, -3).shape[:2]
        max_logits = q.new_empty(rows, dtype=torch.float32) if max_logits is None else max_logits
        given = dict(kv_indices_per_token=indices, topk_length=lengths, max_logits=max_logits, sinks=sinks)
        return ck.attention(q, cache, cache[..., :512], out=out, **given), max_logits

    def quantized(q, cache, indices, extra, others, lengths):
        lists = dict(kv_indices_per_token=indices, extra_indices_per_token=others, extra_topk_length=lengths)
        return ck.attention(q, cache, cache, extra_k=extra, **lists, return_lse=True)

    def of_tokens(q, cache, indices, lengths, sinks, **p):
        lists = dict(kv_indices_per_token=indices, topk_length=lengths)
        kv_format = "v3.2_nope" if cache.size(-1) == 528 else None
        return ck.attention(q, cache, cache, **lists, kv_format=kv_format, sinks=sinks, return_lse=True, **p)

    offsets = (x.sizes_here(0, 5), x.sizes_here(0, 20))
    bits = (x.rand(-(-x.n * x.m // 128) * 16) * 256).to(torch.uint8)
    latent = (x.randn(1, x.n, x.heads[0], 512).half(), x.randn(1, x.n, x.heads[0], 64).half())
    latent += (x.randn(1, x.m, 1, 512).half(), x.randn(1, x.m, 1, 64).half())
    of_lists = (x.randn(1, x.n, x.heads[0], 576).half(), x.randn(4, x.page, 1, 576).half())
    lists = (x.slots_here(x.n, 64 * x.size).unsqueeze(1), x.of_rows_here(10, 7, 64, 3, 0), x.sinks)
    of_lists += lists
    of_bytes = (x.randn(1, x.n, x.heads[0], 512).half(), x.tokens_here(584), x.slots_here(x.n, 30).unsqueeze(1))
    of_bytes += (x.tokens_here(584), x.slots_here(x.n, 40 * x.size).unsqueeze(1), x.of_rows_here(8, 7, 4, 3, 0))
    # Bytes of tokens, columns of queries.
    formats = ((656, 576), (584, 512), (528, 512)) if x.target.backend != "fa2" else ()
    return [
        Call(lambda *t, **p: ck.attention(*t, causal=True, **p), dense, out),
        Call(lambda *t: ck.attention(*t[:3], sinks=[t[3]], o_dtype="float16"), (*dense, x.sinks)),
        Call(lambda *t, **p: varlen(*t, **every, **p), (*x.qkv, *offsets), out, label="returns LSE"),
        Call(paged, (dense[0], x.cache, x.sizes_here(20), x.here(1, 2)[None], x.sinks), out),
        Call(listed, (x.q[:4].unflatten(0, (2, 2)), x.cache, *x.table_here), out, label="returns LSE"),
        Call(scaled, (*dense, x.sinks.abs(), *[x.one] * 3), label="scales"),
        Call(masked, (*x.qkv, *offsets, bits, x.here(0, bits.numel()))),
        Call(rotated, latent),
        Call(
            lambda *t, **p: ck.attention(*t, schedule=ck.Schedule(), batch_invariant=True, **p),
            dense,
            out,
            label="schedule",
        ),
        Call(selected, of_lists, ("out", "max_logits"), apart=True),
        *([Call(quantized, of_bytes, label="returns LSE", apart=True)] if x.target.is_reference else []),
        *(
            Call(
                of_tokens,
                (x.randn(1, x.n, x.heads[0], dim).bfloat16(), x.tokens_here(size), *lists),
                out,
                label="returns LSE",
            )
            for size, dim in formats
        ),
    ]


@public("trtllm_batch_decode_with_kv_cache")
def _trtllm_decode(x: Data) -> list[Call]:
    function, unread = ck.trtllm_batch_decode_with_kv_cache, x.target.workspace(16)
    tensors = (x.q, x.cache, x.here(1, 2)[None], x.sizes_here(20))

    def call(q, cache, table, used, *scales, **options):
        scales = scales or (0.2,)
        return function(q, cache, unread, table, used, x.m, *scales, q_len_per_req=x.n, kv_layout="NHD", **options)

    def with_sinks(q, cache, table, used, sinks, **p):
        return call(q, cache, table, used, sinks=[sinks], **p)

    def of_offsets(q, cache, table, used, cum_q):
        return call(q, cache, table, used, cum_seq_lens_q=cum_q, max_q_len=x.n, out_dtype="bfloat16")

    return [
        Call(call, tensors, ("out",)),
        Call(lambda *t: call(*t, 0.5, window_left=3, return_lse=True), (*tensors, x.one), label="scales"),
        Call(with_sinks, (*tensors, x.sinks), ("out",)),
        Call(of_offsets, (*tensors, x.sizes_here(0, 5))),
    ]


@public("xqa_batch_decode_with_kv_cache")
def _xqa_decode(x: Data) -> list[Call]:
    function, unread = ck.xqa_batch_decode_with_kv_cache, x.target.workspace(16)
    tensors = (x.q[:5], x.cache, x.here(1, 2)[None], x.sizes_here(20))

    def call(q, cache, table, used, mask=None, **options):
        return function(q, cache, unread, table, used, x.m, 0.2, 0.5, q_len_per_req=5, mask=mask, **options)

    return [Call(call, tensors, ("out",)), Call(call, (*tensors, (x.rand(1, 5, 4) * 32).to(torch.uint8)), label="mask")]


@public("trtllm_batch_context_with_kv_cache")
def _trtllm_context(x: Data) -> list[Call]:
    function, unread = ck.trtllm_batch_context_with_kv_cache, x.target.workspace(16)
    tensors = (x.q, x.cache, x.here(1, 2)[None], x.sizes_here(20), x.sizes_here(0, 5), x.sizes_here(0, 20))

    def call(q, cache, table, used, cum_q, cum_kv, bmm1=0.2, **options):
        lengths = (x.n, x.m, bmm1, 1.0, 1, cum_q, cum_kv)
        return function(q, cache, unread, table, used, *lengths, kv_layout="NHD", **options)

    scaled = lambda *t: call(*t, causal=False, window_left=3, return_lse=True)  # noqa: E731
    return [Call(call, tensors, ("out",)), Call(scaled, (*tensors, x.one), label="scales")]
