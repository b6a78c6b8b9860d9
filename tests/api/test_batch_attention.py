"""BatchAttention: prompts, appends and decode steps in one batch."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from problems import Options, expect, make_batch

import cutlass_kernels as ck

LENS = [33, 1, 1, 20], [70, 300, 16, 20]


@pytest.fixture(autouse=True)
def backend_of_the_target(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper takes no backend."""
    if "target" in request.fixturenames:
        monkeypatch.setenv("CUTLASS_KERNELS_BACKEND", request.getfixturevalue("target").backend)


def planned(target: Any, layout: str = "NHD", device: str = "cpu", **options: Any) -> tuple[Any, Any, Any]:
    batch = make_batch(*LENS, 8, 2, 64, device=target.device)
    paged = batch.paged(16, layout)
    wrapper = ck.BatchAttention(layout, target.device)
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32)
    vectors = (x.to(device) for x in (batch.qo_indptr(), paged.indptr, paged.indices, lens))
    dtype = batch.q.dtype
    wrapper.plan(*vectors, 8, 2, 64, 64, 16, q_data_type=dtype, kv_data_type=dtype, **options)
    return wrapper, batch, paged.cache


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_mixed_batches(target, layout, causal):
    wrapper, batch, cache = planned(target, layout, causal=causal, sm_scale=0.2)
    want = expect(batch, Options(causal=causal, sm_scale=0.2))
    out, lse = wrapper.run(batch.q, cache)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)
    places = torch.empty_like(out), torch.empty_like(lse)
    assert all(x is y for x, y in zip(wrapper.run(batch.q, cache, *places), places))
    assert_bitwise(places[0], out)
    assert repr(wrapper).startswith("BatchAttention(4 requests, 55 rows")


def test_vectors_on_the_device(target):
    wrapper, batch, cache = planned(target, device=target.device, causal=True)
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, cache)[0], want.out, want.baseline)


@pytest.mark.parametrize("on", ["cpu", "device", "both"])
def test_requests_with_more_pages_than_their_keys_fill(target, on):
    """FlashInfer's engines allocate pages ahead: ``kv_len_arr`` alone tells the keys."""
    batch = make_batch([3, 1, 2, 4], [20, 0, 32, 70], 8, 2, 64, device=target.device)
    paged = batch.paged(16)
    indices, ends = [], [0]
    for begin, end, more in zip(paged.indptr[:-1].tolist(), paged.indptr[1:].tolist(), (3, 2, 0, 1)):
        indices += [*paged.indices[begin:end].tolist(), *[0] * more]
        ends.append(len(indices))
    vectors = [torch.tensor(x, dtype=torch.int32) for x in (ends, indices, batch.kv_lens)]
    if on == "device":
        vectors = [x.to(target.device) for x in vectors]
    elif on == "both":
        vectors[1] = vectors[1].to(target.device)
    wrapper = ck.BatchAttention(device=target.device)
    wrapper.plan(
        batch.qo_indptr(),
        *vectors,
        8,
        2,
        64,
        64,
        16,
        causal=True,
        q_data_type=batch.q.dtype,
        kv_data_type=batch.q.dtype,
    )
    want = expect(batch, Options(causal=True))
    out, lse = wrapper.run(batch.q, paged.cache)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


def test_caps_and_scales(target):
    wrapper, batch, cache = planned(target, causal=True, logits_soft_cap=5.0)
    want = expect(batch, Options(causal=True, logits_soft_cap=5.0, k_scale=2.0, v_scale=0.5))
    out, _ = wrapper.run(batch.q, cache, k_scale=2.0, v_scale=0.5, logits_soft_cap=5.0)
    assert_close(out, want.out, want.baseline)
    want = expect(batch, Options(causal=True, logits_soft_cap=2.0))
    assert_close(wrapper.run(batch.q, cache, logits_soft_cap=2.0)[0], want.out, want.baseline)


@pytest.mark.runs_nothing("every call raises")
def test_wrong_calls(target):
    wrapper, batch, cache = planned(target)
    vectors = (batch.qo_indptr(), torch.tensor([0, 5, 24, 25, 27]), torch.arange(27))
    sizes = (8, 2, 64, 64, 16)
    with pytest.raises(ValueError, match=r"kv_len_arr\[0\]=81, but the 5 pages of request 0 have room for 80 tokens"):
        wrapper.plan(*vectors, torch.tensor([81, 300, 16, 20]), *sizes)
    with pytest.raises(ValueError, match=r"kv_len_arr\[1\]=-1"):
        wrapper.plan(*vectors, torch.tensor([70, -1, 16, 20]), *sizes)
    with pytest.raises(ValueError, match="kv_indptr ends at 27, but kv_indices has 26 pages"):
        wrapper.plan(*vectors[:2], torch.arange(26), torch.tensor(batch.kv_lens), *sizes)
    with pytest.raises(NotImplementedError, match="use_profiler"):
        wrapper.plan(*vectors, torch.tensor(batch.kv_lens), *sizes, use_profiler=True)
    with pytest.raises(NotImplementedError, match="kv_cache_sf"):
        wrapper.run(batch.q, cache, kv_cache_sf=batch.q)
    with pytest.raises(RuntimeError, match="has no plan"):
        ck.BatchAttention(device=target.device).run(batch.q, cache)
    with pytest.raises(KeyError):
        ck.BatchAttention("DNH", target.device)


@pytest.mark.parametrize("name", ["BatchAttention", "PODWithPagedKVCacheWrapper", "BatchPODWithPagedKVCacheWrapper"])
def test_examples_of_the_documentation(name):
    example = doctest.DocTestFinder(recurse=False).find(getattr(ck, name), name, globs={"torch": torch, **vars(ck)})
    results = [doctest.DocTestRunner().run(x) for x in example]
    assert sum(x.attempted for x in results) and not sum(x.failed for x in results)
