"""skip_softmax_threshold_scale_factor: tiles of keys of negligible weight may be skipped, and fa3 does skip them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import oracle
import pytest
import torch
from compare import assert_bitwise, assert_close
from environment import choose_backend
from fused_problems import Mode, call
from planned_runs import attend
from problems import Batch, Options, expect, make_batch

BLOCK = 128  # keys of fa3's largest block
KINDS = ["ragged", "paged", "fmha_v2"]
MASKS = {"full": Options(), "causal": Options(causal=True), "window": Options(causal=True, window_left=150)}


def leveled(qo_lens: list[int], kv_lens: list[int], levels: list[float], *, device: str, **sizes: Any) -> Batch:
    """Logits of about ``levels[j]`` for the keys of block j of a request, the last level from there on."""
    heads = sizes.pop("heads", (16, 4))
    batch = make_batch(qo_lens, kv_lens, *heads, dtype=torch.bfloat16, device=device, **sizes)
    unit = batch.q.size(-1) ** -0.5  # of levels: a sum of head_dim products, times the softmax scale
    batch.q.copy_(1.0 + 0.1 * batch.q.float())
    for k in batch.k.split(batch.kv_lens):
        for j, keys in enumerate(k.split(BLOCK)):
            keys.copy_((levels[min(j, len(levels) - 1)] + keys.float()) * unit)
    return batch


def run(kind: str, batch: Batch, factor: float | None, options: Options, backend: str) -> tuple[Any, Any]:
    """``(out, lse)``; no LSE of the fused prefill, which also chooses its backend itself."""
    skip: dict[str, Any] = {} if factor is None else {"skip_softmax_threshold_scale_factor": factor}
    if kind != "fmha_v2":
        return attend(backend, batch, options, 16 if kind == "paged" else None, run=skip)
    mode = "sliding_window" if options.window_left >= 0 else "causal" if options.causal else "padding"
    mode, most = Mode(mode, options.window_left, sinks=options.sinks), max(*batch.qo_lens, *batch.kv_lens)
    return call(batch, "SEPARATE_Q_K_V", mode, max_kv_len=most, **skip), None


def negligible(batch: Batch, options: Options, factors: list[float]) -> list[torch.Tensor]:
    """Of each factor, ``[rows, heads]``: the part of each denominator that weights below factor / kv_len make up.

    No other key may be skipped: relative to a later, larger maximum the weights of a skipped tile are smaller still.
    """
    parts: list[list[torch.Tensor]] = [[] for _ in factors]
    for q, k, _ in batch.requests():
        n, m = q.size(0), k.size(0)
        mask = oracle.visible(n, m, causal=options.causal, window_left=options.window_left, device=q.device)
        weights = torch.zeros(q.size(1), n, max(m, 1), device=q.device)
        if m > 0:
            keys = k.float().repeat_interleave(q.size(1) // k.size(1), dim=1)
            s = torch.einsum("ihd,jhd->hij", q.float(), keys) * q.size(-1) ** -0.5
            s = s.masked_fill(~mask, -math.inf)
            weights = torch.exp(s - s.amax(-1, keepdim=True).clamp(min=-1e30))
        for factor, part in zip(factors, parts):
            below = weights < min(factor / max(m, 1), 1.0) * 1.01  # logits of the kernel are rounded
            part.append(((weights * below).sum(-1) / weights.sum(-1).clamp(min=1e-30)).t())
            assert float(part[-1].max()) < factor * 1.01
    return [torch.cat(part) for part in parts]


def exact(batch: Batch, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the oracle, without the baseline that expect() adds."""
    states = []
    for q, k, v in batch.requests():
        bounds = dict(causal=options.causal, window_left=options.window_left)
        mask = oracle.visible(q.size(0), k.size(0), device=q.device, **bounds)
        states.append(oracle.attention(q, k, v, mask=mask, sinks=options.sinks))
    return torch.cat([state.out for state in states]), torch.cat([state.lse for state in states])


def check(kind: str, batch: Batch, factors: list[float], options: Options, backend: str) -> None:
    """The error is at most what follows from skipping every key that may be skipped.

    Without weights e of a denominator D, an output o' is off by the sum of w (v - o') / D over these keys, at most
    2 max|v| e / D, and the LSE too small by -log2(1 - e / D). A sink only makes D larger.
    """
    want, want_lse = exact(batch, options)
    largest = float(batch.v.float().abs().max())
    for factor, part in zip(factors, negligible(batch, options, factors)):
        out, lse = run(kind, batch, factor, options, backend)
        allowed = 2.0 * largest * part[..., None].double()
        assert_close(out, want, allowed=allowed.expand_as(want))
        if lse is None:
            continue
        assert torch.equal(lse == -math.inf, want_lse == -math.inf)
        seen = want_lse > -math.inf
        less = (want_lse - lse.double())[seen]
        most = -torch.log2(1.0 - part.double().clamp(max=1.0 - 1e-9))[seen]
        assert float(less.min()) > -2e-3 and bool((less < most + 2e-3).all())


