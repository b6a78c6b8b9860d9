"""fp8 keys and values under 16-bit queries: what comes of reading them as they are, or copies."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import planned_runs as runs
import pytest
import torch
from compare import assert_all_bitwise, assert_bitwise, assert_close
from guards import poison_
from pairs import every
from planned_runs import check_captured_runs, compare, single, wrapped
from problems import FP8, Batch, Options, graph_buffers, make_batch
from wrapper_problems import Wrapped

from cutlass_kernels._compute import request_facts

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF = [torch.float16, torch.bfloat16]
CAUSAL = Options(causal=True)
READERS = ["fa2", pytest.param("fa3", marks=pytest.mark.hopper)]


def check(result: Any, batch: Batch, options: Options = CAUSAL) -> None:
    compare(result, batch, options, dtype=batch.q.dtype, atol=1e-2, rtol=1e-2)


def planned(
    reader: str, batch: Batch, page_size: int | None, options: Options = CAUSAL, as_is: bool = True, **plan: Any
) -> Wrapped:
    """A plan over pages, or over the tensors themselves, which ``reader`` reads as they are, or else copies."""
    call = wrapped(reader, batch, page_size, plan.pop("kv_layout", "NHD")).plan(options, **plan)
    assert call.wrapper._backend == reader and call.wrapper._plan_info.schedule.as_is == as_is
    return call


def attend(reader: str, batch: Batch, page_size: int | None, options: Options = CAUSAL, **plan: Any) -> Any:
    return planned(reader, batch, page_size, options, **plan).run(return_lse=True)


def batch_of(lens: Any, heads: tuple[int, int] = (8, 2), dim: int = 128, dtype=torch.bfloat16, fp8=E4M3) -> Batch:
    return make_batch(*lens, *heads, dim, dtype=dtype, kv_dtype=fp8, device=DEVICE)


def readers(*page_sizes: int | None) -> Any:
    """(reader, size of pages or none, type): tensors, and e5m2, are fa2's alone."""
    of_fa3 = [pytest.param("fa3", size, E4M3, marks=pytest.mark.hopper) for size in page_sizes if size]
    return every(**{"reader,page_size,fp8": [*itertools.product(["fa2"], page_sizes, FP8), *of_fa3]})


# More than 32 rows of four heads, on average: the kernel for tiles of more rows. Some of its tiles have fewer.
LENS, MORE_LENS = ([1, 7, 0, 20], [300, 7, 5, 130]), ([16, 33, 1, 0, 20], [300, 70, 5, 9, 640])
BOTH = {"few rows": LENS, "more rows": MORE_LENS}


@pytest.mark.pairwise
@every(dim=[64, 80, 128, 256], dtype=HALF)
@readers(None, 5, 16)
@every(**{"lens,heads": {"few rows": (LENS, (4, 2)), "more rows": (MORE_LENS, (8, 2))}})
def test_types_and_head_dims(reader, page_size, fp8, dtype, dim, lens, heads):
    batch = batch_of(lens, heads, dim, dtype, fp8)
    check(attend(reader, batch, page_size), batch)


@every(
    **{
        "rows,heads,kv_lens": [
            # 16 rows or fewer, 32, and more: warps share keys in one way or another.
            *itertools.product([1, 2, 4], [(1, 1), (8, 8), (6, 2), (8, 1), (40, 8), (32, 1)], [[400, 65, 1]]),
            # Of 16 rows of two row tiles and two groups of warps some, or all, are nobody's.
            *((tokens, (8, 2), [700, 65, 33]) for tokens in (8, 9, 12, 16, 17, 24, 32)),
        ]
    }
)
def test_rows_of_a_tile(rows, heads, kv_lens):
    batch = batch_of(([rows] * 3, kv_lens), heads)
    check(attend("fa2", batch, None), batch)


@every(dim=[64, 128], rows={"few rows": 1, "more rows": 16})
def test_queries_beyond_fp16(rows, dim):
    # Rows of bf16 that fp16 has no numbers for get a factor; one row's does not show in others.
    batch = batch_of(([rows, rows], [300, 70]), dim=dim)
    plain = batch.q.clone()
    want, _ = attend("fa2", batch, 16)
    for exponent in (-100, -20, -7, 16, 60):
        scale = 2.0**exponent
        batch.q.copy_(plain).mul_(scale)
        scaled = Options(causal=True, sm_scale=dim**-0.5 / scale)
        result = attend("fa2", batch, 16, scaled)
        assert_close(result[0], want, atol=1e-2, rtol=1e-2)
        check(result, batch, scaled)
    batch.q.copy_(plain)
    batch.q[:, 1::2] *= 2.0**-30
    batch.q[:, 3] = float("inf")
    out, _ = attend("fa2", batch, 16)
    assert_bitwise(out[:, ::2].contiguous(), want[:, ::2].contiguous())


