"""What happens to the scores before the softmax: soft cap, ALiBi, RoPE, sinks, and their order."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from compare import assert_close, assert_lse_close
from mask_problems import KINDS, batch_for, check, run
from problems import Batch, Options, expect, make_batch, wrapper_of

import cutlass_kernels as ck


@pytest.mark.pairwise
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


@pytest.mark.pairwise
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


@pytest.mark.pairwise
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


@pytest.mark.runs_nothing("plans only")
def test_rope_numbers_of_numpy(target):
    numpy = pytest.importorskip("numpy")
    batch = make_batch([2], [50], 2, 1, 64, device=target.device)
    wrapper, offsets, sizes, _ = wrapper_of("ragged", target, batch)
    numbers = {"rope_scale": numpy.array(0.5), "rope_theta": numpy.float32(1e4)}
    wrapper.plan(batch.qo_indptr(), *offsets, *sizes, pos_encoding_mode="ROPE_LLAMA", **numbers)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_rope_at_a_far_position(target, kind):
    batch = make_batch([2], [5000], 2, 1, 64, device=target.device)
    check(target, kind, batch, Options(causal=True, pos_encoding_mode="ROPE_LLAMA"), needs=["rope"])


@pytest.mark.parametrize("kind", KINDS)
def test_rope_of_many_rows(target, kind):
    # More than a tile, or a block of the reference, has.
    batch = batch_for(kind, target, (150, 3, 131), (170, 9, 131))
    check(target, kind, batch, Options(causal=True, pos_encoding_mode="ROPE_LLAMA"), needs=["rope"])


@pytest.mark.parametrize("kind", KINDS)
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
    for given in (sinks, [sinks]):
        check(target, kind, batch, options, run_kwargs={"sinks": given})


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


def scales_of(form: str, device: str) -> dict[str, torch.Tensor | float]:
    """Factors of q (4 heads), k and v (2 heads) in one of the forms that callers give them in."""
    one = {name: torch.tensor([x], device=device) for name, x in (("q", 0.7), ("k", 1.3), ("v", 0.4))}
    heads = {
        "q": torch.linspace(0.5, 1.5, 4, device=device),
        "k": torch.linspace(0.8, 1.2, 2, device=device),
        "v": torch.linspace(0.6, 1.4, 2, device=device),
    }
    mixed = {"q": one["q"], "k": heads["k"], "v": 0.3}
    return {"one": one, "heads": heads, "mixed": mixed, "value": {"v": one["v"]}}[form]


def scaled(batch: Batch, scales: dict[str, torch.Tensor | float]) -> Batch:
    """The batch, in float32, that the scales make of it."""
    given = (torch.as_tensor(scales.get(name, 1.0), device=batch.device).reshape(-1) for name in "qkv")
    heads = (batch.num_qo_heads, batch.num_kv_heads, batch.num_kv_heads)
    return batch.dequantized(*(x.expand(count) for x, count in zip(given, heads)))


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["one", "heads", "mixed", "value"])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_scales_in_tensors(target, kind, form, cap):
    batch = batch_for(kind, target, (133, 1, 9), (171, 43, 9))
    scales = scales_of(form, target.device)
    names = "scale_{}" if kind == "single" else "{}_scale"
    given = {names.format(name): x for name, x in scales.items()}
    out, lse = run(target, kind, batch, Options(causal=True, logits_soft_cap=cap), run_kwargs=given)
    want = expect(scaled(batch, scales), Options(causal=True, logits_soft_cap=cap))
    assert_close(out, want.out, atol=2e-3)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_heads_that_are_0_or_negative(target, kind):
    # The logits of a factor of 0 are all 0, also beside hidden keys.
    batch = batch_for(kind, target, (133, 1, 9), (171, 43, 9))
    factors = {"q": torch.tensor([0.5, 0.0, -1.5, 1.0]), "k": torch.tensor([1.0, -0.8])}
    scales = {name: x.to(target.device) for name, x in factors.items()}
    names = "scale_{}" if kind == "single" else "{}_scale"
    given = {names.format(name): x for name, x in scales.items()}
    out, lse = run(target, kind, batch, Options(causal=True), run_kwargs=given)
    want = expect(scaled(batch, scales), Options(causal=True))
    assert_close(out, want.out, atol=2e-3)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_runs_of_one_plan_with_and_without_scales(target, kind):
    batch = batch_for(kind, target, (133, 1, 9), (171, 43, 9))
    wrapper, table, rest, data = wrapper_of(kind, target, batch)
    plain = Options(causal=True)
    for mode in ("NONE", "ALIBI", "NONE"):
        wrapper.plan(batch.qo_indptr(), *table, *rest, causal=True, pos_encoding_mode=mode)
        for form in (None, "one", None, "heads", "one", None):
            scales = {} if form is None else scales_of(form, target.device)
            given = {f"{name}_scale": x for name, x in scales.items()}
            out, lse = wrapper.run(batch.q, *data, return_lse=True, **given)
            want = expect(scaled(batch, scales), dataclasses.replace(plain, pos_encoding_mode=mode))
            assert_close(out, want.out, atol=2e-3)
            assert_lse_close(lse, want.lse)
    for mode in ("ALIBI", "NONE", "ALIBI"):  # other options than those of the plan
        want = expect(batch, dataclasses.replace(plain, pos_encoding_mode=mode))
        assert_close(wrapper.forward(batch.q, *data, causal=True, pos_encoding_mode=mode), want.out, want.baseline)


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
