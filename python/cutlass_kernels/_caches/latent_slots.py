"""New tokens of latent attention written to slots of its caches."""

from __future__ import annotations

from typing import get_type_hints

import torch

from .._core import autograd, checks, errors, native
from .._core.autograd import without_autocast
from .._core.problems import FP8_DTYPES, HALF_DTYPES
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from . import latent_formats
from .latent_formats import Format
from .slots_of_tokens import Scale, append_paged_kv_cache_by_slot, check_slots

_QUANTIZED = "fp8_ds_mla"
_NAMES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", _QUANTIZED)


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str = "auto",
    scale: Scale = None,
) -> None:
    """Writes new tokens to slots of a cache of latent attention, in place: vLLM's function of this name.

    Token ``i`` goes to entry ``slot_mapping[i] % page_size`` of page ``slot_mapping[i] // page_size``: its latent
    vector, and behind it the columns of the position. An fp8 cache stores both divided by ``scale``, rounded to nearest
    and clamped to the largest finite number. On a GPU this is one kernel, which a CUDA graph can capture.

    ``append_paged_kv_cache_by_slot(ckv[:, None], kpe[:, None], ckv_cache[:, :, None], kpe_cache[:, :, None], slots)``
    does the same for a cache in two tensors.

    Args:
        kv_c: ``[tokens, 512]``, any strides with a contiguous last dimension. Rows behind the last slot are not read.
        k_pe: ``[tokens, 64]`` or ``[tokens, 1, 64]``, of the same dtype.
        kv_cache: ``[pages, page_size, 576]``: the dtype of the tokens, float8_e4m3fn or float8_e5m2; or uint8 with the
            name of an fp8 type. With ``"fp8_ds_mla"`` ``[pages, page_size, 656]`` of uint8, int8 or float8_e4m3fn.
        slot_mapping: int64 or int32 ``[n]``, ``n <= tokens``. Tokens of a negative slot are skipped; on a GPU, those of
            a slot that the cache does not have, too.
        kv_cache_dtype: ``"auto"`` is the dtype of ``kv_cache``; else ``"fp8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``. Or
            ``"fp8_ds_mla"``, the quantized latent cache of DeepSeek V3.2: see
            ``append_quantized_mla_kv_cache`` with ``kv_format="v3.2"``. Bytes are those of vLLM's kernel for bfloat16.
            float16 ``k_pe`` is converted to bfloat16; vLLM copies its bits. Zeros are stored for ``k_pe [tokens, 0]``,
            of models without RoPE.
        scale: a number other than 0, or a float32 tensor of one element; default 1. An fp8 cache alone has one:
            16-bit caches and ``"fp8_ds_mla"`` ignore it, as vLLM's do.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or devices that do not fit together; an unknown ``kv_cache_dtype``; a number of 0 as
            scale; on the CPU, slots behind the cache.

    Examples:
        >>> cache = torch.zeros(4, 64, 576, dtype=torch.bfloat16)
        >>> kv_c, k_pe = torch.randn(3, 512, dtype=torch.bfloat16), torch.randn(3, 64, dtype=torch.bfloat16)
        >>> concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([70, 71, -1]))
    """
    if kv_cache_dtype not in _NAMES:
        raise ValueError(f"kv_cache_dtype={kv_cache_dtype!r} is unknown: use one of {', '.join(_NAMES)}.")
    checks.tensors(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
    k_pe = k_pe.squeeze(1) if k_pe.dim() == 3 and k_pe.size(1) == 1 else k_pe
    checks.tensor("kv_c", kv_c, 2)
    checks.tensor("k_pe", k_pe, 2)
    checks.tensor("kv_cache", kv_cache, 3)
    if kv_cache_dtype == _QUANTIZED:
        kind = latent_formats.FORMATS["v3.2"]
        if not latent_formats.is_quantized(kv_cache, kind.name) or kv_cache.size(2) != kind.bytes:
            raise ValueError(
                f"kv_cache has shape {tuple(kv_cache.shape)} and dtype {kv_cache.dtype}: with "
                f"kv_cache_dtype={_QUANTIZED!r} it must be a uint8 tensor [pages, page_size, {kind.bytes}]."
            )
        _append(_VLLM, kv_c, k_pe, kv_cache.unsqueeze(2), slot_mapping, kind, False)
        return
    rank, columns = kv_c.size(1), kv_cache.size(2)
    if rank + k_pe.size(1) != columns:
        raise ValueError(
            f"kv_c has {rank} columns and k_pe {k_pe.size(1)}, but kv_cache (shape {tuple(kv_cache.shape)}) {columns}: "
            "it must have those of both."
        )
    if kv_cache_dtype != "auto":
        dtype = checks.dtype(kv_cache_dtype)
        if kv_cache.dtype not in (dtype, torch.uint8):
            raise ValueError(
                f"kv_cache_dtype={kv_cache_dtype!r}, but kv_cache has dtype {kv_cache.dtype}: it must be {dtype}, or "
                "uint8."
            )
        kv_cache = kv_cache.view(dtype)
    if kv_cache.dtype not in FP8_DTYPES:
        scale = None
    append_paged_kv_cache_by_slot(
        kv_c.unsqueeze(1),
        k_pe.unsqueeze(1),
        kv_cache[..., :rank].unsqueeze(2),
        kv_cache[..., rank:].unsqueeze(2),
        slot_mapping,
        scale,
        scale,
    )


def append_quantized_mla_kv_cache(
    ckv: torch.Tensor,
    kpe: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_format: str | None = None,
    power_of_two_scales: bool | None = None,
) -> None:
    """Quantizes new tokens, and writes them to slots of a latent cache, in place.

    ``attention(kv_format=)`` and ``flash_mla_with_kvcache()`` read such caches. On a GPU this is one kernel, which a
    CUDA graph can capture; PyTorch computes it, with a warning, where addresses and strides are no multiples of 16
    bytes, or columns of ``ckv`` none of 16.

    The scale of a group of columns is its absmax / 448. Numbers are divided by it in float32, and rounded to nearest
    (ties to even). NaN stays NaN; a group with an infinity becomes NaN. Readers multiply by the scale in float32, and
    round to bfloat16.

    Args:
        ckv: ``[tokens, columns]``, float16 or bfloat16: the columns of ``kv_format``, or the first of them. Rows behind
            the last slot are not read.
        kpe: ``[tokens, columns]``, the other columns, of the same dtype. None if ``ckv`` has all, or for ``"v3.2"``
            without RoPE, whose 64 columns are then zeros.
        kv_cache: ``[pages, page_size, 1, bytes]`` of uint8, int8 or float8_e4m3fn. Pages may be padded.
        slot_mapping: int64 or int32 ``[n]``, ``n <= tokens``: token i goes to entry ``slot_mapping[i] % page_size`` of
            page ``slot_mapping[i] // page_size``. Tokens of a negative slot are skipped; on a GPU, those of a slot that
            the cache does not have, too.
        kv_format: ``"v3.2"`` (656 bytes per token, 512 + 64 columns), ``"v3.2_nope"`` (528, 512), ``"v4"`` (584, 448 +
            64), ``"v4.1_pages"`` or ``"v4.1_tokens"`` (528, 512). Default: from the number of bytes; required for 528.
        power_of_two_scales: whether scales are rounded up to powers of two, of groups with an absmax of at least 1e-4.
            Default: False for ``"v3.2"`` and ``"v3.2_nope"``, whose scales are float32. Others store powers of two.

    A cache carries no gradient: where tokens require one, a warning says so.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or devices that do not fit together; an unknown ``kv_format``; on the CPU, slots
            behind the cache.

    Examples:
        >>> cache = torch.zeros(4, 64, 1, 584, dtype=torch.uint8)
        >>> ckv, kpe = torch.randn(3, 448, dtype=torch.bfloat16), torch.randn(3, 64, dtype=torch.bfloat16)
        >>> append_quantized_mla_kv_cache(ckv, kpe, cache, torch.tensor([70, 71, -1]), "v4")
    """
    checks.tensor("ckv", ckv, 2)
    if kpe is not None:
        checks.tensor("kpe", kpe, 2)
    checks.tensor("kv_cache", kv_cache, 4)
    latent_formats.check_name(kv_format)
    if not latent_formats.is_quantized(kv_cache, kv_format):
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)} and dtype {kv_cache.dtype}: it must be a uint8 tensor [pages, "
            f"page_size, 1, bytes] with {latent_formats.IN_WORDS} per token. For other caches call "
            "concat_and_cache_mla()."
        )
    kind = latent_formats.format_of("kv_cache", kv_cache, kv_format)
    if kv_format is not None and kind.name != kv_format:
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)}, but kv_format={kv_format!r} has "
            f"{latent_formats.FORMATS[kv_format].bytes} bytes per token."
        )
    power = kind.has_powers if power_of_two_scales is None else checks.flag("power_of_two_scales", power_of_two_scales)
    if kind.has_powers and not power:
        raise ValueError(f"power_of_two_scales=False, but kv_format={kind.name!r} stores powers of two: leave it out.")
    _append(_OURS, ckv, kpe, kv_cache, slot_mapping, kind, power)


