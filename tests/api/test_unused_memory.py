"""What nothing refers to may hold NaN, in every form of keys, and rows outside of requests are not written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from guards import Guarded
from plan_free_problems import keys
from problems import Batch, Options, expect, make_batch
from wrapper_problems import KINDS, Wrapped, batch_for, check

import cutlass_kernels as ck


def poison_keys(batch: Batch, keys: list[torch.Tensor], value: float = torch.nan) -> None:
    for (_, k, v), unseen in zip(batch.requests(), keys):
        k[unseen] = value
        v[unseen] = value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("window_left", [0, 5])
def test_keys_left_of_every_window(target, kind, value, window_left):
    batch = batch_for(kind, target, (5, 1, 9), (70, 40, 20))
    lens = zip(batch.qo_lens, batch.kv_lens)
    poison_keys(batch, [torch.arange(m, device=target.device) < m - n - window_left for n, m in lens], value)
    check(target, kind, batch, Options(causal=True, window_left=window_left))


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_the_mask_hides(target, kind):
    batch = batch_for(kind, target, (5, 3, 9), (70, 40, 20))
    masks = batch.random_masks()
    hidden = []
    for mask in masks:
        mask[:, 3:7] = False
        mask[:, -1] = False
        hidden.append(~mask.any(dim=0))
    poison_keys(batch, hidden)
    check(target, kind, batch, Options(custom_masks=masks))


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_hidden_keys_alone(target, kind):
    # 0 * NaN is NaN: a probability of zero is not enough to keep a value out.
    batch = batch_for(kind, target, (5, 3, 9), (70, 40, 20))
    for (_, _, v), n, m in zip(batch.requests(), batch.qo_lens, batch.kv_lens):
        v[: m - n - 4] = torch.nan
    check(target, kind, batch, Options(causal=True, window_left=4))


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_a_row_sees_reach_it(target, kind):
    batch = batch_for(kind, target, (5, 3, 9), (70, 40, 20))
    for _, _, v in batch.requests():
        v[-1, 0] = torch.nan  # only the last row sees it
    w = Wrapped(target, kind, batch, 8).plan(Options(causal=True))
    out, lse = w.run(return_lse=True)
    last = out[torch.tensor(batch.qo_lens).cumsum(0) - 1]
    assert bool(torch.isnan(last[:, :2]).all()) and bool(torch.isfinite(last[:, 2:]).all())
    assert_lse_close(lse, w.expect().lse)


@pytest.mark.parametrize(
    "options", [Options(causal=True), Options(logits_soft_cap=3.0), Options(causal=True, window_left=3)]
)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_unused_pages_and_page_tails(target, page_size, kv_layout, options):
    batch = make_batch([9, 1, 20], [50, 13, 20], 4, 2, 64, device=target.device)
    w = Wrapped(target, "paged", batch, page_size, kv_layout)
    assert bool(torch.isnan(w.kv[0]).any())
    w.plan(options).check()


def test_pages_outside_the_window_may_be_gone(target):
    # An engine frees pages that slid out of the window and leaves some other page number in the table.
    w = Wrapped(target, "paged", make_batch([2], [64], 4, 2, 64, device=target.device), 8)
    w.kv = (torch.cat([w.pages.cache, torch.full_like(w.pages.cache[:1], torch.nan)]),)
    w.pages.indices[:4] = len(w.kv[0]) - 1
    w.plan(Options(causal=True, window_left=20)).check()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("options", [Options(), Options(causal=True, window_left=30)], ids=["full", "window"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_neighbours_in_a_ragged_batch(target, kv_layout, options, value):
    # Tiles of keys reach into the next request, of queries into the rows of others.
    batch = make_batch([5, 70, 3, 130], [13, 90, 40, 130], 4, 2, 64, device=target.device)
    want = expect(batch, options)
    for request in (0, 2):
        for x in batch.requests()[request]:
            x.fill_(value)
    out, lse = Wrapped(target, "ragged", batch, kv_layout=kv_layout).plan(options).run(return_lse=True)
    for rows in (slice(5, 75), slice(78, 208)):
        assert_close(out[rows], want.out[rows], want.baseline[rows])
        assert_lse_close(lse[rows], want.lse[rows])


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_results_are_written_everywhere_and_nowhere_else(target, kind):
    # Including rows that see nothing: an output that was handed over full of NaN has none left.
    batch = make_batch([4, 0, 7, 30], [9, 12, 0, 10], 4, 2, 64, device=target.device)
    out = Guarded((41, 4, 64), torch.float16, target.device)
    lse = Guarded((41, 4), torch.float32, target.device)
    w = Wrapped(target, kind, batch, 8).plan(Options(causal=True))
    w.run(out=out.tensor, lse=lse.tensor, return_lse=True)
    w.check((out.tensor, lse.tensor))
    out.check("out")
    lse.check("lse")


# --- every form of keys, every variant of the kernels ------------------------------------------------------------

F16, B16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
VARIANTS = [
    *((F16, F16, dim, dim) for dim in (64, 96, 128, 192, 256, 512)),
    (B16, B16, 64, 64),
    (B16, B16, 192, 128),
    *((F16, kv, dim, dim) for kv in (E4M3, E5M2) for dim in (64, 128, 192, 256)),
    *((E4M3, E4M3, dim, dim) for dim in (64, 128, 256)),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(3, -1), logits_soft_cap=50.0),
    "sides": dict(window=(255, 73), alibi=True),
}


def zeroed(x: torch.Tensor) -> torch.Tensor:
    """The same tensor with zeros in the place of NaN."""
    nan = x.float().isnan()
    return x.view(torch.uint8).unflatten(-1, (x.size(-1), -1)).masked_fill(nan[..., None], 0).flatten(-2).view(x.dtype)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rows", [1, 9, 700])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("form", ["one request", "dense", "used", "table", "indices"])
def test_nothing_of_it_shows(target, form, variant, rows, options):
    if target.is_reference and (rows == 700 or variant[2] > 64):
        pytest.skip("the reference has one way for all")
    q_dtype, kv_dtype, dim, dim_vo = variant
    lens = [1215] if form == "one request" else [1215, 0, 300, 1]
    types = dict(dtype=q_dtype, kv_dtype=kv_dtype, head_dim_vo=dim_vo, device=target.device)
    batch = make_batch([rows] * len(lens), lens, 4, 2, dim, **types)
    k, v, where = keys(batch, "ragged" if form == "one request" else form)
    if "page_table" in where:  # of pages that no key is in, all are NaN
        table = where["page_table"]
        table[table == 10**6] = int(k.float().flatten(1).isnan().all(1).nonzero()[0])
    given = dict(OPTIONS[options], max_seqlen_k=40_070)  # a bound of lengths that is far too large
    if given.pop("alibi", False):
        given["alibi_slopes"] = torch.rand(4, device=target.device)
    q, results = batch.q.unflatten(0, (len(lens), rows)), []
    for tensors in ((zeroed(k), zeroed(v)), (k, v)):
        try:
            results.append(ck.attention(q, *tensors, **where, **given, return_lse=True, backend=target.backend))
        except ck.BackendError as error:
            if kv_dtype.itemsize > 1:  # both serve all 16-bit types
                raise
            pytest.skip(f"no such kernel: {str(error)[:80]}")
    assert not results[0][0].isnan().any()
    for with_zeros, with_nan in zip(*results):
        assert_bitwise(with_nan, with_zeros)
