"""Calls for torch.compile (compiled_calls): latent attention, and writing its cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from compiled_data import PAGE, Call, Data, ints

import cutlass_kernels as ck


def _latent(x: Data) -> list[Call]:
    w = x.wrapper("BatchMLAPagedAttentionWrapper")
    w.plan(ints(0, 5), *x.table[:2], ints(20), 4, 512, 64, PAGE, True, 0.07, torch.float16, torch.float16)
    queries = (x.randn(5, 4, 512).half(), x.randn(5, 4, 64).half())
    caches = (x.randn(4, PAGE, 512).half(), x.randn(4, PAGE, 64).half())
    tensors = (*queries, *caches)
    packed = (x.randn(5, 4, 576).half(), x.randn(4, PAGE, 576).half(), x.randn(4), x.randn(1).abs())
    if x.target.backend == "fa3":  # scales in tensors are fa2's
        last = (lambda q, c, s: w.run(query=q, kv_cache=c, sinks=s, bmm1_scale=0.1, bmm2_scale=0.5), packed[:3])
    else:
        last = (lambda q, c, s, x: w.run(query=q, kv_cache=c, sinks=s, bmm1_scale=x, bmm2_scale=0.5), packed)
    return [
        (w.run, tensors),
        (lambda *t: w.run(*t, return_lse=True, return_lse_base_on_e=True), tensors),
        (lambda *t: w.run(*t[:4], sinks=[t[4]]), (*tensors, x.randn(4))),
        (lambda *t: w.run(*t[:4], out=t[4]), (*tensors, torch.zeros_like(queries[0]))),
        (lambda *t: w.run(*t[:4], lse=t[4]), (*tensors, torch.zeros(5, 4, device=queries[0].device))),
        last,
    ]


def _append(x: Data) -> list[Call]:
    new = (x.randn(3, 512).half(), x.randn(3, 64).half())
    caches = (x.randn(4, PAGE, 512).half(), x.randn(4, PAGE, 64).half())
    places, table = (x.here(0, 0, -1), x.here(3, 17, 4)), (x.here(1, 2), x.here(0, 2), x.here(4))

    def append(ckv, kpe, owner, position, ckv_cache, kpe_cache, *table):
        ck.append_paged_mla_kv_cache(ckv, kpe, owner, position, ckv_cache, kpe_cache, *table)
        return ckv_cache.clone(), kpe_cache * 2

    return [(append, (*new, *places, *caches, *table))]


CALLS: dict[str, Callable[[Data], list[Call]]] = {
    "BatchMLAPagedAttentionWrapper": _latent,
    "append_paged_mla_kv_cache": _append,
}
