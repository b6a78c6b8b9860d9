"""append_paged_kv_cache and its helpers."""

from __future__ import annotations

import oracle
import pytest
import torch
from guards import Guarded
from problems import indptr, make_batch

import cutlass_kernels as ck

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda:0", id="cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_batch_indices_positions(device):
    append, total = [2, 0, 3, 1], [5, 4, 3, 9]
    got = ck.get_batch_indices_positions(
        indptr(append, device), torch.tensor(total, dtype=torch.int32, device=device), 6
    )
    assert got[0].tolist() == [0, 0, 2, 2, 2, 3]
    assert got[1].tolist() == [3, 4, 0, 1, 2, 8]
    assert got[0].dtype == torch.int32 and got[1].dtype == torch.int32
    lens = torch.tensor(total, dtype=torch.int32, device=device)
    padded = ck.get_batch_indices_positions(indptr(append, device), lens, 8)
    assert [x.tolist() for x in padded] == [[*x.tolist(), -1, -1] for x in got]
    with pytest.raises(ValueError, match=r"nnz=5 is smaller than append_indptr\[-1\]=6"):
        ck.get_batch_indices_positions(indptr(append, "cpu"), lens.cpu(), 5)


@pytest.mark.parametrize("device", DEVICES)
def test_seq_lens(device):
    pages = indptr([0, 1, 3], device)
    last = torch.tensor([0, 4, 2], dtype=torch.int32, device=device)
    assert ck.get_seq_lens(pages, last, 4).tolist() == [0, 4, 10]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["stacked", "tuple"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_append(page_size, kv_layout, form, device):
    total, append = [20, 7, 33], [4, 7, 1]
    batch = make_batch([1] * 3, total, 2, 2, 64, device=device)
    paged = batch.paged(page_size, kv_layout, form, unused="zero")
    before = [paged.k_cache.clone(), paged.v_cache.clone()]
    table = paged.table(device)
    places = ck.get_batch_indices_positions(
        indptr(append, device), torch.tensor(total, dtype=torch.int32, device=device), sum(append)
    )
    keys = torch.randn(sum(append), 2, 64).half().to(device)
    values = torch.randn(sum(append), 2, 64).half().to(device)
    ck.append_paged_kv_cache(keys, values, *places, paged.cache, table[1], table[0], table[2], kv_layout=kv_layout)
    lists = [t.tolist() for t in table]
    found = oracle.gather_pages(paged.k_cache, paged.v_cache, lists[0], lists[1], lists[2], kv_layout)
    start = 0
    for b, (k, v) in enumerate(found):
        _, old_k, old_v = batch.requests()[b]
        kept = total[b] - append[b]
        assert torch.equal(k[:kept], old_k[:kept]) and torch.equal(v[:kept], old_v[:kept])
        assert torch.equal(k[kept:], keys[start : start + append[b]])
        assert torch.equal(v[kept:], values[start : start + append[b]])
        start += append[b]
    # Nothing but the appended tokens has changed.
    changed = sum(int((x != y).any(dim=-1).sum()) for x, y in zip((paged.k_cache, paged.v_cache), before))
    assert changed <= 2 * sum(append) * 2


@pytest.mark.parametrize("device", DEVICES)
def test_append_into_a_strided_cache(device):
    wide = Guarded((4, 2, 8, 2, 64), torch.float16, device, strides=(2 * 8 * 2 * 80, 8 * 2 * 80, 2 * 80, 80, 1))
    wide.tensor.zero_()
    table = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2], [3, 1], [4])]
    keys = torch.randn(12, 2, 64).half().to(device)
    values = torch.randn(12, 2, 64).half().to(device)
    places = (torch.zeros(12, dtype=torch.int32, device=device), torch.arange(12, dtype=torch.int32, device=device))
    ck.append_paged_kv_cache(keys, values, *places, wide.tensor, table[1], table[0], table[2])
    assert torch.equal(wide.tensor[3, 0], keys[:8]) and torch.equal(wide.tensor[1, 1, :4], values[8:])
    assert torch.count_nonzero(wide.tensor[0]) == 0
    wide.check("cache")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("skipped", [(-1, 3), (0, -1), (-1, -1)])
def test_tokens_of_no_request_are_skipped(device, skipped):
    cache = torch.zeros(4, 2, 8, 2, 64, device=device)
    table = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2], [3, 1], [4])]
    places = [torch.tensor([x, y], dtype=torch.int32, device=device) for x, y in zip(skipped, (0, 9))]
    keys = torch.ones(2, 2, 64, device=device)
    ck.append_paged_kv_cache(keys, keys, *places, cache, table[1], table[0], table[2])
    assert bool((cache[1, :, 1] == 1).all()) and int(cache.sum()) == 2 * 2 * 64


@pytest.mark.parametrize("wrong", [-1, 4])
def test_append_to_a_page_that_does_not_exist(wrong):
    cache = torch.zeros(4, 2, 8, 2, 64)
    indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [3, wrong], [4]))
    keys = torch.ones(12, 2, 64)
    places = (torch.zeros(12, dtype=torch.int32), torch.arange(12, dtype=torch.int32))
    with pytest.raises(ValueError, match=f"kv_indices holds the page number {wrong}"):
        ck.append_paged_kv_cache(keys, keys, *places, cache, indices, indptr, last)
    assert torch.count_nonzero(cache) == 0
