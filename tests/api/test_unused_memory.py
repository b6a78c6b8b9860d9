"""What nothing refers to may hold NaN, and rows outside of requests are not written."""

from __future__ import annotations

import pytest
import torch
from compare import assert_close, assert_lse_close
from guards import Guarded
from problems import Batch, Options, expect, make_batch
from wrapper_problems import KINDS, Wrapped, batch_for, check


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
