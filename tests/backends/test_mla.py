"""Latent attention (MLA): one key head of 576 columns, the first 512 of which are the values."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from compare import assert_close, assert_lse_close
from guards import poison_
from plan_free_problems import Mask, Options, expect, keys, queries
from problems import Batch, make_batch

import cutlass_kernels as ck

MASKS = [Mask(causal=True), Mask(), Mask(causal=True, window=(100, -1)), Mask(causal=True, chunk_size=50)]
PAGED = ["table", "indices"]


def latent_batch(qo_lens: list[int], kv_lens: list[int], heads: int, dtype: Any = torch.bfloat16) -> Batch:
    batch = make_batch(qo_lens, kv_lens, heads, 1, 576, dtype=dtype)
    return dataclasses.replace(batch, v=batch.k[..., :512])


def check(batch: Batch, form: str, mask: Mask, page_size: int = 64, **more: Any) -> None:
    """A call gives what it must, into an output that was NaN."""
    q, whose_rows = queries(batch, more.pop("dense", False))
    k, _, whose_keys = keys(batch, form, more.pop("layout", "NHD"), page_size, False)
    out = poison_(torch.empty(*q.shape[:-1], 512, dtype=q.dtype, device=q.device))
    given = {**whose_rows, **whose_keys, **mask.arguments(batch.device)}
    result, lse = ck.attention(q, k, k[..., :512], out=out, return_lse=True, **given, **more)
    assert result is out
    want, want_lse, base = expect(batch, mask, Options())
    assert_close(out.flatten(0, -3), want, base)
    assert_lse_close(lse.flatten(0, -2), want_lse)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("form", PAGED)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [16, 128])
def test_masks(form, layout, mask, heads):
    check(latent_batch([4, 1, 9], [150, 0, 333], heads), form, mask, layout=layout)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("heads", [1, 5, 16, 24, 32, 64, 96, 128])
@pytest.mark.parametrize("page_size", [8, 16, 64, 128])
def test_decode_steps(page_size, heads, rows, dtype):
    lens = [700, rows, 1, 0, 64, 129]
    check(latent_batch([rows] * len(lens), lens, heads, dtype), "table", Mask(causal=True), page_size, dense=True)


@pytest.mark.parametrize("seed", range(60))
def test_random(seed):
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 7, 16, 48, 64, 128])
    count = rng.choice([1, 1, 2, 5, 33])
    qo_lens = [rng.choice([0, 1, 1, 2, rng.randint(0, 40)]) for _ in range(count)]
    qo_lens[-1] = max(qo_lens[-1], 1)
    kv_lens = [rng.choice([0, 1, rng.randint(0, 300), 300]) for _ in range(count)]
    kv_lens[0] = max(kv_lens[0], 3)
    batch = latent_batch(qo_lens, kv_lens, heads, rng.choice([torch.float16, torch.bfloat16]))
    more: dict[str, Any] = dict(num_splits=rng.choice([0, 0, 1, 3, 40]), batch_invariant=rng.random() < 0.2)
    check(batch, rng.choice(PAGED), rng.choice(MASKS), rng.choice([8, 16, 24, 32, 64, 256]), **more)
