"""What nothing refers to may hold NaN, and rows outside of requests are not written."""

from __future__ import annotations

import pytest
import torch
from compare import assert_close, assert_lse_close
from guards import Guarded
from mask_problems import KINDS, batch_for, check, flat, run
from problems import Batch, Options, expect, make_batch

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
    unseen = []
    for n, m in zip(batch.qo_lens, batch.kv_lens):
        unseen.append(torch.arange(m, device=target.device) < m - n - window_left)
    poison_keys(batch, unseen, value)
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
    check(target, kind, batch, Options(custom_masks=masks), needs=["custom_mask"], custom_mask=flat(masks))


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
    out, lse = run(target, kind, batch, Options(causal=True))
    last = out[torch.tensor(batch.qo_lens).cumsum(0) - 1]
    assert bool(torch.isnan(last[:, :2]).all()) and bool(torch.isfinite(last[:, 2:]).all())
    assert_lse_close(lse, expect(batch, Options(causal=True)).lse)


@pytest.mark.parametrize(
    "options", [Options(causal=True), Options(logits_soft_cap=3.0), Options(causal=True, window_left=3)]
)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_unused_pages_and_page_tails(target, page_size, kv_layout, options):
    batch = make_batch([9, 1, 20], [50, 13, 20], 4, 2, 64, device=target.device)
    paged = batch.paged(page_size, kv_layout, spare=5)
    assert bool(torch.isnan(paged.cache).any())
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), kv_layout)
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, page_size, **options.plan_kwargs())
    out, lse = wrapper.run(batch.q, paged.cache, return_lse=True)
    want = expect(batch, options)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


def test_pages_outside_the_window_may_be_gone(target):
    # An engine frees pages that slid out of the window and leaves some other page number in the table.
    batch = make_batch([2], [64], 4, 2, 64, device=target.device)
    paged = batch.paged(8)
    dead = torch.full_like(paged.cache[:1], torch.nan)
    cache = torch.cat([paged.cache, dead])
    paged.indices[:4] = cache.shape[0] - 1
    options = Options(causal=True, window_left=20)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace())
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, **options.plan_kwargs())
    out, lse = wrapper.run(batch.q, cache, return_lse=True)
    want = expect(batch, options)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("options", [Options(), Options(causal=True, window_left=30)], ids=["full", "window"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_neighbours_in_a_ragged_batch(target, kv_layout, options, value):
    # Tiles of keys reach into the next request, of queries into the rows of others.
    batch = make_batch([5, 70, 3, 130], [13, 90, 40, 130], 4, 2, 64, device=target.device)
    clean = make_batch([5, 70, 3, 130], [13, 90, 40, 130], 4, 2, 64, device=target.device)
    for request in (0, 2):
        for x in batch.requests()[request]:
            x.fill_(value)
    k, v = batch.k, batch.v
    if kv_layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), kv_layout, backend=target.backend)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **options.plan_kwargs())
    out, lse = wrapper.run(batch.q, k, v, return_lse=True)
    want = expect(clean, options)
    for rows in (slice(5, 75), slice(78, 208)):
        assert_close(out[rows], want.out[rows], want.baseline[rows])
        assert_lse_close(lse[rows], want.lse[rows])


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_results_are_written_everywhere_and_nowhere_else(target, kind):
    # Including rows that see nothing: an output that was handed over full of NaN has none left.
    batch = make_batch([4, 0, 7, 30], [9, 12, 0, 10], 4, 2, 64, device=target.device)
    out = Guarded((41, 4, 64), torch.float16, target.device)
    lse = Guarded((41, 4), torch.float32, target.device)
    given = {"out": out.tensor, "lse": lse.tensor}
    run(target, kind, batch, Options(causal=True), run_kwargs=given)
    want = expect(batch, Options(causal=True))
    assert_close(out.tensor, want.out, want.baseline)
    assert_lse_close(lse.tensor, want.lse)
    out.check("out")
    lse.check("lse")
