"""Direct runs of planned batches: what ``_C.direct_run`` launches, and what it leaves to Python. What all direct calls
leave to it: test_direct_calls.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded_calls import BF16, CUDA, E4M3, HALF, Gpu, rows_of, view
from recorded_runs import PAGES, Batch, ints


@pytest.fixture
def ragged(gpu: Gpu) -> Batch:
    return Batch(gpu)


@pytest.fixture
def paged(gpu: Gpu) -> Batch:
    return Batch(gpu, page_size=16)


# --- what is launched ---


def test_what_is_of_the_plan(ragged: Batch) -> None:
    assert ragged.run()(*ragged.arguments().values()) is not None
    launched, at = ragged.gpu.launched(), ragged.workspace.data_ptr()
    assert launched["indptrs"] == (ragged.qo_indptr.data_ptr(), ragged.kv_indptr.data_ptr())
    assert at <= launched["tile_list"] < at + ragged.workspace.nbytes


def test_every_option_arrives(ragged: Batch) -> None:
    slopes, bits, starts = torch.zeros(4), torch.zeros(70, dtype=torch.uint8), ints(0, 13, 69)
    ragged.run("fa3", alibi=slopes, bits=bits, bits_indptr=starts)(*ragged.arguments().values())
    launched = ragged.gpu.launched()
    assert launched["alibi"] == slopes.data_ptr() and launched["backend"] == "fa3"
    assert launched["mask"] == (bits.data_ptr(), starts.data_ptr(), 18)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_new_outputs(ragged: Batch, dim: int, zero: bool) -> None:
    """With rows that no kernel writes they are zeros; else like contiguous queries that are as wide."""
    ragged.request.head_dim_vo = dim
    changes = dict(q=rows_of(8, 4, 64), v=rows_of(30, 2, dim))
    out = ragged.run(zero=zero)(*ragged.arguments(**changes).values())
    (made,) = ragged.gpu.made
    assert made[0] == ("zeros" if zero else "empty_like" if dim == 64 else "empty") and made[1] is out
    assert out.shape == (8, 4, dim) and out.dtype == HALF
    assert ragged.gpu.launched()["o"] == view(out)


def test_lse_of_rows_that_no_kernel_writes(ragged: Batch) -> None:
    """They are -inf, which Python writes; a caller's own LSE is left as it is."""
    assert not ragged.accepts(dict(zero=True), return_lse=True)
    assert ragged.accepts(dict(zero=True), return_lse=True, lse=torch.zeros(8, 4))


def test_fp8(gpu: Gpu) -> None:
    batch = Batch(gpu, dtype=E4M3)
    assert batch.run()(*batch.arguments().values()).dtype == HALF
    assert gpu.launched()["dtypes"] == ("float8_e4m3fn", "float8_e4m3fn", "float16")
    batch.request.head_dim_vo = 64  # an output as wide as the queries, but not of their type
    alike = batch.arguments(q=rows_of(8, 4, 64, dtype=E4M3), v=rows_of(30, 2, 64, dtype=E4M3))
    assert batch.run()(*alike.values()).dtype == HALF
    assert gpu.launched()["dtypes"][2] == "float16"
    for page_size, accepted in ((8, True), (12, False), (16, True)):
        assert Batch(gpu, page_size, E4M3).accepts() == accepted
        assert Batch(gpu, page_size, HALF).accepts()


def test_scratch_of_split_keys(gpu: Gpu) -> None:
    batch = Batch(gpu, max_kv_len=5000)
    assert batch.run()(*batch.arguments().values()) is not None
    launched, at = gpu.launched(), batch.scratch.data_ptr()
    assert launched["splits"] > 0 and batch.scratch_bytes > 0
    assert at <= launched["partial_o"] < at + batch.scratch.nbytes
    for less, fits in ((0, True), (1, False)):
        run = batch.run(scratch_bytes=batch.scratch_bytes - less)
        if fits:
            assert gpu.accepts(run, *batch.arguments().values())
            continue
        with pytest.raises(RuntimeError, match="needs a workspace of"):
            run(*batch.arguments().values())
        assert not gpu.module.take_launches()


def test_captured_runs(ragged: Batch) -> None:
    for captured, capturing, accepted in ((True, False, True), (False, True, True), (True, True, False)):
        ragged.gpu.module.set_capturing(capturing)
        assert ragged.accepts(dict(captured=captured)) == accepted
    ragged.gpu.module.set_capturing(False)


