"""Masks of single, ragged and paged calls: running them, and checking what they give."""

from __future__ import annotations

import oracle
import torch
from compare import assert_close, assert_lse_close
from problems import Batch, Options, expect, make_batch

import cutlass_kernels as ck

KINDS = ["single", "ragged", "paged"]


def flat(masks: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([m.reshape(-1) for m in masks])


def packed_per_request(masks: list[torch.Tensor]) -> torch.Tensor:
    """Little-endian bits, every request on a byte boundary."""
    return torch.cat([oracle.pack_bits(m, "little") for m in masks]).to(masks[0].device)


def run(target, kind: str, batch: Batch, options: Options, needs=(), run_kwargs=None, **extra):
    """The batch through one kind of call; a single call takes the only request."""
    kwargs = options.plan_kwargs() | extra
    run_kwargs = run_kwargs or {}

    def call(backend):
        if kind == "single":
            assert len(batch.qo_lens) == 1
            return ck.single_prefill_with_kv_cache(
                batch.q, batch.k, batch.v, return_lse=True, backend=backend, **kwargs, **run_kwargs
            )
        types = dict(q_data_type=batch.q.dtype, kv_data_type=batch.k.dtype)
        if kind == "ragged":
            wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), "NHD", backend=backend)
            wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **types, **kwargs)
            return wrapper.run(batch.q, batch.k, batch.v, return_lse=True, **run_kwargs)
        paged = batch.paged(8)
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "NHD", backend=backend)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, **types, **kwargs)
        return wrapper.run(batch.q, paged.cache, return_lse=True, **run_kwargs)

    return target.attempt(call, [*needs, "paged"] if kind == "paged" else needs)


def check(target, kind: str, batch: Batch, options: Options, **kwargs) -> None:
    out, lse = run(target, kind, batch, options, **kwargs)
    want = expect(batch, options)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


def batch_for(kind: str, target, qo_lens=(33, 1, 9), kv_lens=(70, 40, 9), **kwargs) -> Batch:
    if kind == "single":
        qo_lens, kv_lens = qo_lens[:1], kv_lens[:1]
    return make_batch(qo_lens, kv_lens, 4, 2, 64, device=target.device, **kwargs)
