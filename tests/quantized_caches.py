"""Quantized latent caches, written and read bit by bit from the description of their formats. What a token stands for
are bfloat16 numbers: e4m3 times its scale in fp32, rounded to nearest."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

U8, F64 = torch.uint8, torch.float64


@dataclass(frozen=True)
class Layout:
    """Bytes of a token, e4m3 columns, columns of a scale, bf16 columns."""

    size: int
    latent: int
    group: int
    rope: int
    scales: str  # "fp32" or "ue8m0"
    by_page: bool = False  # scales of a page lie behind its data

    @property
    def columns(self) -> int:
        return self.latent + self.rope


LAYOUTS = {
    "v3.2": Layout(656, 512, 128, 64, "fp32"),
    "v4": Layout(584, 448, 64, 64, "ue8m0", by_page=True),
    "v3.2_nope": Layout(528, 512, 128, 0, "fp32"),
    "v4.1_pages": Layout(528, 512, 32, 0, "ue8m0", by_page=True),
    "v4.1_tokens": Layout(528, 512, 32, 0, "ue8m0"),
}


UNNAMED = [name for name, layout in LAYOUTS.items() if layout.size != 528]  # formats that follow from their bytes


def addresses(name: str, page_size: int, token: int) -> tuple[int, int, int]:
    """Where the e4m3 columns, the scales and the bf16 columns of a token begin in its page."""
    if name == "v3.2":
        return token * 656, token * 656 + 512, token * 656 + 528
    if name == "v4":
        return token * 576, page_size * 576 + token * 8, token * 576 + 448
    if name in ("v3.2_nope", "v4.1_tokens"):
        return token * 528, token * 528 + 512, 0
    return token * 512, page_size * 512 + token * 16, 0


def number(bits: torch.Tensor, exponent_bits: int, mantissa_bits: int) -> torch.Tensor:
    """Floating-point numbers from their bits, as double precision. The largest exponent is for infinities and NaN, but
    of e4m3 for numbers, too."""
    bits = bits.to(torch.int64)
    bias = 2 ** (exponent_bits - 1) - 1
    mantissa = (bits & (2**mantissa_bits - 1)).to(F64) / 2**mantissa_bits
    exponent = (bits >> mantissa_bits) & (2**exponent_bits - 1)
    power = torch.pow(torch.tensor(2.0, dtype=F64), (exponent.clamp(min=1) - bias).to(F64))
    value = torch.where(exponent > 0, 1 + mantissa, mantissa) * power
    last = exponent == 2**exponent_bits - 1
    if (exponent_bits, mantissa_bits) == (4, 3):
        value = torch.where(last & (mantissa == 7 / 8), torch.nan, value)
    else:
        value = torch.where(last, torch.where(mantissa == 0, torch.inf, torch.nan), value)
    return torch.where((bits >> (exponent_bits + mantissa_bits)) & 1 == 1, -value, value)


E4M3 = number(torch.arange(256), 4, 3)  # by byte


def words(x: torch.Tensor, size: int) -> torch.Tensor:
    """Little-endian integers of so many bytes."""
    x = x.to(torch.int64).unflatten(-1, (-1, size))
    return (x << (8 * torch.arange(size))).sum(-1)


def power(exponents: torch.Tensor) -> torch.Tensor:
    """ue8m0 as double precision."""
    value = torch.pow(torch.tensor(2.0, dtype=F64), exponents.to(F64) - 127)
    return torch.where(exponents == 255, torch.nan, value)


def read(name: str, page: torch.Tensor, page_size: int, token: int) -> torch.Tensor:
    """What a token stands for, in double precision, from the bytes of its page."""
    layout = LAYOUTS[name]
    latent, scales, rope = addresses(name, page_size, token)
    count, width = layout.latent // layout.group, 4 if layout.scales == "fp32" else 1
    bits = page[scales : scales + count * width]
    factors = number(words(bits, 4), 8, 23) if width == 4 else power(bits)
    numbers = E4M3[page[latent : latent + layout.latent].long()] * factors.repeat_interleave(layout.group)
    of_rope = number(words(page[rope : rope + 2 * layout.rope], 2), 8, 7)
    return torch.cat([numbers.float().to(torch.bfloat16).double(), of_rope])


def write(name: str, page: torch.Tensor, page_size: int, token: int, generator: torch.Generator) -> None:
    """Random bytes of a token: any e4m3 numbers but NaN, scales of about 1/256, bf16 columns of about 1."""
    layout = LAYOUTS[name]
    latent, scales, rope = addresses(name, page_size, token)
    numbers = torch.randint(256, (layout.latent,), generator=generator).to(U8)
    page[latent : latent + layout.latent] = numbers.masked_fill(numbers & 0x7F == 0x7F, 0x80)
    count = layout.latent // layout.group
    if layout.scales == "fp32":
        factors = torch.rand(count, generator=generator) / 100 + 1e-4
        page[scales : scales + 4 * count] = factors.view(U8)
    else:
        page[scales : scales + count] = torch.randint(116, 121, (count,), generator=generator).to(U8)
    of_rope = torch.randn(layout.rope, generator=generator).to(torch.bfloat16)
    page[rope : rope + 2 * layout.rope] = of_rope.view(U8)


@dataclass
class Cache:
    """A cache among other layers of one allocation. What is not written is 255, NaN in all formats."""

    name: str
    view: torch.Tensor  # uint8 [pages, page_size, 1, bytes]

    @property
    def pages(self) -> int:
        return self.view.size(0)

    @property
    def page_size(self) -> int:
        return self.view.size(1)

    @property
    def slots(self) -> int:
        return self.pages * self.page_size

    def page(self, index: int) -> torch.Tensor:
        """Its bytes, on the CPU."""
        size = self.page_size * LAYOUTS[self.name].size
        begin = self.view.storage_offset() + index * self.view.stride(0)
        return self.view.as_strided((size,), (1,), begin).cpu()

    def numbers(self) -> torch.Tensor:
        """``[slots, 1, columns]`` in double precision, on the device of the cache."""
        found = [
            read(self.name, page, self.page_size, token)
            for page in map(self.page, range(self.pages))
            for token in range(self.page_size)
        ]
        columns = LAYOUTS[self.name].columns
        return torch.stack(found).unsqueeze(1).to(self.view.device) if found else torch.zeros(0, 1, columns)


def empty(
    name: str, pages: int, page_size: int, device: str = "cpu", *, layers: int = 1, padding: int = 1, start: int = 0
) -> Cache:
    """A cache of 255s, the last of so many ``layers`` of each page, whose bytes are padded to a multiple of
    ``padding``. ``start`` bytes lie before."""
    size = LAYOUTS[name].size
    of_page = -(-page_size * size // padding) * padding
    memory = torch.full((start + pages * layers * of_page,), 255, dtype=U8, device=device)
    begin = start + (layers - 1) * of_page if memory.numel() else 0
    return Cache(name, memory.as_strided((pages, page_size, 1, size), (layers * of_page, size, size, 1), begin))


def filled(cache: Cache, used: list[bool], seed: int = 0) -> Cache:
    """The cache with random tokens in the ``used`` slots."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(cache.pages):
        page = cache.page(index).clone()
        for token in range(cache.page_size):
            if used[index * cache.page_size + token]:
                write(cache.name, page, cache.page_size, token, generator)
        begin = cache.view.storage_offset() + index * cache.view.stride(0)
        cache.view.as_strided((page.numel(),), (1,), begin).copy_(page)
    return cache


def some(name: str, rng: random.Random, device: str = "cpu", **sizes: int) -> Cache:
    """An empty cache that lies in memory in one of the ways that callers have."""
    sizes = dict(pages=rng.choice([1, 3, 9]), page_size=rng.choice([1, 2, 7, 64])) | sizes
    places = dict(layers=rng.choice([1, 3]), padding=rng.choice([1, 576, 4096]), start=rng.choice([0, 16, 5]))
    return empty(name, device=device, **(places | sizes))


def is_nearest(bits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Whether e4m3 bytes are the nearest ones to fp64 ``x``, even ones of two, and the largest beyond that."""
    finite = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F])
    values = E4M3[finite]
    distance = (x.clamp(-448, 448).unsqueeze(-1) - values).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    mine = finite == bits.long().unsqueeze(-1)
    return (mine & nearest).any(-1) & ((nearest.sum(-1) == 1) | (bits & 1 == 0))