@every(dim=[64, 128], rows={"few rows": 1, "more rows": 16}, sm_scale=[1.0, 1e-6])
def test_rows_near_the_smallest_numbers(rows, dim, sm_scale):
    # Factor times scale is below the least normal number: logits are 0 then, and hidden keys stay hidden.
    batch = batch_of(([rows, rows], [300, 70]), dim=dim)
    for exponent in (-124, -128, -132):
        batch.q.copy_(torch.randn_like(batch.q, dtype=torch.float32) * 2.0**exponent)
        options = Options(causal=True, sm_scale=sm_scale)
        check(attend("fa2", batch, 16, options), batch, options)


@every(dtype=HALF, dim=[64, 128, 256])
@readers(1)
def test_every_finite_number(reader, page_size, fp8, dim, dtype):
    # A row that sees one key has its value as output. A query of ones sums up the key.
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    finite = codes[torch.isfinite(codes.view(fp8).float())]
    count = len(finite)
    batch = batch_of(([1] * count, [1] * count), (4, 1), dim, dtype, fp8)
    batch.q.fill_(0.0)
    step = 2.0**-7 if fp8 == E4M3 else 2.0**-14  # logits below 500: the exponents' rounding stays small
    batch.q[..., 1::2] = step
    for x in (batch.k, batch.v):
        x.view(torch.uint8).copy_(finite[:, None, None].expand(x.shape))
    batch.k.view(torch.uint8)[..., ::2] = batch.k.view(torch.uint8)[..., ::2].roll(1, 0)
    out, lse = attend(reader, batch, page_size, Options(sm_scale=1.0))
    assert torch.equal(out, batch.v.to(dtype).expand_as(out))
    want = batch.k[..., 1].float() * (dim / 2 * step)
    torch.testing.assert_close(lse, (want * 1.4426950408889634).expand_as(lse), rtol=1e-6, atol=1e-6)


@pytest.mark.pairwise
@every(page_size=[1, 5, 16, 64], kv_layout=["NHD", "HND"], dim=[64, 128, 256], reader=READERS)
def test_pages(reader, dim, kv_layout, page_size):
    batch = batch_of(([3, 1, 18], [40, 333, 200]), (4, 2), dim)
    check(attend(reader, batch, page_size, kv_layout=kv_layout), batch)


MODES = {
    "full": Options(),
    "window": Options(causal=True, window_left=37),
    "cap": Options(causal=True, logits_soft_cap=8.0),
    "negative scale": Options(sm_scale=-0.1),
    "alibi": Options(causal=True, pos_encoding_mode="ALIBI"),
}


@pytest.mark.pairwise
@every(options=MODES, dim=[64, 128], lens=BOTH)
@pytest.mark.parametrize(
    "reader,page_size", [("fa2", None), ("fa2", 16), pytest.param("fa3", 16, marks=pytest.mark.hopper)]
)
def test_modes(lens, reader, page_size, dim, options):
    batch = batch_of(lens, dim=dim, dtype=torch.float16)
    check(attend(reader, batch, page_size, options), batch, options)


@every(
    split=[{}, {"disable_split_kv": True}, {"fixed_split_size": 8}],
    rows={"few rows": [1, 5], "more rows": [16, 20]},
    reader=READERS,
)
def test_sinks_and_split_keys(reader, rows, split):
    batch = batch_of((rows, [5000, 2300]))
    options = Options(causal=True, sinks=torch.randn(8, device=DEVICE))
    check(attend(reader, batch, 64, options, **split), batch, options)


@pytest.mark.parametrize(
    "reader,page_size,fp8",
    [("fa2", None, E5M2), ("fa2", 5, E5M2), *(pytest.param("fa3", n, E4M3, marks=pytest.mark.hopper) for n in (5, 16))],
)
def test_masks_of_any_form(reader, page_size, fp8):
    batch = batch_of(([3, 20], [300, 150]), (4, 2), 64, fp8=fp8)
    masks = batch.random_masks(0.3)
    masks[0][:, 64:192] = False  # values that nobody sees
    for x in (batch.k, batch.v):
        poison_(x[70:190])
    options = Options(custom_masks=masks)
    clean = dataclasses.replace(batch, k=batch.k.clone(), v=batch.v.clone())
    for x in (clean.k, clean.v):
        x[70:190].view(torch.uint8).zero_()
    check(attend(reader, batch, page_size, options), clean, options)


