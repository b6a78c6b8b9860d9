"""Batches of decode, wrappers planned for them, and what they must give."""

from __future__ import annotations

from compare import assert_close, assert_lse_close
from problems import Batch, Options, Paged, expect, make_batch

import cutlass_kernels as ck


def decode_batch(target, kv_lens, q_len=1, heads=(4, 2, 64), **kwargs) -> Batch:
    return make_batch([q_len] * len(kv_lens), kv_lens, *heads, device=target.device, **kwargs)


def q_len_of(batch: Batch) -> int:
    return batch.qo_lens[0] if batch.qo_lens else 1


def plan(wrapper, batch: Batch, paged: Paged, options: Options | None = None, where: str = "cpu", **extra) -> None:
    given = dict(q_data_type=batch.q.dtype, kv_data_type=batch.k.dtype, q_len_per_req=q_len_of(batch))
    given |= (options or Options()).plan_kwargs() | extra
    wrapper.plan(*paged.table(where), *batch.heads, paged.page_size, **given)


def planned(target, batch: Batch, paged: Paged, options: Options | None = None, backend: str | None = None, **extra):
    make = ck.BatchDecodeWithPagedKVCacheWrapper
    wrapper = make(target.workspace(), paged.kv_layout, backend=backend or target.backend)
    plan(wrapper, batch, paged, options, **extra)
    return wrapper


def wanted(batch: Batch, options: Options | None = None):
    """What the oracle gives: several rows see no later ones, and a single row counts as row 0."""
    several = q_len_of(batch) > 1
    return expect(batch, Options(**{**vars(options or Options()), "causal": several}), decode=not several)


def check(target, batch: Batch, paged: Paged, options: Options | None = None, run_kwargs=None, **extra) -> None:
    wrapper = planned(target, batch, paged, options, **extra)
    sinks = None if options is None else options.sinks
    out, lse = wrapper.run(batch.q, paged.cache, return_lse=True, sinks=sinks, **(run_kwargs or {}))
    want = wanted(batch, options)
    assert_close(out, want.out, want.baseline, dtype=batch.q.dtype)
    assert_lse_close(lse, want.lse)