@pytest.mark.parametrize("kind", KINDS)
def test_zero_is_off(target, kind):
    batch = make_batch([600, 40], [600, 700], 16, 4, 128, dtype=torch.bfloat16, device=target.device)
    want, want_lse = run(kind, batch, None, Options(causal=True), target.backend)
    for zero in (0, 0.0):
        out, lse = run(kind, batch, zero, Options(causal=True), target.backend)
        assert_bitwise(out, want)
        if lse is not None:
            assert_bitwise(lse, want_lse, "lse")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_bounded(target, kind, mask):
    levels = [0.0, -9.0, -14.0, 2.0, -5.0, -16.0, 1.0]  # of some blocks more, of some less than what is negligible
    batch = leveled([500, 170], [650, 800], levels, head_dim=128, device=target.device)
    check(kind, batch, [1e-3, 0.3, 100.0], MASKS[mask], target.backend)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (192, 192), (256, 256)], ids=str)
def test_head_dims(target, dims):
    levels = [0.0, -12.0, 1.0, -12.0, -3.0]
    heads = (32, 4) if dims[0] == 64 else (8, 4)  # enough tiles for fa3 to take the large ones
    sizes = dict(head_dim=dims[0], head_dim_vo=dims[1], heads=heads)
    batch = leveled([1100], [1100], levels, device=target.device, **sizes)
    check("ragged", batch, [0.5], Options(), target.backend)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_rows_without_keys(target, kind):
    batch = make_batch([700, 30, 50], [300, 0, 200], 16, 4, 128, dtype=torch.bfloat16, device=target.device)
    check(kind, batch, [1e-3, 1000.0], Options(causal=True), target.backend)


def test_sinks(target):
    sinks = torch.linspace(-3.0, 3.0, 16, device=target.device)
    batch = leveled([640], [900], [0.0, -11.0, 1.0, -12.0], head_dim=128, device=target.device)
    check("ragged", batch, [0.3], Options(causal=True, sinks=sinks), target.backend)


@pytest.mark.parametrize("factor", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused(kind, factor):
    batch = make_batch([3], [5], 2, 2, 64)
    with pytest.raises(ValueError, match="skip_softmax_threshold_scale_factor="):
        run(kind, batch, factor, Options(), "reference")


DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
SKIPPING = [(kind, dims) for kind, dims in itertools.product(KINDS, DIMS) if kind != "paged" or dims[0] == dims[1]]


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind,dims", SKIPPING, ids=str)
def test_fa3_skips(kind, dims, causal):
    """Every row sees keys from ``first`` on, beside which all earlier ones weigh nothing. Blocks are computed from the
    last to the first: those before ``first`` are skipped, and their values, huge ones, are nowhere in the output. Head
    dimensions other than 128 have no kernels that skip: the factor changes nothing."""
    rows, keys = 1200, 19 * BLOCK
    first = keys - rows
    huge = first // BLOCK * BLOCK
    levels = [0.0] * (huge // BLOCK) + [20.0]
    sizes = dict(head_dim=dims[0], head_dim_vo=dims[1], heads=(32, 4))
    batch = leveled([rows], [keys], levels, device="cuda:0", **sizes)
    options = Options(causal=causal)
    want = expect(batch, options)
    batch.v[:huge] = 1e30
    full, _ = run(kind, batch, 0.0, options, "fa3")
    assert float(full.float().abs().min()) > 1e15
    out, lse = run(kind, batch, 1.0, options, "fa3")
    if dims != (128, 128):  # the only kernels that skip
        assert_bitwise(out, full)
        return
    assert_close(out, want.out, want.baseline)
    if lse is not None:
        assert float((lse - want.lse).abs().max()) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_large_factors_over_long_keys(kernel_backend, causal):
    batch = make_batch([16384], [16384], 8, 2, 128, dtype=torch.bfloat16, device="cuda:0")
    want, _ = run("ragged", batch, None, Options(causal=causal), kernel_backend)
    out, lse = run("ragged", batch, 1e4, Options(causal=causal), kernel_backend)
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse).all())
    assert_close(out, want.double(), atol=0.2, rtol=0.0)


@pytest.mark.gpu
def test_later_calls_have_their_own_factor(kernel_backend, monkeypatch):
    """Nothing of a call is left for the next."""
    choose_backend(monkeypatch, kernel_backend)  # of the fused prefill
    batch = leveled([1200], [1408], [0.0] * 6 + [20.0], head_dim=128, heads=(32, 4), device="cuda:0")
    batch.v[:BLOCK] = 1e30
    for kind in KINDS:
        outs = {f: run(kind, batch, f, Options(), kernel_backend)[0] for f in (0.0, 1.0, None)}
        assert_bitwise(outs[None], outs[0.0])
        for factor, out in outs.items():
            assert_bitwise(run(kind, batch, factor, Options(), kernel_backend)[0], out)
