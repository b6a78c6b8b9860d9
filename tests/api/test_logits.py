"""What happens to the scores before the softmax: soft cap, ALiBi, RoPE, sinks, and their order."""

from __future__ import annotations

import math

import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Batch, Options, expect, make_batch
from wrapper_problems import KINDS, Wrapped, batch_for, check, run

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
    check(target, kind, batch_for(kind, target), Options(), logits_soft_cap=cap)


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
    batch = batch_for(kind, target, heads=(*heads, 64))
    check(target, kind, batch, Options(causal=causal, pos_encoding_mode="ALIBI"))


@pytest.mark.parametrize("kind", KINDS)
def test_alibi_then_soft_cap(target, kind):
    options = Options(causal=True, pos_encoding_mode="ALIBI", logits_soft_cap=3.0, sm_scale=0.4)
    check(target, kind, batch_for(kind, target), options)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "scale,theta", [(None, None), (1.0, 1e4), (8.0, 5e5), (0.5, 1e4)], ids=["default", "named", "llama3", "half"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_rope(target, kind, scale, theta, causal):
    options = Options(causal=causal, pos_encoding_mode="ROPE_LLAMA", rope_scale=scale, rope_theta=theta)
    check(target, kind, batch_for(kind, target), options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_rope_with_other_options(target, kind, dtype):
    batch = batch_for(kind, target, (20, 9, 1), (20, 30, 50), dtype=dtype)
    options = Options(causal=True, window_left=11, logits_soft_cap=4.0, pos_encoding_mode="ROPE_LLAMA")
    check(target, kind, batch, options)


@pytest.mark.parametrize("kind", KINDS)
def test_rope_with_more_rows_than_keys(target, kind):
    # Rows before the first key have negative positions.
    batch = batch_for(kind, target, (30, 5, 2), (12, 5, 1))
    check(target, kind, batch, Options(pos_encoding_mode="ROPE_LLAMA"))


@pytest.mark.runs_nothing("plans only")
def test_rope_numbers_of_numpy(target):
    numpy = pytest.importorskip("numpy")
    numbers = {"rope_scale": numpy.array(0.5), "rope_theta": numpy.float32(1e4)}
    Wrapped(target, "ragged").plan(pos_encoding_mode="ROPE_LLAMA", **numbers)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_rope_at_a_far_position(target, kind):
    batch = make_batch([2], [5000], 2, 1, 64, device=target.device)
    check(target, kind, batch, Options(causal=True, pos_encoding_mode="ROPE_LLAMA"))


@pytest.mark.parametrize("kind", KINDS)
def test_rope_of_many_rows(target, kind):
    # More than a tile, or a block of the reference, has.
    batch = batch_for(kind, target, (150, 3, 131), (170, 9, 131))
    check(target, kind, batch, Options(causal=True, pos_encoding_mode="ROPE_LLAMA"))


def numbers_of(target, *values: float) -> torch.Tensor:
    return torch.tensor(values or (-3.0, 0.0, 2.5, 8.0), device=target.device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-1, 9])
def test_sinks(target, kind, causal, window_left):
    options = Options(causal=causal, window_left=window_left, sinks=numbers_of(target))
    check(target, kind, batch_for(kind, target), options)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_sinks_are_not_scaled_or_capped(target, kind):
    batch = batch_for(kind, target)
    sinks = numbers_of(target, -1.0, 0.5, 2.0, 4.0)
    options = Options(causal=True, sm_scale=0.02, logits_soft_cap=0.7, sinks=sinks)
    for given in (sinks, [sinks]):
        check(target, kind, batch, options, run_kwargs={"sinks": given})


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_rows_without_keys_keep_the_sink_in_the_lse(target, kind):
    batch, options = batch_for(kind, target, (20, 4, 3), (8, 0, 3)), Options(causal=True, sinks=numbers_of(target))
    w = Wrapped(target, kind, batch, 8).plan(options)
    out, lse = w.run(return_lse=True)
    assert torch.count_nonzero(out[:12]) == 0
    torch.testing.assert_close(lse[:12], (options.sinks / math.log(2)).expand(12, 4), rtol=1e-5, atol=1e-5)
    w.check((out, lse))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_a_sink_of_minus_infinity_changes_nothing(target, kind):
    none = numbers_of(target, *[-torch.inf] * 4)
    check(target, kind, batch_for(kind, target), Options(causal=True), run_kwargs={"sinks": none})


def test_merging_a_sink_state_counts_the_sink_once(target):
    batch = make_batch([1, 7], [30, 50], 4, 2, 64, device=target.device)
    lens, states = [m // 2 for m in batch.kv_lens], []
    for half, sinks in ((0, numbers_of(target)), (1, None)):
        k, v = (torch.cat([x[at].chunk(2)[half] for x in batch.requests()]) for at in (1, 2))
        part = Batch(batch.qo_lens, lens, batch.q, k, v)
        states += run(target, "ragged", part, Options(sinks=sinks))
    out, lse = ck.merge_state(*states)
    want = expect(batch, Options(sinks=numbers_of(target)))
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


def check_scales(target, kind: str, scales: dict[str, torch.Tensor | float], options: Options) -> None:
    batch = batch_for(kind, target, (133, 1, 9), (171, 43, 9))
    names = "scale_{}" if kind == "single" else "{}_scale"
    given = {names.format(name): x for name, x in scales.items()}
    out, lse = run(target, kind, batch, options, run_kwargs=given)
    want = expect(scaled(batch, scales), options)
    assert_close(out, want.out, atol=2e-3)
    assert_lse_close(lse, want.lse)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["one", "heads", "mixed", "value"])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_scales_in_tensors(target, kind, form, cap):
    check_scales(target, kind, scales_of(form, target.device), Options(causal=True, logits_soft_cap=cap))


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_heads_that_are_0_or_negative(target, kind):
    # The logits of a factor of 0 are all 0, also beside hidden keys.
    factors = {"q": numbers_of(target, 0.5, 0.0, -1.5, 1.0), "k": numbers_of(target, 1.0, -0.8)}
    check_scales(target, kind, factors, Options(causal=True))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_runs_of_one_plan_with_and_without_scales(target, kind):
    batch = batch_for(kind, target, (133, 1, 9), (171, 43, 9))
    w = Wrapped(target, kind, batch, 8)
    for mode in ("NONE", "ALIBI", "NONE"):
        w.plan(Options(causal=True, pos_encoding_mode=mode))
        for form in (None, "one", None, "heads", "one", None):
            scales = {} if form is None else scales_of(form, target.device)
            given = {f"{name}_scale": x for name, x in scales.items()}
            out, lse = w.run(return_lse=True, **given)
            want = expect(scaled(batch, scales), w.options)
            assert_close(out, want.out, atol=2e-3)
            assert_lse_close(lse, want.lse)
    for mode in ("ALIBI", "NONE", "ALIBI"):  # other options than those of the plan
        out = w.wrapper.forward(batch.q, *w.kv, causal=True, pos_encoding_mode=mode)
        w.check(out, Options(causal=True, pos_encoding_mode=mode))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_all_options_at_once(target, kind):
    batch, sinks = batch_for(kind, target), numbers_of(target, -1.0, 0.5, 2.0, 4.0)
    masked = dict(window_left=15, custom_masks=batch.random_masks(), pos_encoding_mode="ALIBI")
    scales = dict(sm_scale=0.3, v_scale=0.5, k_scale=0.9)
    check(target, kind, batch, Options(**masked, logits_soft_cap=5.0, sinks=sinks, **scales))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_neither_keys_nor_sink(target, kind):
    sinks = numbers_of(target, -torch.inf, 0.0, -torch.inf, 1.0)
    batch = batch_for(kind, target, (20, 4, 3), (8, 0, 3))
    w = Wrapped(target, kind, batch, 8).plan(Options(causal=True, sinks=sinks))
    out, lse = w.run(return_lse=True)
    w.check((out, lse))
    assert bool((lse[:12, 0] == -torch.inf).all())