@every(tensors={"floats": False, "tensors": True}, dtype=HALF, reader=READERS)
def test_scales(reader, dtype, tensors):
    batch = batch_of(LENS, (4, 2), dtype=dtype)
    scales = dict(k_scale=0.7, v_scale=1.3)
    options = Options(causal=True, **scales)
    given = {name: torch.tensor([value], device=DEVICE) for name, value in scales.items()} if tensors else {}
    check(planned(reader, batch, 16, options).run(return_lse=True, **given), batch, options)


def test_rows_beyond_a_request_hold_anything():
    # paged() fills what nothing refers to with NaN; here the ragged rows between requests, too.
    batch = batch_of(([2, 3], [50, 70]), (4, 2), 64, torch.float16)
    check(attend("fa2", batch, 64), batch)
    k, v = (poison_(torch.empty(120 + 64, 2, 64, dtype=E4M3, device=DEVICE)) for _ in range(2))
    k[:120], v[:120] = batch.k, batch.v
    call = planned("fa2", batch, None)
    assert_bitwise(call.wrapper.run(batch.q, k, v), call.run())


@every(pitch=[72, 80])
def test_caches_of_other_alignment_are_copied(pitch):
    batch = batch_of(([2, 3], [50, 70]), (4, 2), 64, torch.float16)
    wide = torch.zeros(2, 120, 2, pitch, dtype=torch.uint8, device=DEVICE).view(E4M3)
    k, v = (wide[i, ..., :64] for i in range(2))
    k.copy_(batch.k)
    v.copy_(batch.v)
    wrapper = wrapped("fa2", batch).plan(CAUSAL).wrapper
    for _ in range(2):
        check(wrapper.run(batch.q, k, v, return_lse=True), batch)
    others = [key for key in wrapper._plan_info.other_schedules if not key[2]]
    assert len(others) == (pitch == 72)


@every(rows=[1, 8, 33])
def test_single_calls(rows):
    batch, options = batch_of(([rows], [3000])), Options(causal=True, k_scale=0.5, v_scale=2.0)
    for _ in range(2):
        check(single("fa2", batch, options), batch, options)


def test_runs_may_ask_for_copies_after_all():
    batch = batch_of(([2, 3], [50, 70]), (4, 2), 64, torch.float16)
    call = wrapped("fa2", batch, 8).plan(CAUSAL)
    for mode in ("NONE", "ROPE_LLAMA", "NONE", "ROPE_LLAMA"):
        result = call.wrapper.forward(batch.q, *call.kv, causal=True, pos_encoding_mode=mode, return_lse=True)
        check(result, batch, Options(causal=True, pos_encoding_mode=mode))


@every(rows=[1, pytest.param(20, marks=pytest.mark.hopper)])
def test_captured_runs_follow_later_plans(rows):
    # The first plan's kernel stays, also where a later one has other averages.
    reader = "fa2" if rows == 1 else "fa3"
    steps = [([1, 1, 1], [40, 90, 50]), ([1, 0, 2], [1500, 30, 64]), ([0, 0, 1], [1, 1, 30]), ([1, 1, 1], [70, 27, 70])]
    steps = [([rows * n for n in qo_lens], kv_lens) for qo_lens, kv_lens in steps]
    batches = [make_batch(*step, 8, 2, 128, kv_dtype=E4M3, device=DEVICE, seed=n) for n, step in enumerate(steps)]

    def is_read(of: Wrapped) -> None:
        assert of.wrapper._backend == reader and of.wrapper._plan_info.schedule.as_is

    check_captured_runs("auto", batches, CAUSAL, check, 256, is_read)


