"""Latent attention (MLA): one key head of 576 columns, the first 512 of which are the values. The mma.sync kernel reads
caches of e4m3 as they are."""

from __future__ import annotations

import dataclasses
import random
import warnings
from typing import Any

import mla_problems
import pytest
import torch
from captures import capture
from compare import assert_bitwise, assert_close, assert_lse_close
from guards import poison_
from mla_problems import PLACES
from pairs import every
from plan_free_problems import FORMS, Mask, Options, expect, keys, queries
from problems import FP8, Batch, make_batch
from ran import counts

import cutlass_kernels as ck
from cutlass_kernels._compute.request_facts import Request
from cutlass_kernels._core.problems import Logits, Output, PagedKv, Problem

E4M3 = torch.float8_e4m3fn
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
FOR_E4M3 = [x for x in PLACES.args[1] if "fa3" not in x.id]
OF_E4M3 = pytest.mark.parametrize("place", FOR_E4M3)
# Device, backend, and the type of the cache where it is not that of queries.
SOURCES = pytest.mark.parametrize(
    "source",
    [
        *(pytest.param((*x.values[0], None), id=x.id, marks=x.marks) for x in PLACES.args[1]),
        *(pytest.param((*x.values[0], E4M3), id=f"{x.id}-e4m3", marks=x.marks) for x in FOR_E4M3),
    ],
)
kernels_of = pytest.mark.parametrize("backend", [pytest.param("fa3", marks=pytest.mark.hopper), "fa2"])
CAUSAL = Mask(causal=True)
MASKS = [CAUSAL, Mask(), Mask(causal=True, window=(100, -1)), Mask(window=(9, 30)), Mask(causal=True, chunk_size=50)]


def with_keys(batch: Batch, k: torch.Tensor) -> Batch:
    return dataclasses.replace(batch, k=k, v=k[..., :512])


