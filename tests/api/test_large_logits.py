"""Logits that are all of one huge size, so that fp32 has few bits left for what sets them apart.

An LSE of 3.5e5 in fp32 is a multiple of 2^-5, and a product of that size rounded to one of 2^-6: 1 % of a weight.
Nothing of the kind may happen on the way from q . k, which is exact here, to the output, into however many splits the
keys are divided: among warps, thread blocks or kernels.
"""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from compare import assert_close, assert_lse_close
from planned_runs import paged, ragged
from problems import Batch, Options, make_batch
from targets import Target
from wrapper_problems import Wrapped

LEVELS = [-1e4, -1e5, -2.4e5, 2.4e5]
DTYPES = [torch.float16, torch.bfloat16]
E4M3 = torch.float8_e4m3fn
CAUSAL = Options(causal=True)
# What is lost by rounding P, and the output: nothing of it grows with the logits. Each rounding is off by up to 2^-8 of
# a number in bfloat16, and a row of few keys can meet both.
TOLERANCE = {torch.float16: (1e-3, 2**-11), torch.bfloat16: (2e-3, 2 * 2**-8)}
LENS = ([40, 1, 0, 3], [3000, 1700, 40, 700])
SPLITS = [{}, {"fixed_split_size": 256}, {"disable_split_kv": True}]


def large(
    level: float,
    qo_lens: list[int],
    kv_lens: list[int],
    dim: int,
    dtype: torch.dtype,
    target: Any,
    same_sign: int = 256,
    **kwargs: Any,
) -> Batch:
    """A batch whose logits are ``level`` and a few more or less.

    Every q . k is an integer below 2^22, by whatever order of additions. Values have the same sign in so many keys in
    a row, so that wrong weights of splits do not cancel.
    """
    batch = make_batch(qo_lens, kv_lens, 4, 2, dim, dtype=dtype, device=target.device, **kwargs)
    for x in (batch.q, batch.k):
        x.copy_(torch.randint(-1, 2, x.shape, generator=batch.generator).to(x.dtype))
    size = 8192.0 if batch.k.dtype == E4M3 else 1024.0
    batch.q[..., 0] = size
    batch.k[..., 0] = torch.tensor(level * dim**0.5 / size).to(batch.k.dtype).to(target.device)
    assert float(batch.k[0, 0, 0].float().abs()) * size < 2**22
    sign = torch.cat([torch.arange(length) // same_sign % 2 for length in kv_lens]).to(target.device) * 2 - 1
    batch.v.copy_((batch.v.float() * 0.25 + sign[:, None, None]).to(batch.v.dtype))
    return batch


def check(got: tuple[torch.Tensor, ...], batch: Batch, options: Options) -> None:
    """Against the oracle alone: a program in 16 bits, which other tests compare to as well, cannot hold such logits."""
    states = []
    for b, (q, k, v) in enumerate(batch.requests()):
        custom = None if options.custom_masks is None else options.custom_masks[b]
        mask = oracle.visible(len(q), len(k), causal=options.causal, custom_mask=custom, device=q.device)
        states.append(oracle.attention(q, k, v, mask=mask, sm_scale=options.sm_scale, sinks=options.sinks))
    atol, rtol = TOLERANCE[batch.q.dtype]
    assert_close(got[0], torch.cat([x.out for x in states]), atol=atol, rtol=rtol)
    assert_lse_close(got[1], torch.cat([x.lse for x in states]))


@pytest.mark.pairwise
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("how", [ragged, paged])
def test_few_keys(target, level, dim, how):
    # Few enough for the error of a single weight to be seen.
    batch = large(level, [6, 1], [9, 4], dim, torch.float16, target, same_sign=1)
    for options in (Options(causal=True), Options(sm_scale=-(dim**-0.5))):
        check(how(target, batch, options), batch, options)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long_queries(target, dtype, level, dim):
    # A tile computes all keys of its rows: the others are as exact as these.
    batch = large(level, [150], [700], dim, dtype, target)
    check(ragged(target, batch, CAUSAL), batch, CAUSAL)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_short_queries(kernels, dtype, level, dim, split):
    batch = large(level, *LENS, dim, dtype, kernels)
    for how in (ragged, paged):
        check(how(kernels, batch, CAUSAL, **split), batch, CAUSAL)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("split", [{}, {"fixed_split_size": 16}, {"disable_split_kv": True}], ids=str)
def test_decode(kernels, dtype, level, dim, split):
    batch = large(level, [1] * 8, [3000, 700, 5, 1500] * 2, dim, dtype, kernels)
    check(Wrapped(kernels, "decode", batch).plan(**split).run(return_lse=True), batch, Options())


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 17, 100])
def test_a_single_request(target, dtype, level, rows):
    batch = large(level, [rows], [4000], 128, dtype, target)
    check(Wrapped(target, "single", batch).plan(CAUSAL).run(return_lse=True), batch, CAUSAL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", [-1e5, -2.4e5])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dim", [64, 128])
def test_fp8_keys(kernels, dtype, level, rows, dim):
    # On fa2 warps share the rows of a tile, each with a part of the keys.
    batch = large(level, [rows] * 2, [2900, 700], dim, dtype, kernels, kv_dtype=E4M3)
    check(paged(kernels, batch, Options()), batch, Options())


def check_sinks(level: float, lens: tuple[list[int], list[int]], dim: int, target: Target, **split: Any) -> None:
    # Sinks that count for little, something and nearly all. The scale is a power of two: another one is known to 24
    # bits, and so are the differences between logits and sinks.
    batch = large(level, *lens, dim, torch.float16, target)
    base = float(batch.q[0, 0, 0].float() * batch.k[0, 0, 0].float()) / dim**0.5
    options = Options(causal=True, sinks=base + torch.linspace(-2.0, 10.0, 4, device=target.device))
    check(ragged(target, batch, options, **split), batch, options)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [64, 256])
def test_sinks_of_the_same_size(target, level, dim):
    check_sinks(level, ([6], [9]), dim, target)
    check_sinks(level, ([150], [700]), dim, target)


@pytest.mark.pairwise
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_sinks_beside_splits(kernels, level, dim, split):
    check_sinks(level, LENS, dim, kernels, **split)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("lens", [LENS, ([150], [700])], ids=["short", "long"])
def test_negative_scales(target, level, lens):
    batch = large(level, *lens, 128, torch.float16, target)
    options = Options(causal=True, sm_scale=-(128**-0.5))
    check(ragged(target, batch, options), batch, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", [-1e4, -2.4e5])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_masks_of_bits(kernels, dtype, level, split):
    batch = large(level, [40, 3], [3000, 700], 128, dtype, kernels)
    options = Options(custom_masks=batch.random_masks(0.5))
    check(ragged(kernels, batch, options, **split), batch, options)
