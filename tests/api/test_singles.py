"""single_prefill_with_kv_cache and single_decode_with_kv_cache: shapes, layouts, options, scales, precision."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from captures import no_waiting
from compare import assert_close, assert_lse_close
from problems import Batch, Options, allowed_in_fp8, expect, make_batch

import cutlass_kernels as ck

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
HALF = [torch.float16, torch.bfloat16]
PREFILL, DECODE = ck.single_prefill_with_kv_cache, ck.single_decode_with_kv_cache


def call(target, function: Any, batch: Batch, options: Options | None = None, layout="NHD", needs=(), **extra) -> Any:
    """Output and LSE ``[rows, heads]``; of a decode too."""
    k, v = ((x.transpose(0, 1).contiguous() if layout == "HND" else x) for x in (batch.k, batch.v))
    given = (options or Options()).plan_kwargs() | dict(kv_layout=layout, return_lse=True) | extra
    if function is PREFILL:
        return target.attempt(lambda backend: PREFILL(batch.q, k, v, backend=backend, **given), needs)
    return tuple(x[None] for x in DECODE(batch.q[0], k, v, **given))


def check(target, function: Any, batch: Batch, options: Options | None = None, **extra: Any) -> None:
    tolerance = {name: extra.pop(name) for name in ("atol", "rtol", "lse_atol") if name in extra}
    scales = {x: getattr(options, x) for x in ("q_scale", "k_scale", "v_scale") if getattr(options, x, 1.0) != 1.0}
    out, lse = call(target, function, batch, options, **scales, **extra)
    want, lse_atol = expect(batch, options, decode=function is DECODE), tolerance.pop("lse_atol", None)
    base = None if "rtol" in tolerance else want.baseline
    assert_close(out, want.out, base, dtype=batch.q.dtype, **tolerance)
    assert_lse_close(lse, want.lse, atol=lse_atol)


@dataclass
class Case:
    rows: int
    keys: int
    heads: tuple[int, int]
    dim: int = 64
    dim_vo: int | None = None
    dtype: torch.dtype = torch.float16
    options: Options = field(default_factory=Options)
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        asked = {**self.options.plan_kwargs(), **self.more}
        return f"{self.rows}x{self.keys} {self.heads} {self.dim} {self.dim_vo or ''} {self.dtype} {asked or ''}"

    def batch(self, target) -> Batch:
        sizes = dict(head_dim_vo=self.dim_vo, dtype=self.dtype, device=target.device)
        return make_batch([self.rows], [self.keys], *self.heads, self.dim, **sizes)


CAUSAL = Options(causal=True)
LENGTHS = [
    (1, 1),
    (1, 200),
    (2, 3),
    (16, 16),
    (63, 64),
    (64, 64),
    (65, 129),
    (128, 128),
    (129, 257),
    (200, 65),
    (7, 600),
]
PREFILLS = [
    *[Case(77, 131, (4, 2), x, None, y, z) for x in (64, 128, 256) for y in HALF for z in (Options(), CAUSAL)],
    Case(1, 77, (8, 2), 128, options=CAUSAL),
    *[Case(19, 50, (2, 1), x, options=CAUSAL) for x in (8, 16, 32, 40, 72, 80, 96, 112, 160, 192)],
    *[
        Case(33, 70, (4, 4), *dims, options=CAUSAL, more=dict(needs=["head_dim_vo"]))
        for dims in ((192, 128), (64, 128), (128, 64), (256, 128))
    ],
    *[Case(21, 45, (2 * x, 2), options=CAUSAL) for x in (1, 2, 3, 4, 5, 7, 8, 16, 32)],
    *[Case(*x, (2, 1), options=y) for x in LENGTHS for y in (Options(), CAUSAL)],
    *[Case(30, 75, (6, 3), 128, options=x, more=dict(layout="HND")) for x in (Options(), CAUSAL)],
    Case(4, 4, (4, 4), options=CAUSAL, more=dict(layout="HND")),  # shape checks would not see swapped dimensions
    *[Case(20, 60, (2, 2), options=Options(sm_scale=x)) for x in (0.0, 0.01, 0.3, 1.0)],
    Case(
        17,
        60,
        (4, 2),
        options=Options(causal=True, k_scale=0.5, v_scale=2.0, logits_soft_cap=5.0),
        more=dict(atol=2e-3),
    ),
    Case(20, 40, (2, 1), options=Options(causal=True, sm_scale=50.0), more=dict(atol=2e-2, rtol=2e-2, lse_atol=0.05)),
]
LOGITS = [
    Options(logits_soft_cap=5.0),
    Options(sm_scale=0.05),
    Options(pos_encoding_mode="ALIBI"),
    Options(pos_encoding_mode="ALIBI", logits_soft_cap=3.0, window_left=20),
    Options(pos_encoding_mode="ROPE_LLAMA"),
    Options(pos_encoding_mode="ROPE_LLAMA", rope_scale=4.0, rope_theta=5e5),
]
CORES = [dict(use_tensor_cores=x) for x in (False, True)]
DECODES = [
    *[
        Case(1, x, (8, 2), more=dict(layout=y) | z)
        for x, y, z in itertools.product((1, 2, 63, 64, 257, 1025), ("NHD", "HND"), CORES)
    ],
    *[Case(1, 100, (2 * x, 2), 128, more=y) for x in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32) for y in CORES],
    Case(1, 77, (8, 2), 128),
    *[Case(1, 333, (4, 4), x, None, y) for x in (64, 128, 256) for y in HALF],
    *[Case(1, 100, (4, 2), options=Options(window_left=x)) for x in (0, 1, 7, 99, 100, 1000)],
    *[Case(1, 90, (6, 2), options=x, more=y) for x in LOGITS for y in CORES],
    Case(1, 90, (4, 2), options=Options(q_scale=0.5, k_scale=1.5, v_scale=0.25, logits_soft_cap=4.0)),
]


@pytest.mark.parametrize("case", PREFILLS, ids=str)
def test_prefill(target, case):
    check(target, PREFILL, case.batch(target), case.options, **case.more)


@pytest.mark.parametrize("case", DECODES, ids=str)
def test_decode(target, case):
    check(target, DECODE, case.batch(target), case.options, **case.more)


def test_empty_cache(target):
    out, lse = call(target, DECODE, make_batch([1], [0], 4, 2, 64, device=target.device))
    assert torch.count_nonzero(out) == 0 and bool((lse == -torch.inf).all())


def test_strided_inputs(target):
    packed = torch.randn(70, 3, 4, 64).half().to(target.device)
    check(target, DECODE, Batch([1], [70], packed[-1:, 0], packed[:, 1], packed[:, 2]))


# --- arguments and results ---


def test_return_forms(target):
    batch = make_batch([9], [20], 4, 2, 64, device=target.device)
    tensors, backend = (batch.q, batch.k, batch.v), dict(backend=target.backend)
    plain = PREFILL(*tensors, **backend)
    assert isinstance(plain, torch.Tensor) and plain.shape == (9, 4, 64) and plain.device == batch.q.device
    out, lse = ck.single_prefill_with_kv_cache_return_lse(*tensors, **backend)
    assert lse.shape == (9, 4) and lse.dtype == torch.float32
    assert torch.equal(out, plain)
    place = torch.zeros_like(lse)
    PREFILL(*tensors, **backend, lse=place)
    assert torch.equal(place, lse)
    plain = DECODE(batch.q[0], *tensors[1:])
    assert isinstance(plain, torch.Tensor) and plain.shape == (4, 64)
    out, lse = DECODE(batch.q[0], *tensors[1:], return_lse=True)
    assert torch.equal(out, plain) and lse.shape == (4,) and lse.dtype == torch.float32
    for cores in CORES:  # one head keeps its dimension
        out, lse = DECODE(batch.q[0, :1], batch.k[:, :1], batch.v[:, :1], return_lse=True, **cores)
        assert out.shape == (1, 64) and lse.shape == (1,)


def test_seed_positional_order(target):
    batch = make_batch([9], [20], 2, 1, 64, device=target.device)
    options = Options(causal=True, window_left=5, logits_soft_cap=3.0, sm_scale=0.2)
    # q, k, v, custom_mask, packed, causal, layout, pos, fp16_qk, sm_scale, window_left, cap, rope_scale, rope_theta
    args = (batch.q, batch.k, batch.v, None, None, True, "NHD", "NONE", False, 0.2, 5, 3.0, None, None)
    want = expect(batch, options)
    out, lse = ck.single_prefill_with_kv_cache_return_lse(*args)
    assert_lse_close(lse, want.lse)
    for found in (PREFILL(*args), out):
        assert_close(found, want.out, want.baseline)


def test_seed_positional_order_of_decode(target):
    batch = make_batch([1], [50], 4, 2, 64, device=target.device)
    # q, k, v, layout, pos, tensor_cores, q_scale, k_scale, v_scale, window_left, cap, sm_scale, rope_scale, rope_theta
    args = (batch.q[0], batch.k, batch.v, "NHD", "NONE", False, 0.5, 2.0, 3.0, 9, 2.0, 0.2, None, None)
    want = expect(
        batch, Options(q_scale=0.5, k_scale=2.0, v_scale=3.0, window_left=9, logits_soft_cap=2.0, sm_scale=0.2)
    )
    assert_close(DECODE(*args), want.out[0], want.baseline[0], atol=3e-3)
    assert isinstance(DECODE(*args, True), tuple)


@pytest.mark.parametrize("name", ["allow_fp16_qk_reduction", "use_fp16_qk_reduction"])
def test_fp16_qk_reduction_has_two_names(target, name):
    batch = make_batch([9], [20], 2, 1, 64, device=target.device)
    out = PREFILL(batch.q, batch.k, batch.v, causal=True, **{name: True})
    assert_close(out, expect(batch, CAUSAL).out)


def test_also_found_in_other_modules():
    assert ck.prefill.single_prefill_with_kv_cache is PREFILL and ck.decode.single_decode_with_kv_cache is DECODE
    assert callable(ck.prefill.single_prefill_with_kv_cache_return_lse)


# --- fp8 ---


@FP8
@pytest.mark.parametrize("dtype", HALF, ids=["fp16", "bf16"])
def test_fp8_keys_and_values(target, dtype, fp8):
    batch = make_batch([17], [60], 4, 2, 64, dtype=dtype, kv_dtype=fp8, device=target.device)
    options = Options(causal=True, k_scale=0.7, v_scale=1.3)
    check(target, PREFILL, batch, options, needs=["fp8_kv"], atol=1e-2, rtol=1e-2, lse_atol=5e-3)


@FP8
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
def test_fp8_cache(target, mode, fp8):
    batch = make_batch([1], [90], 4, 2, 64, kv_dtype=fp8, device=target.device)
    options = Options(k_scale=0.9, v_scale=1.1, pos_encoding_mode=mode)
    check(target, DECODE, batch, options, atol=1e-2, rtol=1e-2, lse_atol=5e-3)


@FP8
@pytest.mark.parametrize("window_left", [-1, 10])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_all_fp8_with_head_scales(target, fp8, window_left, soft_cap):
    batch = make_batch([17], [60], 4, 2, 64, dtype=fp8, device=target.device)
    options = Options(causal=True, window_left=window_left, logits_soft_cap=soft_cap)
    bounds = {"scale_q": (0.5, 1.5, 4), "scale_k": (0.8, 1.2, 2), "scale_v": (0.6, 1.9, 2)}
    scales = {name: torch.linspace(*x, device=target.device) for name, x in bounds.items()}
    out, lse = call(target, PREFILL, batch, options, needs=["fp8"], o_dtype=torch.bfloat16, **scales)
    wide = batch.dequantized(**scales)
    want, allowed = expect(wide, options), allowed_in_fp8(wide, options)
    assert_close(out, want.out, atol=2e-2, rtol=2e-2, dtype=torch.bfloat16, allowed=allowed)
    assert_lse_close(lse, want.lse, atol=5e-3)


def test_all_fp8_without_scales_means_ones(target):
    batch = make_batch([5], [30], 2, 2, 64, dtype=E4M3, device=target.device)
    out, _ = call(target, PREFILL, batch, needs=["fp8"], o_dtype=torch.float16)
    assert_close(out, expect(batch).out, atol=2e-2, rtol=2e-2, dtype=torch.float16, allowed=allowed_in_fp8(batch))


@FP8
def test_fp8_outputs_are_limited_to_their_largest_number(fp8):
    q, k, v = torch.randn(3, 9, 2, 64).half()
    out = PREFILL(q, k, v, o_dtype=fp8, v_scale=1e6)
    assert out.dtype == fp8 and float(out.float().abs().max()) == torch.finfo(fp8).max


# --- numbers, and what a call does not do ---


@pytest.mark.parametrize("dtype", HALF, ids=["fp16", "bf16"])
@pytest.mark.parametrize("level", [-1e4, -2.45e5])
def test_extremely_negative_logits(target, level, dtype):
    # Every visible logit is far below any finite stand-in for "masked", yet a masked key must not win.
    batch = make_batch([20], [40], 2, 1, 64, dtype=dtype, device=target.device)
    batch.q.fill_(16.0)
    batch.k.fill_(level / (64 * 16 * 16))
    batch.k[:, :, 0] += torch.linspace(0, 1, 40, device=target.device)[:, None].to(dtype)
    options = Options(causal=True, sm_scale=16.0)
    lse = expect(batch, options).lse
    assert float(lse.max()) < level / 4
    check(target, PREFILL, batch, options, atol=1e-2, rtol=1e-2, lse_atol=float(lse.abs().max()) * 1e-5)


def test_the_reference_computes_double_precision():
    batch = make_batch([7], [20], 4, 2, 64, dtype=torch.float64)
    out, lse = PREFILL(batch.q, batch.k, batch.v, causal=True, return_lse=True, backend="reference")
    want = expect(batch, CAUSAL)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, want.out, rtol=0, atol=1e-13)
    assert_lse_close(lse, want.lse)


def test_inputs_are_left_alone_and_bits_are_the_same(target):
    batch = make_batch([50], [300], 4, 1, 128, device=target.device)
    tensors = (batch.q, batch.k, batch.v)
    before, options = [x.clone() for x in tensors], Options(causal=True, logits_soft_cap=2.0)
    for asked in (options, CAUSAL):
        first = call(target, PREFILL, batch, asked)
        for _ in range(3):
            assert all(map(torch.equal, call(target, PREFILL, batch, asked), first))
    assert all(map(torch.equal, tensors, before))


def test_nothing_synchronises(kernel_backend):
    batch = make_batch([17], [60], 4, 2, 64, device="cuda:0")
    with no_waiting():
        out = PREFILL(batch.q, batch.k, batch.v, causal=True, backend=kernel_backend)
    want = expect(batch, CAUSAL)
    assert_close(out, want.out, want.baseline)
