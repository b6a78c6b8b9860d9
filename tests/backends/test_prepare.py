"""Copies for kernels, where q, k or v are fp8 or have to be rotated, and what they hold.

What attention makes of them, the tests of the public functions say."""

from __future__ import annotations

import itertools
from typing import Any

import oracle
import pytest
import torch
from guards import Guarded
from pairs import every
from problems import FP8, Batch, make_batch

from cutlass_kernels._compute import half_precision
from cutlass_kernels._core.problems import Logits, Mask, Offsets, Output, PagedKv, Pages, Problem, RaggedKv

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
HALF = [torch.float16, torch.bfloat16]
E4M3 = torch.float8_e4m3fn
ROPE = (2.0, 1e4)
WAYS = {"convert": None, "rotate": ROPE}


def module_and_stream() -> tuple[Any, int]:
    """What copies are made with."""
    from cutlass_kernels import _C

    return _C, torch.cuda.current_stream().cuda_stream


@pytest.fixture
def temporaries(monkeypatch) -> list[Guarded]:
    """The temporaries, handed out full of NaN (tables: of garbage) inside memory that is watched."""
    made: list[Guarded] = []

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, shape, dtype, device):
            if dtype == torch.int32:
                return torch.full(shape, -77, dtype=dtype, device=device)
            made.append(Guarded(shape, dtype, device))
            return made[-1].tensor

    monkeypatch.setattr(half_precision, "torch", Torch())
    return made


def prepare(problem: Problem, offsets: Offsets | None, temporaries: list[Guarded]) -> Problem:
    prepared = half_precision.prepare(problem, offsets, *module_and_stream())
    for guarded in temporaries:
        guarded.check("a temporary")
    return prepared


def problem_of(batch: Batch, kv: RaggedKv | PagedKv | None = None, rope=None, o_dtype=None, window_left=-1) -> Problem:
    out = torch.zeros(*batch.q.shape[:2], batch.v.shape[2], dtype=o_dtype or batch.q.dtype, device=batch.device)
    mask = Mask(causal=True, window_left=window_left)
    kv = RaggedKv(batch.k, batch.v) if kv is None else kv
    return Problem(batch.q, kv, Logits(0.1, rope=rope), Output(out), mask)


def offsets_of(batch: Batch, pages: Pages | None = None, kv_indptr: torch.Tensor | None = None) -> Offsets:
    kv = batch.kv_indptr(DEVICE) if kv_indptr is None else kv_indptr
    return Offsets(batch.qo_indptr(DEVICE), kv, len(batch.q), pages=pages)


def assert_rotated(actual: torch.Tensor, x: torch.Tensor, first: int, rope: tuple[float, float]) -> None:
    """``actual`` is ``x`` ``[tokens, heads, dim]``, rotated from position ``first`` on and rounded once."""
    positions = torch.arange(first, first + len(x), device=x.device)
    wide = x.double()
    exact = torch.stack([oracle.rotate(wide[:, h], positions, *rope) for h in range(x.shape[1])], 1)
    info = torch.finfo(actual.dtype)
    half = x.shape[2] // 2
    size = (wide[..., :half].abs() + wide[..., half:].abs()).repeat(1, 1, 2)
    # Half a unit in the last place, and what fp32 and its angles leave.
    allowed = exact.abs() * info.eps / 2 + info.tiny * info.eps / 2 + size * 3e-7
    excess = (actual.double() - exact).abs() - allowed
    assert float(excess.max()) <= 0, f"off by {float((actual.double() - exact).abs().max()):.3g}"
    different = int((actual != exact.to(actual.dtype)).sum())
    assert different <= 2 + actual.numel() // 500, f"{different} of {actual.numel()} are not the nearest numbers"


def assert_copied(
    actual: torch.Tensor, x: torch.Tensor, first: int = 0, rope: tuple[float, float] | None = None
) -> None:
    if rope is not None:
        assert_rotated(actual, x, first, rope)
    else:
        assert torch.equal(actual, x.to(actual.dtype))


def test_rounding_saturates():
    wide = torch.arange(-(2**15), 2**15).short().to(DEVICE).view(torch.float16).reshape(64, 16, 64)  # every number
    out = torch.empty(wide.shape, dtype=E4M3, device=DEVICE)
    half_precision.round_output(wide, out, *module_and_stream())
    got, want = out.float(), wide.float()
    assert torch.equal(got.isnan(), want.isnan())
    want, got = want[~want.isnan()], got[~got.isnan()]
    assert bool((got.abs() <= 448).all()) and torch.equal(got[want.abs() >= 448], 448 * want[want.abs() >= 448].sign())
    assert bool(((got - want.clamp(-448, 448)).abs() <= (want.abs() / 16).clamp(2.0**-10, 16)).all())
    assert torch.equal(got, want.clamp(-448, 448).to(E4M3).float())