_OURS, _VLLM = ("append_quantized_mla_kv_cache", "ckv", "kpe"), ("concat_and_cache_mla", "kv_c", "k_pe")


def _append(
    names: tuple[str, str, str],
    ckv: torch.Tensor,
    kpe: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kind: Format,
    power_of_two: bool,
) -> None:
    """Checks and writes tokens. ``names`` are those of the function and its first arguments."""
    cache = latent_formats.as_bytes("kv_cache", checks.last_dim_contiguous("kv_cache", kv_cache), kind)
    if any(cache.size(d) > 1 and cache.stride(d) == 0 for d in (0, 1)):
        raise ValueError(f"kv_cache has strides {tuple(kv_cache.stride())}: its tokens share memory.")
    function, *of_tokens = names
    tokens = dict(zip(of_tokens, (ckv, kpe)))
    for name, x in tokens.items():
        if x is not None and (x.dtype not in HALF_DTYPES or x.dtype != ckv.dtype):
            raise ValueError(
                f"{name} has dtype {x.dtype}: {' and '.join(of_tokens)} must be bfloat16 or float16, of one dtype."
            )
    checks.same_device(cache.device, "kv_cache is", **tokens)
    own, others = ckv.size(1), 0 if kpe is None else kpe.size(1)
    without_rope = own == kind.latent == latent_formats.VALUES and others == 0
    if (own + others != kind.columns and not without_rope) or (kind.rope and others not in (0, kind.rope)):
        each = f", {kind.latent} and {kind.rope}" if kind.rope else ""
        raise ValueError(
            f"{of_tokens[0]} has {own} columns and {of_tokens[1]} {others}, but kv_format={kind.name!r} has "
            f"{kind.columns} columns{each}."
        )
    checks.tensors(slot_mapping=slot_mapping)
    ckv, _ = autograd.without_grad(ckv, ckv, function)
    if kpe is not None:
        kpe, _ = autograd.without_grad(kpe, kpe, function)
    apart = is_traced() or have_own_dispatch(ckv, kpe, cache, slot_mapping)
    write = _in_graph if apart else _write
    write(ckv=ckv, kpe=kpe, kv_cache=cache, slot_mapping=slot_mapping, kv_format=kind.name, power_of_two=power_of_two)


@without_autocast
def _write(
    ckv: torch.Tensor,
    kpe: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_format: str,
    power_of_two: bool,
) -> None:
    """Writes checked tokens, some of whose slots the cache may not have."""
    if native.append_quantized(ckv, kpe, kv_cache, slot_mapping, kv_format, power_of_two) is not None:
        return
    if kv_cache.is_cuda:
        errors.warn(
            "Tokens of a quantized latent cache are written with PyTorch: the kernel needs columns in multiples of 16, "
            "and addresses and strides of 16 bytes.",
            errors.PerformanceWarning,
        )
    check_slots(slot_mapping, ckv.size(0) if kpe is None else min(ckv.size(0), kpe.size(0)), kv_cache)
    count, kind = slot_mapping.size(0), latent_formats.FORMATS[kv_format]
    x = ckv[:count] if kpe is None else torch.cat([ckv[:count], kpe[:count]], -1)
    x = torch.nn.functional.pad(x, (0, kind.columns - x.size(1)))
    latent_formats.write(x, kv_cache, slot_mapping.to(kv_cache.device), kind, power_of_two)


_in_graph = operators.in_place("write_latent", get_type_hints(_write), _write, ("kv_cache",))
