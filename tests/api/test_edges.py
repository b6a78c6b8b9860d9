"""The edges every backend must pass: empty and degenerate sizes, long caches, big offsets."""

from __future__ import annotations

import pytest
import torch
from compare import assert_close, assert_lse_close
from mask_problems import KINDS, check, run
from problems import Batch, Options, expect, make_batch

import cutlass_kernels as ck

NO_ROWS = pytest.mark.runs_nothing("without query rows, no kernel is launched")


@pytest.mark.pairwise
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "qo_len,kv_len",
    [
        pytest.param(0, 0, marks=NO_ROWS),
        pytest.param(0, 5, marks=NO_ROWS),
        (5, 0),
        (1, 0),
        (1, 1),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_empty_sides(target, kind, qo_len, kv_len, causal):
    batch = make_batch([qo_len], [kv_len], 4, 2, 64, device=target.device)
    out, lse = run(target, kind, batch, Options(causal=causal))
    assert out.shape == (qo_len, 4, 64) and lse.shape == (qo_len, 4)
    if kv_len == 0:
        assert torch.count_nonzero(out) == 0 and bool((lse == -torch.inf).all())
    want = expect(batch, Options(causal=causal))
    assert_close(out, want.out)
    assert_lse_close(lse, want.lse)


@NO_ROWS
@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_batch_of_none(target, kind):
    batch = make_batch([], [], 4, 2, 64, device=target.device)
    out, lse = run(target, kind, batch, Options(causal=True))
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("extra", [1, 3, 64, 200])
def test_more_rows_than_keys(target, kind, causal, extra):
    batch = make_batch([20 + extra], [20], 4, 2, 64, device=target.device)
    check(target, kind, batch, Options(causal=causal))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window_left", [0, 19, 20, 21])
def test_windows_around_the_length(target, kind, window_left):
    batch = make_batch([20], [20], 4, 2, 64, device=target.device)
    check(target, kind, batch, Options(causal=True, window_left=window_left))
    if window_left == 0:
        out, _ = run(target, kind, batch, Options(causal=True, window_left=0))
        assert torch.equal(out, batch.v.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_one_row_beside_a_long_prefill(target, kind):
    batch = make_batch([1, 300, 1, 1], [500, 300, 3, 64], 4, 2, 64, device=target.device)
    check(target, kind, batch, Options(causal=True))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize("size,group", [(128, 2), (16, 32)])
def test_many_small_requests(target, kind, size, group):
    lens = [1 + b % 3 for b in range(size)]
    batch = make_batch(lens, [n + b % 11 for b, n in enumerate(lens)], group, 1, 64, device=target.device)
    check(target, kind, batch, Options(causal=True))


@pytest.mark.parametrize("kind", KINDS)
def test_long_cache(target, kind):
    batch = make_batch([2], [33000], 2, 1, 64, device=target.device)
    check(target, kind, batch, Options(causal=True))


def test_long_decode(target):
    batch = make_batch([1], [33000], 4, 1, 64, device=target.device)
    out, lse = ck.single_decode_with_kv_cache(batch.q[0], batch.k, batch.v, return_lse=True)
    want = expect(batch)
    assert_close(out, want.out[0], want.baseline[0])
    assert_lse_close(lse, want.lse[0])


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_a_fully_masked_request_among_others(target, kind):
    batch = make_batch([4, 6, 5], [30, 20, 9], 4, 2, 64, device=target.device)
    masks = batch.random_masks()
    masks[1][:] = False
    out, lse = run(
        target, kind, batch, Options(), needs=["custom_mask"], custom_mask=torch.cat([m.reshape(-1) for m in masks])
    )
    assert torch.count_nonzero(out[4:10]) == 0 and bool((lse[4:10] == -torch.inf).all())
    want = expect(batch, Options(custom_masks=masks))
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_states_merge_without_nan(target, kind):
    batch = make_batch([30], [10], 4, 2, 64, device=target.device)
    out, lse = run(target, kind, batch, Options(causal=True))
    other, other_lse = run(target, kind, batch, Options())
    merged, merged_lse = ck.merge_state(out, lse, other, other_lse)
    assert not bool(torch.isnan(merged).any()) and not bool(torch.isnan(merged_lse).any())
    assert torch.equal(merged[:20], other[:20]) and torch.equal(merged_lse[:20], other_lse[:20])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_keys_and_values(target, kind):
    # Uniform probabilities over the visible keys: LSE is log2 of their number, the output their common value.
    batch = make_batch([16], [48], 2, 2, 64, device=target.device)
    batch.k.zero_()
    batch.v.fill_(1.5)
    out, lse = run(target, kind, batch, Options(causal=True))
    assert bool((out == 1.5).all())
    counts = torch.arange(33, 49, device=target.device).float().log2()
    torch.testing.assert_close(lse, counts[:, None].expand(16, 2), rtol=1e-5, atol=1e-4)


def test_duplicate_and_shared_pages(target):
    batch = make_batch([3, 3], [16, 16], 4, 2, 64, device=target.device)
    cache = torch.randn(1, 2, 8, 2, 64).half().to(target.device)
    k, v = cache[0, 0].repeat(4, 1, 1), cache[0, 1].repeat(4, 1, 1)
    batch = Batch([3, 3], [16, 16], batch.q, k, v)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace())
    table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 4], [0, 0, 0, 0], [8, 8])]
    wrapper.plan(batch.qo_indptr(), *table, *batch.heads, 8, causal=True)
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, cache), want.out, want.baseline)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_offsets_beyond_32_bits(target, kv_layout):
    # The last page lies beyond 2**31 elements. The memory between the pages is never touched: a CPU does not back it.
    try:
        big = torch.empty(2**31 + 2**20, dtype=torch.float16, device=target.device)
    except RuntimeError as error:
        pytest.skip(f"4 GiB of address space are not available: {error}")
    page, heads, dim = 8, 2, 64
    block = page * heads * dim
    stride = 2**30 + 8
    shape = (3, page, heads, dim) if kv_layout == "NHD" else (3, heads, page, dim)
    inner = (heads * dim, dim, 1) if kv_layout == "NHD" else (page * dim, dim, 1)
    k_cache = big.as_strided(shape, (stride, *inner), 0)
    v_cache = big.as_strided(shape, (stride, *inner), block)
    batch = make_batch([3], [16], 4, 2, 64, device=target.device)
    for cache, data in ((k_cache, batch.k), (v_cache, batch.v)):
        for number, where in enumerate((2, 0)):
            part = data[number * page : (number + 1) * page]
            cache[where].copy_(part if kv_layout == "NHD" else part.transpose(0, 1))
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), kv_layout)
    table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [2, 0], [8])]
    wrapper.plan(batch.qo_indptr(), *table, *batch.heads, page, causal=True)
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, (k_cache, v_cache)), want.out, want.baseline)
