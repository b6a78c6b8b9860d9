"""The kernels that say where new tokens belong, and write them there: the same as PyTorch does on the CPU.

What appending is, test_page.py says, for all devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_bitwise
from guards import Guarded
from problems import indptr

import cutlass_kernels as ck
from cutlass_kernels._compute import kernels

DEVICE = "cuda:0"
E4M3 = torch.float8_e4m3fn
LENGTHS = ([4, 0, 7, 1, 0, 300], [20, 3, 7, 33, 0, 300])  # new tokens, and all, of every request


def ints(values: Any, device: str = DEVICE) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Cache:
    """Pages in random order for requests of these lengths: guarded on the device, and the same on the CPU."""

    def __init__(
        self,
        lengths: list[int],
        page_size: int,
        heads: int,
        dims: tuple[int, int],
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "NHD",
        gap: int = 0,
    ) -> None:
        counts = [-(-length // page_size) for length in lengths]
        self.indptr = indptr(counts)
        self.indices = torch.randperm(sum(counts) + 3)[: sum(counts)].to(torch.int32)
        self.last = ints([(n - 1) % page_size + 1 if n else 0 for n in lengths], "cpu")
        self.layout = layout
        inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
        self.guarded = []
        for dim in dims:
            row = dim + gap
            shape = (sum(counts) + 3, *inner, dim)
            strides = (inner[0] * inner[1] * row + gap, inner[1] * row, row, 1)
            values = torch.randn(shape).to(dtype).to(DEVICE)
            self.guarded.append(Guarded(shape, dtype, DEVICE, strides, values))
        self.on_device = tuple(x.tensor for x in self.guarded)
        self.on_cpu = tuple(x.cpu().contiguous() for x in self.on_device)

    def append(self, k: torch.Tensor, v: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor], **other: Any) -> None:
        """Appends on both devices, with index tensors of this one's unless they are given."""
        table = {"kv_indices": self.indices, "kv_indptr": self.indptr, "kv_last_page_len": self.last} | other
        on_device = {name: x.to(DEVICE) for name, x in table.items()}
        ck.append_paged_kv_cache(k, v, *places, self.on_device, kv_layout=self.layout, **on_device)
        cpu = [x.cpu() for x in (k, v, *places)]
        ck.append_paged_kv_cache(*cpu, self.on_cpu, kv_layout=self.layout, **table)

    def check(self) -> None:
        for got, want, guarded in zip(self.on_device, self.on_cpu, self.guarded):
            assert_bitwise(got.cpu(), want)
            guarded.check("cache")


@pytest.fixture
def no_torch(monkeypatch):
    """Fails where PyTorch is to write to a cache on a GPU."""
    from cutlass_kernels._caches import page_functions

    bits = page_functions._bits

    def refuse(x):
        assert not x.is_cuda, f"PyTorch writes to a cache of {x.dtype}"
        return bits(x)

    monkeypatch.setattr(page_functions, "_bits", refuse)


