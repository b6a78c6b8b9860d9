"""The same bits in every run, of prompts whose last KV block is not full and holds what other tiles left there."""

from __future__ import annotations

import random

import pytest
import torch
from captures import disturbed
from compare import assert_bitwise
from fused_problems import Mode, call, pack
from problems import make_batch

pytestmark = pytest.mark.gpu

ROWS, KEYS = [1, 592, 176, 256, 511, 81, 831], [1, 592, 176, 2049, 3369, 3208, 831]
MODES = {
    "window": (Mode("sliding_window", 33, cap=10.0), (16, 2)),
    "chunks": (Mode("chunked", chunked_attention_size=32, cap=10.0), (16, 2)),
    "causal": (Mode(cap=10.0), (8, 8)),
    "no cap": (Mode("sliding_window", 33), (16, 2)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mode", MODES)
def test_soft_caps(target, mode, head_dim, dtype):
    if target.is_reference:
        pytest.skip("the reference has no tiles")
    options, heads = MODES[mode]
    batch = make_batch(ROWS, KEYS, *heads, head_dim, dtype=dtype, device=target.device)
    qkv, tables = pack(batch, "Q_PAGED_KV_NHD")
    want = call(batch, "Q_PAGED_KV_NHD", options, qkv=qkv, tables=tables)
    stream, chance = torch.cuda.Stream(target.device), random.Random(0)
    for _ in range(12):
        again = lambda: call(batch, "Q_PAGED_KV_NHD", options, qkv=qkv, tables=tables)  # noqa: E731
        assert_bitwise(disturbed(again, stream, chance), want)
    torch.cuda.synchronize()
