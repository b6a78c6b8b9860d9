"""single_prefill_with_kv_cache: shapes, heads, layouts, scales, precision."""

from __future__ import annotations

import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Batch, Options, allowed_in_fp8, expect, make_batch

import cutlass_kernels as ck


def run(target, batch: Batch, options: Options | None = None, kv_layout: str = "NHD", needs=(), **extra):
    options = options or Options()
    k, v = batch.k, batch.v
    if kv_layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    kwargs = options.plan_kwargs() | extra

    def call(backend):
        return ck.single_prefill_with_kv_cache(
            batch.q, k, v, kv_layout=kv_layout, return_lse=True, backend=backend, **kwargs
        )

    return target.attempt(call, needs)


def check(target, batch: Batch, options: Options | None = None, **extra) -> None:
    out, lse = run(target, batch, options, **extra)
    want = expect(batch, options)
    assert_close(out, want.out, want.baseline, dtype=batch.q.dtype)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_dims(target, head_dim, causal, dtype):
    batch = make_batch([77], [131], 4, 2, head_dim, dtype=dtype, device=target.device)
    check(target, batch, Options(causal=causal))


@pytest.mark.parametrize("head_dim", [8, 16, 32, 40, 72, 80, 96, 112, 160, 192])
def test_odd_head_dims(target, head_dim):
    batch = make_batch([19], [50], 2, 1, head_dim, device=target.device)
    check(target, batch, Options(causal=True))


@pytest.mark.parametrize("dim_qk,dim_vo", [(192, 128), (64, 128), (128, 64), (256, 128)])
def test_value_head_dim_differs(target, dim_qk, dim_vo):
    batch = make_batch([33], [70], 4, 4, dim_qk, head_dim_vo=dim_vo, device=target.device)
    check(target, batch, Options(causal=True), needs=["head_dim_vo"])


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 32])
def test_group_sizes(target, group):
    batch = make_batch([21], [45], 2 * group, 2, 64, device=target.device)
    check(target, batch, Options(causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "qo_len,kv_len",
    [(1, 1), (1, 200), (2, 3), (16, 16), (63, 64), (64, 64), (65, 129), (128, 128), (129, 257), (200, 65), (7, 600)],
)
def test_lengths(target, qo_len, kv_len, causal):
    batch = make_batch([qo_len], [kv_len], 2, 1, 64, device=target.device)
    check(target, batch, Options(causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_hnd(target, causal):
    batch = make_batch([30], [75], 6, 3, 128, device=target.device)
    check(target, batch, Options(causal=causal), kv_layout="HND")


def test_hnd_where_head_count_equals_length(target):
    # A swapped dimension would go unnoticed by shape checks alone.
    batch = make_batch([4], [4], 4, 4, 64, device=target.device)
    check(target, batch, Options(causal=True), kv_layout="HND")


@pytest.mark.parametrize("sm_scale", [0.0, 0.01, 0.3, 1.0])
def test_sm_scale(target, sm_scale):
    batch = make_batch([20], [60], 2, 2, 64, device=target.device)
    check(target, batch, Options(sm_scale=sm_scale))


def test_return_forms(target):
    batch = make_batch([9], [20], 2, 1, 64, device=target.device)
    plain = ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, backend=target.backend)
    assert isinstance(plain, torch.Tensor) and plain.shape == (9, 2, 64) and plain.device == batch.q.device
    out, lse = ck.single_prefill_with_kv_cache_return_lse(batch.q, batch.k, batch.v, backend=target.backend)
    assert lse.shape == (9, 2) and lse.dtype == torch.float32
    assert torch.equal(out, plain)
    place = torch.zeros_like(lse)
    ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, backend=target.backend, lse=place)
    assert torch.equal(place, lse)


def test_seed_positional_order(target):
    batch = make_batch([9], [20], 2, 1, 64, device=target.device)
    options = Options(causal=True, window_left=5, logits_soft_cap=3.0, sm_scale=0.2)
    # q, k, v, custom_mask, packed, causal, layout, pos, fp16_qk, sm_scale, window_left, cap, rope_scale, rope_theta
    args = (batch.q, batch.k, batch.v, None, None, True, "NHD", "NONE", False, 0.2, 5, 3.0, None, None)
    out = ck.single_prefill_with_kv_cache(*args)
    want = expect(batch, options)
    assert_close(out, want.out, want.baseline)
    out, lse = ck.single_prefill_with_kv_cache_return_lse(*args)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("name", ["allow_fp16_qk_reduction", "use_fp16_qk_reduction"])
def test_fp16_qk_reduction_has_two_names(target, name):
    batch = make_batch([9], [20], 2, 1, 64, device=target.device)
    out = ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, **{name: True})
    assert_close(out, expect(batch, Options(causal=True)).out)


def test_also_found_in_the_prefill_module():
    assert ck.prefill.single_prefill_with_kv_cache is ck.single_prefill_with_kv_cache
    assert callable(ck.prefill.single_prefill_with_kv_cache_return_lse)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_fp8_keys_and_values(target, dtype, kv_dtype):
    batch = make_batch([17], [60], 4, 2, 64, dtype=dtype, kv_dtype=kv_dtype, device=target.device)
    options = Options(causal=True, k_scale=0.7, v_scale=1.3)
    out, lse = run(target, batch, options, needs=["fp8_kv"], k_scale=0.7, v_scale=1.3)
    want = expect(batch, options)
    assert_close(out, want.out, atol=1e-2, rtol=1e-2, dtype=dtype)
    assert_lse_close(lse, want.lse, atol=5e-3)