def latent_batch(
    qo_lens: list[int],
    kv_lens: list[int],
    heads: int,
    device: str,
    dtype: Any = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> Batch:
    batch = make_batch(qo_lens, kv_lens, heads, 1, 576, dtype=dtype, kv_dtype=kv_dtype, device=device)
    return with_keys(batch, batch.k)


def compare(result: tuple[torch.Tensor, ...], batch: Batch, mask: Mask, options: Options | None = None) -> None:
    """Output and LSE, of dense queries too, are those of the oracle."""
    want, want_lse, base = expect(batch, mask, options or Options())
    assert_close(result[0].flatten(0, -3), want, base)
    assert_lse_close(result[1].flatten(0, -2), want_lse)


def check(batch: Batch, backend: str, form: str, mask: Mask, page_size: int = 64, **more: Any) -> torch.Tensor:
    """A call gives what it must, into an output that was NaN; returns it. On a GPU the named backend alone computes it,
    or ``taken``. Keys and values of 8 bits have the factor ``scale``."""
    descales, taken = more.pop("descales", {}), more.pop("taken", backend)
    if batch.k.dtype in FP8:
        descales = dict.fromkeys(("k_descale", "v_descale"), more.pop("scale", 0.5))
    options = Options(soft_cap=more.pop("soft_cap", None), sinks=more.pop("sinks", None), descales=descales)
    q, whose_rows = queries(batch, more.pop("dense", False))
    k, _, whose_keys = keys(batch, form, "NHD", page_size, False)
    out_dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
    out = poison_(torch.empty(*q.shape[:-1], 512, dtype=out_dtype, device=q.device))
    given = {**whose_rows, **whose_keys, **mask.arguments(batch.device), **options.arguments(batch.num_qo_heads, None)}
    before = counts()
    result, lse = ck.attention(q, k, k[..., :512], out=out, return_lse=True, backend=backend, **given, **more)
    assert result is out
    if q.is_cuda:
        assert (counts() - before).keys() == {taken}
    compare((out, lse), batch, mask, options)
    return out


@SOURCES
@every(mask=MASKS, form=FORMS, heads=[16, 128])
def test_every_form_of_keys(source, form, mask, heads):
    device, backend, kv_dtype = source
    kv_lens = [96, 96, 96] if form == "dense" else [150, 0, 333]
    check(latent_batch([4, 1, 9], kv_lens, heads, device, kv_dtype=kv_dtype), backend, form, mask)


@SOURCES
@every(num_splits=[1, 3], heads=[8, 16, 32, 64, 128])
def test_rising_maxima(source, heads, num_splits):
    """The maximum of a row rises in most KV blocks, as they come from last to first. In 16 bits it rises by the columns
    of the position: V is as small as elsewhere."""
    device, backend, kv_dtype = source
    batch = latent_batch([1, 2], [1500, 700], heads, device, kv_dtype=kv_dtype)
    first, most = (0, 8.0) if kv_dtype else (512, 24.0)
    rising = torch.cat([torch.linspace(most, 0.1, n) for n in batch.kv_lens]).to(batch.k.device)[:, None, None]
    k = batch.k.float()
    k[..., first:] *= rising
    check(with_keys(batch, k.to(batch.k.dtype)), backend, "table", CAUSAL, num_splits=num_splits)


@pytest.mark.pairwise
@SOURCES
@every(page_size=[1, 3, 8, 16, 64, 128], heads=[1, 5, 16, 24, 32, 64, 96, 128], rows=[1, 2, 3, 8], dtype=HALF)
def test_decode_steps(source, page_size, heads, rows, dtype):
    device, backend, kv_dtype = source
    lens = [700, rows, 1, 0, 64, 129] if device == "cpu" else [4100, rows, 1, 0, 64, 129, 1000]
    batch = latent_batch([rows] * len(lens), lens, heads, device, dtype, kv_dtype)
    check(batch, backend, "table", CAUSAL, page_size, dense=True)


@SOURCES
@every(seed=range(60))
def test_random(source, seed):
    device, backend, kv_dtype = source
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 7, 16, 48, 64, 128])
    count = rng.choice([1, 1, 2, 5, 33])
    most = 3000 if device != "cpu" and count < 9 else 300
    qo_lens = [rng.choice([0, 1, 1, 2, rng.randint(0, 40)]) for _ in range(count)]
    qo_lens[-1] = max(qo_lens[-1], 1)
    kv_lens = [rng.choice([0, 1, rng.randint(0, most), most]) for _ in range(count)]
    kv_lens[0] = max(kv_lens[0], 3)
    batch = latent_batch(qo_lens, kv_lens, heads, device, rng.choice([torch.float16, torch.bfloat16]), kv_dtype)
    more: dict[str, Any] = dict(num_splits=rng.choice([0, 0, 1, 3, 40]), batch_invariant=rng.random() < 0.2)
    if rng.random() < 0.2:
        more["soft_cap"] = 5.0
    if rng.random() < 0.2:
        more["sinks"] = torch.randn(heads, generator=batch.generator).to(device)
    if kv_dtype:
        more["scale"] = rng.choice([0.5, torch.full((count, 1), 0.25, device=device)])
    else:
        if rng.random() < 0.3:
            more["sm_scale"] = 576**-0.5
        if rng.random() < 0.3 and backend != "fa3":  # which reads no scales in tensors
            scales = [torch.rand(count, 1, generator=batch.generator) + 0.5 for _ in range(3)]
            names = ("q_descale", "k_descale", "v_descale")
            more["descales"] = {name: x.to(device) for name, x in zip(names, scales)}
    form = rng.choice([form for form in FORMS if form != "dense"])
    check(batch, backend, form, rng.choice(MASKS), rng.choice([1, 5, 8, 16, 24, 32, 64, 256]), **more)


