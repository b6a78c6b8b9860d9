"""The same bits in every run, of each variant of the kernels: types, head dimensions, masks and changes of logits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from captures import disturbed
from compare import assert_bitwise
from problems import make_batch

import cutlass_kernels as ck
from cutlass_kernels import BackendError

E4M3 = torch.float8_e4m3fn
TYPES = {
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "e4m3 cache": (torch.bfloat16, E4M3),
    "e4m3": (E4M3, E4M3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "cap": dict(causal=True, logits_soft_cap=10.0),
    "window and cap": dict(causal=True, window_left=33, logits_soft_cap=10.0),
    "alibi": dict(pos_encoding_mode="ALIBI"),
    "mask": {},
}
# Prompts, appends and decodes; most last KV blocks are not full.
ROWS, KEYS = [1, 592, 176, 81, 4, 256], [1, 592, 1076, 3208, 5000, 831]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("types", TYPES)
def test_of_every_variant(kernel_backend, types, head_dim, options):
    q_dtype, kv_dtype = TYPES[types]
    batch = make_batch(ROWS, KEYS, 8, 2, head_dim, device="cuda:0")
    pages = batch.paged(16)
    given = dict(OPTIONS[options])
    if options == "mask":
        given["custom_mask"] = torch.cat([x.flatten() for x in batch.random_masks()])
    memory = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(memory, backend=kernel_backend)
    o_dtype = torch.bfloat16 if q_dtype == E4M3 else q_dtype
    dtypes = dict(q_data_type=q_dtype, kv_data_type=kv_dtype, o_data_type=o_dtype)
    try:
        wrapper.plan(batch.qo_indptr(), *pages.table(), *batch.heads, 16, **dtypes, **given)
    except (BackendError, AssertionError) as error:
        if kv_dtype.itemsize > 1:  # both serve all 16-bit types
            raise
        pytest.skip(f"no such kernel: {str(error)[:80]}")
    q, cache = batch.q.to(q_dtype), pages.cache.to(kv_dtype)
    want = wrapper.run(q, cache, return_lse=True)
    stream, chance = torch.cuda.Stream("cuda:0"), random.Random(0)
    for _ in range(8):
        for a, b in zip(disturbed(lambda: wrapper.run(q, cache, return_lse=True), stream, chance), want):
            assert_bitwise(a, b)
    torch.cuda.synchronize()
