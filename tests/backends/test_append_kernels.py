"""The kernels that say where new tokens belong, and write them there, by pages and by slots: the bits that PyTorch
stores on the CPU, and nothing elsewhere.

What appending is, test_page.py and test_append_by_slot.py say, for all devices."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from captures import no_waiting
from compare import assert_all_bitwise, assert_bitwise
from guards import Guarded
from pairs import every
from problems import indptr

import cutlass_kernels as ck
from cutlass_kernels._caches import page_functions, slots_of_tokens
from cutlass_kernels._compute import kernels

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF = [torch.float16, torch.bfloat16]
LENGTHS = ([4, 0, 7, 1, 0, 300], [20, 3, 7, 33, 0, 300])  # new tokens, and all, of every request


def ints(values: Any, device: str = DEVICE) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def on_cpu(values: Any) -> list[Any]:
    return [x.cpu() if isinstance(x, torch.Tensor) else x for x in values]


class Caches:
    """Pages of keys and of values: guarded on the device, and the same on the CPU. ``gap`` elements lie between rows,
    and between pages."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        heads: int,
        dims: tuple[int, int] = (64, 64),
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "NHD",
        gap: int = 0,
    ) -> None:
        inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
        self.layout, self.guarded = layout, list[Guarded]()
        for dim in dims:
            shape, row = (pages, *inner, dim), dim + gap
            strides = (inner[0] * inner[1] * row + gap, inner[1] * row, row, 1)
            self.guarded.append(Guarded(shape, dtype, DEVICE, strides, torch.randn(shape).to(dtype).to(DEVICE)))
        self.on_device = tuple(x.tensor for x in self.guarded)
        self.on_cpu = tuple(x.cpu().contiguous() for x in self.on_device)

    def append_by_slot(self, new: list[torch.Tensor], slots: torch.Tensor, *rest: Any) -> None:
        """On both devices."""
        for caches, given in ((self.on_device, (*new, slots, *rest)), (self.on_cpu, on_cpu((*new, slots, *rest)))):
            ck.append_paged_kv_cache_by_slot(*given[:2], *caches, *given[2:], kv_layout=self.layout)

    def check(self) -> None:
        assert_all_bitwise([x.cpu() for x in self.on_device], self.on_cpu)
        for guarded in self.guarded:
            guarded.check("cache")