@PLACES
@pytest.mark.parametrize(("soft_cap", "sm_scale"), [(None, 0.1), (None, 0.0), (None, -0.1), (5.0, 0.1)])
def test_what_changes_logits_leaves_masked_ones_masked(place, soft_cap, sm_scale):
    batch = latent_batch([1, 4, 2], [0, 70, 333], 16, place[0])
    q, whose = queries(batch, False)
    k, _, given = keys(batch, "table", "NHD", 16, False)
    call = dict(causal=True, sm_scale=sm_scale, logits_soft_cap=soft_cap, return_lse=True, backend=place[1])
    result = ck.attention(q, k, k[..., :512], **call, **whose, **given)
    compare(result, batch, CAUSAL, Options(soft_cap=soft_cap, descales=dict(q_descale=sm_scale * 24)))


def check_captured(batch: Batch, others: list[list[int]], backend: str, repeats: int = 0) -> None:
    """A captured call gives what it must for other KV lengths, none longer, and the same bits in each repetition."""
    k, _, given = keys(batch, "table", "NHD", 64, False)
    q, whose = queries(batch, True)
    out = torch.empty(*q.shape[:-1], 512, dtype=q.dtype, device=q.device)
    lens = given.pop("seqused_k").clone()
    call = dict(**whose, **given, seqused_k=lens, causal=True, out=out, backend=backend)
    call["max_seqlen_k"] = max(batch.kv_lens)
    graph, _ = capture(lambda: ck.attention(q, k, k[..., :512], **call))
    for other in others:
        lens.copy_(torch.tensor(other))
        poison_(out)
        graph.replay()
        parts = [x[:n].view(torch.uint8) for x, n in zip(batch.k.split(batch.kv_lens), other)]
        shorter = dataclasses.replace(with_keys(batch, torch.cat(parts).view(batch.k.dtype)), kv_lens=other)
        want, _, base = expect(shorter, CAUSAL, Options())
        assert_close(out.flatten(0, 1), want, base)
        first = out.clone()
        for _ in range(repeats):
            graph.replay()
            assert_bitwise(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend,kv_dtype", [pytest.param("fa3", None, marks=pytest.mark.hopper), ("fa2", None), ("fa2", E4M3)]
)
@every(heads=[8, 128])
def test_a_captured_call_follows_lengths_and_repeats_bit_by_bit(heads, backend, kv_dtype):
    batch = latent_batch([2] * 5, [900, 64, 1, 333, 4096], heads, "cuda:0", kv_dtype=kv_dtype)
    others = [[900, 64, 1, 333, 4000], [7, 63, 0, 300, 129], [900, 2, 1, 65, 2048]]
    check_captured(batch, others, backend, repeats=5)


@pytest.mark.gpu
@kernels_of
@every(rank=range(3), rows=[1, 4])
def test_keys_spread_over_ranks(rank, rows, backend):
    whole = latent_batch([rows] * 3, [700, 33, 5000], 16, "cuda:0")
    places = [torch.arange(n)[torch.arange(n) // 16 % 3 == rank] for n in whole.kv_lens]
    begins = [0, 700, 733]
    at = torch.cat([p + begin for p, begin in zip(places, begins)]).cuda()
    part = dataclasses.replace(with_keys(whole, whole.k[at]), kv_lens=[p.numel() for p in places])
    k, _, given = keys(part, "table", "NHD", 16, False)
    given["seqused_k"] = torch.tensor(whole.kv_lens, dtype=torch.int32, device="cuda:0")
    q, whose = queries(part, True)
    call = dict(**whose, **given, kv_shard=(3, rank, 16), causal=True, return_lse=True, backend=backend)
    seen = [CAUSAL.visible(b, rows, n, "cuda:0")[:, places[b].cuda()] for b, n in enumerate(whole.kv_lens)]
    compare(ck.attention(q, k, k[..., :512], **call), part, Mask(bits=seen))


@pytest.mark.gpu
@every(page_size=[1, 5, 48], heads=[4, 16, 40, 128])
def test_pages_of_any_size(page_size, heads):
    before = counts()
    check(latent_batch([1, 3, 1], [1000, 40, 0], heads, "cuda:0"), "fa2", "table", CAUSAL, page_size)
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
    check(batch, "auto", "table", CAUSAL, page_size, dense=True, taken=taken)
    assert counts() - before == {taken: 1}


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "rows"), [(16, 1), (16, 2), (128, 1), (128, 4)])
def test_auto_reads_e4m3_as_it_is(heads, rows):
    batch = latent_batch([rows] * 3, [100, 64, 700], heads, "cuda:0", kv_dtype=E4M3)
    check(batch, "auto", "table", CAUSAL, dense=True, taken="fa2")


