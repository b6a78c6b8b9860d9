"""Latent attention (MLA): one key head of 576 columns, the first 512 of which are the values."""

from __future__ import annotations

import dataclasses
import random
import warnings
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from guards import poison_
from plan_free_problems import FORMS, Mask, Options, expect, keys, queries
from problems import Batch, make_batch
from ran import counts

import cutlass_kernels as ck

on_hopper = pytest.mark.parametrize(
    "place",
    [
        pytest.param(("cpu", "reference"), id="cpu-reference"),
        pytest.param(("cuda:0", "fa3"), id="cuda-fa3", marks=[pytest.mark.gpu, pytest.mark.hopper]),
        pytest.param(("cuda:0", "fa2"), id="cuda-fa2", marks=[pytest.mark.gpu]),
    ],
)
kernels_of = pytest.mark.parametrize("backend", [pytest.param("fa3", marks=pytest.mark.hopper), "fa2"])
MASKS = [
    Mask(causal=True),
    Mask(),
    Mask(causal=True, window=(100, -1)),
    Mask(window=(9, 30)),
    Mask(causal=True, chunk_size=50),
]


def latent_batch(qo_lens: list[int], kv_lens: list[int], heads: int, device: str, dtype: Any = torch.bfloat16) -> Batch:
    batch = make_batch(qo_lens, kv_lens, heads, 1, 576, dtype=dtype, device=device)
    return dataclasses.replace(batch, v=batch.k[..., :512])


def check(batch: Batch, backend: str, form: str, mask: Mask, page_size: int = 64, **more: Any) -> torch.Tensor:
    """A call gives what it must, into an output that was NaN; returns it."""
    descales = more.pop("descales", {})
    options = Options(soft_cap=more.pop("soft_cap", None), sinks=more.pop("sinks", None), descales=descales)
    q, whose_rows = queries(batch, more.pop("dense", False))
    k, _, whose_keys = keys(batch, form, more.pop("layout", "NHD"), page_size, False)
    out = poison_(torch.empty(*q.shape[:-1], 512, dtype=q.dtype, device=q.device))
    given = {**whose_rows, **whose_keys, **mask.arguments(batch.device), **options.arguments(batch.num_qo_heads, None)}
    result, lse = ck.attention(q, k, k[..., :512], out=out, return_lse=True, backend=backend, **given, **more)
    assert result is out
    want, want_lse, base = expect(batch, mask, options)
    assert_close(out.flatten(0, -3), want, base)
    assert_lse_close(lse.flatten(0, -2), want_lse)
    return out


@on_hopper
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [16, 128])
def test_every_form_of_keys(place, form, mask, heads):
    kv_lens = [96, 96, 96] if form == "dense" else [150, 0, 333]
    check(latent_batch([4, 1, 9], kv_lens, heads, place[0]), place[1], form, mask)


@on_hopper
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("heads", [8, 32, 64, 128])
def test_rising_maxima(place, heads, num_splits):
    """The maximum of a row rises in most KV blocks, as they come from last to first. It rises by the columns of the
    position: V is as small as elsewhere."""
    batch = latent_batch([1, 2], [1500, 700], heads, place[0])
    rising = torch.cat([torch.linspace(24.0, 0.1, n) for n in batch.kv_lens]).to(batch.k.device)[:, None, None]
    k = torch.cat([batch.k[..., :512], (batch.k[..., 512:] * rising).to(batch.k.dtype)], -1)
    batch = dataclasses.replace(batch, k=k, v=k[..., :512])
    check(batch, place[1], "table", Mask(causal=True), num_splits=num_splits)


@pytest.mark.pairwise
@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("heads", [1, 5, 16, 24, 32, 64, 96, 128])
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 64, 128])
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
    if rng.random() < 0.2:
        more["soft_cap"] = 5.0
    if rng.random() < 0.2:
        more["sinks"] = torch.randn(heads, generator=batch.generator).to(place[0])
    if rng.random() < 0.3:
        more["sm_scale"] = 576**-0.5
    if rng.random() < 0.3 and place[1] != "fa3":  # which reads no scales in tensors
        scales = [torch.rand(count, 1, generator=batch.generator) + 0.5 for _ in range(3)]
        names = ("q_descale", "k_descale", "v_descale")
        more["descales"] = {name: x.to(place[0]) for name, x in zip(names, scales)}
    form = rng.choice([form for form in FORMS if form != "dense"])
    check(batch, place[1], form, rng.choice(MASKS), rng.choice([1, 5, 8, 16, 24, 32, 64, 256]), **more)


