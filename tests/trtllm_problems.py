"""Calls of FlashInfer's plan-free functions over paged caches, and what they must give."""

from __future__ import annotations

from typing import Any

import torch
from compare import assert_close
from plan_free_problems import Mask, Options, expect, page_table
from problems import Batch, make_batch

import cutlass_kernels as ck

E4M3 = torch.float8_e4m3fn
DECODE, CONTEXT = ck.trtllm_batch_decode_with_kv_cache, ck.trtllm_batch_context_with_kv_cache
XQA = ck.xqa_batch_decode_with_kv_cache
EMPTY = torch.empty(0, dtype=torch.uint8)


def cache_and_table(batch: Batch, layout: str = "HND", form: str = "stacked", page_size: int = 16) -> tuple[Any, ...]:
    """``kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len``."""
    paged = batch.paged(page_size, layout, form=form)
    table = page_table(paged, len(batch.kv_lens)).to(batch.device)
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=batch.device)
    return paged.cache, EMPTY.to(batch.device), table, lens, max(batch.kv_lens)


def scale_of(batch: Batch) -> float:
    return batch.q.size(-1) ** -0.5


def compare(batch: Batch, out: torch.Tensor, mask: Mask | None = None, options: Options | None = None) -> torch.Tensor:
    """Checks an output, and returns the LSE that belongs to it."""
    want, lse, base = expect(batch, mask or Mask(causal=True), options or Options())
    assert out.shape == batch.q.shape
    assert_close(out, want, base.to(out.dtype))
    return lse


def decode_batch(target, rows: int = 1, **sizes: Any) -> Batch:
    return make_batch([rows] * 4, [90, 7, 200, 16], 8, 2, 64, device=target.device, **sizes)
