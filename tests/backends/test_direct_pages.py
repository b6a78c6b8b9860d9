"""Direct runs of batches in pages: what ``_C.direct_run`` launches, and what it leaves to Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded_calls import BF16, CPU, CUDA, HALF, Gpu, faults_of_matrix, rows_of
from recorded_runs import PAGES, Batch


@pytest.fixture
def paged(gpu: Gpu) -> Batch:
    return Batch(gpu, page_size=16)


# --- what is launched ---


@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("pool", [False, True], ids=["pair", "pool"])
def test_a_paged_run_as_it_is_launched(paged: Batch, pool: bool, hnd: bool) -> None:
    shape = (2, 16) if hnd else (16, 2)
    whole = rows_of(PAGES + 1, 2, *shape, 64, every=2)
    k, v = (whole[:, 0], whole[:, 1]) if pool else (whole[:, 0], rows_of(PAGES + 1, *shape, 128, every=3))
    paged.request.head_dim_vo = v.size(-1)
    given = paged.arguments(k=whole if pool else (k, v))
    assert paged.run(hnd=hnd)(*given.values()) is not None
    launched = paged.gpu.launched()
    token, head = (2, 1) if hnd else (1, 2)
    for name, x in (("k", k), ("v", v)):
        assert launched[name] == (x.data_ptr(), x.stride(token), x.stride(head))
        assert launched["pages"][f"{name}_stride_page"] == x.stride(0)
    assert paged.pages is not None
    assert launched["pages"]["indices"] == paged.pages.indices.data_ptr()
    assert launched["pages"]["last_page_len"] == paged.pages.last_page_len.data_ptr()
    assert launched["pages"]["page_size"] == 16 and launched["pages"]["num_pages"] == PAGES + 1
    assert launched["indptrs"] == (paged.qo_indptr.data_ptr(), paged.kv_indptr.data_ptr())


@pytest.mark.parametrize("pool", [False, True])
def test_pages_of_one_token_without_their_dimension(gpu: Gpu, pool: bool) -> None:
    batch = Batch(gpu, page_size=1)
    if pool:
        batch.request.head_dim_vo = 64
    whole = rows_of(PAGES, 2, 2, 64, every=3)
    cache = whole if pool else (whole[:, 0], rows_of(PAGES, 2, 128, every=2))
    assert batch.run()(*batch.arguments(k=cache).values()) is not None
    launched = gpu.launched()
    for name, x in zip("kv", (whole[:, 0], whole[:, 1]) if pool else cache):
        assert launched[name] == (x.data_ptr(), x.stride(0), x.stride(1))
        assert launched["pages"][f"{name}_stride_page"] == x.stride(0)


# --- what is left to Python ---


def pair(*, tokens: tuple[int, int] = (16, 16), heads: tuple[int, int] = (2, 2), **changes: Any) -> Any:
    facts = dict(pages=(PAGES, PAGES), dims=(64, 128), dtypes=(HALF, HALF)) | changes
    sizes = zip(facts["pages"], tokens, heads, facts["dims"], facts["dtypes"])
    return tuple(rows_of(*size, dtype=dtype) for *size, dtype in sizes)


CACHES_LEFT_TO_PYTHON = {
    "v beside a cache": dict(v=rows_of(30, 2, 128)),
    "no cache": dict(k=None),
    "list": dict(k=list(pair())),
    "three tensors": dict(k=(*pair(), pair()[0])),
    "one tensor in a tuple": dict(k=pair()[:1]),
    "keys that are no tensor": dict(k=(None, pair()[1])),
    "values that are no tensor": dict(k=(pair()[0], None)),
    "other pages of v": dict(k=pair(pages=(PAGES, PAGES + 1))),
    "pages of other sizes": dict(k=pair(tokens=(16, 8))),
    "another page size": dict(k=pair(tokens=(8, 8))),
    "other heads of v": dict(k=pair(heads=(2, 4))),
    "other heads": dict(k=pair(heads=(4, 4))),
    "other dimension of k": dict(k=pair(dims=(128, 128))),
    "other dimension of v": dict(k=pair(dims=(64, 64))),
    "another type": dict(k=pair(dtypes=(BF16, BF16))),
    "k of another type": dict(k=pair(dtypes=(BF16, HALF))),
    "v of another type": dict(k=pair(dtypes=(HALF, BF16))),
    "k of integers": dict(k=pair(dtypes=(torch.int16, HALF))),
    "v of integers": dict(k=pair(dtypes=(HALF, torch.int16))),
    "fewer pages": dict(k=pair(pages=(7, 7))),
    "keys without tokens": dict(k=(pair()[0][:, 0], pair()[1])),
    "both without tokens": dict(k=tuple(x[:, 0] for x in pair())),
    "both without heads": dict(k=tuple(x[:, 0, 0] for x in pair())),
}


@pytest.mark.parametrize("change", CACHES_LEFT_TO_PYTHON)
def test_caches_that_are_left_to_python(paged: Batch, change: str) -> None:
    assert paged.accepts()
    assert not paged.accepts(**CACHES_LEFT_TO_PYTHON[change])


@pytest.mark.parametrize(
    "cache",
    [rows_of(PAGES, 3, 16, 2, 64), rows_of(PAGES, 2, 64), rows_of(1, PAGES, 2, 16, 2, 64), rows_of(PAGES, 2, 64)],
)
def test_pools_that_are_left_to_python(paged: Batch, cache: torch.Tensor) -> None:
    paged.request.head_dim_vo = 64
    assert paged.accepts(k=rows_of(PAGES, 2, 16, 2, 64))
    assert not paged.accepts(k=cache)


@pytest.mark.parametrize("which", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
def test_pages_as_no_kernel_reads_them(paged: Batch, hnd: bool, which: int) -> None:
    shape = (2, 16) if hnd else (16, 2)
    cache = rows_of(PAGES, *shape, 64, every=2), rows_of(PAGES, *shape, 128, every=2)
    given, x, run = paged.arguments(k=cache), cache[which], paged.run(hnd=hnd)
    faults = faults_of_matrix(x, 1, hnd)
    for name, stride in (("in one place", 0), ("unaligned", x.stride(0) + 4), ("far", (1 << 30) + 8)):
        faults[f"pages {name}"] = dict(strides=(stride, *x.stride()[1:]))
    assert paged.gpu.accepts(run, *given.values())
    for fault, facts in faults.items():
        paged.gpu.tell(x, **facts)
        assert not paged.gpu.accepts(run, *given.values()), fault


def test_most_pages(paged: Batch) -> None:
    given = paged.arguments()
    for most, accepted in ((1 << 30, True), ((1 << 30) + 1, False)):
        for x in given["k"]:
            paged.gpu.tell(x, shape=(most, *x.shape[1:]))
        assert paged.gpu.accepts(paged.run(), *given.values()) == accepted


def test_pages_of_one_token_as_no_kernel_reads_them(gpu: Gpu) -> None:
    batch = Batch(gpu, page_size=1)
    cache = rows_of(PAGES, 2, 64, every=2), rows_of(PAGES, 2, 128, every=2)
    given, run = batch.arguments(k=cache), batch.run()
    assert gpu.accepts(run, *given.values())
    for x in cache:
        (page, head, _), address = x.stride(), x.data_ptr()
        for facts in (
            dict(data=address + 8),
            dict(strides=(page, head, 2)),
            dict(strides=(page, 0, 1)),
            dict(strides=(page, head + 4, 1)),
            dict(strides=(0, head, 1)),
        ):
            gpu.tell(x, **facts)
            assert not gpu.accepts(run, *given.values()), facts
        gpu.tell(x)


def test_pages_of_one_token_in_other_dimensions(gpu: Gpu) -> None:
    batch = Batch(gpu, page_size=1)
    k, v = rows_of(PAGES, 2, 64), rows_of(PAGES, 2, 128)
    for cache, accepted in (
        ((k, v), True),
        ((k[:, None], v[:, None]), True),
        ((k, v[:, None]), False),
        ((k[:, None], v), False),
        ((k[..., None, None], v[..., None, None]), False),
    ):
        assert batch.accepts(k=cache) == accepted


@pytest.mark.parametrize("device", [(CUDA, 1), (CPU, 0)], ids=["another GPU", "the CPU"])
def test_pages_of_other_devices(paged: Batch, device: tuple[int, int]) -> None:
    given, run = paged.arguments(), paged.run()
    for other in ((0,), (1,), (0, 1)):
        for i, x in enumerate(given["k"]):
            paged.gpu.tell(x, device=device if i in other else (CUDA, 0))
        assert not paged.gpu.accepts(run, *given.values()), other
