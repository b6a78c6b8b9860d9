"""Public functions compute the same under ``torch.autocast``, which rounds products and refuses to join other types."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compare import assert_bitwise
from compiled_calls import CALLS
from compiled_data import PAGE, Call, Data
from problems import make_batch

import cutlass_kernels as ck
from cutlass_kernels import flash_attn

pytestmark = pytest.mark.runs_nothing("many functions compute no attention")
DTYPES = [torch.float16, torch.bfloat16]


def _ropes(x: Data) -> list[Call]:
    """Columns of the position in tensors of their own."""
    q, k, q_rope, k_rope = (
        x.randn(1, n, h, d).half() for n, h, d in ((5, 4, 512), (20, 1, 512), (5, 4, 64), (20, 1, 64))
    )
    return [(lambda q, k, *ropes: ck.attention(q, k, k, q_rope=ropes[0], k_rope=ropes[1]), (q, k, q_rope, k_rope))]


def _with_values(x: Data) -> list[Call]:
    dense = tuple(y[None] for y in x.qkv)
    return [(lambda *t: flash_attn.flash_attn_func(*t[:3], qv=t[3]), (*dense, x.randn(1, 5, 4, 64).half()))]


def _rotary(x: Data) -> list[Call]:
    q, k, v = (y[None] for y in x.qkv)
    angles = x.randn(20, 16)

    def step(q, k, v, k_cache, v_cache, lens, cos, sin):
        options = dict(cache_seqlens=lens, rotary_cos=cos, rotary_sin=sin, causal=True)
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)

    caches = (torch.zeros_like(k), torch.zeros_like(v))
    return [(step, (q, k[:, :5], v[:, :5], *caches, x.here(3), angles.cos(), angles.sin()))]


def _half_states(x: Data) -> list[Call]:
    state = (x.state[0].half(), x.state[1])
    in_place = CALLS["merge_state_in_place"](x)[0][0]
    return [(ck.merge_state, (*state, *state)), (in_place, (*state, *state))]


def _combine(x: Data) -> list[Call]:
    return [(flash_attn.flash_attn_combine, (x.randn(3, 2, 5, 4, 64), x.randn(3, 2, 5, 4)))]


ALL = CALLS | {"q_rope": _ropes, "qv": _with_values, "rotary tables": _rotary, "flash_attn_combine": _combine}
ALL |= {"states in half": _half_states}


def several(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def copies(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.clone(memory_format=torch.preserve_format) for x in tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_autocast_changes_nothing(target, name, dtype):
    for function, tensors in ALL[name](Data(target)):
        ours, theirs = copies(tensors), copies(tensors)
        want = several(function(*theirs))
        with torch.autocast(target.device.split(":")[0], dtype):
            got = several(function(*ours))
        assert len(got) == len(want)
        for a, b in zip((*got, *ours), (*want, *theirs)):
            assert_bitwise(a, b)


@pytest.mark.parametrize("name", ["states in half", "merge_states", "attention", "apply_rope_with_cos_sin_cache"])
def test_compiled_calls(target, name):
    function, tensors = ALL[name](Data(target))[0]
    torch._dynamo.reset()
    compiled, want = torch.compile(function, fullgraph=True, backend="aot_eager"), several(function(*copies(tensors)))
    for dtype in DTYPES:
        with torch.autocast(target.device.split(":")[0], dtype):
            for a, b in zip(several(compiled(*copies(tensors))), want):
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