class PagesOf(Caches):
    """Pages in random order for requests of these lengths."""

    def __init__(self, lengths: list[int], page_size: int, heads: int, *more: Any) -> None:
        counts = [-(-length // page_size) for length in lengths]
        super().__init__(sum(counts) + 3, page_size, heads, *more)
        self.indptr = indptr(counts)
        self.indices = torch.randperm(sum(counts) + 3)[: sum(counts)].to(torch.int32)
        self.last = ints([(n - 1) % page_size + 1 if n else 0 for n in lengths], "cpu")

    def table(self, device: str = DEVICE) -> list[torch.Tensor]:
        return [x.to(device) for x in (self.indices, self.indptr, self.last)]

    def append(self, k: torch.Tensor, v: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor]) -> None:
        """On both devices."""
        ck.append_paged_kv_cache(k, v, *places, self.on_device, *self.table(), kv_layout=self.layout)
        given = on_cpu((k, v, *places))
        ck.append_paged_kv_cache(*given, self.on_cpu, *self.table("cpu"), kv_layout=self.layout)


WRITERS = {module: module.bits for module in (page_functions, slots_of_tokens)}  # PyTorch writes bits of caches


@pytest.fixture
def no_torch(monkeypatch) -> None:
    """Fails where PyTorch is to write to a cache on a GPU."""
    for module, bits in WRITERS.items():

        def refuse(x: torch.Tensor, bits: Any = bits) -> torch.Tensor:
            assert not x.is_cuda, f"PyTorch writes to a cache of {x.dtype}"
            return bits(x)

        monkeypatch.setattr(module, "bits", refuse)


def fresh(heads: int, dims: tuple[int, int] = (64, 64), dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    tokens = sum(LENGTHS[0])
    return [(10 * torch.randn(tokens, heads, dim)).to(dtype).to(DEVICE) for dim in dims]


def all_places() -> tuple[torch.Tensor, torch.Tensor]:
    append, total = LENGTHS
    return ck.get_batch_indices_positions(indptr(append, DEVICE), ints(total), sum(append))


def of_any_strides(packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of 4 heads of 64 columns in tokens of 12."""
    yield packed[:, 4:8], packed[:, 8:]
    yield packed[:, :4].transpose(0, 1).contiguous().transpose(0, 1), packed[:, :1].expand(-1, 4, -1)
    yield packed[:, :8, ::2].transpose(1, 2)[:, :4].repeat(1, 1, 8), packed[:, 4:8].flip(-1)
    yield packed[:, :4].mT.contiguous().mT, packed[..., 1:].flatten(1)[:, 1:257].unflatten(1, (4, 64))
    yield packed[:, :4].flip(-1), packed[:, :4].mT.contiguous().mT


# --- places ------------------------------------------------------------------------------------------------------


@pytest.mark.pairwise
@every(append=[[], [0], [0, 0, 0], [5], [0, 1, 0, 0, 2], [1] * 300, [700, 0, 1]], more=[0, 3], first=[0, 2])
def test_places(append, more, first):
    offsets, lens = indptr(append, DEVICE) + first, ints([n + 7 * i for i, n in enumerate(append)])
    nnz = int(offsets[-1]) + more
    got = ck.get_batch_indices_positions(offsets, lens, nnz)
    assert_all_bitwise([x.cpu() for x in got], ck.get_batch_indices_positions(offsets.cpu(), lens.cpu(), nnz))


def test_places_are_written_to_given_tensors():
    out = ints([9] * 20), ints([9] * 20)
    got = ck.get_batch_indices_positions(indptr([2, 4], DEVICE), ints([5, 4]), 6, out[0][7:13], out[1][7:13])
    assert got[0].data_ptr() == out[0][7:].data_ptr()
    assert out[0].tolist() == [9] * 7 + [0, 0, 1, 1, 1, 1] + [9] * 7
    assert out[1].tolist() == [9] * 7 + [3, 4, 0, 1, 2, 3] + [9] * 7


def test_offsets_that_make_no_sense_are_survived():
    for offsets in ([5, 3, 100, -7], [-4, -2, 1, 2], [2**31 - 1] * 4):
        owner, _ = ck.get_batch_indices_positions(ints(offsets), ints([1, 2, 3]), 9)
        assert bool(((owner >= -1) & (owner < 3)).all())


# --- appending by pages ------------------------------------------------------------------------------------------


@pytest.mark.pairwise
@every(layout=["NHD", "HND"], page_size=[1, 5, 16])
@pytest.mark.parametrize(
    "heads,dims,dtype",
    [
        (2, (64, 64), torch.bfloat16),
        (8, (128, 128), torch.float16),
        (40, (192, 128), torch.bfloat16),  # more than a block of threads takes at once
        (1, (8, 8), torch.float16),
        (3, (20, 12), torch.float16),  # no multiples of 16 bytes
        (3, (16, 48), torch.float32),
        (2, (64, 64), E4M3),
        (2, (5, 7), E5M2),
    ],
)
def test_append(no_torch, heads, dims, dtype, page_size, layout):
    cache = PagesOf(LENGTHS[1], page_size, heads, dims, dtype, layout)
    cache.append(*fresh(heads, dims, dtype), all_places())
    cache.check()


@every(layout=["NHD", "HND"], gap=[8, 3], dtype=[torch.bfloat16, E4M3])
def test_append_to_caches_with_gaps(no_torch, gap, layout, dtype):
    cache = PagesOf(LENGTHS[1], 16, 4, (64, 64), dtype, layout, gap)
    cache.append(*fresh(4, dtype=dtype), all_places())
    cache.check()


def test_append_tensors_of_any_layout(no_torch):
    packed = torch.randn(sum(LENGTHS[0]), 3 * 4, 64).to(torch.bfloat16).to(DEVICE)
    for k, v in of_any_strides(packed):
        cache = PagesOf(LENGTHS[1], 8, 4)
        cache.append(k, v, all_places())
        cache.check()


@every(dtype=[*HALF, torch.float32], cache_dtype=[E4M3, E5M2])
def test_values_are_converted_as_torch_does(no_torch, cache_dtype, dtype):
    k, v = fresh(2, dtype=torch.float32)
    beyond = torch.tensor([447, 448, 456, 464, 465, 480, 1e4, 57344, 61439, 61440, 6.5e4, torch.inf, torch.nan])
    small = 2.0 ** -torch.arange(5, 20)
    special = torch.cat([x * sign for x in (beyond, small, 1.5 * small) for sign in (1, -1)])
    k[0].view(-1)[: special.numel()] = special.to(DEVICE)
    k, v = k.to(dtype), (100 * v).to(dtype)
    cache = PagesOf([k.size(0)], 16, 2, (64, 64), cache_dtype)
    places = torch.zeros_like(ints([0] * k.size(0))), torch.arange(k.size(0), dtype=torch.int32, device=DEVICE)
    ck.append_paged_kv_cache(k, v, *places, cache.on_device, *cache.table())
    for new, stored in zip((k, v), cache.on_device):
        rows = stored[cache.indices.to(DEVICE)].flatten(0, 1)[: k.size(0)]
        assert_bitwise(rows, new.to(cache_dtype))


@every(cache_dtypes=[(torch.float64,) * 2, (torch.float16, torch.float32)])
def test_torch_writes_the_rest(cache_dtypes):
    k, v = fresh(2, (8, 8))
    cache = PagesOf(LENGTHS[1], 4, 2, (8, 8), torch.float32)
    cache.on_device = tuple(x.to(dtype) for x, dtype in zip(cache.on_device, cache_dtypes))
    cache.on_cpu = tuple(x.to(dtype) for x, dtype in zip(cache.on_cpu, cache_dtypes))
    cache.append(k, v, all_places())
    assert_all_bitwise([x.cpu() for x in cache.on_device], cache.on_cpu)


def test_some_tokens_are_skipped(no_torch):
    cache = PagesOf(LENGTHS[1], 5, 2)
    owner, position = all_places()
    owner[::3] = -1
    position[1::7] = -2
    cache.append(*fresh(2), (owner, position))
    cache.check()
    owner.fill_(-1)
    cache.append(*fresh(2), (owner, position))
    cache.check()


def test_places_that_do_not_exist_are_skipped(no_torch):
    k, v = (torch.randn(10, 2, 64).to(torch.bfloat16).to(DEVICE) for _ in range(2))
    for owner, position, kv_indptr, indices in (
        ([2, 3, 2**31 - 1, -(2**31)] * 2 + [2, 2], range(10), [0, 2, 4], [0, 1, 2, 3]),  # requests
        ([0] * 10, [8, 9, 15, 16, 100, 2**31 - 1, -1, -(2**31), 8, 8], [0, 2, 4], [0, 1, 2, 3]),  # positions
        ([0] * 10, range(10), [0, 4, 4], [4, -1, 2**31 - 1, -(2**31)]),  # pages
        ([0] * 10, range(10), [3, 9, 4], [9, 9, 9]),  # entries of the table
        ([0] * 10, range(10), [-9, 9, 4], [0, 1, 2, 3]),
    ):
        cache = PagesOf([8, 8], 4, 2)  # pages of 4, so that a request has 2 or 4 of them
        for guarded in cache.guarded:
            guarded._before = guarded._bytes().clone()
        pages = [x.clone() for x in cache.on_device]
        table = [ints(x) for x in (indices, kv_indptr, [4, 4])]
        small = tuple(x[:4] for x in cache.on_device)
        ck.append_paged_kv_cache(k, v, ints(owner), ints(list(position)), small, *table)
        for x, y, guarded in zip(cache.on_device, pages, cache.guarded):
            assert_bitwise(x, y)
            guarded.check_untouched("cache")


@every(wrong=[-1, 4])
def test_page_numbers_on_the_cpu_are_checked(wrong):
    cache = torch.zeros(4, 2, 8, 2, 64, device=DEVICE)
    keys = torch.ones(12, 2, 64, device=DEVICE)
    places = (ints([0] * 12), ints(list(range(12))))
    table = [ints(x, "cpu") for x in ([3, wrong, 99], [0, 2], [4])]
    with pytest.raises(ValueError, match=f"kv_indices holds the page number {wrong}"):
        ck.append_paged_kv_cache(keys, keys, *places, cache, *table)
    assert torch.count_nonzero(cache) == 0
    table[0][1] = 1  # what no request owns is not looked at
    ck.append_paged_kv_cache(keys, keys, *places, cache, *table)
    assert torch.equal(cache[3, 0], keys[:8]) and torch.equal(cache[1, 1, :4], keys[8:])


def test_an_engine_without_these_kernels_does_the_same(monkeypatch):
    cache, again = (PagesOf(LENGTHS[1], 16, 2) for _ in range(2))
    k, v = fresh(2)
    cache.append(k, v, all_places())
    monkeypatch.setattr(kernels, "move", lambda x: False)
    again.append(k, v, all_places())
    again.check()
    cache.check()


# --- appending by slot --------------------------------------------------------------------------------------------


SPECIAL = [0.0, 2.0**-24, 2.0**-17, 1.5 * 2.0**-10, 447, 448, 456, 464, 465, 480]
SPECIAL += [57344, 61440, 6.5e4, math.inf, math.nan]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of all sizes, with special ones among them."""
    x = torch.randn(shape) * 2.0 ** torch.randint(-18, 17, shape)
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape)]
    return torch.where(torch.rand(shape) < 0.2, special * torch.randn(shape).sign(), x).to(dtype)


def slots_of(rng: random.Random, room: int, count: int) -> list[int]:
    """Distinct slots, some replaced by padding."""
    slots = rng.sample(range(room), min(count, room))
    return [rng.choice([-1, -7, -(2**31)]) if rng.random() < 0.2 else x for x in slots]


@every(dtype=HALF, cache_dtype=[None, E4M3, E5M2], seed=range(24))
def test_the_same_bits_as_on_the_cpu(no_torch, dtype, cache_dtype, seed):
    rng = random.Random(f"{dtype} {cache_dtype} {seed}")
    torch.manual_seed(rng.randrange(1 << 30))
    pages, page_size, heads = rng.randint(1, 9), rng.choice([1, 5, 16, 64]), rng.choice([1, 2, 3, 8, 40])
    dims = rng.choice([(64, 64), (128, 128), (192, 128), (8, 8), (20, 12), (5, 7)])
    layout, gap = rng.choice(["NHD", "HND"]), rng.choice([0, 0, 8, 3])
    slots = slots_of(rng, pages * page_size, rng.choice([0, 1, 7, 300]))
    # Slices of packed tokens, whose addresses 16 bytes divide or not, with rows behind the last slot.
    first = rng.choice([0, 8, 1])
    packed = values((len(slots) + rng.choice([0, 5]), heads, first + sum(dims)), dtype).to(DEVICE)
    new = [packed[..., first : first + dims[0]], packed[..., first + dims[0] :]]
    caches = Caches(pages, page_size, heads, dims, cache_dtype or dtype, layout, gap)
    factors = torch.rand(2, 2 * heads, device=DEVICE) + 0.5
    scales = [rng.choice([None, 0.3, x[:1], x[::2]]) for x in factors]
    mapping = torch.tensor(slots, dtype=rng.choice([torch.int32, torch.int64]), device=DEVICE)
    caches.append_by_slot(new, mapping, *scales)
    caches.check()


@every(dtype=HALF, cache_dtype=[None, E4M3, E5M2], head_dim=[64, 1], scale=[1.0, 0.3])  # units of 8 elements, of one
def test_every_number_of_16_bits(no_torch, dtype, cache_dtype, head_dim, scale):
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(-1, 1, head_dim).to(DEVICE)
    caches = Caches(numbers.size(0) // 16, 16, 1, (head_dim, head_dim), cache_dtype or dtype)
    caches.append_by_slot([numbers, numbers], torch.randperm(numbers.size(0), device=DEVICE), scale, -scale)
    caches.check()


@every(cache_dtype=[torch.bfloat16, E4M3])
def test_layouts_of_one_allocation(no_torch, cache_dtype):
    """The halves of [pages, 2, ...], and keys beside values in the last dimension."""
    new = [values((9, 4, 64), torch.bfloat16).to(DEVICE) for _ in range(2)]
    slots = torch.tensor([3, 30, -1, 17, 0, 31, -1, 8, 9], device=DEVICE)
    for whole, halves in (
        (torch.zeros(2, 2, 16, 4, 64), lambda x: x.unbind(1)),
        (torch.zeros(2, 2, 16, 4, 64), lambda x: x.unbind(0)),
        (torch.zeros(2, 16, 4, 128), lambda x: x.chunk(2, -1)),
        (torch.zeros(2, 4, 16, 128), lambda x: x.transpose(1, 2).chunk(2, -1)),
    ):
        want, got = whole.to(cache_dtype), whole.to(cache_dtype).to(DEVICE)
        ck.append_paged_kv_cache_by_slot(*new, *halves(got), slots, 0.5)
        ck.append_paged_kv_cache_by_slot(*on_cpu(new), *halves(want), slots.cpu(), 0.5)
        assert_bitwise(got.cpu(), want)


@every(cache_dtype=[torch.float16, E4M3], head_dim=[64, 5])
def test_slots_of_no_page_touch_no_memory(no_torch, cache_dtype, head_dim):
    new = torch.ones(8, 2, head_dim, dtype=torch.float16, device=DEVICE)
    caches = [Guarded((3, 4, 2, head_dim), cache_dtype, DEVICE) for _ in range(2)]
    small = [x.tensor[:2] for x in caches]  # the third page exists, but not for this call
    for slots in ([8, 9, 11, 12, 13, 1 << 31, 1 << 62, -1], [-8, -9, -(1 << 31), -(1 << 63), 8, 8, 8, 8]):
        ck.append_paged_kv_cache_by_slot(new, new, *small, torch.tensor(slots, device=DEVICE))
    for x in caches:
        x.check_untouched("cache")


def test_keys_of_any_strides(no_torch):
    packed = torch.randn(9, 12, 64).to(torch.bfloat16).to(DEVICE)
    slots = torch.arange(9, device=DEVICE).repeat_interleave(2)[::2]  # strided slots
    for k, v in of_any_strides(packed):
        caches = Caches(1, 16, 4, dtype=E4M3)
        caches.append_by_slot([k, v], slots, 0.7)
        caches.check()


def test_a_call_allocates_nothing_and_does_not_synchronise(no_torch):
    new = torch.randn(64, 8, 128, device=DEVICE).bfloat16()
    caches = [torch.zeros(8, 16, 8, 128, device=DEVICE).to(E4M3) for _ in range(2)]
    slots, scale = torch.arange(64, device=DEVICE), torch.rand(8, device=DEVICE) + 0.5
    call = lambda: ck.append_paged_kv_cache_by_slot(new, new, *caches, slots, 0.5, scale)  # noqa: E731
    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waiting():
        call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 numbers rounded to the nearest of an fp8 type, to even in the middle of two, not beyond its range."""
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    grid = grid[grid.isfinite() & (grid > 0)].sort().values
    grid = torch.cat([grid.new_zeros(1), grid])
    middle = (grid[1:] + grid[:-1]) / 2
    at = torch.searchsorted(middle, x.abs())  # the lower one in the middle
    tie = (at < middle.numel()) & (middle[at.clamp(max=middle.numel() - 1)] == x.abs())
    return torch.copysign(grid[at + (tie & (at % 2 == 1)).long()], x)


@every(dtype=HALF, cache_dtype=[E4M3, E5M2], scale=[0.875, 1.2, 0.3, 3.0, 0.5])
def test_every_number_is_rounded_to_nearest(no_torch, dtype, cache_dtype, scale):
    """The exact quotient is, by the scale as fp32 holds it."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    new = torch.cat([numbers, numbers.new_zeros(-numbers.numel() % 576)]).view(-1, 8, 72).to(DEVICE)
    cache = torch.zeros(new.size(0), 1, 8, 72, device=DEVICE).to(cache_dtype)
    values = torch.zeros_like(cache)
    slots = torch.arange(new.size(0), device=DEVICE)
    ck.append_paged_kv_cache_by_slot(new, new, cache, values, slots, scale, scale)
    exact = new.cpu().double() / float(torch.tensor(scale, dtype=torch.float32))
    for stored in (cache, values):
        assert_bitwise(stored.cpu().double().view(-1, 8, 72), nearest(exact, cache_dtype))