@every(backend=["auto", "fa2"])
def test_long_queries_are_computed_from_copies(backend):
    batch = batch_of(([request_facts.SOME_ROWS // 2 + 1], [request_facts.SOME_ROWS]), (4, 2), 64, torch.float16)
    call = wrapped(backend, batch, 16).plan(CAUSAL)
    assert not call.wrapper._plan_info.schedule.as_is
    check(call.run(return_lse=True), batch)


@every(split=[{"fixed_split_size": 16}, {"disable_split_kv": True}], backend=["auto", "fa2"])
def test_results_do_not_depend_on_the_batch(backend, split):
    """One row alone, and beside a prompt: neither another kernel nor another tile."""
    few = batch_of(([1, 20], [2000, 600]), dtype=torch.float16)
    rest = make_batch([900, 1], [900, 3000], 8, 2, 128, kv_dtype=E4M3, device=DEVICE, seed=1)
    one = Batch(few.qo_lens[:1], few.kv_lens[:1], few.q[:1], few.k[:2000], few.v[:2000])
    results = [runs.attend(backend, batch, CAUSAL, 16, **split) for batch in (one, few, few.followed_by(rest))]
    for alone, among in itertools.pairwise(results):
        assert_all_bitwise([x[: len(y)] for x, y in zip(among, alone)], alone)


def test_a_graph_wrapper_runs_fewer_rows_outside_its_graph():
    """The tile list is made for the rows of the first plan, and its tiles with it."""
    first = batch_of(([16] * 4, [300] * 4), dtype=torch.float16)
    later = make_batch([1] * 4, [300, 20, 7, 150], 8, 2, 128, kv_dtype=E4M3, device=DEVICE, seed=1)
    wrapper = None
    for batch in (first, later):
        call = wrapped("fa2", batch, 16, wrapper=wrapper, **({} if wrapper else graph_buffers(4, 100, DEVICE)))
        check(call.plan(CAUSAL).run(return_lse=True), batch)
        wrapper = call.wrapper


# --- fa3, whose producers convert pages of e4m3 -------------------------------------------------------------------


@pytest.mark.hopper
class TestFa3:
    @pytest.mark.pairwise
    @every(
        dim=[64, 80, 128, 192, 256],
        heads=[(8, 8), (16, 2), (28, 4), (64, 1)],
        page_size=[1, 3, 16, 64],
        lens={
            "split": ([40, 3, 0, 17], [5000, 700, 90, 17]),  # keys are split
            "one": ([100], [100]),
            "short": ([1, 2, 60] * 5, [1, 130, 64] * 5),
            "many": ([33] * 40, [257] * 40),  # more tiles than SMs
        },
    )
    def test_converts(self, lens, page_size, heads, dim):
        batch = batch_of(lens, heads, dim)
        # So many rows are computed from copies.
        sizes = (len(batch.q), len(lens[0]), heads[0] // heads[1], (dim, dim))
        as_is = request_facts.feature_of_rows(torch.bfloat16, E4M3, *sizes) != ""
        for options in (CAUSAL, Options(), Options(causal=True, window_left=50)):
            check(attend("fa3", batch, page_size, options, as_is=as_is), batch, options)

    def test_where_the_device_knows_the_lengths(self):
        """The first run makes the tile list."""
        batch = batch_of(([20, 1, 33], [3000, 64, 40]))
        given = dict(where=DEVICE, seq_lens_q=torch.tensor(batch.qo_lens))
        check(runs.attend("fa3", batch, CAUSAL, 16, **given), batch)

    @every(dim=[64, 128, 256])
    def test_nan(self, dim):
        """NaN in a key is NaN in the rows that see it, NaN in a value in its column."""
        batch = batch_of(([40, 40], [600, 600]), (4, 1), dim)
        batch.k.view(torch.uint8)[580, 0, 3] = 0x7F
        batch.v.view(torch.uint8)[600 + 3, 0, 5] = 0x7F
        nan = torch.isnan(attend("fa3", batch, 16)[0])
        rows = torch.arange(40, device=DEVICE) + 560
        want = torch.zeros_like(nan)
        want[:40][rows >= 580] = True
        want[40:, :, 5] = True
        assert torch.equal(nan, want)

    @every(page_size=[1, 16], dim=[64, 128, 256])
    def test_pages_that_the_cache_does_not_have(self, dim, page_size):
        """Their keys and values count as zeros."""
        batch = batch_of(([40, 40], [640, 330]), (4, 1), dim)
        call = wrapped("fa3", batch, page_size)
        # Below 128 keys, at the end of the first request's keys, and all keys of the second.
        missing = (slice(0, 112), len(call.kv[0])), (slice(608, 640), -1), (slice(640, None), 2**30)
        for keys, wrong in missing:
            entries = slice(keys.start // page_size, keys.stop and keys.stop // page_size)
            call.pages.indices[entries] = wrong
            batch.k.view(torch.uint8)[keys] = 0
            batch.v.view(torch.uint8)[keys] = 0
        check(call.plan(CAUSAL, where=DEVICE).run(return_lse=True), batch)