@every(shape=[(3, 1, 8), (5, 2, 40), (1, 7, 64), (70, 32, 256)], gap=[0, 8, 3])
def test_rows_that_no_kernel_wrote_are_not_rounded(shape, gap):
    rows, heads, dim = shape
    wide = torch.randn(shape, device=DEVICE).half()
    unwritten = torch.arange(rows, device=DEVICE) % 3 == 1
    module, stream = module_and_stream()
    wide.view(torch.uint8)[unwritten] = module.unwritten_byte
    out = Guarded(shape, E4M3, DEVICE, (heads * (dim + gap) + gap, dim + gap, 1))
    before = torch.randint(256, shape, dtype=torch.uint8, device=DEVICE)
    out.tensor.view(torch.uint8).copy_(before)
    half_precision.round_output(wide, out.tensor, module, stream)
    out.check("out")
    after = out.tensor.view(torch.uint8)
    assert torch.equal(after[unwritten], before[unwritten])
    assert torch.equal(out.tensor[~unwritten].float(), wide[~unwritten].to(E4M3).float())


LENS = ([5, 0, 70, 3], [9, 4, 33, 1])  # with a request without rows, and rows at negative positions


@pytest.mark.pairwise
@every(dim=[8, 16, 40, 64, 80, 128, 256], dtype=HALF, rope={"default": (1.0, 1e4), "llama3": (8.0, 5e5)})
def test_rotation_of_a_ragged_batch(dim, dtype, rope, temporaries):
    batch = make_batch(*LENS, 6, 2, dim, dtype=dtype, device=DEVICE)
    prepared = prepare(problem_of(batch, rope=rope), offsets_of(batch), temporaries)
    assert prepared.logits.rope is None and prepared.kv.v is batch.v
    assert prepared.q.dtype == prepared.kv.k.dtype == dtype
    copy = Batch(*LENS, prepared.q, prepared.kv.k, batch.v)
    for (q, k, _), (q_copy, k_copy, _) in zip(batch.requests(), copy.requests()):
        if len(q) == 0:  # nobody sees these keys
            assert bool(torch.isnan(k_copy).all())
            continue
        assert_rotated(q_copy, q, len(k) - len(q), rope)
        assert_rotated(k_copy, k, 0, rope)


@every(heads=[(1, 1), (3, 1), (32, 32), (70, 7)], rope=WAYS)
def test_numbers_of_heads(heads, rope, temporaries):
    batch = make_batch([19], [33], *heads, 72, head_dim_vo=24, dtype=torch.bfloat16, kv_dtype=E4M3, device=DEVICE)
    prepared = prepare(problem_of(batch, rope=rope), None, temporaries)
    if rope is not None:
        assert_rotated(prepared.q, batch.q, 33 - 19, rope)
    assert_copied(prepared.kv.k, batch.k, 0, rope)
    assert_copied(prepared.kv.v, batch.v)


@every(dtype=HALF, fp8=FP8)
def test_every_fp8_number(dtype, fp8, temporaries):
    batch = make_batch([256], [256], 2, 1, 64, dtype=fp8, device=DEVICE)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    for x in (batch.q, batch.k, batch.v):
        x.view(torch.uint8).copy_(codes[:, None, None].expand(x.shape))
    prepared = prepare(problem_of(batch, o_dtype=dtype), None, temporaries)
    for copy, x in ((prepared.q, batch.q), (prepared.kv.k, batch.k), (prepared.kv.v, batch.v)):
        wanted = x.to(dtype)
        assert copy.dtype == dtype
        torch.testing.assert_close(copy, wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(copy[0x80]), torch.ones_like(copy[0x80], dtype=torch.bool))  # -0


@every(fp8=FP8, dim=[40, 64, 80, 128])
def test_rotation_of_fp8(fp8, dim, temporaries):
    batch = make_batch([7], [50], 4, 2, dim, dtype=fp8, device=DEVICE)
    prepared = prepare(problem_of(batch, rope=ROPE, o_dtype=torch.float16), None, temporaries)
    assert_rotated(prepared.q, batch.q, 43, ROPE)
    assert_rotated(prepared.kv.k, batch.k, 0, ROPE)
    assert_copied(prepared.kv.v, batch.v)


