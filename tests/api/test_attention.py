"""attention(): lengths and tables on the device, no plan."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from plan_free_problems import FORMS, Mask, Options, caller, check, expect, random_batch, random_mask
from problems import make_batch, randn
from refusals import rows

import cutlass_kernels as ck
from cutlass_kernels._core import index_vectors

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_form_of_keys(target, form, layout, causal):
    kv_lens = [50, 50, 50] if form == "dense" else [50, 0, 33]
    batch = make_batch([20, 3, 33], kv_lens, device=target.device)
    check(batch, target, form, Mask(causal=causal), layout=layout)


@pytest.mark.parametrize("mask", [Mask(window=(5, 3)), Mask(chunk_size=7), Mask(True, (5, -1), 7)], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_masks(target, mask, soft_cap):
    batch = make_batch([12] * 3, [40] * 3, 6, 2, device=target.device)
    check(batch, target, "dense", mask, Options(soft_cap=soft_cap), dense=True)


@pytest.mark.parametrize("seed", range(120))
def test_random_calls(target, seed):
    rng = random.Random(seed)
    dtype = rng.choice([torch.float16, torch.bfloat16])
    dims = rng.choice([(64, 64), (64, 64), (128, 128), (256, 256), (80, 80), (192, 128)])
    if target.backend != "fa3" and rng.random() < 0.1:
        dims = (512, 512)
    batch, dense = random_batch(rng, target.device, dtype, head_dim=dims[0], head_dim_vo=dims[1])
    mask = random_mask(rng, batch)
    options = Options(soft_cap=rng.choice([None, None, None, 20.0]), alibi=rng.random() < 0.15)
    if rng.random() < 0.2:
        options.sinks = torch.randn(batch.num_qo_heads, device=target.device)
    if rng.random() < 0.15:
        shape = (len(batch.qo_lens), batch.num_kv_heads)
        options.descales = {x: torch.rand(shape, device=target.device) + 0.5 for x in ("k_descale", "v_descale")}
    options.extra = dict(num_splits=rng.choice([0, 0, 1, 3, 7]))
    form = rng.choice(FORMS)
    layout = rng.choice(["NHD", "HND"])
    side_by_side = layout == "NHD" and rng.random() < 0.3
    page_size = rng.choice([1, 5, 16, 64, 128])
    given = dict(layout=layout, side_by_side=side_by_side, page_size=page_size, dense=dense)
    check(batch, target, form, mask, options, **given)


@pytest.mark.parametrize("form", ["table", "dense"])
@pytest.mark.parametrize("kv_dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("rows", [1, 30])
def test_8_bit_caches_under_16_bit_queries(target, form, kv_dtype, rows):
    if target.backend == "fa3" and (form == "dense" or kv_dtype != E4M3):
        pytest.skip(
            "attention() makes no copies, and of such caches fa3 reads e4m3 in pages alone: fa2 serves the others"
        )
    batch = make_batch([rows] * 3, [90, 7, 200], 8, 2, 128, kv_dtype=kv_dtype, device=target.device)
    scales = torch.rand(3, 2, device=target.device) + 0.5
    for descales in ({}, dict(k_descale=0.5, v_descale=2.0), dict(k_descale=scales, v_descale=scales[:1])):
        options = Options(descales=descales)
        if descales and isinstance(descales["v_descale"], torch.Tensor):
            options = Options(descales=dict(k_descale=scales, v_descale=scales[0]))
        check(batch, target, form, Mask(causal=True), options, dense=True)


@pytest.mark.parametrize("form", ["table", "dense", "ragged"])
def test_8_bit_queries(target, form):
    batch = make_batch([30, 1, 64], [90, 7, 200], 8, 2, 128, dtype=E4M3, device=target.device)
    scales = torch.rand(3, 2, device=target.device) + 0.5
    for descales in ({}, dict(q_descale=scales, k_descale=scales.flip(0), v_descale=scales.flip(1))):
        out, _ = check(batch, target, form, Mask(causal=True), Options(descales=descales))
        assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("seed", range(6))
def test_8_bit_queries_that_no_fp8_kernel_takes(target, dtype, page_size, seed):
    batch = make_batch([30, 1, 64], [90, 7, 200], 8, 2, 128, dtype=dtype, device=target.device)
    mask = random_mask(random.Random(seed), batch)

    def call(backend):
        check(batch, dataclasses.replace(target, backend=backend), "table", mask, page_size=page_size)

    target.attempt(call, [] if dtype == E4M3 else ["e5m2_keys_as_they_are"])


def test_used_rows(target):
    batch = make_batch([20, 3, 33], [50, 9, 70], device=target.device)
    used = torch.tensor([7, 0, 33], dtype=torch.int32, device=target.device)
    out = torch.full_like(batch.q, 7.0)
    caller(target, batch, "ragged")(seqused_q=used, out=out, causal=True)
    shorter = make_batch([7, 33], [50, 70])
    rows = [*range(7), *range(23, 56)]
    shorter.q = batch.q[rows]
    shorter.k, shorter.v = (torch.cat([x[:50], x[59:]]) for x in (batch.k, batch.v))
    want, _, base = expect(shorter, Mask(causal=True), Options())
    assert_close(out[rows], want, base)
    assert bool((out[7:23] == 7.0).all())


@pytest.mark.parametrize("learned", [False, True])
def test_used_rows_of_requests_that_do_not_join(target, learned):
    batch = make_batch([5, 5, 5], [50, 9, 70], device=target.device)
    used = torch.tensor([2, 0, 5], dtype=torch.int32, device=target.device)
    call = caller(target, batch, dense=True, seqused_q=used)
    want = call()
    for value in (7.0, 9.0, 7.0, 9.0):  # freed memory may hold one of them
        big = torch.full((3, 8, 4, 64), value, dtype=batch.q.dtype, device=target.device).requires_grad_(learned) * 1
        out = big[:, :5]
        call(out=out)
        for b, count in enumerate([2, 0, 5]):
            assert_bitwise(out[b, :count], want[b, :count])
            assert bool((out[b, count:] == value).all())


def test_rows_behind_the_last_request_are_not_written(target):
    batch = make_batch([4, 5], [30, 40], device=target.device)
    q = torch.cat([batch.q, batch.q])
    out = torch.full_like(q, 7.0)
    caller(target, batch)(q=q, out=out)
    assert bool((out[9:] == 7.0).all()) and not bool((out[:9] == 7.0).all(-1).any())


@pytest.mark.parametrize("dense", [False, True])
def test_lse_in_both_bases(target, dense):
    call = caller(target, make_batch([6, 6], [30, 40], device=target.device), dense=dense, return_lse=True)
    assert_lse_close(call(lse_base=math.e)[1] / math.log(2.0), call(lse_base=2)[1].double())


@pytest.mark.parametrize("splits", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("rows", [1, 20])
def test_splits(target, splits, rows):
    batch = make_batch([rows] * 3, [900, 17, 300], 8, 1, 128, device=target.device)
    check(batch, target, "table", Mask(causal=True), Options(extra=dict(num_splits=splits)), dense=True)


def test_a_single_request_needs_no_lengths(target):
    batch = make_batch([30], [50], device=target.device)
    out = ck.attention(batch.q, batch.k, batch.v, causal=True, backend=target.backend)
    want, _, base = expect(batch, Mask(causal=True), Options())
    assert_close(out, want, base)


def test_strides(target):
    """q of a packed projection, out inside a larger tensor, rows of a batch that do not follow one another."""
    generator = torch.Generator().manual_seed(3)
    qkv = randn((3, 8, 6, 64), torch.float16, target.device, generator)  # [B, n, 4 + 1 + 1 heads, D]
    q, k, v = qkv[:, :, :4], qkv[:, :, 4:5], qkv[:, :, 5:]
    batch = make_batch([8] * 3, [8] * 3, 4, 1)
    batch.q, batch.k, batch.v = (x.reshape(24, -1, 64) for x in (q, k, v))
    want, _, base = expect(batch, Mask(causal=True), Options())
    out = ck.attention(q, k, v, causal=True, backend=target.backend)
    assert_close(out.flatten(0, 1), want, base)
    room = torch.full((3, 9, 4, 64), 7.0, dtype=torch.float16, device=target.device)
    returned = ck.attention(q, k, v, causal=True, out=room[:, :8], backend=target.backend)
    assert_bitwise(returned, out)
    assert bool((room[:, 8] == 7.0).all()) and returned.data_ptr() == room.data_ptr()
    rows = qkv.transpose(0, 1)[:, :, :4]  # [n, B, ...]: requests of 3 rows
    twisted = ck.attention(rows, k[:1].expand(8, -1, -1, -1), v[:1].expand(8, -1, -1, -1), backend=target.backend)
    straight = [ck.attention(rows[b], k[0], v[0], backend=target.backend) for b in range(8)]
    assert_close(twisted, torch.stack(straight).double(), atol=2e-3)


def test_index_tensors_may_be_of_64_bits_and_on_the_cpu(target):
    """Bounds may be integers of numpy, as vLLM passes them for chunked local attention."""
    batch = make_batch([4, 5], [30, 40], device=target.device)
    call = caller(target, batch, max_seqlen_k=40)
    out = call()
    assert_bitwise(call(max_seqlen_q=np.int32(5), max_seqlen_k=np.int64(40)), out)
    vectors = {n: x for n, x in call.keywords.items() if isinstance(x, torch.Tensor) and x.dtype == torch.int32}
    for change in (lambda x: x.long(), lambda x: x.cpu()):
        assert_bitwise(call(**{n: change(x) for n, x in vectors.items()}), out)


@pytest.mark.runs_nothing("there are no rows")
def test_empty_calls(target):
    batch = make_batch([2, 3], [30, 40], device=target.device)
    none = torch.zeros(3, dtype=torch.int32, device=target.device)
    out, lse = caller(target, batch, backend="auto")(
        q=batch.q[:0], cu_seqlens_q=none, max_seqlen_q=None, return_lse=True
    )
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


ANY = (ValueError, TypeError, RuntimeError)
WRONG = [
    (dict.fromkeys("kv", torch.zeros(2, 9, 2, 128).half()), ANY, "q has head_dim 64 and k 128"),
    (dict.fromkeys("kv", torch.zeros(3, 9, 2, 64).half()), ANY, "k holds 3 requests"),
    (dict.fromkeys("kv", torch.zeros(9, 2, 64).half()), ANY, "for 2 requests: pass cu_seqlens_k"),
    (
        dict(q=torch.zeros(24, 5, 64).half()) | dict.fromkeys("kv", torch.zeros(8, 16, 64).half()),
        ANY,
        r"q is \[rows, num_qo_heads, head_dim\]: where heads come first",
    ),
    (dict(kv_indptr=torch.zeros(3).int(), page_table=torch.zeros(2, 4).int()), ANY, "pass one of them"),
    (dict(packed_custom_mask=torch.zeros(9), mask_indptr=torch.zeros(3).int()), ANY, "must be a 1-D uint8"),
    *rows(ANY, "they may differ in head_dim alone", v=torch.zeros(2, 8, 2, 64).half()),
    *rows(ANY, "{name} is", page_table=torch.zeros(3, 4).int(), alibi_slopes=torch.ones(5)),
    *rows(ANY, "without lengths", page_table=torch.zeros(2, 4).int()),
    *rows(ANY, "without kv_indices", kv_indptr=torch.zeros(3).int()),
    *rows(ANY, "{name} has 3 elements", seqused_k=torch.zeros(3).int()),
    *rows(ANY, "it must be a 1-D int32 tensor", seqused_k=torch.zeros(2)),
    *rows(ANY, "with {name} it must be", cu_seqlens_q=torch.zeros(3).int(), cu_seqlens_k=torch.zeros(3).int()),
    *rows(ANY, "is not a pair", window=3),
    *rows(ANY, "{name}={value}", chunk_size=-1, num_splits=-2),
    (dict(lse_base=10, return_lse=True), ANY, "lse_base=10"),
    *rows(ANY, "{name} has shape", k_descale=torch.ones(5), sinks=torch.ones(5), out=torch.zeros(2, 4, 4, 32).half()),
    *rows(ANY, "pass mask_indptr", packed_custom_mask=torch.zeros(9).byte()),
    *rows(ANY, "is not a backend", backend="fa9"),
    *rows(ANY, "the dtype of q", q=torch.zeros(2, 4, 4, 64).bfloat16()),
    *rows(ANY, "last dimension, which must be contiguous", q=torch.zeros(2, 4, 64, 4).half().transpose(2, 3)),
]


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _table(*pages: int, **given: Any) -> dict[str, Any]:
    """2 requests over pages of 9 tokens."""
    return dict(page_table=torch.tensor([pages, pages]), seqused_k=ints(9, 9)) | given


def _indices(*offsets: int, last: tuple[int, int] = (9, 9), pages: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    return dict(kv_indptr=ints(*offsets), kv_indices=ints(*pages), kv_last_page_len=ints(*last))


def _ragged(of_q: tuple[int, ...], of_k: tuple[int, ...]) -> dict[str, Any]:
    q, kv = torch.zeros(8, 4, 64).half(), torch.zeros(18, 2, 64).half()
    return dict(q=q, k=kv, v=kv, cu_seqlens_q=ints(*of_q), cu_seqlens_k=ints(*of_k))


# The CPU knows all values. A GPU does not read them back: kernels compute nothing from what makes no sense.
OF_THE_CPU = [
    ("page number 99, but the cache has only 2 pages", _table(99)),
    (f"page number {2**32}, but the cache has only 2 pages", _table(2**32)),
    (f"page number {-(2**63)}, but the cache", _table(-(2**63))),
    ("page number 5, but the cache has only 2 pages", _indices(0, 1, 2, pages=(0, 5))),
    ("page_table is .* torch.bool", _table(page_table=torch.zeros(2, 1).bool())),
    ("page_table is .* torch.complex64", _table(page_table=torch.zeros(2, 1, dtype=torch.complex64))),
    (f"seqused_k holds {-(2**63)}, which does not fit", dict(seqused_k=torch.tensor([9, -(2**63)]))),
    (f"seqused_k holds {2**31}, which does not fit", dict(seqused_k=torch.tensor([9, 2**31]))),
    ("request 1 has 10 keys, but its 1 pages have room for 9", _table(0, seqused_k=ints(9, 10))),
    ("request 1 has 10 keys from row 0 on, but k has 9 rows", dict(seqused_k=ints(9, 10))),
    ("request 0 has -1 keys", dict(seqused_k=ints(-1, 9))),
    ("seqused_q.1.=-4, but request 1 has 4 rows", dict(seqused_q=ints(1, -4))),
    ("seqused_q.0.=5, but request 0 has 4 rows", dict(seqused_q=ints(5, 4))),
    ("cu_seqlens_q goes from 5 to 4 at request 1", _ragged((0, 5, 4), (0, 9, 18))),
    ("cu_seqlens_q goes from 4 to 9 at request 1, but q has 8 rows", _ragged((0, 4, 9), (0, 9, 18))),
    ("request 1 has -2 keys from row 9 on", _ragged((0, 4, 8), (0, 9, 7))),
    ("request 1 has 10 keys from row 9 on, but k has 18 rows", _ragged((0, 4, 8), (0, 9, 19))),
    ("kv_indptr goes from 1 to 0 at request 1", _indices(0, 1, 0)),
    ("kv_indptr goes from 1 to 3 at request 1, but kv_indices has 2 pages", _indices(0, 1, 3)),
    ("kv_last_page_len.1.=10, but a page holds 9", _indices(0, 1, 2, last=(9, 10))),
    ("kv_last_page_len.1.=0, but a page holds 9", _indices(0, 1, 2, last=(9, 0))),
]
WRONG += [(change, ANY, words) for words, change in OF_THE_CPU]


@pytest.mark.parametrize("change,error,words", WRONG)
def test_what_makes_no_sense_is_refused_in_a_sentence(change, error, words):
    kv = torch.zeros(2, 9, 2, 64).half()
    given = dict(q=torch.zeros(2, 4, 4, 64).half(), k=kv, v=kv) | change
    with pytest.raises(error, match=words):
        ck.attention(**given)


def test_tables_of_64_bits_for_kernels_do_not_wrap():
    numbers = torch.tensor([[3, 2**32, -(2**63)]])
    assert index_vectors.saturated(numbers).tolist() == [[3, 2**31 - 1, -(2**31)]]
    assert index_vectors.saturated(numbers).dtype == torch.int32


def test_nothing_is_written_where_a_later_request_is_refused():
    kv, out = torch.ones(2, 9, 2, 64).half(), torch.zeros(2, 4, 4, 64).half()
    with pytest.raises(ValueError, match="request 1 has 10 keys"):
        ck.attention(torch.ones(2, 4, 4, 64).half(), kv, kv, seqused_k=ints(9, 10), out=out)
    assert not out.any()
