"""Public functions compute the same under ``torch.autocast``, which rounds products and refuses to join other types."""

from __future__ import annotations

import math

import pytest
import torch
from compare import assert_bitwise
from problems import make_batch
from registry import ENTRIES, PAGE, Data, several

import cutlass_kernels as ck
from cutlass_kernels import flash_attn

pytestmark = pytest.mark.runs_nothing("many functions compute no attention")
DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])
def test_autocast_changes_nothing(target, dtype):
    """Values in the logits, and rotary tables in float32. Of every call of the registry: test_public_calls.py."""
    x = Data(target)
    q, k, v = (y[None] for y in x.qkv)
    qv, angles = x.randn(1, 5, 4, 64).half(), x.randn(20, 16)
    turns = dict(cache_seqlens=x.here(3), rotary_cos=angles.cos(), rotary_sin=angles.sin(), causal=True)

    def results() -> list[torch.Tensor]:
        caches = torch.zeros_like(k), torch.zeros_like(v)
        rotated = flash_attn.flash_attn_with_kvcache(q, *caches, k[:, :5], v[:, :5], **turns)
        return [flash_attn.flash_attn_func(q, k, v, qv=qv), rotated, *caches]

    want = results()
    with torch.autocast(target.device.split(":")[0], dtype):
        for a, b in zip(results(), want, strict=True):
            assert_bitwise(a, b)


@pytest.mark.parametrize("name", ["merge_state", "merge_states", "attention", "apply_rope_with_cos_sin_cache"])
def test_compiled_calls(target, name):
    call = ENTRIES[name].calls(Data(target))[0]
    torch._dynamo.reset()
    compiled, want = torch.compile(call.run, fullgraph=True, backend="aot_eager"), several(call.run(*call.copies()))
    for dtype in DTYPES:
        with torch.autocast(target.device.split(":")[0], dtype):
            for a, b in zip(several(compiled(*call.copies())), want, strict=True):
                torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_large_queries_are_not_rounded(target):
    """What autocast's bfloat16 products lose of queries 8 times as large as usual."""
    batch = make_batch([33], [257], 4, 2, 64, device=target.device)
    with torch.autocast(target.device.split(":")[0], torch.bfloat16):
        got = ck.attention(8 * batch.q[None], batch.k[None], batch.v[None], backend=target.backend)[0]
    k, v = (x.double().repeat_interleave(2, 1) for x in (batch.k, batch.v))
    logits = torch.einsum("nhd,mhd->hnm", 8 * batch.q.double(), k) / math.sqrt(64)
    want = torch.einsum("hnm,mhd->nhd", logits.softmax(-1), v)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4e-3)


def test_autocast_stays_on_around_a_call(target):
    kind, state = target.device.split(":")[0], Data(target).state
    x = torch.ones(PAGE, PAGE, device=target.device)
    with torch.autocast(kind, torch.bfloat16):
        ck.merge_state(*state, *state)
        assert torch.is_autocast_enabled(kind) and (x @ x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled(kind)
