"""Latent caches of bytes: e4m3 columns with a scale for each group of them, and columns of the position (RoPE) in bf16.

    name          bytes  e4m3  scales                   RoPE  in memory
    "v3.2"        656    512   4 of fp32, per 128       64    by token: e4m3, scales, RoPE
    "v4"          584    448   7 of ue8m0, per 64, + 1  64    by page: e4m3 and RoPE of all tokens, then all scales
    "v4.1"        528    512   16 of ue8m0, per 32      -     by token: e4m3, scales
    "v4.1_pages"  528    512   16 of ue8m0, per 32      -     by page: e4m3 of all tokens, then all scales

- Keys are all columns, values the first 512. "v4.1" quantises its RoPE columns as the others.
- FlashMLA takes ``[pages, page_size, 1, bytes]`` of uint8, int8 or float8_e4m3fn. The tokens of a page follow one
  another; pages may be padded. vLLM pads those of "v4" to a multiple of 576 bytes.
- FlashMLA's first kernels for DeepSeek V4.1, and FlashInfer's, read "v4.1_pages". FlashMLA's release of September 30,
  2026 reads "v4.1". The bytes do not say which it is.
- The scale of a group is its largest number / 448. vLLM's ``concat_and_cache_mla`` stores that ("v3.2"). Its writer for
  "v4", and FlashMLA's tests for all formats, round it up to a power of two.
- FlashMLA's kernels on Hopper round fp32 scales to bf16, and keys to bf16. Here products with scales are in fp32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .._core import hints
from .._core.autograd import without_autocast
from . import scatter

VALUES = 512  # columns of the values, in all formats
_LARGEST = 448.0  # of e4m3
_SMALLEST = 1e-4  # largest number of a group, for a scale that is a power of two: as vLLM's writers have it
_NAN = 0x7F  # of e4m3
_BYTES = (torch.uint8, torch.int8)


class Format(NamedTuple):
    """How a token is stored. Positions are those in its record: what is stored of it, joined."""

    name: str
    bytes: int
    latent: int  # e4m3 columns, first in the record
    rope: int  # bf16 columns
    group: int  # columns of a scale
    has_powers: bool  # scales are ue8m0, else fp32
    scales_at: int
    scale_bytes: int  # with those that nothing reads
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
        Format("v4", 584, 448, 64, 64, True, 576, 8, 448, True),
        Format("v4.1", 528, 512, 0, 32, True, 512, 16, 528, False),
        Format("v4.1_pages", 528, 512, 0, 32, True, 512, 16, 528, True),
    )
}
_WITH_BYTES = {size: [x for x in FORMATS.values() if x.bytes == size] for size in (656, 584, 528)}
_NAMES = ", ".join(map(repr, FORMATS))


# --- which format a cache has ------------------------------------------------------------------------------------


def is_packed(cache: torch.Tensor, kv_format: str | None) -> bool:
    """Whether a cache is bytes of one of the formats: 8-bit integers, or float8_e4m3fn where ``kv_format`` says so."""
    size, named = cache.shape[-1], FORMATS.get(kv_format) if isinstance(kv_format, str) else None
    if cache.dtype in _BYTES:
        return named is not None or any(size == x for x in _WITH_BYTES)  # the size of a traced tensor has no hash
    return cache.dtype == torch.float8_e4m3fn and named is not None and size == named.bytes


def format_of(name: str, cache: torch.Tensor, kv_format: str | None) -> Format:
    """The format of a cache that ``is_packed``: ``kv_format`` where that has as many bytes, else what the bytes say.
    ValueError where they do not."""
    size = cache.size(-1)
    if kv_format is not None and FORMATS[kv_format].bytes == size:
        return FORMATS[kv_format]
    if size not in _WITH_BYTES:
        raise ValueError(f"{name} has shape {tuple(cache.shape)}: a latent cache has 656, 584 or 528 bytes per token.")
    found = _WITH_BYTES[size]
    if len(found) > 1:
        raise ValueError(
            f"{name} has {size} bytes per token (shape {tuple(cache.shape)}), which {len(found)} formats have: pass "
            f"kv_format={' or '.join(repr(x.name) for x in found)}."
        )
    return found[0]


def check_name(kv_format: Any) -> None:
    if kv_format is not None and (not isinstance(kv_format, str) or kv_format not in FORMATS):
        raise ValueError(f"kv_format={hints.shown(kv_format)} is unknown: use one of {_NAMES}.")


def as_bytes(name: str, cache: torch.Tensor, kind: Format) -> torch.Tensor:
    """A cache ``[pages, page_size, 1, bytes]`` or ``[tokens, 1, bytes]`` as uint8; ValueError where it lies otherwise
    than the format needs."""
    if cache.size(-2) != 1:
        raise ValueError(f"{name} has shape {tuple(cache.shape)}: a latent cache of bytes has one head.")
    if kind.by_page and cache.dim() == 4 and cache.size(1) > 1 and cache.stride(1) != kind.bytes:
        raise ValueError(
            f"{name} has strides {tuple(cache.stride())}: pages of kv_format={kind.name!r} are "
            f"{cache.size(1)} * {kind.bytes} bytes that follow one another. Pages may be padded, tokens may not."
        )
    return cache.view(torch.uint8)


# --- bytes and numbers -------------------------------------------------------------------------------------------


def parts(cache: torch.Tensor, kind: Format) -> list[torch.Tensor]:
    """What is stored of tokens, as views of uint8 ``[pages, page_size, 1, n]`` (or ``[tokens, 1, n]``), which joined in
    the last dimension are records."""
    data = kind.bytes - kind.scale_bytes
    if not kind.by_page:
        return [cache]
    if cache.dim() == 3:
        return [cache[..., :data], cache[..., data:]]
    pages, page_size, _, _ = cache.shape
    found, begin = [], cache.storage_offset()
    for size in (data, kind.scale_bytes):
        found.append(cache.as_strided((pages, page_size, 1, size), (cache.stride(0), size, size, 1), begin))
        begin += page_size * size
    return found


@without_autocast
def decoded(records: torch.Tensor, kind: Format) -> torch.Tensor:
    """Records uint8 ``[..., bytes]`` as numbers, fp32 ``[..., columns]``."""
    scales = records[..., kind.scales_at : kind.scales_at + kind.scale_bytes]
    if kind.has_powers:
        factors = _power_of(scales[..., : kind.scales])
    else:
        factors = scales.contiguous().view(torch.float32)
    numbers = records[..., : kind.latent].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    latent = (numbers.unflatten(-1, (kind.scales, kind.group)) * factors.unsqueeze(-1)).flatten(-2)
    if not kind.rope:
        return latent
    rope = records[..., kind.rope_at : kind.rope_at + 2 * kind.rope].contiguous().view(torch.bfloat16)
    return torch.cat([latent, rope.to(torch.float32)], -1)


def unpack(cache: torch.Tensor, kind: Format) -> torch.Tensor:
    """All tokens of a cache of uint8 ``[pages, page_size, 1, bytes]``, fp32 ``[pages, page_size, 1, columns]``."""
    return decoded(torch.cat(parts(cache, kind), -1), kind)


def _power_of(exponents: torch.Tensor) -> torch.Tensor:
    """ue8m0 as fp32: 2^(x - 127). 255 is NaN, and 0 is no normal number of fp32."""
    bits = (exponents.to(torch.int32) << 23).masked_fill_(exponents == 0, 1 << 22)
    return bits.masked_fill_(exponents == 255, 0x7FC00000).view(torch.float32)


@without_autocast
def encoded(x: torch.Tensor, kind: Format, power_of_two: bool = True) -> torch.Tensor:
    """Rows ``[tokens, columns]`` as records, uint8 ``[tokens, bytes]``.

    A group's scale is its largest number / 448, rounded up to a power of two if ``power_of_two``. Numbers are divided
    by it in fp32 and rounded to nearest (ties to even). NaN stays NaN and does not count as the largest; a group with
    an infinity is NaN when it is read, as that of vLLM's writers. RoPE columns are rounded to bf16.
    """
    groups = x[:, : kind.latent].float().unflatten(1, (kind.scales, kind.group))
    largest = groups.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(-1)
    if kind.has_powers or power_of_two:
        exponents = _exponent_above(largest.clamp_min(_SMALLEST) / _LARGEST)
        scales = _power_of(exponents)
    else:
        scales = (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (groups / scales.unsqueeze(-1)).clamp(-_LARGEST, _LARGEST).flatten(1)
    stored = numbers.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(numbers.isnan(), _NAN)
    records = x.new_zeros((x.size(0), kind.bytes), dtype=torch.uint8)
    records[:, : kind.latent] = stored
    bits = exponents if kind.has_powers else scales.contiguous().view(torch.uint8)
    records[:, kind.scales_at : kind.scales_at + bits.size(1)] = bits
    if kind.rope:
        rope = x[:, kind.latent :].to(torch.bfloat16).contiguous()
        records[:, kind.rope_at : kind.rope_at + 2 * kind.rope] = rope.view(torch.uint8)
    return records


def _exponent_above(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below positive ``x``, as ue8m0. Exact, where a rounded logarithm is not."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent with 0.5 <= mantissa < 1
    biased = exponent + 127 - (mantissa == 0.5).to(exponent.dtype)
    return torch.where(x.isinf(), 255, biased).to(torch.uint8)


@without_autocast
def pack(
    ckv: torch.Tensor,
    kpe: torch.Tensor | None,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kind: Format,
    power_of_two: bool = True,
) -> None:
    """Writes tokens to slots of a cache of uint8 ``[pages, page_size, 1, bytes]``, in place.

    ``kpe`` may be None where ``ckv`` has all columns, or the format no RoPE. Without the RoPE columns of "v3.2", their
    bytes stay as they are. Slots that the cache does not have are skipped; see ``encoded``.
    """
    if cache.numel() == 0 or slots.numel() == 0:
        return
    x = ckv if kpe is None else torch.cat([ckv, kpe], -1)
    missing = kind.columns - x.size(-1)
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    records = encoded(x[: slots.numel()], kind, power_of_two)
    places = parts(cache, kind)
    if missing:
        assert missing == kind.rope and len(places) == 1
        places, records = [places[0][..., : kind.rope_at]], records[:, : kind.rope_at]
    for place, rows in zip(places, records.split([x.size(-1) for x in places], 1)):
        scatter.write(rows.unsqueeze(1), place, slots.long())


def values_dim(k: torch.Tensor, v: torch.Tensor, kv_format: str | None) -> int:
    """Columns of the values."""
    return VALUES if is_packed(k, kv_format) else v.shape[-1]