@pytest.mark.gpu
@pytest.mark.hopper
@every(what=["values of their own", "two key heads"])
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
    result = ck.attention(q, k, v, causal=True, return_lse=True, **whose, **given)
    assert counts() - before == {"reference": 2}
    compare(result, batch, CAUSAL)


SIZES = dict(device="cuda", compute_capability=90, num_kv_heads=1, head_dim_qk=576, head_dim_vo=512)


def skip_without(*kernels: tuple[str, str]) -> None:
    """Skips where a kernel (backend, type of keys) of latent attention is not built."""
    built = {(x["backend"], x["kv_dtype"]) for x in ck.list_kernels() if x["head_dim_qk"] == 576}
    if not built.issuperset(kernels):
        pytest.skip("this build has no kernels of latent attention")


def test_explain_says_what_is_missing(extension):
    skip_without(("fa3", "float16"), ("fa2", "float16"))
    sizes = dict(SIZES, num_qo_heads=16)
    assert ck.explain(**sizes).selected == "fa3"
    assert ck.explain(**sizes, features=["short_queries"]).selected == "fa2"
    assert not ck.explain(**sizes).reasons["fa2"]
    for backend in ("fa3", "fa2"):
        for change, words in (
            (dict(features=["separate_values"]), "first columns of the keys"),
            (dict(head_dim_vo=256), "576 and 512"),
            (dict(num_kv_heads=16), "num_kv_heads=16"),
        ):
            (reason,) = ck.explain(**{**sizes, **change}).reasons[backend]
            assert words in reason


@every(q_dtype=["bfloat16", "float16", "float8_e4m3fn"])
def test_explain_knows_who_reads_e4m3(extension, q_dtype):
    skip_without(("fa2", "float8_e4m3fn"))
    asked = dict(SIZES, q_dtype=q_dtype, num_qo_heads=128)
    for features in ([], ["paged"], ["short_queries"], ["paged", "fp8_copies"]):
        assert ck.explain(**asked, kv_dtype="float8_e4m3fn", features=features).selected == "fa2"
    assert ck.explain(**asked, kv_dtype="float8_e5m2").selected == "reference"
    assert ck.explain(**asked, kv_dtype="float8_e4m3fn", features=["rope"]).selected == "reference"


# --- 8 bits -------------------------------------------------------------------------------------------------------


@OF_E4M3
@every(rows=[1, 3], heads=[16, 128])
def test_queries_of_8_bits_too(place, heads, rows):
    batch = latent_batch([rows] * 3, [300, 0, 65], heads, place[0], kv_dtype=E4M3)
    batch.q = batch.q.to(E4M3)
    check(batch, place[1], "table", CAUSAL, dense=True)


@OF_E4M3
@every(magnitude=[1e-12, 2.0**-10, 2.0**14, 1e9])
def test_queries_that_float16_does_not_hold(place, magnitude):
    """Keys become float16, and with them queries: rows of bfloat16 are scaled where they do not fit."""
    batch = latent_batch([1, 20], [200, 130], 8, place[0], kv_dtype=E4M3)
    batch.q[..., ::3] *= magnitude
    q, whose = queries(batch, False)
    k, _, given = keys(batch, "table", "NHD", 16, False)
    scale = dict(q_descale=1.0 / max(magnitude, 1.0))
    call = dict(causal=True, return_lse=True, backend=place[1], **scale)
    compare(ck.attention(q, k, k[..., :512], **call, **whose, **given), batch, CAUSAL, Options(descales=scale))