def fresh(heads: int, dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    tokens = sum(LENGTHS[0])
    return [(10 * torch.randn(tokens, heads, dim)).to(dtype).to(DEVICE) for dim in dims]


def all_places() -> tuple[torch.Tensor, torch.Tensor]:
    append, total = LENGTHS
    return ck.get_batch_indices_positions(indptr(append, DEVICE), ints(total), sum(append))


# --- places ------------------------------------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.gpu
@pytest.mark.parametrize("append", [[], [0], [0, 0, 0], [5], [0, 1, 0, 0, 2], [1] * 300, [700, 0, 1]])
@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("first", [0, 2])
def test_places(append, more, first):
    offsets, lens = indptr(append, DEVICE) + first, ints([n + 7 * i for i, n in enumerate(append)])
    nnz = int(offsets[-1]) + more
    got = ck.get_batch_indices_positions(offsets, lens, nnz)
    want = ck.get_batch_indices_positions(offsets.cpu(), lens.cpu(), nnz)
    for x, y in zip(got, want):
        assert_bitwise(x.cpu(), y)


@pytest.mark.gpu
def test_places_are_written_to_given_tensors():
    out = ints([9] * 20), ints([9] * 20)
    got = ck.get_batch_indices_positions(indptr([2, 4], DEVICE), ints([5, 4]), 6, out[0][7:13], out[1][7:13])
    assert got[0].data_ptr() == out[0][7:].data_ptr()
    assert out[0].tolist() == [9] * 7 + [0, 0, 1, 1, 1, 1] + [9] * 7
    assert out[1].tolist() == [9] * 7 + [3, 4, 0, 1, 2, 3] + [9] * 7


@pytest.mark.gpu
def test_offsets_that_make_no_sense_are_survived():
    for offsets in ([5, 3, 100, -7], [-4, -2, 1, 2], [2**31 - 1] * 4):
        owner, _ = ck.get_batch_indices_positions(ints(offsets), ints([1, 2, 3]), 9)
        assert bool(((owner >= -1) & (owner < 3)).all())


# --- appending ---------------------------------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
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
        (2, (5, 7), torch.float8_e5m2),
    ],
)
def test_append(no_torch, heads, dims, dtype, page_size, layout):
    cache = Cache(LENGTHS[1], page_size, heads, dims, dtype, layout)
    cache.append(*fresh(heads, dims, dtype), all_places())
    cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("gap", [8, 3])
def test_append_to_caches_with_gaps(no_torch, gap, layout):
    for dtype in (torch.bfloat16, E4M3):
        cache = Cache(LENGTHS[1], 16, 4, (64, 64), dtype, layout, gap)
        cache.append(*fresh(4, (64, 64), dtype), all_places())
        cache.check()


@pytest.mark.gpu
def test_append_tensors_of_any_layout(no_torch):
    packed = torch.randn(sum(LENGTHS[0]), 3 * 4, 64).to(torch.bfloat16).to(DEVICE)
    for k, v in (
        (packed[:, 4:8], packed[:, 8:]),
        (packed[:, :4].transpose(0, 1).contiguous().transpose(0, 1), packed[:, :1].expand(-1, 4, -1)),
        (packed[:, :8, ::2].transpose(1, 2)[:, :4].repeat(1, 1, 8), packed[:, 4:8].flip(-1)),
        (packed[:, :4].mT.contiguous().mT, packed[..., 1:].flatten(1)[:, 1:257].unflatten(1, (4, 64))),
    ):
        cache = Cache(LENGTHS[1], 8, 4, (64, 64))
        cache.append(k, v, all_places())
        cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache_dtype", [E4M3, torch.float8_e5m2])