@on_hopper
@pytest.mark.parametrize(("soft_cap", "sm_scale"), [(None, 0.1), (None, 0.0), (None, -0.1), (5.0, 0.1)])
def test_what_changes_logits_leaves_masked_ones_masked(place, soft_cap, sm_scale):
    batch = latent_batch([1, 4, 2], [0, 70, 333], 16, place[0])
    q, whose = queries(batch, False)
    k, _, given = keys(batch, "table", "NHD", 16, False)
    options = Options(soft_cap=soft_cap, descales=dict(q_descale=sm_scale * 24))
    call = dict(causal=True, sm_scale=sm_scale, logits_soft_cap=soft_cap, return_lse=True, backend=place[1])
    out, lse = ck.attention(q, k, k[..., :512], **call, **whose, **given)
    want, want_lse, base = expect(batch, Mask(causal=True), options)
    assert_close(out, want, base)
    assert_lse_close(lse, want_lse)


def check_captured(batch: Batch, others: list[list[int]], backend: str, repeats: int = 0) -> None:
    """A captured call gives what it must for other KV lengths, none longer, and the same bits in each repetition."""
    k, _, given = keys(batch, "table", "NHD", 64, False)
    q, whose = queries(batch, True)
    out = torch.empty(*q.shape[:-1], 512, dtype=q.dtype, device=q.device)
    lens = given.pop("seqused_k").clone()
    call = dict(**whose, **given, seqused_k=lens, causal=True, out=out, backend=backend)
    call["max_seqlen_k"] = max(batch.kv_lens)
    ck.attention(q, k, k[..., :512], **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ck.attention(q, k, k[..., :512], **call)
    for other in others:
        lens.copy_(torch.tensor(other))
        poison_(out)
        graph.replay()
        shorter = latent_batch(batch.qo_lens, other, batch.num_qo_heads, str(batch.device))
        shorter.q = batch.q
        shorter.k = torch.cat([x[:n] for x, n in zip(batch.k.split(batch.kv_lens), other)])
        shorter.v = shorter.k[..., :512]
        want, _, base = expect(shorter, Mask(causal=True), Options())
        assert_close(out.flatten(0, 1), want, base)
        first = out.clone()
        for _ in range(repeats):
            graph.replay()
            assert_bitwise(out, first)


@pytest.mark.gpu
@kernels_of
@pytest.mark.parametrize("heads", [8, 128])
def test_a_captured_call_follows_lengths_and_repeats_bit_by_bit(heads, backend):
    batch = latent_batch([2] * 5, [900, 64, 1, 333, 4096], heads, "cuda:0")
    others = [[900, 64, 1, 333, 4000], [7, 63, 0, 300, 129], [900, 2, 1, 65, 2048]]
    check_captured(batch, others, backend, repeats=5)


@pytest.mark.gpu
@kernels_of
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("rows", [1, 4])
def test_keys_spread_over_ranks(rank, rows, backend):
    whole = latent_batch([rows] * 3, [700, 33, 5000], 16, "cuda:0")
    places = [torch.arange(n)[torch.arange(n) // 16 % 3 == rank] for n in whole.kv_lens]
    begins = [0, 700, 733]
    at = torch.cat([p + begin for p, begin in zip(places, begins)]).cuda()
    part = Batch(whole.qo_lens, [p.numel() for p in places], whole.q, whole.k[at], whole.k[at][..., :512])
    k, _, given = keys(part, "table", "NHD", 16, False)
    given["seqused_k"] = torch.tensor(whole.kv_lens, dtype=torch.int32, device="cuda")
    q, whose = queries(part, True)
    call = dict(**whose, **given, kv_shard=(3, rank, 16), causal=True, return_lse=True, backend=backend)
    out, lse = ck.attention(q, k, k[..., :512], **call)
    seen = [Mask(causal=True).visible(b, rows, n, "cuda:0")[:, places[b].cuda()] for b, n in enumerate(whole.kv_lens)]
    want, want_lse, base = expect(part, Mask(bits=seen), Options())
    assert_close(out.flatten(0, 1), want, base)
    assert_lse_close(lse.flatten(0, 1), want_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 5, 48])
@pytest.mark.parametrize("heads", [4, 16, 40, 128])
def test_pages_of_any_size(page_size, heads):
    batch = latent_batch([1, 3, 1], [1000, 40, 0], heads, "cuda:0")
    before = counts()
    check(batch, "fa2", "table", Mask(causal=True), page_size)
    assert counts() - before == {"fa2": 1}


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(
    ("heads", "rows", "page_size", "taken"),
    [(16, 1, 64, "fa2"), (4, 4, 64, "fa2"), (16, 2, 64, "fa3"), (128, 1, 64, "fa3"), (128, 1, 5, "fa3")],
)
def test_auto_takes_fa2_for_few_rows(heads, rows, page_size, taken):
    batch = latent_batch([rows] * 3, [100, 64, 700], heads, "cuda:0")
    before = counts()
    check(batch, "auto", "table", Mask(causal=True), page_size, dense=True)
    assert counts() - before == {taken: 1}


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("what", ["values of their own", "two key heads"])
def test_what_the_kernel_does_not_read_is_never_computed_wrongly(what):
    batch = latent_batch([1, 3], [100, 40], 4, "cuda:0")
    if what == "two key heads":
        batch = make_batch([1, 3], [100, 40], 4, 2, 576, head_dim_vo=512, dtype=torch.bfloat16, device="cuda:0")
    k, v, given = keys(batch, "table", "NHD", 16, False)
    q, whose = queries(batch, False)
    for backend in ("fa3", "fa2"):
        with pytest.raises((ValueError, RuntimeError), match=backend):
            ck.attention(q, k, v, causal=True, backend=backend, **whose, **given)
    before = counts()
    out = ck.attention(q, k, v, causal=True, **whose, **given)
    assert counts() - before == {"reference": 2}
    want, _, base = expect(batch, Mask(causal=True), Options())
    assert_close(out, want, base)


def test_explain_says_what_is_missing(extension):
    sizes = dict(
        device="cuda", compute_capability=90, num_qo_heads=16, num_kv_heads=1, head_dim_qk=576, head_dim_vo=512
    )
    built = {(kernel["backend"], kernel["head_dim_qk"]) for kernel in ck.list_kernels()}
    if not {("fa3", 576), ("fa2", 576)} <= built:
        pytest.skip("this build has no kernels of latent attention")
    assert ck.explain(**sizes).selected == "fa3"
    assert ck.explain(**sizes, features=["short_queries"]).selected == "fa2"
    assert not ck.explain(**sizes).reasons["fa2"]
    for backend in ("fa3", "fa2"):
        (reason,) = ck.explain(**sizes, features=["separate_values"]).reasons[backend]
        assert "first columns of the keys" in reason
        (reason,) = ck.explain(**dict(sizes, head_dim_vo=256)).reasons[backend]
        assert "576 and 512" in reason
        (reason,) = ck.explain(**dict(sizes, num_kv_heads=16)).reasons[backend]
        assert "num_kv_heads=16" in reason


def apart(x: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The first 512 columns and the others: views of the same rows, or tensors of their own."""
    first, last = x[..., :512], x[..., 512:]
    return (first, last) if how == "views" else (first.contiguous(), last.contiguous())


@on_hopper
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("q_is", ["whole", "views", "apart"])
@pytest.mark.parametrize("k_is", ["whole", "views", "apart"])
def test_rope_columns_in_tensors_of_their_own(place, form, layout, q_is, k_is):
    device = place[0]
    kv_lens = [96, 96, 96] if form == "dense" else [150, 0, 333]
    batch = latent_batch([2, 1, 5], kv_lens, 16, device)
    k, _, given = keys(batch, form, layout, 16, False)
    q, whose = queries(batch, False)
    ropes = {}
    if q_is != "whole":
        q, ropes["q_rope"] = apart(q, q_is)
    v = k[..., :512]
    if k_is != "whole":
        k, ropes["k_rope"] = apart(k, k_is)
        v = k
    out, lse = ck.attention(q, k, v, **ropes, causal=True, return_lse=True, backend=place[1], **whose, **given)
    want, want_lse, base = expect(batch, Mask(causal=True), Options())
    assert out.shape == (8, 16, 512)
    assert_close(out, want, base)
    assert_lse_close(lse, want_lse)


@on_hopper
def test_dense_queries_and_an_expanded_cache_in_two_tensors(place):
    batch = latent_batch([3, 3], [40, 40], 4, place[0])
    batch.k = torch.cat([batch.k[:40]] * 2)
    batch.v = batch.k[..., :512]
    q, _ = queries(batch, True)
    q, q_rope = apart(q, "apart")
    k, k_rope = (x.unsqueeze(0).expand(2, -1, -1, -1) for x in apart(batch.k[:40], "apart"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ck.PerformanceWarning)
        out = ck.attention(q, k, k, q_rope=q_rope, k_rope=k_rope)
    want, _, base = expect(batch, Mask(), Options())
    assert_close(out.flatten(0, 1), want, base)


def test_fp8_in_two_tensors_is_that_in_one():
    batch = latent_batch([1, 3], [50, 7], 4, "cpu")
    k, _, given = keys(batch, "table", "NHD", 8, False)
    k = k.nan_to_num().to(torch.float8_e4m3fn)
    q, whose = queries(batch, False)
    call = dict(causal=True, k_descale=0.5, v_descale=0.5, **whose, **given)
    want = ck.attention(q, k, k[..., :512], **call)
    ckv, kpe = (x.view(torch.uint8).contiguous().view(k.dtype) for x in apart(k, "views"))
    assert_bitwise(ck.attention(q, ckv, ckv, k_rope=kpe, **call), want)
    q8 = q.to(torch.float8_e4m3fn)
    want = ck.attention(q8, k, k[..., :512], **call)
    assert want.dtype == torch.bfloat16
    nope, pe = (x.view(torch.uint8).contiguous().view(q8.dtype) for x in apart(q8, "views"))
    assert_bitwise(ck.attention(nope, ckv, ckv, q_rope=pe, k_rope=kpe, **call), want)


def test_a_gradient_of_rope_columns_is_refused_in_backward():
    q, k = torch.randn(1, 2, 512), torch.randn(5, 1, 512)
    q_rope, k_rope = torch.randn(1, 2, 64, requires_grad=True), torch.randn(5, 1, 64)
    out = ck.attention(q, k, k, q_rope=q_rope, k_rope=k_rope)
    with pytest.raises(RuntimeError, match="forward only"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q_rope": torch.zeros(2, 4, 32)}, ValueError, "head_dim"),
        ({"q_rope": torch.zeros(2, 3, 64)}, ValueError, "q_rope has shape"),
        ({"q_rope": torch.zeros(2, 4, 64).half()}, ValueError, "q_rope has dtype"),
        ({"q_rope": 1.0}, TypeError, "q_rope is float"),
        ({"q_rope": None}, ValueError, "q has head_dim 512 and k 576"),
        ({"k_rope": torch.zeros(9, 1, 128)[..., ::2]}, ValueError, "contiguous"),
        ({"k_rope": torch.zeros(8, 1, 64)}, ValueError, "k_rope has shape"),
        ({"k_rope": [1]}, TypeError, "k_rope is list"),
        ({"k_rope": None}, ValueError, "q has head_dim 576 and k 512"),
        ({"v": torch.zeros(9, 1, 512)}, ValueError, "Pass v=k"),
    ],
)
def test_wrong_rope_tensors_are_refused_in_a_sentence(change, error, words):
    k = torch.zeros(9, 1, 512)
    call = dict(q=torch.zeros(2, 4, 512), k=k, v=k, q_rope=torch.zeros(2, 4, 64), k_rope=torch.zeros(9, 1, 64))
    with pytest.raises(error, match=words):
        ck.attention(**{**call, **change})


def test_the_default_scale_counts_all_columns():
    q, k = torch.randn(3, 2, 576), torch.randn(9, 1, 576)
    (nope, pe), (ckv, kpe) = apart(q, "apart"), apart(k, "apart")
    want = ck.attention(q, k, k[..., :512], sm_scale=576**-0.5)
    assert_bitwise(ck.attention(nope, ckv, ckv, q_rope=pe, k_rope=kpe), want)


def test_the_operator_of_a_traced_call_takes_them():
    q, k = torch.randn(3, 2, 576), torch.randn(9, 1, 576)
    (nope, pe), (ckv, kpe) = apart(q, "apart"), apart(k, "apart")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(nope, pe, ckv, kpe):
        return ck.attention(nope, ckv, ckv, q_rope=pe, k_rope=kpe, return_lse=True)

    want = ck.attention(q, k, k[..., :512], return_lse=True)
    for x, y in zip(step(nope, pe, ckv, kpe), want):
        assert_bitwise(x, y)
    assert step(nope, pe, ckv, kpe)[0].shape == (3, 2, 512)