@every(where=["address", "rows"])
def test_caches_that_copies_cannot_align_are_no_kernels(where):
    rows = 592 if where == "address" else 584
    memory = torch.zeros(10 * 64 * rows + 8, dtype=torch.uint8)[8 if where == "address" else 0 :][: 10 * 64 * rows]
    k = memory.view(E4M3).view(10, 64, 1, rows)[..., :576]
    q = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [5])]
    kv = PagedKv(k, k[..., :512], *table)
    problem = Problem(q, kv, Logits(1.0), Output(q[..., :512].clone()), qo_indptr=table[0])
    assert "unaligned" in Request.from_problem(problem).features


# --- columns of the position in tensors of their own --------------------------------------------------------------


def apart(x: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The first 512 columns and the others: views of the same rows, or tensors of their own."""
    first, last = x[..., :512], x[..., 512:]
    return (first, last) if how == "views" else (mla_problems.apart(first), mla_problems.apart(last))


def check_rope_columns(place, batch: Batch, form: str, layout: str, q_is: str, k_is: str, **descales: float) -> None:
    k, _, given = keys(batch, form, layout, 16, False)
    q, whose = queries(batch, False)
    ropes = {}
    if q_is != "whole":
        q, ropes["q_rope"] = apart(q, q_is)
    v = k[..., :512]
    if k_is != "whole":
        k, ropes["k_rope"] = apart(k, k_is)
        v = k
    call, before = dict(causal=True, return_lse=True, backend=place[1], **descales), counts()
    out, lse = ck.attention(q, k, v, **ropes, **call, **whose, **given)
    if place[0] != "cpu":
        assert (counts() - before).keys() == {place[1]}
    assert out.shape == (8, 16, 512)
    compare((out, lse), batch, CAUSAL, Options(descales=descales))


@PLACES
@every(form=FORMS, layout=["NHD", "HND"], q_is=["whole", "views", "apart"], k_is=["whole", "views", "apart"])
def test_rope_columns_in_tensors_of_their_own(place, form, layout, q_is, k_is):
    kv_lens = [96, 96, 96] if form == "dense" else [150, 0, 333]
    check_rope_columns(place, latent_batch([2, 1, 5], kv_lens, 16, place[0]), form, layout, q_is, k_is)


@OF_E4M3
@every(form=FORMS, q_is_fp8=[False, True])
def test_rope_columns_of_8_bits(place, form, q_is_fp8):
    kv_lens = [96, 96, 96] if form == "dense" else [150, 0, 333]
    batch = latent_batch([2, 1, 5], kv_lens, 16, place[0], kv_dtype=E4M3)
    if q_is_fp8:
        batch.q = batch.q.to(E4M3)
    check_rope_columns(place, batch, form, "NHD", "apart", "apart", k_descale=0.5, v_descale=0.5)


@PLACES
def test_dense_queries_and_an_expanded_cache_in_two_tensors(place):
    batch = latent_batch([3, 3], [40, 40], 4, place[0])
    batch = with_keys(batch, torch.cat([batch.k[:40]] * 2))
    q, q_rope = apart(queries(batch, True)[0], "apart")
    k, k_rope = (x.unsqueeze(0).expand(2, -1, -1, -1) for x in apart(batch.k[:40], "apart"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ck.PerformanceWarning)
        compare(ck.attention(q, k, k, q_rope=q_rope, k_rope=k_rope, return_lse=True), batch, Mask())


def test_fp8_in_two_tensors_is_that_in_one():
    batch = latent_batch([1, 3], [50, 7], 4, "cpu")
    k, _, given = keys(batch, "table", "NHD", 8, False)
    k = k.nan_to_num().to(E4M3)
    q, whose = queries(batch, False)
    call = dict(causal=True, k_descale=0.5, v_descale=0.5, **whose, **given)
    ckv, kpe = apart(k, "apart")
    assert_bitwise(ck.attention(q, ckv, ckv, k_rope=kpe, **call), ck.attention(q, k, k[..., :512], **call))
    q8 = q.to(E4M3)
    want = ck.attention(q8, k, k[..., :512], **call)
    assert want.dtype == torch.bfloat16
    nope, pe = apart(q8, "apart")
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
