"""Pages of e4m3 under 16-bit queries on fa3, whose producers convert them."""

from __future__ import annotations

import pytest
import torch
from problems import Options, make_batch
from test_fp8_cache import DEVICE, E4M3, check, paged_wrapper, run_paged

from cutlass_kernels._compute import request_facts

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]


@pytest.mark.pairwise
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("heads", [(8, 8), (16, 2), (28, 4), (64, 1)], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize(
    "lens",
    [
        ([40, 3, 0, 17], [5000, 700, 90, 17]),  # keys are split
        ([100], [100]),
        ([1, 2, 60] * 5, [1, 130, 64] * 5),
        ([33] * 40, [257] * 40),  # more tiles than SMs
    ],
    ids=["split", "one", "short", "many"],
)
def test_converts(lens, page_size, heads, dim):
    batch = make_batch(*lens, *heads, dim, dtype=torch.bfloat16, kv_dtype=E4M3, device=DEVICE)
    # So many rows are computed from copies.
    sizes = (len(batch.q), len(lens[0]), heads[0] // heads[1], (dim, dim))
    as_is = request_facts.feature_of_rows(torch.bfloat16, E4M3, *sizes) != ""
    for options in (Options(causal=True), Options(), Options(causal=True, window_left=50)):
        check(run_paged(batch, page_size, options, backend="fa3", as_is=as_is), batch, options)


def test_where_the_device_knows_the_lengths():
    """The first run makes the tile list."""
    batch = make_batch([20, 1, 33], [3000, 64, 40], 8, 2, 128, dtype=torch.bfloat16, kv_dtype=E4M3, device=DEVICE)
    options = Options(causal=True)
    paged = batch.paged(16)
    wrapper = paged_wrapper("fa3")
    types = dict(q_data_type=batch.q.dtype, kv_data_type=E4M3, causal=True, seq_lens_q=torch.tensor(batch.qo_lens))
    indptr, *table = (x.to(DEVICE) for x in (batch.qo_indptr(), *paged.table()))
    wrapper.plan(indptr, *table, *batch.heads, 16, **types)
    check(wrapper.run(batch.q, paged.cache, return_lse=True), batch, options)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nan(dim):
    """NaN in a key is NaN in the rows that see it, NaN in a value in its column."""
    batch = make_batch([40, 40], [600, 600], 4, 1, dim, dtype=torch.bfloat16, kv_dtype=E4M3, device=DEVICE)
    batch.k.view(torch.uint8)[580, 0, 3] = 0x7F
    batch.v.view(torch.uint8)[600 + 3, 0, 5] = 0x7F
    out, _ = run_paged(batch, 16, Options(causal=True), backend="fa3")
    nan = torch.isnan(out)
    rows = torch.arange(40, device=DEVICE) + 560
    want = torch.zeros_like(nan)
    want[:40][rows >= 580] = True
    want[40:, :, 5] = True
    assert torch.equal(nan, want)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages_that_the_cache_does_not_have(dim, page_size):
    """Their keys and values count as zeros."""
    batch = make_batch([40, 40], [640, 330], 4, 1, dim, dtype=torch.bfloat16, kv_dtype=E4M3, device=DEVICE)
    paged = batch.paged(page_size)
    indices = paged.indices.clone()
    # Below 128 keys, at the end of the first request's keys, and all keys of the second.
    missing = [slice(0, 112 // page_size), slice(608 // page_size, 640 // page_size), slice(640 // page_size, None)]
    for entries, wrong in zip(missing, (len(paged.cache), -1, 2**30)):
        indices[entries] = wrong
    for keys in (slice(0, 112), slice(608, 640), slice(640, None)):
        batch.k.view(torch.uint8)[keys] = 0
        batch.v.view(torch.uint8)[keys] = 0
    wrapper = paged_wrapper("fa3")
    table = (paged.indptr, indices, paged.last_page_len)
    types = dict(q_data_type=batch.q.dtype, kv_data_type=E4M3, causal=True)
    wrapper.plan(batch.qo_indptr(), *(x.to(DEVICE) for x in table), *batch.heads, page_size, **types)
    check(wrapper.run(batch.q, paged.cache, return_lse=True), batch, Options(causal=True))