def test_values_are_converted_as_torch_does(no_torch, cache_dtype, dtype):
    k, v = fresh(2, (64, 64), torch.float32)
    beyond = torch.tensor([447, 448, 456, 464, 465, 480, 1e4, 57344, 61439, 61440, 6.5e4, torch.inf, torch.nan])
    small = 2.0 ** -torch.arange(5, 20)
    special = torch.cat([x * sign for x in (beyond, small, 1.5 * small) for sign in (1, -1)])
    k[0].view(-1)[: special.numel()] = special.to(DEVICE)
    k, v = k.to(dtype), (100 * v).to(dtype)
    cache = Cache([k.size(0)], 16, 2, (64, 64), cache_dtype)
    places = torch.zeros_like(ints([0] * k.size(0))), torch.arange(k.size(0), dtype=torch.int32, device=DEVICE)
    table = [x.to(DEVICE) for x in (cache.indices, cache.indptr, cache.last)]
    ck.append_paged_kv_cache(k, v, *places, cache.on_device, *table)
    for new, stored in zip((k, v), cache.on_device):
        rows = stored[cache.indices.to(DEVICE)].flatten(0, 1)[: k.size(0)]
        assert_bitwise(rows, new.to(cache_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtypes", [(torch.float64,) * 2, (torch.float16, torch.float32)])
def test_torch_writes_the_rest(cache_dtypes):
    k, v = fresh(2, (8, 8))
    cache = Cache(LENGTHS[1], 4, 2, (8, 8), torch.float32)
    cache.on_device = tuple(x.to(dtype) for x, dtype in zip(cache.on_device, cache_dtypes))
    cache.on_cpu = tuple(x.to(dtype) for x, dtype in zip(cache.on_cpu, cache_dtypes))
    cache.append(k, v, all_places())
    for got, want in zip(cache.on_device, cache.on_cpu):
        assert_bitwise(got.cpu(), want)


@pytest.mark.gpu
def test_some_tokens_are_skipped(no_torch):
    cache = Cache(LENGTHS[1], 5, 2, (64, 64))
    owner, position = all_places()
    owner[::3] = -1
    position[1::7] = -2
    cache.append(*fresh(2, (64, 64)), (owner, position))
    cache.check()
    owner.fill_(-1)
    cache.append(*fresh(2, (64, 64)), (owner, position))
    cache.check()


@pytest.mark.gpu
def test_places_that_do_not_exist_are_skipped(no_torch):
    k, v = (torch.randn(10, 2, 64).to(torch.bfloat16).to(DEVICE) for _ in range(2))
    for owner, position, kv_indptr, indices in (
        ([2, 3, 2**31 - 1, -(2**31)] * 2 + [2, 2], range(10), [0, 2, 4], [0, 1, 2, 3]),  # requests
        ([0] * 10, [8, 9, 15, 16, 100, 2**31 - 1, -1, -(2**31), 8, 8], [0, 2, 4], [0, 1, 2, 3]),  # positions
        ([0] * 10, range(10), [0, 4, 4], [4, -1, 2**31 - 1, -(2**31)]),  # pages
        ([0] * 10, range(10), [3, 9, 4], [9, 9, 9]),  # entries of the table
        ([0] * 10, range(10), [-9, 9, 4], [0, 1, 2, 3]),
    ):
        cache = Cache([8, 8], 4, 2, (64, 64))  # pages of 4, so that a request has 2 or 4 of them
        for guarded in cache.guarded:
            guarded._before = guarded._bytes().clone()
        pages = [x.clone() for x in cache.on_device]
        table = [ints(x) for x in (indices, kv_indptr, [4, 4])]
        small = tuple(x[:4] for x in cache.on_device)
        ck.append_paged_kv_cache(k, v, ints(owner), ints(list(position)), small, *table)
        for x, y, guarded in zip(cache.on_device, pages, cache.guarded):
            assert_bitwise(x, y)
            guarded.check_untouched("cache")


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [-1, 4])
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


@pytest.mark.gpu
def test_graphs(no_torch):
    cache = Cache(LENGTHS[1], 16, 2, (64, 64))
    k, v = fresh(2, (64, 64))
    offsets, lens = indptr(LENGTHS[0], DEVICE), ints(LENGTHS[1])
    table = [x.to(DEVICE) for x in (cache.indices, cache.indptr, cache.last)]

    def step() -> None:
        places = ck.get_batch_indices_positions(offsets, lens, k.size(0))
        ck.append_paged_kv_cache(k, v, *places, cache.on_device, *table)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for x in (k, v):
        x.copy_(torch.randn(x.shape))
    places = ck.get_batch_indices_positions(offsets.cpu(), lens.cpu(), k.size(0))
    ck.append_paged_kv_cache(k.cpu(), v.cpu(), *places, cache.on_cpu, cache.indices, cache.indptr, cache.last)
    graph.replay()
    cache.check()


@pytest.mark.gpu
def test_an_engine_without_these_kernels_does_the_same(monkeypatch):
    cache, again = (Cache(LENGTHS[1], 16, 2, (64, 64)) for _ in range(2))
    k, v = fresh(2, (64, 64))
    cache.append(k, v, all_places())
    monkeypatch.setattr(kernels, "move", lambda x: False)
    again.append(k, v, all_places())
    again.check()
    cache.check()
