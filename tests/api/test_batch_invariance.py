"""attention(batch_invariant=True): the bits of a request depend on nothing but the request."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from captures import capture
from compare import assert_bitwise
from plan_free_problems import Mask, Options, check, keys, queries, random_mask
from problems import Batch, make_batch

import cutlass_kernels as ck

HEADS = [(8, 2), (4, 4), (8, 1), (40, 2), (6, 2), (64, 1)]
# Rows that a tile for decoding holds, that packed heads do, and more than these.
ROWS = [0, 1, 1, 2, 3, 7, 16, 17, 40, 64, 65, 130, 300]
KEYS = [0, 1, 127, 255, 256, 600, 1024, 1025, 2500, 5000]


def draw(rng: random.Random, device: str, **sizes: Any) -> Batch:
    count = rng.choice([2, 3, 6, 24])
    most = rng.choice([1, 4, 64, 300])
    rows = [min(rng.choice(ROWS), most) for _ in range(count)]
    rows[0] = max(rows[0], 1)
    lens = [rng.choice(KEYS) if rng.random() < 0.8 else rng.randint(0, 3000) for _ in range(count)]
    if sum(lens) == 0:
        lens[0] = 900
    return make_batch(rows, lens, *rng.choice(HEADS), device=device, seed=rng.randrange(1 << 30), **sizes)


def together_and_alone(batch: Batch, form: str, some: list[int], mask: Mask | None = None, **options: Any) -> None:
    """The requests of ``some`` have the same bits alone as in the batch."""
    mask = mask or Mask(causal=True)
    k, v, given = keys(batch, form, "NHD", 16, False)
    if batch.q.size(-1) == 576:  # latent attention: values are columns of the keys
        v = k[..., :512]
    q, whose = queries(batch, dense=False)
    options = dict(options, batch_invariant=True, return_lse=True)
    masked = mask.arguments(batch.device)
    out, lse = (x.split(batch.qo_lens) for x in ck.attention(q, k, v, **whose, **given, **masked, **options))
    rows = q.split(batch.qo_lens)
    for b in some:
        if batch.qo_lens[b] == 0:
            continue
        mine = {name: x[b : b + 1] for name, x in given.items() if name in ("page_table", "seqused_k")}
        mine["kv_layout"] = "NHD"
        key, value = (x[: sum(batch.kv_lens)].split(batch.kv_lens)[b] if form == "ragged" else x for x in (k, v))
        own_mask = dataclasses.replace(mask, bits=None if mask.bits is None else [mask.bits[b]])
        alone = ck.attention(rows[b], key, value, **mine, **own_mask.arguments(batch.device), **options)
        assert_bitwise(alone[0], out[b])
        assert_bitwise(alone[1], lse[b])


@pytest.mark.parametrize("seed", range(40))
def test_a_request_has_the_same_bits_alone(target, seed):
    rng = random.Random(seed)
    dims = rng.choice([(128, 128), (128, 128), (64, 64), (256, 256), (72, 72), (192, 128)])
    dtype = rng.choice([torch.bfloat16, torch.float16])
    batch = draw(rng, target.device, head_dim=dims[0], head_dim_vo=dims[1], dtype=dtype)
    backend = "auto" if rng.random() < 0.6 else target.backend
    options: dict[str, Any] = dict(logits_soft_cap=rng.choice([0.0, 0.0, 20.0]))
    if rng.random() < 0.3:
        options["sinks"] = torch.randn(batch.num_qo_heads, device=target.device)
    if rng.random() < 0.3:
        options["alibi_slopes"] = torch.rand(batch.num_qo_heads, device=target.device)
    if rng.random() < 0.3:
        options["k_descale"] = torch.rand(batch.num_kv_heads, device=target.device) + 0.5
    some = rng.sample(range(len(batch.qo_lens)), min(6, len(batch.qo_lens)))
    form = rng.choice(["table", "ragged"])
    together_and_alone(batch, form, some, random_mask(rng, batch), backend=backend, **options)


F16, B16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
MASKED = [(128, F16, F16), (64, B16, B16), (40, F16, F16)]
MASKED_ON_A_GPU = [(512, B16, B16), (192, F16, F16), (128, B16, E4M3), (64, F16, torch.float8_e5m2), (128, E4M3, E4M3)]


@pytest.mark.parametrize(
    "head_dim, dtype, kv_dtype", [*MASKED, *(pytest.param(*x, marks=pytest.mark.gpu) for x in MASKED_ON_A_GPU)]
)
@pytest.mark.parametrize("heads", [(16, 2), (4, 4)])
def test_custom_masks(target, heads, head_dim, dtype, kv_dtype):
    """Rows past the end of a request would have the mask of the next one."""
    if kv_dtype.itemsize == 1 and target.backend != "fa2":
        pytest.skip("attention() makes no copies, and fp8 below masks has no kernel but fa2's")
    rows, lens = [679, 33, 1, 80], [1200, 900, 203, 2047]
    for backend in {"auto", target.backend if dtype == kv_dtype != E4M3 else "auto"}:
        batch = make_batch(rows, lens, *heads, head_dim, device=target.device, dtype=dtype, kv_dtype=kv_dtype)
        mask = Mask(bits=batch.random_masks(0.02))
        scales = {name: torch.rand(heads[1], device=target.device) + 0.5 for name in ("k_descale", "v_descale")}
        for options in ({}, dict(sinks=torch.randn(heads[0], device=target.device)), scales):
            together_and_alone(batch, "ragged", [0, 1, 2, 3], mask, backend=backend, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "fa2"])
@pytest.mark.parametrize("form", ["table", "ragged"])
@pytest.mark.parametrize("rows, length", [(64, 16384), (64, 8192), (32, 8192), (17, 9000), (130, 5000)])
def test_tiles_of_a_request_are_split_alike(backend, form, rows, length):
    batch = make_batch([rows, 3, rows], [length, 40, 700], 32, 8, 128, device="cuda:0")
    together_and_alone(batch, form, [0, 2], backend=backend)


@pytest.mark.parametrize("head_dim", [96, 192, 512])
@pytest.mark.parametrize("rows", [[1, 5, 80], [1, 1, 1]])
def test_other_head_dims(target, head_dim, rows):
    batch = make_batch(rows, [700, 2100, 300], 8, 2, head_dim, device=target.device)
    together_and_alone(batch, "table", [0, 1, 2], backend="auto")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("rows", [[1, 5, 80], [2, 1, 1]])
def test_fp8_caches(kv_dtype, rows):
    batch = make_batch(rows, [700, 2100, 300], 8, 2, 128, device="cuda:0", kv_dtype=kv_dtype)
    together_and_alone(batch, "table", [0, 1, 2], backend="auto")


@pytest.mark.parametrize("heads", [5, 16, 128])
@pytest.mark.parametrize("rows", [[1, 5, 40], [1, 1, 1], [2, 3, 1]])
def test_latent_attention(target, rows, heads):
    batch = make_batch(rows, [4100, 2100, 300], heads, 1, 576, device=target.device, dtype=torch.bfloat16)
    batch = dataclasses.replace(batch, v=batch.k[..., :512])
    together_and_alone(batch, "table", [0, 1, 2], backend="auto")


@pytest.mark.parametrize("seed", range(40))
def test_results(target, seed):
    rng = random.Random(1000 + seed)
    batch = draw(rng, target.device, head_dim=rng.choice([64, 128, 256]))
    extra = dict(batch_invariant=True, num_splits=rng.choice([0, 0, 0, 1]))
    form = rng.choice(["table", "indices", "ragged", "used"])
    if form == "used" and max(batch.kv_lens) > 1100:
        form = "table"
    auto = type(target)(target.device, "auto") if rng.random() < 0.6 else target
    check(batch, auto, form, random_mask(rng, batch), Options(alibi=rng.random() < 0.2, extra=extra))


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_dense_queries_have_the_bits_of_ragged_ones(target, rows):
    batch = make_batch([rows] * 3, [900, 17, 2300], 8, 2, 128, device=target.device)
    k, v, given = keys(batch, "table", "NHD", 16, False)
    options: dict[str, Any] = dict(causal=True, batch_invariant=True, backend="auto")
    results = []
    for dense in (False, True):
        q, whose = queries(batch, dense)
        results.append(ck.attention(q, k, v, **whose, **given, **options).reshape(batch.q.shape))
    assert_bitwise(*results)


def test_bounds_of_lengths_change_no_bit(target):
    batch = make_batch([1, 30, 2, 90], [900, 2000, 17, 2300], 8, 2, 128, device=target.device)
    k, v, given = keys(batch, "table", "NHD", 16, False)
    q, whose = queries(batch, dense=False)
    options: dict[str, Any] = dict(causal=True, batch_invariant=True, backend="auto", **given)
    want = ck.attention(q, k, v, **whose, **options)
    whose["max_seqlen_q"] = q.size(0)
    assert_bitwise(ck.attention(q, k, v, **whose, max_seqlen_k=2300, **options), want)


@pytest.mark.gpu
def test_captured_calls_follow_new_lengths():
    batch = make_batch([1, 40, 2, 90], [900, 2000, 17, 2300], 8, 2, 128, device="cuda:0")
    k, v, given = keys(batch, "table", "NHD", 16, False)
    q, whose = queries(batch, dense=False)
    whose["max_seqlen_q"] = q.size(0)
    options: dict[str, Any] = dict(causal=True, batch_invariant=True, **given)
    call = lambda: ck.attention(q, k, v, **whose, **options)  # noqa: E731
    graph, out = capture(call, warm_up=2)
    for lens in ([900, 2000, 17, 2300], [33, 1900, 0, 90], [900, 5, 17, 2300]):
        given["seqused_k"].copy_(torch.tensor(lens))
        for _ in range(2):
            graph.replay()
            assert_bitwise(out, call())
    # Rows move from one request to another, and so from one kernel to another.
    for bounds in ([0, 50, 51, 130, 133], [0, 1, 2, 3, 133]):
        whose["cu_seqlens_q"].copy_(torch.tensor(bounds))
        graph.replay()
        assert_bitwise(out, call())


def test_masks_of_bits(target):
    batch = make_batch([1, 30, 70], [900, 600, 800], 8, 2, 64, device=target.device)
    bits = batch.random_masks(0.5)
    for backend in (target.backend, "auto"):
        on, options = type(target)(target.device, backend), Options(extra=dict(batch_invariant=True))
        check(batch, on, "table", Mask(bits=bits), options)
