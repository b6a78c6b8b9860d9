"""Quantized latent caches: e4m3 columns with a scale for each group of them, and RoPE columns in bf16.

    kv_format      bytes  e4m3  scales                   RoPE  in memory
    "v3.2"         656    512   4 of fp32, per 128       64    by token: e4m3, scales, RoPE
    "v3.2_nope"    528    512   4 of fp32, per 128       -     by token: e4m3, scales
    "v4"           584    448   7 of ue8m0, per 64, + 1  64    by page: e4m3 and RoPE of all tokens, then all scales
    "v4.1_pages"   528    512   16 of ue8m0, per 32      -     by page: e4m3 of all tokens, then all scales
    "v4.1_tokens"  528    512   16 of ue8m0, per 32      -     by token: e4m3, scales

- Keys are all columns, values the first 512. "v4.1" formats quantize the RoPE columns as the others.
- Caches are ``[pages, page_size, 1, bytes]`` of uint8, int8 or float8_e4m3fn. Tokens of a page are adjacent; pages
  may be padded. vLLM pads those of "v4" to a multiple of 576 bytes.
- "v3.2_nope" is for models without RoPE (GLM-5.3-Flash). vLLM, SGLang and FlashMLA's releases before September 30, 2026
  have "v4.1_pages", FlashMLA's release of that day "v4.1_tokens". 528 bytes do not tell which it is.
- The scale of a group is its absmax / 448. vLLM's ``concat_and_cache_mla`` stores that ("v3.2"). Its writer for "v4"
  rounds it up to a power of two, as FlashMLA's tests do for all formats.
- A token stands for bf16 numbers, whatever the dtype of the queries: e4m3 times its scale in fp32, rounded to nearest.
  FlashMLA's kernels on Hopper round fp32 scales to bf16 before.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .._core import hints
from .._core.autograd import without_autocast
from . import scatter

NUMBERS = torch.bfloat16  # dtype of what tokens stand for
BYTES = (torch.uint8, torch.int8)  # dtypes that quantized caches have, and float8_e4m3fn where kv_format is given
VALUES = 512  # columns of the values, in all formats
_LARGEST = 448.0  # of e4m3
_NAN = 0x7F  # of e4m3
# Lower bound of a group's absmax, for power-of-two scales only: that of vLLM's writer for "v4". FlashMLA's tests bound
# the scale instead, by 1e-4, so that groups of small numbers have other bytes there.
_SMALLEST = 1e-4


class Format(NamedTuple):
    """How a token is stored. Offsets are in the token's record: its data bytes, then its scale bytes; or, where
    ``by_page`` is False, its bytes in order."""

    name: str
    bytes: int
    latent: int  # e4m3 columns, first in the record
    rope: int  # bf16 columns
    group: int  # columns of a scale
    has_powers: bool  # scales are ue8m0, else fp32
    scales_at: int
    scale_bytes: int  # including padding
    rope_at: int
    by_page: bool  # the scales of a page lie behind the data of all its tokens

    @property
    def columns(self) -> int:
        return self.latent + self.rope

    @property
    def scales(self) -> int:
        return self.latent // self.group

    @property
    def reads(self) -> tuple[int, ...]:
        """Columns that queries may have: all, or the latent ones alone, for models without RoPE."""
        return (self.columns,) if self.latent < VALUES or not self.rope else (self.columns, self.latent)


FORMATS = {
    x.name: x
    for x in (
        Format("v3.2", 656, 512, 64, 128, False, 512, 16, 528, False),
        Format("v3.2_nope", 528, 512, 0, 128, False, 512, 16, 528, False),
        Format("v4", 584, 448, 64, 64, True, 576, 8, 448, True),
        Format("v4.1_pages", 528, 512, 0, 32, True, 512, 16, 528, True),
        Format("v4.1_tokens", 528, 512, 0, 32, True, 512, 16, 528, False),
    )
}
SIZES = sorted({x.bytes for x in FORMATS.values()}, reverse=True)
IN_WORDS = f"{', '.join(map(str, SIZES[:-1]))} or {SIZES[-1]} bytes"


# --- which format a cache has ------------------------------------------------------------------------------------


def is_quantized(cache: torch.Tensor, kv_format: str | None) -> bool:
    """Whether a cache has the dtype and the bytes of one of the formats. float8_e4m3fn needs ``kv_format``, since it
    may also be columns with one scale."""
    size, named = cache.shape[-1], None if kv_format is None else FORMATS.get(kv_format)
    if cache.dtype in BYTES:
        return named is not None or any(size == x for x in SIZES)  # the size of a traced tensor has no hash
    return cache.dtype == torch.float8_e4m3fn and named is not None and size == named.bytes


def format_of(name: str, cache: torch.Tensor, kv_format: str | None) -> Format:
    """The format of a cache that ``is_quantized``: ``kv_format`` if that has as many bytes, else the one with as many.
    ValueError where none or several have."""
    size = cache.size(-1)
    if kv_format is not None and FORMATS[kv_format].bytes == size:
        return FORMATS[kv_format]
    found = [x for x in FORMATS.values() if x.bytes == size]
    if not found:
        raise ValueError(f"{name} has shape {tuple(cache.shape)}: a quantized latent cache has {IN_WORDS} per token.")
    if len(found) > 1:
        raise ValueError(
            f"{name} has {size} bytes per token (shape {tuple(cache.shape)}), which {len(found)} formats have: pass "
            f"kv_format={' or '.join(repr(x.name) for x in found)}."
        )
    return found[0]


def check_name(kv_format: Any) -> None:
    if kv_format is not None and (not isinstance(kv_format, str) or kv_format not in FORMATS):
        raise ValueError(f"kv_format={hints.shown(kv_format)} is unknown: use one of {', '.join(map(repr, FORMATS))}.")


def as_bytes(name: str, cache: torch.Tensor, kind: Format) -> torch.Tensor:
    """A cache ``[pages, page_size, 1, bytes]``, or of formats by token ``[tokens, 1, bytes]``, as uint8. ValueError if
    it lies otherwise than the format needs."""
    if cache.size(-2) != 1:
        raise ValueError(f"{name} has shape {tuple(cache.shape)}: a quantized latent cache has one head.")
    if kind.by_page and cache.dim() != 4:
        raise ValueError(
            f"{name} has shape {tuple(cache.shape)}: with kv_format={kind.name!r} the scales of a page lie behind its "
            f"data, so the page size must be known: pass [pages, page_size, 1, {kind.bytes}]."
        )
    if kind.by_page and cache.size(1) > 1 and cache.stride(1) != kind.bytes:
        raise ValueError(
            f"{name} has strides {tuple(cache.stride())}: pages of kv_format={kind.name!r} are "
            f"{cache.size(1)} * {kind.bytes} adjacent bytes. Pages may be padded, tokens may not."
        )
    return cache.view(torch.uint8)


# --- bytes and numbers -------------------------------------------------------------------------------------------


def parts(cache: torch.Tensor, kind: Format) -> list[torch.Tensor]:
    """What is stored of tokens, as views of uint8 ``[pages, page_size, 1, n]`` (or ``[tokens, 1, n]``), which joined in
    the last dimension are records."""
    if not kind.by_page:
        return [cache]
    pages, page_size, _, _ = cache.shape
    found, begin = [], cache.storage_offset()
    for size in (kind.bytes - kind.scale_bytes, kind.scale_bytes):
        found.append(cache.as_strided((pages, page_size, 1, size), (cache.stride(0), size, size, 1), begin))
        begin += page_size * size
    return found


@without_autocast
def decoded(stored: list[torch.Tensor], kind: Format) -> torch.Tensor:
    """Bytes of tokens, uint8 ``[..., n]`` of each of ``parts()``, as the ``NUMBERS`` ``[..., columns]`` that they stand
    for."""
    data, scales = stored[0], stored[-1]
    scales = scales if kind.by_page else scales[..., kind.scales_at : kind.scales_at + kind.scale_bytes]
    if kind.has_powers:
        factors = _power_of(scales[..., : kind.scales])
    else:
        factors = scales.contiguous().view(torch.float32)
    exact = NUMBERS if kind.has_powers else torch.float32  # bf16 holds e4m3 times a power of two
    latent = data.view(torch.float8_e4m3fn)[..., : kind.latent].to(exact)
    latent.unflatten(-1, (kind.scales, kind.group)).mul_(factors.to(exact).unsqueeze(-1))
    numbers = data.new_empty((*data.shape[:-1], kind.columns), dtype=NUMBERS)
    numbers[..., : kind.latent].copy_(latent)
    if kind.rope:
        rope = data[..., kind.rope_at : kind.rope_at + 2 * kind.rope].contiguous().view(NUMBERS)
        numbers[..., kind.latent :].copy_(rope)
    return numbers


def _power_of(exponents: torch.Tensor) -> torch.Tensor:
    """ue8m0 as fp32: 2^(x - 127). 255 is NaN, and 0 is no normal number of fp32."""
    bits = (exponents.to(torch.int32) << 23).masked_fill_(exponents == 0, 1 << 22)
    return bits.masked_fill_(exponents == 255, 0x7FC00000).view(torch.float32)


@without_autocast
def encoded(x: torch.Tensor, kind: Format, power_of_two: bool) -> torch.Tensor:
    """Rows ``[tokens, columns]`` as records, uint8 ``[tokens, bytes]``.

    The scale of a group is its absmax / 448, rounded up to a power of two if ``power_of_two``. Numbers are divided by
    it in fp32 and rounded to nearest (ties to even). NaN stays NaN and is no absmax. A group with an infinity is NaN
    when it is read, as with vLLM's writers. RoPE columns are rounded to bf16.
    """
    groups = x[:, : kind.latent].float().unflatten(1, (kind.scales, kind.group))
    largest = groups.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(-1)
    if power_of_two:
        exponents = _exponent_above(largest.clamp_min(_SMALLEST) / _LARGEST)
        scales = _power_of(exponents)
    else:
        scales = (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (groups / scales.unsqueeze(-1)).flatten(1)
    stored = numbers.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(numbers.isnan(), _NAN)
    records = x.new_zeros((x.size(0), kind.bytes), dtype=torch.uint8)
    records[:, : kind.latent] = stored
    bits = exponents if kind.has_powers else scales.contiguous().view(torch.uint8)
    records[:, kind.scales_at : kind.scales_at + bits.size(1)] = bits
    if kind.rope:
        rope = x[:, kind.latent :].to(NUMBERS).contiguous()
        records[:, kind.rope_at : kind.rope_at + 2 * kind.rope] = rope.view(torch.uint8)
    return records


def _exponent_above(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below positive ``x``, as ue8m0. Exact, unlike a rounded logarithm."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent with 0.5 <= mantissa < 1
    biased = exponent + 127 - (mantissa == 0.5).to(exponent.dtype)
    return torch.where(x.isinf(), 255, biased).to(torch.uint8)


def write(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, kind: Format, power_of_two: bool) -> None:
    """Writes rows ``[tokens, columns]`` to slots of a cache of uint8 ``[pages, page_size, 1, bytes]``, in place.

    Slots that the cache does not have are skipped; see ``encoded``.
    """
    if cache.numel() == 0 or slots.numel() == 0:
        return
    places = parts(cache, kind)
    records = encoded(x, kind, power_of_two).unsqueeze(1)
    for place, rows in zip(places, records.split([x.size(-1) for x in places], -1)):
        scatter.write(rows, place, slots.long())
