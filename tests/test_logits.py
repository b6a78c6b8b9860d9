"""What happens to the scores before the softmax: soft cap, ALiBi, RoPE, sinks, and their order."""

from __future__ import annotations

import math

import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Options, expect, make_batch
from test_masks import KINDS, batch_for, check, run

import cutlass_kernels as ck


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cap", [0.5, 1.0, 30.0, 50.0])
def test_soft_cap(target, kind, cap, causal):
    check(target, kind, batch_for(kind, target), Options(causal=causal, logits_soft_cap=cap))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", [None, 0.0, 0, -1.0])
def test_soft_cap_off(target, kind, cap):
    batch = batch_for(kind, target)
    out, lse = run(target, kind, batch, Options(), logits_soft_cap=cap)
    want = expect(batch)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("kind", KINDS)
def test_soft_cap_comes_after_the_scale_and_before_the_mask(target, kind):
    # Large logits: a cap applied to unscaled scores, or to masked ones, gives something else.
    batch = batch_for(kind, target)
    check(target, kind, batch, Options(causal=True, window_left=7, logits_soft_cap=2.0, sm_scale=1.5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 3), (12, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(target, kind, heads, causal):
    batch = batch_for(kind, target)
    batch = make_batch(batch.qo_lens, batch.kv_lens, *heads, 64, device=target.device)
    check(target, kind, batch, Options(causal=causal, pos_encoding_mode="ALIBI"), needs=["alibi"])


@pytest.mark.parametrize("kind", KINDS)
def test_alibi_then_soft_cap(target, kind):
    options = Options(causal=True, pos_encoding_mode="ALIBI", logits_soft_cap=3.0, sm_scale=0.4)
    check(target, kind, batch_for(kind, target), options, needs=["alibi"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "scale,theta", [(None, None), (1.0, 1e4), (8.0, 5e5), (0.5, 1e4)], ids=["default", "named", "llama3", "half"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_rope(target, kind, scale, theta, causal):
    options = Options(causal=causal, pos_encoding_mode="ROPE_LLAMA", rope_scale=scale, rope_theta=theta)
    check(target, kind, batch_for(kind, target), options, needs=["rope"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_rope_with_other_options(target, kind, dtype):
    batch = batch_for(kind, target, (20, 9, 1), (20, 30, 50), dtype=dtype)
    options = Options(causal=True, window_left=11, logits_soft_cap=4.0, pos_encoding_mode="ROPE_LLAMA")
    check(target, kind, batch, options, needs=["rope"])


@pytest.mark.parametrize("kind", KINDS)
def test_rope_with_more_rows_than_keys(target, kind):
    # Rows before the first key have negative positions.
    batch = batch_for(kind, target, (30, 5, 2), (12, 5, 1))
    check(target, kind, batch, Options(pos_encoding_mode="ROPE_LLAMA"), needs=["rope"])


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_rope_at_a_far_position(target, kind):
    batch = make_batch([2], [5000], 2, 1, 64, device=target.device)
    check(target, kind, batch, Options(causal=True, pos_encoding_mode="ROPE_LLAMA"), needs=["rope"])


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-1, 9])
def test_sinks(target, kind, causal, window_left):
    batch = batch_for(kind, target)
    sinks = torch.tensor([-3.0, 0.0, 2.5, 8.0], device=target.device)
    options = Options(causal=causal, window_left=window_left, sinks=sinks)
    check(target, kind, batch, options, run_kwargs={"sinks": sinks})


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_sinks_are_not_scaled_or_capped(target, kind):
    batch = batch_for(kind, target)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0], device=target.device)
    options = Options(causal=True, sm_scale=0.02, logits_soft_cap=0.7, sinks=sinks)
    check(target, kind, batch, options, run_kwargs={"sinks": sinks})


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_rows_without_keys_keep_the_sink_in_the_lse(target, kind):
    batch = batch_for(kind, target, (20, 4, 3), (8, 0, 3))
    sinks = torch.tensor([-3.0, 0.0, 2.5, 8.0], device=target.device)
    out, lse = run(target, kind, batch, Options(causal=True), run_kwargs={"sinks": sinks})
    assert torch.count_nonzero(out[:12]) == 0
    torch.testing.assert_close(lse[:12], (sinks / math.log(2)).expand(12, 4), rtol=1e-5, atol=1e-5)
    want = expect(batch, Options(causal=True, sinks=sinks))
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_a_sink_of_minus_infinity_changes_nothing(target, kind):
    batch = batch_for(kind, target)
    sinks = torch.full((4,), -torch.inf, device=target.device)
    out, lse = run(target, kind, batch, Options(causal=True), run_kwargs={"sinks": sinks})
    want = expect(batch, Options(causal=True))
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


def test_merging_a_sink_state_counts_the_sink_once(target):
    batch = make_batch([1, 7], [30, 50], 4, 2, 64, device=target.device)
    sinks = torch.tensor([-3.0, 0.0, 2.5, 8.0], device=target.device)
    parts = []
    for first in (True, False):
        lens = [m // 2 for m in batch.kv_lens]
        k = torch.cat([x[: x.shape[0] // 2] if first else x[x.shape[0] // 2 :] for _, x, _ in batch.requests()])
        v = torch.cat([x[: x.shape[0] // 2] if first else x[x.shape[0] // 2 :] for _, _, x in batch.requests()])
        part = type(batch)(batch.qo_lens, lens, batch.q, k, v)
        given = {"sinks": sinks} if first else {}
        parts.append(run(target, "ragged", part, Options(), run_kwargs=given))
    out, lse = ck.merge_state(parts[0][0], parts[0][1], parts[1][0], parts[1][1])
    want = expect(batch, Options(sinks=sinks))
    assert_close(out, want.out, atol=2e-3)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_all_options_at_once(target, kind):
    batch = batch_for(kind, target)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0], device=target.device)
    masks = batch.random_masks()
    options = Options(
        window_left=15,
        logits_soft_cap=5.0,
        sm_scale=0.3,
        pos_encoding_mode="ALIBI",
        custom_masks=masks,
        sinks=sinks,
        v_scale=0.5,
        k_scale=0.9,
    )
    check(
        target,
        kind,
        batch,
        options,
        needs=["alibi", "custom_mask"],
        custom_mask=torch.cat([m.reshape(-1) for m in masks]),
        run_kwargs={"sinks": sinks, "v_scale": 0.5, "k_scale": 0.9},
    )


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_neither_keys_nor_sink(target, kind):
    batch = batch_for(kind, target, (20, 4, 3), (8, 0, 3))
    sinks = torch.tensor([-torch.inf, 0.0, -torch.inf, 1.0], device=target.device)
    out, lse = run(target, kind, batch, Options(causal=True), run_kwargs={"sinks": sinks})
    want = expect(batch, Options(causal=True, sinks=sinks))
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)
    assert bool((lse[:12, 0] == -torch.inf).all())
