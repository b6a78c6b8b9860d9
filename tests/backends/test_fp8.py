"""Attention that is e4m3 throughout: what kernels of fp8 compute, and what is computed from copies of 16 bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from pairs import every
from planned_runs import attend, check_captured_runs, single, wrapped
from problems import Batch, Options, allowed_in_fp8, expect, make_batch

import cutlass_kernels as ck

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]
DEVICE = "cuda:0"
E4M3 = torch.float8_e4m3fn
DIMS = [64, 128, 256]
SCALES = ("q_scale", "k_scale", "v_scale")

OPTIONS = {
    "full": Options(),
    "causal": Options(causal=True),
    "window": Options(causal=True, window_left=50),
    "window alone": Options(window_left=200),
    "cap": Options(causal=True, logits_soft_cap=2.0),
    "negative scale": Options(sm_scale=-0.1),
    "scales": Options(causal=True, q_scale=0.5, k_scale=1.7, v_scale=-1.3),
}
CAUSAL = OPTIONS["causal"]


def check(result: Any, batch: Batch, options: Options, lse_rtol: float = 1e-5) -> None:
    """Output, and LSE where there is one."""
    out, *lse = result
    want, allowed = expect(batch, options), allowed_in_fp8(batch, options)
    assert_close(out, want.out, atol=2e-2, rtol=1e-2, allowed=allowed)
    # Rounding errors are independent of one another, so that on the whole far less is lost than an element may lose.
    error, size = ((x.double()).square().mean().sqrt() for x in (out.double() - want.out, allowed * 16))
    assert float(error) <= 0.03 * float(size) + 2e-3
    for x in lse:
        assert_lse_close(x, want.lse, atol=5e-3, rtol=lse_rtol)


def run(batch: Batch, options: Options, page_size: int | None = None, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """By the wrappers of fa3; a page size says which."""
    return attend("fa3", batch, options, page_size, o_data_type=torch.bfloat16, **more)


def fp8_batch(qo_lens: list[int], kv_lens: list[int], heads=4, kv_heads=2, dim=128, seed: int = 0) -> Batch:
    return make_batch(qo_lens, kv_lens, heads, kv_heads, dim, dtype=E4M3, device=DEVICE, seed=seed)


# Tiles of 128 or 192 rows and blocks of 128 keys: just below, at and just beyond; requests without rows, or keys.
LENS = ([200, 0, 5, 128, 1, 300, 70], [200, 60, 0, 129, 700, 520, 30])


@every(dim=DIMS, options=OPTIONS)
def test_ragged(dim, options):
    batch = fp8_batch(*LENS, dim=dim)
    check(run(batch, options), batch, options)


@pytest.mark.pairwise
@every(dim=DIMS, name=["full", "window"])
@pytest.mark.parametrize("page_size,layout", [(8, "NHD"), (16, "HND"), (24, "NHD"), (64, "NHD"), (256, "HND")])
def test_pages_with_nan_in_what_is_not_used(dim, page_size, layout, name):
    batch = fp8_batch(*LENS, dim=dim)
    check(run(batch, OPTIONS[name], page_size, kv_layout=layout), batch, OPTIONS[name])


@every(page_size=[1, 5, 12])
def test_other_pages_are_copied(page_size):
    batch = fp8_batch([30, 7], [100, 90])
    check(run(batch, CAUSAL, page_size), batch, CAUSAL)


@every(dim=DIMS)
def test_nan_beside_a_request(dim):
    # What lies behind the last key of a request, and keys that nobody sees.
    batch = fp8_batch([100, 90], [100, 333], dim=dim)
    options = Options(causal=True, window_left=20)
    for x in (batch.k, batch.v):
        x.view(torch.uint8)[100 : 100 + 333 - 90 - 20] = 0x7F
    k, v = (torch.nan_to_num(x.float()) for x in (batch.k, batch.v))
    check(run(batch, options), dataclasses.replace(batch, q=batch.q.float(), k=k, v=v), options)


@pytest.mark.pairwise
@every(dim=DIMS, causal=[False, True], lens=[(1000, 1000), (129, 4097), (64, 100), (3, 2000), (700, 300)])
def test_single(dim, causal, lens):
    batch = fp8_batch([lens[0]], [lens[1]], dim=dim)
    options = Options(causal=causal)
    for o_dtype in (torch.float16, torch.bfloat16):
        out, lse = single("fa3", batch, options, o_dtype=o_dtype)
        assert out.dtype == o_dtype
        check((out, lse), batch, options)
        alone = ck.single_prefill_with_kv_cache(
            batch.q, batch.k, batch.v, o_dtype=o_dtype, causal=causal, backend="fa3"
        )
        assert_bitwise(alone, out)


@every(dim=DIMS, heads=[(8, 8), (8, 2), (8, 1), (6, 2)], name=["causal", "cap"], page_size=[None, 16])
def test_short_queries_share_keys(dim, heads, name, page_size):
    batch = fp8_batch([1, 3, 1, 2, 0], [1, 500, 3000, 129, 7], *heads, dim=dim)
    check(run(batch, OPTIONS[name], page_size), batch, OPTIONS[name])


@every(page_size=[None, 16], lens={"rows": LENS, "packed": ([1, 4, 1], [300, 2000, 5])}, soft_cap=[None, 3.0])
def test_scales_of_heads(lens, page_size, soft_cap):
    batch = fp8_batch(*lens, 8, 2)
    scales = tuple(torch.linspace(0.3, 1.9, n, device=DEVICE) for n in (8, 2, 2))
    options = Options(causal=True, logits_soft_cap=soft_cap)
    result = run(batch, options, page_size, run=dict(zip(SCALES, scales)))
    # Logits are up to 3.6 times those of the other tests, and so is what tensor cores lose of them: they add
    # products of fp8 with about 14 bits.
    check(result, batch.dequantized(*scales), options, lse_rtol=1e-3)


def test_scales_that_are_not_positive():
    batch = fp8_batch([150], [300], 4, 2)
    scales = [torch.tensor(x, device=DEVICE) for x in ([-1.0, 0.0, 0.5, 2.0], [1.0, 1.0], [-2.0, 0.0])]
    out, lse = run(batch, Options(), run=dict(zip(SCALES, scales)))
    wide = batch.dequantized(*scales)
    want, allowed = expect(wide), allowed_in_fp8(wide)
    assert_close(out, want.out, atol=2e-2, rtol=1e-2, allowed=allowed)
    assert_lse_close(lse, want.lse, atol=5e-3)


@every(lens={"rows": ([300, 0, 40], [300, 10, 0]), "packed": ([1, 2], [700, 0])})
def test_sinks(lens):
    batch = fp8_batch(*lens, 8, 2)
    options = Options(causal=True, sinks=torch.linspace(-2, 4, 8, device=DEVICE))
    check(run(batch, options), batch, options)


@every(dim=DIMS)
def test_maxima_that_rise(dim):
    # Blocks are taken from the last to the first, so keys that grow towards the first raise the maximum at each
    # step: gently, which P's headroom takes, a little more than that, and by far more.
    for step in (0.3, 2.0, 6.0, 40.0):
        batch = fp8_batch([200], [2000], dim=dim)
        growth = step * torch.linspace(1.0, 0.0, 2000, device=DEVICE)[:, None, None]
        q, k = torch.full_like(batch.q.float(), 1.0), batch.k.float() * 0.1 + growth
        batch = dataclasses.replace(batch, q=q.to(E4M3), k=k.to(E4M3))
        options = Options(sm_scale=1.0 / dim * 8)
        check(run(batch, options), batch, options)


@every(level=[-448.0, 0.0, 448.0])
def test_equal_and_extreme_logits(level):
    batch = fp8_batch([140], [600])
    q, k = (torch.full_like(x.float(), value).to(E4M3) for x, value in ((batch.q, 1.0), (batch.k, level)))
    batch = dataclasses.replace(batch, q=q, k=k)
    options = Options(causal=True, sm_scale=1.0)
    out, lse = run(batch, options)
    want = expect(batch, options)
    assert_close(out, want.out, atol=2e-2, rtol=1e-2, allowed=allowed_in_fp8(batch, options))
    torch.testing.assert_close(lse.double(), want.lse.double(), rtol=1e-6, atol=5e-3)


def test_nan_in_what_is_seen_stays_nan():
    batch = fp8_batch([130], [130], 2, 1, dim=128)
    batch.q.view(torch.uint8)[7, 0] = 0x7F
    batch.v.view(torch.uint8)[100, 0, 5] = 0x7F
    found = torch.isnan(run(batch, CAUSAL)[0])
    assert bool(found[7, 0].all()) and bool(found[100:, :, 5].all())
    found[7, 0], found[:, :, 5] = False, False
    assert not bool(found.any())


@every(mode=["custom mask", "ROPE_LLAMA", "ALIBI", "page of 5", "8-byte rows"])
def test_what_gets_copies(mode):
    batch, options = fp8_batch([40, 9], [150, 9]), CAUSAL
    if mode == "8-byte rows":
        padded = [torch.cat([x, x[..., :8]], -1)[..., :-8] for x in (batch.q, batch.k, batch.v)]
        batch = dataclasses.replace(batch, q=padded[0], k=padded[1], v=padded[2])
        assert batch.q.stride(1) % 16 == 8
    elif mode == "custom mask":
        options = Options(custom_masks=batch.random_masks())
    elif mode != "page of 5":
        options = Options(causal=True, pos_encoding_mode=mode)
    check(run(batch, options, 5 if mode == "page of 5" else None), batch, options)


@every(page_size=[None, 16])
def test_runs_may_change_between_copies_and_none(page_size):
    batch = fp8_batch([40, 9], [150, 30])
    call = wrapped("fa3", batch, page_size).plan(CAUSAL, o_data_type=torch.bfloat16)
    for mode in ("NONE", "ALIBI", "NONE", "ROPE_LLAMA", "ALIBI", "NONE"):
        out = call.wrapper.forward(batch.q, *call.kv, causal=True, pos_encoding_mode=mode)
        check([out], batch, Options(causal=True, pos_encoding_mode=mode))


def test_captured_runs_follow_later_plans():
    steps = [([4, 4], [40, 90]), ([1, 7], [150, 7]), ([8, 0], [33, 5]), ([4, 4], [40, 90])]
    batches = [fp8_batch(*step, dim=64, seed=n) for n, step in enumerate(steps)]
    check_captured_runs("fa3", batches, CAUSAL, check)
