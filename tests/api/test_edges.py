"""The edges every backend must pass: empty and degenerate sizes, long caches, big offsets."""

from __future__ import annotations

import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Options, expect, make_batch
from wrapper_problems import KINDS, Wrapped, batch_for, check, run

import cutlass_kernels as ck

CAUSAL = Options(causal=True)

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
    w = Wrapped(target, kind, batch, 8).plan(Options(causal=causal))
    out, lse = w.run(return_lse=True)
    assert out.shape == (qo_len, 4, 64) and lse.shape == (qo_len, 4)
    if kv_len == 0:
        assert torch.count_nonzero(out) == 0 and bool((lse == -torch.inf).all())
    w.check((out, lse))


@NO_ROWS
@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_batch_of_none(target, kind):
    batch = make_batch([], [], 4, 2, 64, device=target.device)
    out, lse = run(target, kind, batch, CAUSAL)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


LENGTHS = [
    *(([20 + extra], [20]) for extra in (1, 3, 64, 200)),  # more rows than keys
    ([1, 300, 1, 1], [500, 300, 3, 64]),  # one row beside a long prefill
]


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("qo_lens,kv_lens", LENGTHS)
def test_lengths(target, kind, causal, qo_lens, kv_lens):
    check(target, kind, batch_for(kind, target, qo_lens, kv_lens), Options(causal=causal))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window_left", [0, 19, 20, 21])
def test_windows_around_the_length(target, kind, window_left):
    batch = make_batch([20], [20], 4, 2, 64, device=target.device)
    check(target, kind, batch, Options(causal=True, window_left=window_left))
    if window_left == 0:
        out, _ = run(target, kind, batch, Options(causal=True, window_left=0))
        assert torch.equal(out, batch.v.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize("size,group", [(128, 2), (16, 32)])
def test_many_small_requests(target, kind, size, group):
    lens = [1 + b % 3 for b in range(size)]
    batch = make_batch(lens, [n + b % 11 for b, n in enumerate(lens)], group, 1, 64, device=target.device)
    check(target, kind, batch, CAUSAL)


@pytest.mark.parametrize("kind", KINDS)
def test_long_cache(target, kind):
    check(target, kind, batch_for(kind, target, [2], [33000], (2, 1, 64)), CAUSAL)


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
    w = Wrapped(target, kind, batch, 8).plan(Options(custom_masks=masks))
    out, lse = w.run(return_lse=True)
    assert torch.count_nonzero(out[4:10]) == 0 and bool((lse[4:10] == -torch.inf).all())
    w.check((out, lse))


@pytest.mark.parametrize("kind", KINDS)
def test_masked_states_merge_without_nan(target, kind):
    batch = make_batch([30], [10], 4, 2, 64, device=target.device)
    out, lse = run(target, kind, batch, CAUSAL)
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
    out, lse = run(target, kind, batch, CAUSAL)
    assert bool((out == 1.5).all())
    counts = torch.arange(33, 49, device=target.device).float().log2()
    torch.testing.assert_close(lse, counts[:, None].expand(16, 2), rtol=1e-5, atol=1e-4)


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
    w = Wrapped(target, "paged", make_batch([3], [16], 4, 2, 64, device=target.device), page, kv_layout)
    for cache, data in ((k_cache, w.batch.k), (v_cache, w.batch.v)):
        for part, where in zip(data.split(page), (2, 0)):
            cache[where].copy_(part if kv_layout == "NHD" else part.transpose(0, 1))
    w.pages.indices, w.kv = torch.tensor([2, 0], dtype=torch.int32), ((k_cache, v_cache),)
    w.plan(CAUSAL).check(w.run())