@every(kv_dtype=[torch.float16, E4M3])
def test_views_inside_watched_memory(kv_dtype, temporaries):
    # A packed projection; heads before tokens; a pitch of 8 elements more, which leaves fp8 rows 8-byte aligned.
    batch = make_batch([20], [30], 4, 2, 64, kv_dtype=kv_dtype, device=DEVICE)
    packed = torch.full((20, 3, 4, 64), torch.nan, dtype=torch.float16, device=DEVICE)
    packed[:, 1] = batch.q
    k = batch.k.transpose(0, 1).contiguous().transpose(0, 1)
    v = Guarded(batch.v.shape, kv_dtype, DEVICE, (2 * 72, 72, 1), batch.v).tensor
    views = Batch([20], [30], packed[:, 1], k, v)
    prepared = prepare(problem_of(views, rope=ROPE), None, temporaries)
    assert_rotated(prepared.q, batch.q, 10, ROPE)
    assert_rotated(prepared.kv.k, batch.k, 0, ROPE)
    assert prepared.kv.v is v if kv_dtype == torch.float16 else torch.equal(prepared.kv.v, batch.v.half())


@every(dim=[64, 128], first=[1 << 20, (1 << 24) - 5])
def test_far_positions(dim, first, temporaries):
    # One key shown as all of them; a window hides those that would take long to check.
    batch = make_batch([3], [1], 2, 1, dim, device=DEVICE)
    k = batch.k.expand(first + 3, 1, dim) if first < 1 << 22 else batch.k.expand(first + 3, 1, dim)[..., :8]
    if k.shape[2] != dim:
        batch = Batch([3], [1], batch.q[..., :8], k[:1], batch.v)
    problem = problem_of(batch, RaggedKv(k, k), rope=(1.0, 1e4), window_left=2)
    prepared = prepare(problem, None, temporaries)
    assert_rotated(prepared.q, batch.q, first, (1.0, 1e4))
    assert_rotated(prepared.kv.k[first - 2 :], k[first - 2 :], first - 2, (1.0, 1e4))
    assert bool(torch.isnan(prepared.kv.k[first - 10 : first - 2]).all())


def test_keys_left_of_every_window_are_left_out(temporaries, monkeypatch):
    batch = make_batch([4, 1, 9], [40, 30, 3], 4, 2, 64, kv_dtype=E4M3, device=DEVICE)
    problem = problem_of(batch, rope=ROPE, window_left=6)
    prepared = prepare(problem, offsets_of(batch), temporaries)
    copy = Batch(batch.qo_lens, batch.kv_lens, prepared.q, prepared.kv.k, prepared.kv.v)
    for (q, k, v), (_, k_copy, v_copy) in zip(batch.requests(), copy.requests()):
        hidden = max(0, len(k) - len(q) - 6)
        assert bool(torch.isnan(k_copy[:hidden]).all()) and bool(torch.isnan(v_copy[:hidden]).all())
        assert_rotated(k_copy[hidden:], k[hidden:], hidden, ROPE)
        assert_copied(v_copy[hidden:], v[hidden:])