def test_scalar_scales_with_16_bit_inputs(target):
    batch = make_batch([17], [60], 4, 2, 64, device=target.device)
    options = Options(causal=True, k_scale=0.5, v_scale=2.0, logits_soft_cap=5.0)
    out, lse = run(target, batch, options, k_scale=0.5, v_scale=2.0)
    want = expect(batch, options)
    assert_close(out, want.out, want.baseline, atol=2e-3)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("window_left", [-1, 10])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_all_fp8_with_head_scales(target, fp8, window_left, soft_cap):
    heads, kv_heads = 4, 2
    batch = make_batch([17], [60], heads, kv_heads, 64, dtype=fp8, device=target.device)
    scale_q = torch.linspace(0.5, 1.5, heads, device=target.device)
    scale_k = torch.linspace(0.8, 1.2, kv_heads, device=target.device)
    scale_v = torch.linspace(0.6, 1.9, kv_heads, device=target.device)

    def call(backend):
        return ck.single_prefill_with_kv_cache(
            batch.q,
            batch.k,
            batch.v,
            scale_q=scale_q,
            scale_k=scale_k,
            scale_v=scale_v,
            o_dtype=torch.bfloat16,
            causal=True,
            window_left=window_left,
            logits_soft_cap=soft_cap,
            return_lse=True,
            backend=backend,
        )

    out, lse = target.attempt(call, ["fp8"])
    wide = Batch(
        batch.qo_lens,
        batch.kv_lens,
        batch.q.float() * scale_q[:, None],
        batch.k.float() * scale_k[:, None],
        batch.v.float() * scale_v[:, None],
    )
    options = Options(causal=True, window_left=window_left, logits_soft_cap=soft_cap)
    want, allowed = expect(wide, options), allowed_in_fp8(wide, options)
    assert_close(out, want.out, atol=2e-2, rtol=2e-2, dtype=torch.bfloat16, allowed=allowed)
    assert_lse_close(lse, want.lse, atol=5e-3)


def test_all_fp8_without_scales_means_ones(target):
    batch = make_batch([5], [30], 2, 2, 64, dtype=torch.float8_e4m3fn, device=target.device)

    def call(backend):
        return ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, o_dtype=torch.float16, backend=backend)

    out = target.attempt(call, ["fp8"])
    assert_close(out, expect(batch).out, atol=2e-2, rtol=2e-2, dtype=torch.float16, allowed=allowed_in_fp8(batch))


@pytest.mark.parametrize("o_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_fp8_outputs_are_limited_to_their_largest_number(o_dtype):
    q, k, v = torch.randn(3, 9, 2, 64).half()
    out = ck.single_prefill_with_kv_cache(q, k, v, o_dtype=o_dtype, v_scale=1e6)
    assert out.dtype == o_dtype and float(out.float().abs().max()) == torch.finfo(o_dtype).max


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("level", [-1e4, -2.45e5])
def test_extremely_negative_logits(target, level, dtype):
    # Every visible logit is far below any finite stand-in for "masked", yet a masked key must not win.
    batch = make_batch([20], [40], 2, 1, 64, dtype=dtype, device=target.device)
    batch.q.fill_(16.0)
    batch.k.fill_(level / (64 * 16 * 16))
    batch.k[:, :, 0] += torch.linspace(0, 1, 40, device=target.device)[:, None].to(dtype)
    options = Options(causal=True, sm_scale=16.0)
    out, lse = run(target, batch, options)
    want = expect(batch, options)
    assert float(want.lse.max()) < level / 4
    assert_close(out, want.out, atol=1e-2, rtol=1e-2)
    assert_lse_close(lse, want.lse, atol=float(want.lse.abs().max()) * 1e-5)


def test_large_logits_do_not_overflow(target):
    batch = make_batch([20], [40], 2, 1, 64, device=target.device)
    options = Options(causal=True, sm_scale=50.0)
    out, lse = run(target, batch, options)
    want = expect(batch, options)
    assert_close(out, want.out, atol=2e-2, rtol=2e-2)
    assert_lse_close(lse, want.lse, atol=0.05)


def test_the_reference_computes_double_precision():
    batch = make_batch([7], [20], 4, 2, 64, dtype=torch.float64)
    out, lse = ck.single_prefill_with_kv_cache(
        batch.q, batch.k, batch.v, causal=True, return_lse=True, backend="reference"
    )
    want = expect(batch, Options(causal=True))
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, want.out, rtol=0, atol=1e-13)
    assert_lse_close(lse, want.lse)


def test_inputs_are_left_alone(target):
    batch = make_batch([20], [40], 2, 1, 64, device=target.device)
    before = [x.clone() for x in (batch.q, batch.k, batch.v)]
    run(target, batch, Options(causal=True, logits_soft_cap=2.0))
    for x, y in zip((batch.q, batch.k, batch.v), before):
        assert torch.equal(x, y)


def test_same_call_gives_same_bits(target):
    batch = make_batch([50], [300], 4, 1, 128, device=target.device)
    first = run(target, batch, Options(causal=True))
    for _ in range(3):
        again = run(target, batch, Options(causal=True))
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_nothing_synchronises(kernel_backend):
    batch = make_batch([17], [60], 4, 2, 64, device="cuda:0")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, backend=kernel_backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = expect(batch, Options(causal=True))
    assert_close(out, want.out, want.baseline)
