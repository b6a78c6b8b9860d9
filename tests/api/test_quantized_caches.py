"""attention() over quantized latent caches (kv_format), by lists and by pages, against the oracle."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import oracle
import pytest
import quantized_caches
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from mla_problems import DEVICES
from pairs import every
from quantized_caches import LAYOUTS, UNNAMED
from quantized_problems import Quantized, make, run
from refusals import Row, rows

import cutlass_kernels as ck
from cutlass_kernels._caches import latent_formats
from cutlass_kernels._compute import selection

INT32, U8, E4M3 = torch.int32, torch.uint8, torch.float8_e4m3fn
BF16, HALF = torch.bfloat16, torch.float16
# What fa3 reads: all columns of each format, and those of 656 bytes for queries without RoPE.
OF_FA3 = [*LAYOUTS, "v3.2 without RoPE"]
pytestmark = pytest.mark.filterwarnings("ignore::cutlass_kernels.PerformanceWarning")


def options_of(seed: int, heads: int, device: str) -> dict[str, Any]:
    rng = random.Random(seed)
    options: dict[str, Any] = dict(sm_scale=rng.choice([None, 192**-0.5, 0.5]))
    if rng.random() < 0.5:
        options["sinks"] = torch.randn(heads, generator=torch.Generator().manual_seed(seed)).to(device) * 3
    return options


def for_fa3(name: str, caches: int, seed: int, **given: Any) -> Quantized:
    kind, _, without_rope = name.partition(" ")
    dim = 512 if without_rope else None
    return make([kind] * caches, seed, "cuda:0", dim=dim, padding=given.pop("padding", 16), start=16, **given)


@DEVICES
@every(name=list(LAYOUTS), seed=range(8))
def test_random_lists(device, name, seed):
    rng = random.Random(seed)
    sizes = dict(rows=rng.choice([1, 2, 7]), heads=rng.choice([1, 3, 8, 64]), dtype=rng.choice([BF16, HALF]))
    problem = make([name], seed, device, widths=(rng.choice([1, 31, 64, 100]),), lengths=rng.random() < 0.5, **sizes)
    problem.options = options_of(seed, sizes["heads"], device)
    problem.check(*run(problem))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_is_the_number_that_it_stands_for(name):
    """A bfloat16 number: of all e4m3 bytes and exponents of scales, NaN included."""
    kind, layout = latent_formats.FORMATS[name], LAYOUTS[name]
    cache = quantized_caches.empty(name, 256, 1)
    every_byte = torch.arange(256, dtype=torch.int64)
    for page in range(256):
        view = cache.view.as_strided((layout.size,), (1,), page * cache.view.stride(0))
        quantized_caches.write(name, view, 1, 0, torch.Generator().manual_seed(page))
        latent, scales, _ = quantized_caches.addresses(name, 1, 0)
        view[latent : latent + 256] = (every_byte + page).to(U8)
        if layout.scales == "ue8m0":
            view[scales] = page
    found = latent_formats.decoded(latent_formats.parts(cache.view, kind), kind)[:, 0]
    want = cache.numbers()
    assert found.dtype == BF16 and bool(want.isnan().any())
    torch.testing.assert_close(found.double(), want, rtol=0.0, atol=0.0, equal_nan=True)


@DEVICES
@every(form=["HND", "tokens", "tokens HND", "int8", "e4m3", "named", "parts", "dense", "values"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_forms_give_the_same(device, name, form):
    if LAYOUTS[name].by_page and "tokens" in form:
        pytest.skip("pages of 4 dimensions alone")
    problem = make([name], 3, device, pages=4, page_size=1 if "tokens" in form else 6)
    want, call = run(problem), problem.arguments()
    k = call["k"]
    if form == "HND":
        k, call["kv_layout"] = k.transpose(1, 2), "HND"
    elif form == "tokens":
        k = k.squeeze(1)
    elif form == "tokens HND":
        k, call["kv_layout"] = k.squeeze(1).transpose(0, 1), "HND"
    elif form == "int8":
        k = k.view(torch.int8)
    elif form in ("e4m3", "named"):
        k, call["kv_format"] = k.view(E4M3) if form == "e4m3" else k, name
    elif form == "parts":
        q, rope = problem.q.split([problem.q.size(2) - 64, 64], -1)
        call |= dict(q=q.contiguous(), q_rope=rope.contiguous())
    found = run(problem, **call | dict(k=k, v=k.view(k.shape) if form == "values" else k))
    for x, y in zip(found, want):
        assert_bitwise(x, y)


def test_queries_without_rope_read_the_latent_columns():
    """GLM-5.3-Flash: 512 columns of 656 bytes."""
    problem = make(["v3.2"], 5, dim=512)
    problem.check(*run(problem))


@every(dtype=[E4M3, torch.float32, torch.float64], name=["v3.2", "v4"])
def test_queries_of_other_types(dtype, name):
    problem = make([name], 6, lists=["full"], lengths=False)
    narrow = problem.q.to(dtype)
    out = ck.attention(**problem.arguments() | dict(q=narrow))
    assert out.dtype == (BF16 if dtype == E4M3 else dtype)
    problem.q = narrow.to(BF16)
    want, _ = problem.expected()
    torch.testing.assert_close(out.double(), want.out, atol=2e-2, rtol=2e-2)


# --- requests in pages, without lists ---


@DEVICES
@every(name=list(LAYOUTS), causal=[False, True], where=["table", "indptr", "ragged", "dense"])
def test_requests(device, name, causal, where):
    if LAYOUTS[name].by_page and where == "ragged":
        pytest.skip("pages of 4 dimensions alone")
    lens, n, heads = [13, 0, 24], 2, 4
    layout, per_page = LAYOUTS[name], {"ragged": 1, "dense": 24}.get(where, 8)
    pages = sum(lens) if where == "ragged" else 3 if where == "dense" else 7
    cache = quantized_caches.empty(name, pages, per_page, device, padding=1 if where == "ragged" else 576)
    order = list(range(pages)) if where in ("ragged", "dense") else [5, 2, 0, 6, 1, 3, 4]
    need = [-(-m // per_page) for m in lens] if where != "dense" else [1, 1, 1]
    mine = [[order.pop(0) for _ in range(count)] for count in need]
    used = [False] * cache.slots
    slots = [[page * per_page + i for page in of for i in range(per_page)][:m] for of, m in zip(mine, lens)]
    for slot in chain.from_iterable(slots):
        used[slot] = True
    quantized_caches.filled(cache, used)
    q = torch.randn(3, n, heads, layout.columns).to(device, BF16)
    k = cache.view.squeeze(1) if where == "ragged" else cache.view

    def ints(x: list[Any]) -> torch.Tensor:
        return torch.tensor(x, dtype=INT32, device=device)

    given: dict[str, Any] = dict(q=q)
    if where == "table":
        given |= dict(page_table=ints([[*of, 99, 99, 99][:3] for of in mine]), seqused_k=ints(lens))
    elif where == "indptr":
        starts = [0, *torch.tensor(need).cumsum(0).tolist()]
        given |= dict(kv_indptr=ints(starts), kv_indices=ints([*chain.from_iterable(mine)]), seqused_k=ints(lens))
    elif where == "dense":
        given |= dict(seqused_k=ints(lens))
    else:
        starts = [0, *torch.tensor(lens).cumsum(0).tolist()]
        given |= dict(q=q.flatten(0, 1), cu_seqlens_q=ints([0, 2, 4, 6]), cu_seqlens_k=ints(starts))
    kv_format = None if name in UNNAMED else name
    call = dict(k=k, v=k, kv_format=kv_format, causal=causal, sm_scale=0.1, return_lse=True)
    out, lse = ck.attention(**given, **call)
    out, lse = out.view(3, n, heads, 512), lse.view(3, n, heads)
    numbers = cache.numbers()
    for b, of in enumerate(slots):
        keys = numbers[of]
        mask = oracle.visible(n, len(of), causal=causal, device=device)
        options = dict(mask=mask, sm_scale=0.1)
        want = oracle.attention(q[b].double(), keys, keys[..., :512], **options)
        narrow = keys.to(BF16)
        base = oracle.attention(q[b], narrow, narrow[..., :512], arithmetic=BF16, **options)
        assert_close(out[b], want.out, base.out.to(BF16))
        assert_lse_close(lse[b], want.lse)


def test_new_outputs_have_the_columns_of_the_values():
    problem = make(["v3.2"], 1)
    assert ck.attention(**problem.arguments()).shape == (5, 8, 512)
    empty = make(["v4"], 1, rows=0)
    assert ck.attention(**empty.arguments()).shape == (0, 8, 512)
    gone = quantized_caches.empty("v4", 0, 16).view
    out, lse = ck.attention(**make(["v4"], 1).arguments() | dict(k=gone, v=gone), return_lse=True)
    assert not out.any() and bool((lse == -torch.inf).all())


@pytest.mark.gpu
@pytest.mark.hopper
@every(name=OF_FA3, seed=range(30))
def test_fa3_reads_tokens_at_multiples_of_16_bytes(name, seed):
    rng = random.Random(seed)
    sizes = dict(
        rows=rng.choice([1, 2, 7]), heads=rng.choice([1, 8, 16, 64, 96, 128]), page_size=rng.choice([1, 2, 7, 16, 64])
    )
    given = dict(widths=(rng.choice([1, 31, 64, 100, 128, 300, 700]),), lengths=rng.random() < 0.5)
    problem = for_fa3(name, 1, seed, padding=rng.choice([16, 576]), **sizes, **given)
    problem.options = options_of(seed, sizes["heads"], "cuda:0")
    problem.check(*run(problem, "fa3", num_splits=rng.choice([0, 0, 1, 7])))


@pytest.mark.gpu
@pytest.mark.hopper
@every(name=OF_FA3, heads=[12, 16, 64, 96, 128, 192], caches=[1, 2], num_splits=[0, 1])
def test_fa3_takes_more_rows_than_there_are_thread_blocks(name, heads, caches, num_splits):
    """So each computes several tiles, as do pairs of them."""
    problem = for_fa3(name, caches, heads, rows=300, heads=heads, page_size=16, widths=(130, 70))
    problem.options = options_of(heads + caches, heads, "cuda:0")
    problem.check(*run(problem, "fa3", num_splits=num_splits))


@pytest.mark.gpu
@pytest.mark.hopper
@every(name=OF_FA3, heads=[8, 64, 128], caches=[1, 2])
def test_fa3_writes_no_row_of_impossible_lengths(name, heads, caches):
    problem = for_fa3(name, caches, 1, rows=6, heads=heads, page_size=16, widths=(130, 70))
    want = run(problem, "fa3", num_splits=1)  # whose bits do not depend on other rows
    for scope in problem.scopes:
        assert scope.lengths is not None
        scope.lengths[1], scope.lengths[4] = -1, scope.indices.size(2) + 1
        found = run(problem, "fa3", num_splits=1)
        for x, y in zip(found[::2], want[::2]):  # poisoned
            assert bool(x[[1, 4]].isnan().all())
            assert_bitwise(x[[0, 2, 3, 5]], y[[0, 2, 3, 5]])


@pytest.mark.gpu
@pytest.mark.hopper
@every(name=OF_FA3, heads=[8, 64, 128], caches=[1, 2])
def test_fa3_takes_lists_without_room(name, heads, caches):
    problem = for_fa3(name, caches, 1, rows=6, heads=heads, page_size=16, widths=(0, 70))
    problem.check(*run(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [pytest.param("fa3", marks=pytest.mark.hopper), "fa2"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_kernels_leave_others_to_pytorch_and_say_so(name, backend, monkeypatch):
    monkeypatch.setattr(selection, "_warned", set())  # the same reasons are given once in a process
    problem = make([name], 1, "cuda:0", dtype=HALF)
    with pytest.warns(ck.PerformanceWarning, match="kv_format"):
        problem.check(*run(problem))
    with pytest.raises(ValueError, match=f"kv_format.*, for these tensors and options, has no {backend} kernel"):
        run(problem, backend)


# --- refusals ---

Q = torch.zeros(4, 8, 576, dtype=BF16)
LIST = torch.zeros(4, 1, 5, dtype=INT32)


def of_bytes(size: int, page_size: int = 16) -> torch.Tensor:
    return torch.zeros(3, page_size, 1, size, dtype=U8)


def both(k: torch.Tensor, **others: Any) -> dict[str, Any]:
    return dict(k=k, v=k, **others)


NARROW = Q[..., :512]
REFUSED: list[Row] = [
    *rows(ValueError, "{name}={value} is unknown: use one of 'v3.2', 'v3.2_nope'", kv_format="fp8"),
    *rows(ValueError, "{name}={value} is unknown", kv_format=656),
    (dict(kv_format="v4"), ValueError, "k has dtype torch.uint8 .* kv_format='v4' is .* 584 bytes"),
    (
        both(of_bytes(528), q=NARROW),
        ValueError,
        "528 bytes .* pass kv_format='v3.2_nope' or 'v4.1_pages' or 'v4.1_tokens'",
    ),
    (both(of_bytes(640)), ValueError, "q has head_dim 576 and k 640"),
    (both(of_bytes(576)), ValueError, "k and v have dtype torch.uint8"),
    (both(of_bytes(640), kv_format="v3.2"), ValueError, "640.* kv_format='v3.2' is .* 656 bytes"),
    (
        both(torch.zeros(3, 16, 1, 576, dtype=BF16), kv_format="v4"),
        ValueError,
        "k has dtype torch.bfloat16 .* kv_format='v4'",
    ),
    (both(of_bytes(584)), ValueError, r"q has head_dim 576, but k .*kv_format='v4'\) has keys of 512 columns"),
    (dict(q=Q[..., :448]), ValueError, "q has head_dim 448, but k .* has keys of 576 or 512 columns"),
    (both(torch.zeros(3, 16, 2, 656, dtype=U8)), ValueError, "has one head"),
    (dict(v=of_bytes(656)), ValueError, "v has shape .*: pass v=k"),
    (dict(v=of_bytes(656)[..., :512]), ValueError, "v has shape .*: they may differ|pass v=k"),
    (dict(k_rope=of_bytes(64)), ValueError, "k_rope=.* but a quantized latent cache holds .* leave it out"),
    (
        both(of_bytes(584).flatten(0, 1), q=NARROW),
        ValueError,
        r"page size must be known: pass \[pages, page_size, 1, 584",
    ),
    (both(of_bytes(584, 1).squeeze(1), q=NARROW), ValueError, "page size must be known"),
    (both(of_bytes(528).flatten(0, 1), q=NARROW, kv_format="v4.1_pages"), ValueError, "page size must be known"),
    (both(of_bytes(656).view(E4M3)), ValueError, "q has head_dim 576 and k 656"),
    (both(of_bytes(1312)[..., ::2]), ValueError, "k has stride 2 in its last dimension"),
    (both(of_bytes(1168)[..., :584], q=NARROW), ValueError, "pages of kv_format='v4' are 16 \\* 584 adjacent bytes"),
    (both(of_bytes(656).float()), ValueError, "q has head_dim 576 and k 656"),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_refusals(change, error, words):
    out = torch.full((4, 8, 512), 7.0, dtype=BF16)
    with pytest.raises(error, match=words):
        ck.attention(**{**both(of_bytes(656)), "q": Q, "kv_indices_per_token": LIST, "out": out, **change})
    assert bool((out == 7.0).all())
