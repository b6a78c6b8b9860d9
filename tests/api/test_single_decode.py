"""single_decode_with_kv_cache: one query row."""

from __future__ import annotations

import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Batch, Options, expect, make_batch

import cutlass_kernels as ck


def decode(batch: Batch, kv_layout: str = "NHD", **kwargs):
    k, v = batch.k, batch.v
    if kv_layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return ck.single_decode_with_kv_cache(batch.q[0], k, v, kv_layout=kv_layout, **kwargs)


def check(batch: Batch, options: Options | None = None, **kwargs) -> None:
    options = options or Options()
    given = options.plan_kwargs()
    given.pop("causal", None)
    out, lse = decode(batch, return_lse=True, **given, **kwargs)
    want = expect(batch, options, decode=True)
    assert_close(out, want.out[0], want.baseline[0], dtype=batch.q.dtype)
    assert_lse_close(lse, want.lse[0])


@pytest.mark.pairwise
@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_len", [1, 2, 63, 64, 257, 1025])
def test_lengths_and_layouts(target, kv_len, kv_layout, tensor_cores):
    batch = make_batch([1], [kv_len], 8, 2, 64, device=target.device)
    check(batch, kv_layout=kv_layout, use_tensor_cores=tensor_cores)


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 32])
def test_any_group_size(target, group, tensor_cores):
    batch = make_batch([1], [100], 2 * group, 2, 128, device=target.device)
    check(batch, use_tensor_cores=tensor_cores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_dims(target, head_dim, dtype):
    batch = make_batch([1], [333], 4, 4, head_dim, dtype=dtype, device=target.device)
    check(batch)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_one_head_keeps_its_dimension(target, tensor_cores):
    batch = make_batch([1], [10], 1, 1, 64, device=target.device)
    out, lse = decode(batch, use_tensor_cores=tensor_cores, return_lse=True)
    assert out.shape == (1, 64) and lse.shape == (1,)


def test_return_forms(target):
    batch = make_batch([1], [10], 4, 2, 64, device=target.device)
    plain = decode(batch)
    assert isinstance(plain, torch.Tensor) and plain.shape == (4, 64)
    out, lse = decode(batch, return_lse=True)
    assert torch.equal(out, plain) and lse.shape == (4,) and lse.dtype == torch.float32


@pytest.mark.parametrize("window_left", [0, 1, 7, 99, 100, 1000])
def test_window_keeps_the_last_keys(target, window_left):
    batch = make_batch([1], [100], 4, 2, 64, device=target.device)
    check(batch, Options(window_left=window_left))


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        Options(logits_soft_cap=5.0),
        Options(sm_scale=0.05),
        Options(pos_encoding_mode="ALIBI"),
        Options(pos_encoding_mode="ALIBI", logits_soft_cap=3.0, window_left=20),
        Options(pos_encoding_mode="ROPE_LLAMA"),
        Options(pos_encoding_mode="ROPE_LLAMA", rope_scale=4.0, rope_theta=5e5),
    ],
    ids=["cap", "scale", "alibi", "alibi-cap-window", "rope", "rope-scaled"],
)
def test_logits_options(target, options, tensor_cores):
    batch = make_batch([1], [90], 6, 2, 64, device=target.device)
    check(batch, options, use_tensor_cores=tensor_cores)


def test_scales(target):
    batch = make_batch([1], [90], 4, 2, 64, device=target.device)
    options = Options(q_scale=0.5, k_scale=1.5, v_scale=0.25, logits_soft_cap=4.0)
    out, lse = decode(batch, q_scale=0.5, k_scale=1.5, v_scale=0.25, logits_soft_cap=4.0, return_lse=True)
    want = expect(batch, options)
    assert_close(out, want.out[0], want.baseline[0])
    assert_lse_close(lse, want.lse[0])


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
def test_fp8_cache(target, mode, kv_dtype):
    batch = make_batch([1], [90], 4, 2, 64, kv_dtype=kv_dtype, device=target.device)
    options = Options(k_scale=0.9, v_scale=1.1, pos_encoding_mode=mode)
    out, lse = decode(batch, k_scale=0.9, v_scale=1.1, pos_encoding_mode=mode, return_lse=True)
    want = expect(batch, options, decode=True)
    assert_close(out, want.out[0], atol=1e-2, rtol=1e-2, dtype=torch.float16)
    assert_lse_close(lse, want.lse[0], atol=5e-3)


def test_seed_positional_order(target):
    batch = make_batch([1], [50], 4, 2, 64, device=target.device)
    # q, k, v, layout, pos, tensor_cores, q_scale, k_scale, v_scale, window_left, cap, sm_scale, rope_scale, rope_theta
    args = (batch.q[0], batch.k, batch.v, "NHD", "NONE", False, 0.5, 2.0, 3.0, 9, 2.0, 0.2, None, None)
    out = ck.single_decode_with_kv_cache(*args)
    options = Options(q_scale=0.5, k_scale=2.0, v_scale=3.0, window_left=9, logits_soft_cap=2.0, sm_scale=0.2)
    want = expect(batch, options)
    assert_close(out, want.out[0], want.baseline[0], atol=3e-3)
    assert isinstance(ck.single_decode_with_kv_cache(*args, True), tuple)


def test_empty_cache(target):
    batch = make_batch([1], [0], 4, 2, 64, device=target.device)
    out, lse = decode(batch, return_lse=True)
    assert torch.count_nonzero(out) == 0 and bool((lse == -torch.inf).all())


def test_strided_inputs(target):
    packed = torch.randn(70, 3, 4, 64).half().to(target.device)
    q, k, v = packed[-1, 0], packed[:, 1], packed[:, 2]
    batch = Batch([1], [70], q[None], k, v)
    out, lse = ck.single_decode_with_kv_cache(q, k, v, return_lse=True)
    want = expect(batch)
    assert_close(out, want.out[0], want.baseline[0])
    assert_lse_close(lse, want.lse[0])


def test_equals_a_prefill_of_one_row(target):
    batch = make_batch([1], [77], 8, 2, 128, device=target.device)
    out, lse = decode(batch, return_lse=True)
    out2, lse2 = ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, return_lse=True)
    torch.testing.assert_close(out, out2[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, lse2[0], rtol=1e-5, atol=1e-3)


def test_also_found_in_the_decode_module():
    assert ck.decode.single_decode_with_kv_cache is ck.single_decode_with_kv_cache
