"""single_prefill_with_kv_cache by position, in FlashInfer's newer order (scales behind v) and in the documented one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Batch, Options, allowed_in_fp8, expect, make_batch

import cutlass_kernels as ck

DTYPES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn]
OPTIONS = Options(causal=True, window_left=9, logits_soft_cap=3.0, sm_scale=0.2)
# What follows the masks in both orders: causal, layout, encoding, fp16 reduction, scale, window, cap, RoPE twice.
BEHIND_MASKS = (True, "NHD", "NONE", False, 0.2, 9, 3.0, None, None)


def scales_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One factor per head of q, k and v."""
    heads, kv_heads, _ = batch.heads
    ranges = ((0.5, 1.5, heads), (0.8, 1.2, kv_heads), (0.6, 1.9, kv_heads))
    return tuple(torch.linspace(*x, device=batch.device) for x in ranges)  # type: ignore[return-value]


def check(result: Any, batch: Batch, options: Options, dtype: torch.dtype) -> None:
    """That ``result`` is (out, lse) of a batch whose scales are those of ``scales_of``."""
    wide = batch.dequantized(*scales_of(batch))
    out, lse = result
    want = expect(wide, options)
    allowed = allowed_in_fp8(wide, options) if batch.q.element_size() == 1 else None
    assert out.dtype == dtype
    assert_close(out, want.out, atol=2e-2, rtol=2e-2, dtype=dtype, allowed=allowed)
    assert_lse_close(lse, want.lse, atol=5e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "e4m3"])
def test_scales_by_position(target, dtype):
    batch = make_batch([9], [30], 4, 2, 64, dtype=dtype, device=target.device)
    o_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype

    def call(backend: str) -> Any:
        return ck.single_prefill_with_kv_cache_return_lse(
            batch.q, batch.k, batch.v, *scales_of(batch), causal=True, o_dtype=o_dtype, backend=backend
        )

    check(target.attempt(call, ["fp8"] if dtype.itemsize == 1 else []), batch, Options(causal=True), o_dtype)


def test_every_position_of_the_newer_order(target):
    batch = make_batch([9], [30], 4, 2, 64, dtype=torch.bfloat16, device=target.device)
    args = (batch.q, batch.k, batch.v, *scales_of(batch), torch.bfloat16, None, None, *BEHIND_MASKS)
    check(ck.single_prefill_with_kv_cache(*args, target.backend, True), batch, OPTIONS, torch.bfloat16)
    check(ck.single_prefill_with_kv_cache_return_lse(*args), batch, OPTIONS, torch.bfloat16)
    # kv_cache_sf, k_scale and v_scale
    plain = ck.single_prefill_with_kv_cache(*args, target.backend)
    twice = ck.single_prefill_with_kv_cache(*args, target.backend, False, None, None, 2.0)
    torch.testing.assert_close(twice, 2.0 * plain)


def test_masks_of_both_orders(target):
    batch = make_batch([9], [30], 4, 2, 64, device=target.device)
    (mask,) = batch.random_masks()
    bits = ck.packbits(mask.flatten(), bitorder="little")
    tensors, options = (batch.q, batch.k, batch.v), Options(custom_masks=[mask])
    ones = [torch.ones(n, device=target.device) for n in (4, 2, 2)]
    want = ck.single_prefill_with_kv_cache(*tensors, custom_mask=mask)
    assert_close(want, expect(batch, options).out)
    for args in [
        (mask,),
        (mask, None, True, "NHD"),
        (None, bits),
        (bits.new_zeros(0), bits),  # a byte tensor in the place of the mask: the packed one wins
        (*ones, None, mask),
        (*ones, torch.float16, None, bits),
        (None, None, None, torch.float16, mask),  # the dtype tells
        (None, None, None, None, mask),  # no mask has this position in the documented order
        (None, None, None, None, None, bits),
        (None, ones[1], None, None, mask),  # one scale tells
        (None, None, ones[2], None, mask),
    ]:
        torch.testing.assert_close(ck.single_prefill_with_kv_cache(*tensors, *args), want)


