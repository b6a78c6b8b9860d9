"""Latent attention (MLA), and writing its cache."""

from __future__ import annotations

import torch

import cutlass_kernels as ck
from cutlass_kernels import flash_mla, mla

from .data import Data
from .entry import Call, Planned, no_attention, public


@public("BatchMLAPagedAttentionWrapper")
def _wrapper(x: Data) -> list[Planned]:
    queries = (x.randn(x.n, x.heads[0], 512).half(), x.randn(x.n, x.heads[0], 64).half())
    tensors = (*queries, x.randn(4, x.page, 512).half(), x.randn(4, x.page, 64).half())
    packed = (x.randn(x.n, x.heads[0], 576).half(), x.randn(4, x.page, 576).half(), x.sinks, x.randn(1).abs())

    def plan(w):
        half = (torch.float16, torch.float16)
        w.plan(x.rows, *x.table[:2], x.sizes(20, 9), x.heads[0], 512, 64, x.page, True, 0.07, *half)

    def calls(w):
        if x.target.backend == "fa3":  # scales in tensors are fa2's
            run = lambda q, c, s: w.run(query=q, kv_cache=c, sinks=s, bmm1_scale=0.1, bmm2_scale=0.5)  # noqa: E731
        else:
            run = lambda q, c, s, y: w.run(query=q, kv_cache=c, sinks=s, bmm1_scale=y, bmm2_scale=0.5)  # noqa: E731
        e = dict(return_lse=True, return_lse_base_on_e=True)
        return [
            Call(w.run, tensors, ("out",)),
            Call(lambda *t, **p: w.run(*t, **e, **p), tensors, ("out", "lse"), label="returns LSE"),
            Call(lambda *t: w.run(*t[:4], sinks=[t[4]]), (*tensors, x.sinks)),
            Call(run, packed[: 3 if x.target.backend == "fa3" else 4], label="scales"),
        ]

    return [Planned(x.wrapper("BatchMLAPagedAttentionWrapper"), plan, calls)]


@public("mla.trtllm_batch_decode_with_kv_cache_mla")
def _trtllm(x: Data) -> list[Call]:
    pages = (x.randn(4, x.page, 576).half(), x.here(1, 2)[None], x.sizes_here(20))
    tensors = (x.randn(1, x.n, x.heads[0], 576).half(), *pages)
    unread = x.target.workspace(16)

    def call(q, cache, table, used, **options):
        sizes = (unread, 128, 512, 64, table, used, x.m)
        return mla.trtllm_batch_decode_with_kv_cache_mla(q, cache, *sizes, bmm1_scale=0.1, **options)

    lse = lambda *t, **p: call(*t[:4], sinks=t[4], return_lse=True, **p)  # noqa: E731

    def sparse(q, cache, lists, lengths, **p):
        return call(q, cache, lists, None, sparse_mla_top_k=64 * x.size, sparse_mla_top_k_lens=lengths, **p)

    lists = (*tensors[:2], x.slots_here(x.n, 64 * x.size)[None], x.of_rows_here(10, 7, 64, 3, 0))
    return [
        Call(call, tensors, ("out",)),
        Call(lse, (*tensors, x.sinks), ("out", "lse"), label="returns LSE"),
        Call(sparse, lists, ("out",)),
    ]


@public("flash_mla.flash_mla_with_kvcache")
def _flash_mla(x: Data) -> list[Call]:
    pages = (x.randn(4, x.page, 1, 576).half(), x.here(1, 2)[None], x.sizes_here(20))
    tensors = (x.randn(1, x.n, x.heads[0], 576).half(), *pages)
    selected = (*tensors[:2], x.slots_here(x.n, 64 * x.size)[None], x.sinks, x.sizes_here(50))

    def call(*tensors, **places):
        return flash_mla.flash_mla_with_kvcache(*tensors, 512, *flash_mla.get_mla_metadata(), causal=True, **places)

    def sparse(q, cache, indices, sinks, lengths, **places):
        given = dict(indices=indices, attn_sink=sinks, topk_length=lengths)
        return flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, **given, **places)

    def quantized(q, cache, indices, extra, others):
        given = dict(indices=indices, extra_k_cache=extra, extra_indices_in_kvcache=others)
        return flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, **given)

    of_bytes = (tensors[0], x.tokens_here(656), selected[2], x.tokens_here(656), selected[2][..., :9])
    return [
        Call(call, tensors, ("out",), label="returns LSE"),
        Call(sparse, selected, ("out",), label="returns LSE"),
        *([Call(quantized, of_bytes, label="returns LSE")] if x.target.is_reference else []),
    ]


