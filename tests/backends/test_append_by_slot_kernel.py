"""The kernel that appends by slot: the bits that PyTorch stores on the CPU, and nothing outside of the slots.

What appending by slot is, test_append_by_slot.py says, for all devices."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from compare import assert_bitwise
from guards import Guarded

import cutlass_kernels as ck
from cutlass_kernels._caches import slots_of_tokens

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SPECIAL = [
    0.0,
    2.0**-24,
    2.0**-17,
    1.5 * 2.0**-10,
    447,
    448,
    456,
    464,
    465,
    480,
    57344,
    61440,
    6.5e4,
    math.inf,
    math.nan,
]


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
    """Fails where PyTorch is to write to a cache on a GPU."""
    write = slots_of_tokens._write

    def refuse(new: torch.Tensor, cache: torch.Tensor, *rest: Any) -> None:
        assert not cache.is_cuda, f"PyTorch writes to a cache of {cache.dtype}"
        write(new, cache, *rest)

    monkeypatch.setattr(slots_of_tokens, "_write", refuse)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of all sizes, with special ones among them."""
    x = torch.randn(shape) * 2.0 ** torch.randint(-18, 17, shape)
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape)]
    return torch.where(torch.rand(shape) < 0.2, special * torch.randn(shape).sign(), x).to(dtype)


def slots_of(rng: random.Random, room: int, count: int) -> list[int]:
    """Distinct slots, some replaced by padding."""
    slots = rng.sample(range(room), min(count, room))
    return [rng.choice([-1, -7, -(2**31)]) if rng.random() < 0.2 else x for x in slots]


class Cache:
    """Keys or values, guarded on the device, and the same on the CPU."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> None:
        self.guarded = Guarded(shape, dtype, DEVICE, strides, torch.randn(shape).to(dtype).to(DEVICE))
        self.on_device = self.guarded.tensor
        self.on_cpu = self.on_device.cpu().contiguous()

    def check(self) -> None:
        assert_bitwise(self.on_device.cpu(), self.on_cpu)
        self.guarded.check("cache")


def append_on_both(
    new: list[torch.Tensor], caches: list[Cache], slots: torch.Tensor, *rest: Any, **options: Any
) -> None:
    ck.append_paged_kv_cache_by_slot(*new, *(x.on_device for x in caches), slots, *rest, **options)
    plain = [x.cpu() if isinstance(x, torch.Tensor) else x for x in (*new, slots, *rest)]
    ck.append_paged_kv_cache_by_slot(*plain[:2], *(x.on_cpu for x in caches), *plain[2:], **options)
    for cache in caches:
        cache.check()


def strides_of(shape: tuple[int, ...], gap: int) -> tuple[int, ...]:
    """Rows, and pages, with ``gap`` elements between them."""
    row = shape[-1] + gap
    return (shape[1] * shape[2] * row + gap, shape[2] * row, row, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [None, E4M3, E5M2])
@pytest.mark.parametrize("seed", range(24))
def test_the_same_bits_as_on_the_cpu(dtype, cache_dtype, seed):
    rng = random.Random(f"{dtype} {cache_dtype} {seed}")
    torch.manual_seed(rng.randrange(1 << 30))
    pages, page_size, heads = rng.randint(1, 9), rng.choice([1, 5, 16, 64]), rng.choice([1, 2, 3, 8, 40])
    dims = rng.choice([(64, 64), (128, 128), (192, 128), (8, 8), (20, 12), (5, 7)])
    layout, gap = rng.choice(["NHD", "HND"]), rng.choice([0, 0, 8, 3])
    inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
    slots = slots_of(rng, pages * page_size, rng.choice([0, 1, 7, 300]))
    # Slices of packed tokens, whose addresses 16 bytes divide or not, with rows behind the last slot.
    first = rng.choice([0, 8, 1])
    packed = values((len(slots) + rng.choice([0, 5]), heads, first + sum(dims)), dtype).to(DEVICE)
    new = [packed[..., first : first + dims[0]], packed[..., first + dims[0] :]]
    shapes = [(pages, *inner, dim) for dim in dims]
    caches = [Cache(shape, strides_of(shape, gap), cache_dtype or dtype) for shape in shapes]
    factors = torch.rand(2, 2 * heads, device=DEVICE) + 0.5
    scales = [rng.choice([None, 0.3, x[:1], x[::2]]) for x in factors]
    mapping = torch.tensor(slots, dtype=rng.choice([torch.int32, torch.int64]), device=DEVICE)
    append_on_both(new, caches, mapping, *scales, kv_layout=layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [None, E4M3, E5M2])
@pytest.mark.parametrize("head_dim", [64, 1])  # units of 8 elements, and of one
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_every_number_of_16_bits(dtype, cache_dtype, head_dim, scale):
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(-1, 1, head_dim).to(DEVICE)
    shape = (numbers.size(0) // 16, 16, 1, head_dim)
    caches = [Cache(shape, strides_of(shape, 0), cache_dtype or dtype) for _ in range(2)]
    append_on_both([numbers, numbers], caches, torch.randperm(numbers.size(0), device=DEVICE), scale, -scale)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_layouts_of_one_allocation(cache_dtype):
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
        ck.append_paged_kv_cache_by_slot(*(x.cpu() for x in new), *halves(want), slots.cpu(), 0.5)
        assert_bitwise(got.cpu(), want)


@pytest.mark.parametrize("cache_dtype", [torch.float16, E4M3])
@pytest.mark.parametrize("head_dim", [64, 5])
def test_slots_of_no_page_touch_no_memory(cache_dtype, head_dim):
    new = torch.ones(8, 2, head_dim, dtype=torch.float16, device=DEVICE)
    caches = [Guarded((3, 4, 2, head_dim), cache_dtype, DEVICE) for _ in range(2)]
    small = [x.tensor[:2] for x in caches]  # the third page exists, but not for this call
    for slots in ([8, 9, 11, 12, 13, 1 << 31, 1 << 62, -1], [-8, -9, -(1 << 31), -(1 << 63), 8, 8, 8, 8]):
        ck.append_paged_kv_cache_by_slot(new, new, *small, torch.tensor(slots, device=DEVICE))
    for x in caches:
        x.check_untouched("cache")


def test_keys_of_any_strides():
    packed = torch.randn(9, 12, 64).to(torch.bfloat16).to(DEVICE)
    slots = torch.arange(9, device=DEVICE).repeat_interleave(2)[::2]  # strided slots
    for k, v in (
        (packed[:, 4:8], packed[:, 8:]),
        (packed[:, :4].transpose(0, 1).contiguous().transpose(0, 1), packed[:, :1].expand(-1, 4, -1)),
        (packed[:, :4].flip(-1), packed[:, :4].mT.contiguous().mT),
    ):
        caches = [Cache((1, 16, 4, 64), strides_of((1, 16, 4, 64), 0), E4M3) for _ in range(2)]
        append_on_both([k, v], caches, slots, 0.7)


def test_a_call_allocates_nothing_and_does_not_synchronise():
    new = torch.randn(64, 8, 128, device=DEVICE).bfloat16()
    caches = [torch.zeros(8, 16, 8, 128, device=DEVICE).to(E4M3) for _ in range(2)]
    slots, scale = torch.arange(64, device=DEVICE), torch.rand(8, device=DEVICE) + 0.5
    call = lambda: ck.append_paged_kv_cache_by_slot(new, new, *caches, slots, 0.5, scale)  # noqa: E731
    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [0.875, 1.2, 0.3, 3.0, 0.5])
def test_every_number_is_rounded_to_nearest(dtype, cache_dtype, scale):
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
