"""Latent attention (MLA): one key head of 576 columns, the first 512 of which are the values."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from guards import poison_
from plan_free_problems import Mask, Options, expect, keys, queries
from problems import Batch, make_batch

import cutlass_kernels as ck


@pytest.fixture(autouse=True)
def _needs_a_kernel(request: pytest.FixtureRequest) -> None:
    built = {(kernel["backend"], kernel["head_dim_qk"]) for kernel in ck.list_kernels()}
    if request.node.get_closest_marker("gpu") and ("fa3", 576) not in built:
        pytest.skip("this build has no fa3 kernel of latent attention")


on_hopper = pytest.mark.parametrize(
    "place",
    [
        pytest.param(("cpu", "reference"), id="cpu-reference"),
        pytest.param(("cuda:0", "fa3"), id="cuda-fa3", marks=[pytest.mark.gpu, pytest.mark.hopper]),
    ],
)
MASKS = [Mask(causal=True), Mask(), Mask(causal=True, window=(100, -1)), Mask(causal=True, chunk_size=50)]
PAGED = ["table", "indices"]


def latent_batch(qo_lens: list[int], kv_lens: list[int], heads: int, device: str, dtype: Any = torch.bfloat16) -> Batch:
    batch = make_batch(qo_lens, kv_lens, heads, 1, 576, dtype=dtype, device=device)
    return dataclasses.replace(batch, v=batch.k[..., :512])


def check(batch: Batch, backend: str, form: str, mask: Mask, page_size: int = 64, **more: Any) -> torch.Tensor:
    """A call gives what it must, into an output that was NaN; returns it."""
    q, whose_rows = queries(batch, more.pop("dense", False))
    k, _, whose_keys = keys(batch, form, more.pop("layout", "NHD"), page_size, False)
    out = poison_(torch.empty(*q.shape[:-1], 512, dtype=q.dtype, device=q.device))
    given = {**whose_rows, **whose_keys, **mask.arguments(batch.device)}
    result, lse = ck.attention(q, k, k[..., :512], out=out, return_lse=True, backend=backend, **given, **more)
    assert result is out
    want, want_lse, base = expect(batch, mask, Options())
    assert_close(out.flatten(0, -3), want, base)
    assert_lse_close(lse.flatten(0, -2), want_lse)
    return out


@on_hopper
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("form", PAGED)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [16, 128])
def test_masks(place, form, layout, mask, heads):
    check(latent_batch([4, 1, 9], [150, 0, 333], heads, place[0]), place[1], form, mask, layout=layout)


@pytest.mark.pairwise
@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("heads", [1, 5, 16, 24, 32, 64, 96, 128])
@pytest.mark.parametrize("page_size", [8, 16, 64, 128])
def test_decode_steps(place, page_size, heads, rows, dtype):
    lens = [700, rows, 1, 0, 64, 129] if place[0] == "cpu" else [4100, rows, 1, 0, 64, 129, 1000]
    batch = latent_batch([rows] * len(lens), lens, heads, place[0], dtype)
    check(batch, place[1], "table", Mask(causal=True), page_size, dense=True)


@on_hopper
@pytest.mark.parametrize("seed", range(60))
def test_random(place, seed):
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 7, 16, 48, 64, 128])
    count = rng.choice([1, 1, 2, 5, 33])
    most = 3000 if place[0] != "cpu" and count < 9 else 300
    qo_lens = [rng.choice([0, 1, 1, 2, rng.randint(0, 40)]) for _ in range(count)]
    qo_lens[-1] = max(qo_lens[-1], 1)
    kv_lens = [rng.choice([0, 1, rng.randint(0, most), most]) for _ in range(count)]
    kv_lens[0] = max(kv_lens[0], 3)
    batch = latent_batch(qo_lens, kv_lens, heads, place[0], rng.choice([torch.float16, torch.bfloat16]))
    more: dict[str, Any] = dict(num_splits=rng.choice([0, 0, 1, 3, 40]), batch_invariant=rng.random() < 0.2)
    check(batch, place[1], rng.choice(PAGED), rng.choice(MASKS), rng.choice([8, 16, 24, 32, 64, 256]), **more)


@pytest.mark.gpu
@pytest.mark.hopper
def test_a_captured_call_follows_lengths_and_repeats_bit_by_bit():
    batch = latent_batch([2] * 5, [900, 64, 1, 333, 4000], 128, "cuda:0")
    k, _, given = keys(batch, "table", "NHD", 64, False)
    q, whose = queries(batch, True)
    out = torch.empty(*q.shape[:-1], 512, dtype=q.dtype, device=q.device)
    lens = given.pop("seqused_k").clone()
    call = dict(**whose, **given, seqused_k=lens, causal=True, out=out, max_seqlen_k=4096, backend="fa3")
    ck.attention(q, k, k[..., :512], **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ck.attention(q, k, k[..., :512], **call)
    for other in ([900, 64, 1, 333, 4000], [7, 63, 0, 300, 129], [900, 2, 1, 65, 2048]):
        lens.copy_(torch.tensor(other))
        poison_(out)
        graph.replay()
        shorter = latent_batch(batch.qo_lens, other, 128, "cuda:0")
        shorter.q = batch.q
        parts = [x[:n] for x, n in zip(batch.k.split(batch.kv_lens), other)]
        shorter.k = torch.cat(parts)
        shorter.v = shorter.k[..., :512]
        want, _, base = expect(shorter, Mask(causal=True), Options())
        assert_close(out.flatten(0, 1), want, base)
        first = out.clone()
        for _ in range(5):
            graph.replay()
            assert_bitwise(out, first)