class PagedCase:
    """Requests that share pages, some of which the cache does not have, in a table longer than they need."""

    INDPTR = (2, 5, 5, 9, 10)
    #         ----  request 0   request 2        3   none
    INDICES = (4, 4, 5, 2, 0, 5, 2, -1, 5, 1 << 30, 0, 6)
    V_INDICES = (4, 4, 0, 1, 2, 3, 7, 5, 4, 1, 9, 9)
    PAGES = 6

    def __init__(self, page_size: int, layout: str, kv_dtype: torch.dtype, own_values: bool) -> None:
        self.page_size = page_size
        self.last = (max(page_size - 1, 1), 1, page_size, 1)
        dim, heads = 64, 2
        shape = (self.PAGES, page_size, heads, dim) if layout == "NHD" else (self.PAGES, heads, page_size, dim)
        caches = [torch.randn(shape, device=DEVICE).to(kv_dtype) for _ in range(2)]
        self.k, self.v = caches if layout == "NHD" else [x.transpose(1, 2) for x in caches]

        def ints(values: tuple[int, ...]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        self.indptr, self.indices, self.last_page_len = ints(self.INDPTR), ints(self.INDICES), ints(self.last)
        self.v_indices = ints(self.V_INDICES) if own_values else None
        self.qo_lens = [3, 1, 30, 2]

    def problem(self, rope: tuple[float, float] | None) -> tuple[Problem, Offsets]:
        batch = make_batch(self.qo_lens, self.qo_lens, 4, 2, 64, device=DEVICE)
        kv = PagedKv(self.k, self.v, self.indptr, self.indices, self.last_page_len, self.v_indices)
        pages = Pages(self.indices, self.last_page_len, self.page_size, self.v_indices)
        return problem_of(batch, kv, rope=rope), offsets_of(batch, pages, self.indptr)

    def kv_len(self, request: int) -> int:
        pages = self.INDPTR[request + 1] - self.INDPTR[request]
        return (pages - 1) * self.page_size + self.last[request] if pages else 0


# 16 bits that are not rotated reach kernels as they are.
TURNED = [*itertools.product(FP8, WAYS.values()), (torch.float16, ROPE)]


@pytest.mark.pairwise
@every(**{"own_values": [False, True], "layout": ["NHD", "HND"], "page_size": [1, 5, 16], "kv_dtype,rope": TURNED})
def test_pages(page_size, layout, kv_dtype, own_values, rope, temporaries):
    case = PagedCase(page_size, layout, kv_dtype, own_values)
    problem, offsets = case.problem(rope)
    prepared = prepare(problem, offsets, temporaries)
    kv, entries = prepared.kv, len(case.INDICES)
    assert kv.k_cache.shape == (entries, page_size, 2, 64) and kv.indptr is problem.kv.indptr
    fp8 = kv_dtype != torch.float16
    if not fp8:
        assert kv.v_cache is case.v
    k_pages, v_pages = case.INDICES, case.V_INDICES if own_values else case.INDICES
    for b in range(4):
        begin, kv_len = case.INDPTR[b], case.kv_len(b)
        for number in range(case.INDPTR[b + 1] - begin):
            entry, first = begin + number, number * page_size
            tokens = min(page_size, kv_len - first)
            k_page, v_page = k_pages[entry], v_pages[entry]
            for cache, page, table, copies, source, rotation in (
                ("k", k_page, kv.indices, kv.k_cache, case.k, rope),
                ("v", v_page, kv.v_indices, kv.v_cache, case.v, None),
            ):
                copied = cache == "k" or fp8
                if not 0 <= page < case.PAGES:
                    assert int(table[entry]) == -1
                    assert not copied or bool(torch.isnan(copies[entry]).all())
                    continue
                assert int(table[entry]) == (entry if copied else page)
                if copied:
                    assert_copied(copies[entry, :tokens], source[page, :tokens], first, rotation)
                    assert bool(torch.isnan(copies[entry, tokens:]).all()), "the end of a last page is nobody's"
    for entry in (0, 1, 10, 11):  # of no request
        assert bool(torch.isnan(kv.k_cache[entry]).all())
    if rope is not None:
        q = problem.q.split(case.qo_lens)
        for b, q_copy in enumerate(prepared.q.split(case.qo_lens)):
            assert_rotated(q_copy, q[b], case.kv_len(b) - case.qo_lens[b], rope)


def test_no_keys(temporaries):
    batch = make_batch([3], [0], 4, 2, 64, device=DEVICE)
    prepared = prepare(problem_of(batch, rope=ROPE), None, temporaries)
    assert_rotated(prepared.q, batch.q, -3, ROPE)
    assert prepared.kv.k.shape == (0, 2, 64)


def test_an_empty_table(temporaries, monkeypatch):
    case = PagedCase(4, "NHD", E4M3, False)
    case.indices = case.indices[:0]
    case.indptr = torch.zeros_like(case.indptr)
    problem, offsets = case.problem(ROPE)
    prepared = prepare(problem, offsets, temporaries)
    assert prepared.kv.k_cache.data_ptr() != 0 and prepared.kv.indices.numel() == 0
    assert bool(torch.isfinite(prepared.q).all())


# Offsets on the device were never checked. Of what they damage nothing is read or written; the rest is copied.
BAD_OFFSETS = {
    "beyond the end": ([0, 5, 9], [0, 7, 10**9], 0),
    "negative": ([0, 5, 9], [-(10**9), 7, 12], 1),
    "decreasing rows": ([0, 5, -4], [0, 7, 12], 0),
    "many rows": ([0, 5, 2**31 - 1], [0, 7, 12], 0),
}


@every(**{"qo,kv,good": BAD_OFFSETS})
def test_offsets_that_make_no_sense(qo, kv, good, temporaries):
    batch = make_batch([5, 4], [7, 5], 4, 2, 64, device=DEVICE)
    offsets = Offsets(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (qo, kv)), 9)
    prepared = prepare(problem_of(batch, rope=ROPE), offsets, temporaries)
    copy = Batch([5, 4], [7, 5], prepared.q, prepared.kv.k, batch.v)
    q, k, _ = batch.requests()[good]
    q_copy, k_copy, _ = copy.requests()[good]
    assert_rotated(q_copy, q, len(k) - len(q), ROPE)
    assert_rotated(k_copy, k, 0, ROPE)
    assert bool(torch.isnan(copy.requests()[1 - good][0]).all()), "rows of a request that is not computed"


def test_garbage_in_the_page_table(temporaries, monkeypatch):
    case = PagedCase(5, "NHD", E4M3, True)
    problem, offsets = case.problem(ROPE)
    generator = torch.Generator().manual_seed(0)
    for x in (offsets.pages.indices, offsets.pages.v_indices, offsets.pages.last_page_len, offsets.kv_indptr):
        garbage = torch.randint(-(2**31), 2**31, x.shape, generator=generator)
        x.copy_(garbage.to(torch.int32))
    prepare(problem, offsets, temporaries)
    torch.cuda.synchronize()  # an access outside of memory would show here