def test_a_run_on_another_gpu(ragged: Batch) -> None:
    given = ragged.arguments(out=rows_of(8, 4, 128))
    for x in (given[name] for name in ("q", "k", "v", "out")):
        ragged.gpu.tell(x, device=(CUDA, 3))
    assert ragged.run(device=0)(*given.values()) is None
    assert ragged.run(device=3)(*given.values()) is given["out"]
    launched = ragged.gpu.launched()
    assert launched["device"] == 3 and launched["stream"] == 67
    assert ragged.gpu.module.current_device() == 64


# --- what is accepted, and what is left to Python ---


@pytest.mark.parametrize(
    "rows,most,accepted", [(8, 1, True), (7, 8, False), (9, 9, False), (-1, 8, True), (-1, 7, False)]
)
def test_rows_of_a_run(ragged: Batch, rows: int, most: int, accepted: bool) -> None:
    assert ragged.accepts(dict(rows=rows, most_rows=most)) == accepted


def test_fewer_rows_than_the_most(ragged: Batch) -> None:
    assert ragged.run(rows=-1, most_rows=9)(*ragged.arguments(q=rows_of(7, 4, 64)).values()).shape == (7, 4, 128)
    assert ragged.gpu.launched()["totals"] == (7, 30)


@pytest.mark.parametrize("batch,held", [("ragged", 30), ("paged", PAGES)])
def test_rows_and_pages_of_keys(request: pytest.FixtureRequest, batch: str, held: int) -> None:
    for least, accepted in ((held, True), (held + 1, False), (0, True)):
        assert request.getfixturevalue(batch).accepts(dict(least_kv=least)) == accepted


def test_more_keys_than_are_planned(ragged: Batch) -> None:
    ragged.run()(*ragged.arguments(k=rows_of(31, 2, 64), v=rows_of(31, 2, 128)).values())
    assert ragged.gpu.launched()["totals"] == (8, 31)


@pytest.mark.parametrize(
    "change",
    [
        dict(k=rows_of(31, 2, 64)),
        dict(v=rows_of(31, 2, 128)),
        dict(k=rows_of(29, 2, 64), v=rows_of(29, 2, 128)),
        dict(k=rows_of(30, 4, 64), v=rows_of(30, 4, 128)),
        dict(k=(rows_of(30, 1, 2, 64), rows_of(30, 1, 2, 128)), v=None),  # pages, where none are planned
    ],
)
def test_keys_that_are_left_to_python(ragged: Batch, change: dict[str, Any]) -> None:
    assert not ragged.accepts(**change)


def test_an_encoding_that_cannot_be_compared(ragged: Batch) -> None:
    class Mode:
        def __eq__(self, other: object) -> bool:
            raise ValueError

        __hash__ = None  # type: ignore[assignment]

    ragged.options.pos_encoding_mode = Mode()
    assert not ragged.accepts()


def test_a_mask_that_stands_for_causal(ragged: Batch) -> None:
    for mask, planned, causal, accepted in (
        (True, True, False, False),
        (True, False, True, False),
        (True, True, True, True),
        (False, True, False, True),
    ):
        ragged.options.causal = causal
        assert ragged.accepts(dict(mask_is_causal=mask, causal=planned)) == accepted


# --- caches in pages ---


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
    assert launched["totals"] == (8, 30)  # as planned, whatever the cache has room for
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
    "another page size": dict(k=pair(tokens=(8, 8))),
    "other heads": dict(k=pair(heads=(4, 4))),
    "another type": dict(k=pair(dtypes=(BF16, BF16))),
    "fewer pages": dict(k=pair(pages=(7, 7))),
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


def test_most_pages(paged: Batch) -> None:
    given = paged.arguments()
    for most, accepted in ((1 << 30, True), ((1 << 30) + 1, False)):
        for x in given["k"]:
            paged.gpu.tell(x, shape=(most, *x.shape[1:]))
        assert paged.gpu.accepts(paged.run(), *given.values()) == accepted


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


def test_pages_of_another_gpu(paged: Batch) -> None:
    given = paged.arguments()
    for x in given["k"]:
        paged.gpu.tell(x, device=(CUDA, 1))
    assert not paged.gpu.accepts(paged.run(), *given.values())