@public("flash_mla.flash_mla_sparse_fwd")
def _flash_mla_prefill(x: Data) -> list[Call]:
    tensors = (x.randn(x.n, x.heads[0], 576).half(), x.randn(4 * x.page, 1, 576).half())
    tensors += (x.slots_here(x.n, 64 * x.size).unsqueeze(1),)

    def call(q, kv, indices, **places):
        return flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, **places)

    return [Call(call, tensors, ("out",), label="returns LSE")]


@no_attention("flash_mla.get_mla_metadata")
def _metadata(x: Data) -> list[Call]:
    return [Call(lambda lens: flash_mla.get_mla_metadata(lens, 4, 1), (x.here(20, 7),))]


@no_attention("append_paged_mla_kv_cache", gradients="warned")
def _append(x: Data) -> list[Call]:
    new = (x.randn(3, 512).half(), x.randn(3, 64).half())
    caches = (x.randn(4, x.page, 512).half(), x.randn(4, x.page, 64).half())
    places = (x.here(0, 1, -1), x.here(17, 4, 4))

    def append(ckv, kpe, owner, position, ckv_cache, kpe_cache, *table):
        ck.append_paged_mla_kv_cache(ckv, kpe, owner, position, ckv_cache, kpe_cache, *table)
        return ckv_cache.clone(), kpe_cache * 2

    indptr, indices, last = x.table_here
    return [Call(append, (*new, *places, *caches, indices, indptr, last), writes=True, inputs=(0, 1))]


@no_attention("mla.concat_and_cache_mla", gradients="warned")
def _concat(x: Data) -> list[Call]:
    new, slots = (x.randn(3, 512).half(), x.randn(3, 64).half()), x.here(35, -1, 18)
    quantized = (x.randn(4, x.page, 576).to(torch.float8_e4m3fn), slots, x.one + 1)
    fp8 = lambda *t: mla.concat_and_cache_mla(*t[:4], "fp8", t[4])  # noqa: E731
    tokens = lambda *t: mla.concat_and_cache_mla(*t, "fp8_ds_mla")  # noqa: E731
    calls = [(lambda *t: mla.concat_and_cache_mla(*t), (x.randn(4, x.page, 576).half(), slots)), (fp8, quantized)]
    calls.append((tokens, (x.tokens_here(656).squeeze(2), slots)))
    return [Call(run, (*new, *others), writes=True, inputs=(0, 1)) for run, others in calls]


@no_attention("mla.append_quantized_mla_kv_cache", gradients="warned")
def _append_quantized(x: Data) -> list[Call]:
    slots = x.here(35, -1, 18)
    parts = (x.randn(3, 448).half(), x.randn(3, 64).half(), x.tokens_here(584), slots)
    whole = (x.randn(3, 512).half(), x.tokens_here(528), slots)
    run = mla.append_quantized_mla_kv_cache
    rotated = (*_rotated(x), x.randn(3, 448).half(), x.tokens_here(584), slots)

    def rotate(q, kpe, positions, table, ckv, cache, slots):
        run(ckv, kpe, cache, slots, "v4", None, positions, table, True, q)
        return q * 1

    return [
        Call(run, parts, writes=True, inputs=(0, 1)),
        Call(lambda x, *t: run(x, None, *t, "v4.1_pages"), whole, writes=True, inputs=(0,)),
        Call(rotate, rotated, writes=True, inputs=(0, 1, 4)),
    ]


def _rotated(x: Data) -> tuple[torch.Tensor, ...]:
    """RoPE columns of queries and keys, positions, a table."""
    angles = x.here(*range(10))[:, None] * (torch.arange(32, device=x.device) + 1) / 32
    table = torch.cat([angles.cos(), angles.sin()], -1)
    return x.randn(3, 4, 64).half(), x.randn(3, 64).half(), x.here(3, 0, 9), table


@no_attention("mla.concat_and_cache_mla_rope_fused", gradients="warned")
def _concat_rotated(x: Data) -> list[Call]:
    slots = x.here(35, -1, 18)
    caches = {"auto": x.randn(4, x.page, 576).half(), "fp8_ds_mla": x.tokens_here(656).squeeze(2)}

    def call(kind: str, cache: torch.Tensor) -> Call:
        def run(q, k, positions, table, kv_c, cache, slots):
            mla.concat_and_cache_mla_rope_fused(positions, q, k, kv_c, table, False, slots, cache, kind)
            return q * 1, k + 1

        return Call(run, (*_rotated(x), x.randn(3, 512).half(), cache, slots), writes=True, inputs=(1, 4))

    return [call(*item) for item in caches.items()]