@pytest.mark.parametrize("shape", [(1,), ()], ids=["one element", "no dimensions"])
def test_scales_of_one_element(target, shape):
    batch = make_batch([9], [30], 4, 2, 64, device=target.device)
    scale_q, scale_k, scale_v = (torch.full(shape, x, device=target.device) for x in (0.5, 0.75, 1.5))
    out = ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, scale_q, scale_k, scale_v, causal=True)
    want = expect(batch, Options(causal=True, q_scale=0.5, k_scale=0.75, v_scale=1.5))
    assert_close(out, want.out, atol=2e-3)


DOCUMENTED = list(inspect.signature(ck.single_prefill_with_kv_cache).parameters)[3:14]
NEWER = ["scale_q", "scale_k", "scale_v", "o_dtype", *DOCUMENTED, "backend", "return_lse"]
NEWER[NEWER.index("allow_fp16_qk_reduction")] = "use_fp16_qk_reduction"
SCALES = [torch.ones(4), torch.ones(2), torch.ones(2), torch.float16]
POSITIONS = {
    "documented": ([None, None, *BEHIND_MASKS], DOCUMENTED),
    "newer": ([*SCALES, None, None, *BEHIND_MASKS, "auto", False], NEWER),
}


@pytest.mark.runs_nothing("refuses")
@pytest.mark.parametrize("order", POSITIONS)
@pytest.mark.parametrize("function", [ck.single_prefill_with_kv_cache, ck.single_prefill_with_kv_cache_return_lse])
def test_an_argument_given_twice(function, order):
    tensors = make_batch([9], [30], 4, 2, 64)
    args, names = POSITIONS[order]
    if function is ck.single_prefill_with_kv_cache_return_lse and order == "newer":
        args = args[:-1]  # the keyword return_lse is given already
    values = dict(inspect.signature(ck.single_prefill_with_kv_cache).parameters)
    for name, value in zip(names, args):
        default = values[name].default
        again = [x for x in (value, default) if x is not None] or [torch.ones(1)]  # None is a keyword left out
        for x in again:
            with pytest.raises(TypeError, match=f"multiple values for argument '{name}'"):
                function(tensors.q, tensors.k, tensors.v, *args, **{name: x})


@pytest.mark.runs_nothing("refuses")
def test_wrong_positions():
    tensors = make_batch([9], [30], 4, 2, 64)
    qkv = (tensors.q, tensors.k, tensors.v)
    call = ck.single_prefill_with_kv_cache
    with pytest.raises(TypeError, match="takes from 3 to 14 positional arguments, but 15 were given"):
        call(*qkv, None, None, *BEHIND_MASKS, False)
    with pytest.raises(TypeError, match="takes from 3 to 23 positional arguments, but 24 were given"):
        call(*qkv, *scales_of(tensors), None, None, None, *BEHIND_MASKS, "auto", False, None, None, None, None)
    with pytest.raises(TypeError, match=r"^single_prefill_with_kv_cache\(\) missing 1 required positional"):
        call(*qkv[:2])
    with pytest.raises(TypeError, match=r"^single_prefill_with_kv_cache\(\) got multiple values for argument 'k'"):
        call(*qkv, k=tensors.k)
    with pytest.raises(TypeError, match=r"^single_prefill_with_kv_cache\(\) got an unexpected keyword argument 'cap'"):
        call(*qkv, *scales_of(tensors), cap=3.0)
    with pytest.raises(ValueError, match="scale_q"):
        call(*qkv, torch.ones(3), torch.ones(2), torch.ones(2))


def test_the_documented_signature_is_shown():
    shown = inspect.signature(ck.single_prefill_with_kv_cache)
    assert list(shown.parameters)[3:5] == ["custom_mask", "packed_custom_mask"]
    assert shown.parameters["causal"].default is False and shown.parameters["kv_layout"].default == "NHD"
    for function in (ck.single_prefill_with_kv_cache, ck.single_prefill_with_kv_cache_return_lse):
        assert function.__qualname__ == function.__name__ and "Examples:" in (function.__doc__ or "")
        assert all(x.kind is not x.VAR_POSITIONAL for x in inspect.signature(function).parameters.values())
