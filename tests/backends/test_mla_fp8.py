"""Latent attention (MLA) over caches of e4m3, which the mma.sync kernel reads as they are."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from guards import poison_
from mla_problems import apart
from plan_free_problems import FORMS, Mask, Options, expect, keys, queries
from problems import Batch, make_batch
from ran import counts

import cutlass_kernels as ck
from cutlass_kernels._compute.request_facts import Request
from cutlass_kernels._core.problems import Logits, Output, PagedKv, Problem

E4M3 = torch.float8_e4m3fn
PLACES = pytest.mark.parametrize(
    "place",
    [
        pytest.param(("cpu", "reference"), id="cpu-reference"),
        pytest.param(("cuda:0", "fa2"), id="cuda-fa2", marks=pytest.mark.gpu),
    ],
)


def fp8_batch(qo_lens: list[int], kv_lens: list[int], heads: int, device: str, dtype: Any = torch.bfloat16) -> Batch:
    batch = make_batch(qo_lens, kv_lens, heads, 1, 576, dtype=dtype, kv_dtype=E4M3, device=device)
    return dataclasses.replace(batch, v=batch.k[..., :512])


def check(batch: Batch, backend: str, form: str, mask: Mask, page_size: int = 64, **more: Any) -> torch.Tensor:
    """A call gives what it must, into an output that was NaN; returns it. On a GPU that backend alone computes it."""
    scale = more.pop("scale", 0.5)
    descales = dict(k_descale=scale, v_descale=scale)
    options = Options(soft_cap=more.pop("soft_cap", None), sinks=more.pop("sinks", None), descales=descales)
    q, whose_rows = queries(batch, more.pop("dense", False))
    k, _, whose_keys = keys(batch, form, more.pop("layout", "NHD"), page_size, False)
    out_dtype = torch.bfloat16 if q.dtype == E4M3 else q.dtype
    out = poison_(torch.empty(*q.shape[:-1], 512, dtype=out_dtype, device=q.device))
    given = {**whose_rows, **whose_keys, **mask.arguments(batch.device), **options.arguments(batch.num_qo_heads, None)}
    before = counts()
    result, lse = ck.attention(q, k, k[..., :512], out=out, return_lse=True, backend=backend, **given, **more)
    assert result is out
    if q.is_cuda:
        assert (counts() - before).keys() == {"fa2"}
    want, want_lse, base = expect(batch, mask, options)
    assert_close(out.flatten(0, -3), want, base)
    assert_lse_close(lse.flatten(0, -2), want_lse)
    return out


@PLACES
@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(), Mask(causal=True, window=(100, -1))], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [16, 128])
def test_every_form_of_keys(place, form, mask, heads):
    kv_lens = [96, 96, 96] if form == "dense" else [150, 0, 333]
    check(fp8_batch([4, 1, 9], kv_lens, heads, place[0]), place[1], form, mask)


@PLACES
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("heads", [8, 16, 32, 128])
def test_rising_maxima(place, heads, num_splits):
    """The maximum of a row rises in most KV blocks, as they come from last to first."""
    batch = fp8_batch([1, 2], [1500, 700], heads, place[0])
    rising = torch.cat([torch.linspace(8.0, 0.1, n) for n in batch.kv_lens]).to(batch.k.device)[:, None, None]
    k = (batch.k.float() * rising).to(E4M3)
    batch = dataclasses.replace(batch, k=k, v=k[..., :512])
    check(batch, place[1], "table", Mask(causal=True), num_splits=num_splits)


@pytest.mark.pairwise
@PLACES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("heads", [1, 5, 16, 32, 64, 128])
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 64, 128])
def test_decode_steps(place, page_size, heads, rows, dtype):
    lens = [700, rows, 1, 0, 64, 129] if place[0] == "cpu" else [4100, rows, 1, 0, 64, 129, 1000]
    batch = fp8_batch([rows] * len(lens), lens, heads, place[0], dtype)
    check(batch, place[1], "table", Mask(causal=True), page_size, dense=True)


@PLACES
@pytest.mark.parametrize("seed", range(40))
def test_random(place, seed):
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 7, 16, 48, 64, 128])
    count = rng.choice([1, 1, 2, 5, 33])
    most = 3000 if place[0] != "cpu" and count < 9 else 300
    qo_lens = [rng.choice([0, 1, 1, 2, rng.randint(0, 40)]) for _ in range(count)]
    qo_lens[-1] = max(qo_lens[-1], 1)
    kv_lens = [rng.choice([0, 1, rng.randint(0, most), most]) for _ in range(count)]
    kv_lens[0] = max(kv_lens[0], 3)
    batch = fp8_batch(qo_lens, kv_lens, heads, place[0], rng.choice([torch.float16, torch.bfloat16]))
    more: dict[str, Any] = dict(num_splits=rng.choice([0, 0, 1, 3, 40]), batch_invariant=rng.random() < 0.2)
    more["scale"] = rng.choice([0.5, torch.full((count, 1), 0.25, device=place[0])])
    if rng.random() < 0.2:
        more["soft_cap"] = 5.0
    if rng.random() < 0.2:
        more["sinks"] = torch.randn(heads, generator=batch.generator).to(place[0])
    form = rng.choice([form for form in FORMS if form != "dense"])
    check(batch, place[1], form, rng.choice([Mask(causal=True), Mask()]), rng.choice([1, 5, 8, 16, 64, 256]), **more)


@PLACES
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("heads", [16, 128])
def test_queries_of_8_bits_too(place, heads, rows):
    batch = fp8_batch([rows] * 3, [300, 0, 65], heads, place[0])
    batch.q = batch.q.to(E4M3)
    check(batch, place[1], "table", Mask(causal=True), dense=True)


@PLACES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("q_is_fp8", [False, True])
def test_rope_columns_in_tensors_of_their_own(place, form, q_is_fp8):
    kv_lens = [96, 96, 96] if form == "dense" else [150, 0, 333]
    batch = fp8_batch([2, 1, 5], kv_lens, 16, place[0])
    if q_is_fp8:
        batch.q = batch.q.to(E4M3)
    k, _, given = keys(batch, form, "NHD", 16, False)
    q, whose = queries(batch, False)
    (q, q_rope), (k, k_rope) = ((apart(x[..., :512]), apart(x[..., 512:])) for x in (q, k))
    before = counts()
    call = dict(causal=True, k_descale=0.5, v_descale=0.5, return_lse=True, backend=place[1])
    out, lse = ck.attention(q, k, k, q_rope=q_rope, k_rope=k_rope, **call, **whose, **given)
    if place[0] != "cpu":
        assert (counts() - before).keys() == {"fa2"}
    want, want_lse, base = expect(batch, Mask(causal=True), Options(descales=dict(k_descale=0.5, v_descale=0.5)))
    assert_close(out, want, base)
    assert_lse_close(lse, want_lse)


@PLACES
@pytest.mark.parametrize("magnitude", [1e-12, 2.0**-10, 2.0**14, 1e9])
def test_queries_that_float16_does_not_hold(place, magnitude):
    """Keys become float16, and with them queries: rows of bfloat16 are scaled where they do not fit."""
    batch = fp8_batch([1, 20], [200, 130], 8, place[0])
    batch.q[..., ::3] *= magnitude
    q, whose = queries(batch, False)
    k, _, given = keys(batch, "table", "NHD", 16, False)
    scale = 1.0 / max(magnitude, 1.0)
    call = dict(causal=True, q_descale=scale, return_lse=True, backend=place[1])
    out, lse = ck.attention(q, k, k[..., :512], **call, **whose, **given)
    want, want_lse, base = expect(batch, Mask(causal=True), Options(descales=dict(q_descale=scale)))
    assert_close(out, want, base)
    assert_lse_close(lse, want_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 128])
def test_a_captured_call_follows_lengths_and_repeats_bit_by_bit(heads):
    batch = fp8_batch([2] * 5, [900, 64, 1, 333, 4000], heads, "cuda:0")
    k, _, given = keys(batch, "table", "NHD", 64, False)
    q, whose = queries(batch, True)
    out = torch.empty(*q.shape[:-1], 512, dtype=q.dtype, device=q.device)
    lens = given.pop("seqused_k").clone()
    call = dict(**whose, **given, seqused_k=lens, causal=True, out=out, max_seqlen_k=4096, backend="fa2")
    ck.attention(q, k, k[..., :512], **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ck.attention(q, k, k[..., :512], **call)
    for other in ([900, 64, 1, 333, 4000], [7, 63, 0, 300, 129]):
        lens.copy_(torch.tensor(other))
        poison_(out)
        graph.replay()
        parts = [x[:n] for x, n in zip(batch.k.split(batch.kv_lens), other)]
        joined = torch.cat([x.view(torch.uint8) for x in parts]).view(E4M3)
        shorter = Batch(batch.qo_lens, other, batch.q, joined, joined[..., :512], batch.generator)
        want, _, base = expect(shorter, Mask(causal=True), Options())
        assert_close(out.flatten(0, 1), want, base)
        first = out.clone()
        for _ in range(5):
            graph.replay()
            assert_bitwise(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "rows"), [(16, 1), (16, 2), (128, 1), (128, 4)])
def test_auto_reads_e4m3_as_it_is(heads, rows):
    batch = fp8_batch([rows] * 3, [100, 64, 700], heads, "cuda:0")
    check(batch, "auto", "table", Mask(causal=True), dense=True)


@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_explain_knows_who_reads_e4m3(extension, q_dtype):
    built = {(kernel["backend"], kernel["head_dim_qk"], kernel["kv_dtype"]) for kernel in ck.list_kernels()}
    if ("fa2", 576, "float8_e4m3fn") not in built:
        pytest.skip("this build has no kernels of latent attention")
    sizes = dict(num_qo_heads=128, num_kv_heads=1, head_dim_qk=576, head_dim_vo=512)
    asked = dict(device="cuda", compute_capability=90, q_dtype=q_dtype, **sizes)
    for features in ([], ["paged"], ["short_queries"], ["paged", "fp8_copies"]):
        assert ck.explain(**asked, kv_dtype="float8_e4m3fn", features=features).selected == "fa2"
    assert ck.explain(**asked, kv_dtype="float8_e5m2").selected == "reference"
    assert ck.explain(**asked, kv_dtype="float8_e4m3fn", features=["rope"]).selected == "reference"


@pytest.mark.parametrize("where", ["address", "rows"])
def test_caches_that_copies_cannot_align_are_no_kernels(where):
    rows = 592 if where == "address" else 584
    memory = torch.zeros(10 * 64 * rows + 8, dtype=torch.uint8)[8 if where == "address" else 0 :][: 10 * 64 * rows]
    k = memory.view(E4M3).view(10, 64, 1, rows)[..., :576]
    q = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [5])]
    kv = PagedKv(k, k[..., :512], *table)
    problem = Problem(q, kv, Logits(1.0), Output(q[..., :512].clone()), qo_indptr=table[0])
    assert "unaligned" in Request.from_problem(problem).features
