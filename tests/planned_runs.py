"""A batch planned and run once, in pages or without."""

from __future__ import annotations

from typing import Any

import torch
from problems import Batch, Options
from targets import Target

import cutlass_kernels as ck


def paged(target: Target, batch: Batch, options: Options, page_size: int = 16, **plan: Any) -> tuple[torch.Tensor, ...]:
    """Output and LSE of the paged wrapper."""
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "NHD", backend=target.backend)
    form = "stacked" if batch.k.shape == batch.v.shape else "tuple"
    pages = batch.paged(page_size, form=form)
    if "fixed_split_size" in plan:
        plan["fixed_split_size"] = -(-plan["fixed_split_size"] // page_size)  # in pages
    given = {"head_dim_vo": batch.v.shape[2], "q_data_type": batch.q.dtype, **options.plan_kwargs(), **plan}
    wrapper.plan(batch.qo_indptr(), *pages.table(), *batch.heads, page_size, **given)
    return wrapper.run(batch.q, pages.cache, return_lse=True, sinks=options.sinks)


def ragged(target: Target, batch: Batch, options: Options, **plan: Any) -> tuple[torch.Tensor, ...]:
    """Output and LSE of the ragged wrapper."""
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), "NHD", backend=target.backend)
    given = {"head_dim_vo": batch.v.shape[2], "q_data_type": batch.q.dtype, **options.plan_kwargs(), **plan}
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **given)
    return wrapper.run(batch.q, batch.k, batch.v, return_lse=True, sinks=options.sinks)
