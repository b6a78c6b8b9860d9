"""New tokens of latent attention written to slots of its caches."""

from __future__ import annotations

import torch

from .._core import checks
from .._core.problems import FP8_DTYPES
from . import latent_formats, latent_writer
from .latent_writer import Names, Rotation
from .rotary import rope_append_paged_kv_cache_by_slot
from .slots_of_tokens import Scale, append_paged_kv_cache_by_slot

_QUANTIZED = "fp8_ds_mla"
_NAMES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", _QUANTIZED)
_OURS = Names("append_quantized_mla_kv_cache", "ckv", "kpe")
_VLLM = Names("concat_and_cache_mla", "kv_c", "k_pe")
_VLLM_ROTATED = Names("concat_and_cache_mla_rope_fused", "kv_c", "k_pe")


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
    kv_c, k_pe, kv_cache = _checked(kv_c, k_pe, kv_cache, kv_cache_dtype)
    if kv_cache_dtype == _QUANTIZED:
        kind = latent_formats.FORMATS["v3.2"]
        latent_writer.append(_VLLM, kv_c, k_pe, kv_cache, slot_mapping, kind, False, Rotation())
        return
    scale = scale if kv_cache.dtype in FP8_DTYPES else None
    append_paged_kv_cache_by_slot(
        kv_c.unsqueeze(1), k_pe.unsqueeze(1), *_parts(kv_cache, kv_c), slot_mapping, scale, scale
    )


def concat_and_cache_mla_rope_fused(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_dtype: str = "auto",
    kv_cache_scale: Scale = None,
) -> None:
    """Rotates ``q_pe`` and ``k_pe`` in place, and writes new tokens to slots of a cache of latent attention: vLLM's
    function of this name. One kernel on a GPU, which a CUDA graph can capture.

    The same bits as ``apply_rope_with_cos_sin_cache_inplace(positions, q_pe, k_pe, 64, cos_sin_cache, is_neox)`` and
    then ``concat_and_cache_mla``. Rows behind the last slot are left as they are. On a GPU, a token whose position the
    table does not have is left as it is, too, and not written. Other than vLLM's function, this one

    - takes ``"fp8_ds_mla"``;
    - rotates in float32, vLLM's in the dtype of the tokens;
    - rotates tokens of negative slots, too.

    Args:
        positions: int64 or int32 ``[n or more]``.
        q_pe: ``[n or more, heads, 64]``, any strides with a contiguous last dimension.
        k_pe: ``[n or more, 64]`` or ``[n or more, 1, 64]``.
        kv_c: ``[n or more, 512]``, not rotated.
        cos_sin_cache: ``[positions, 64]``, float32 or the dtype of the tokens: in row ``p`` the cosines of position
            ``p``, one per pair, then the sines.
        is_neox: whether pairs are halves of the 64 columns, else neighbours.
        slot_mapping: int64 or int32 ``[n]``.
        kv_cache, kv_cache_dtype: as in ``concat_and_cache_mla``.
        kv_cache_scale: the ``scale`` of ``concat_and_cache_mla``.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or devices that do not fit together; an unknown ``kv_cache_dtype``; a number of 0 as
            scale; on the CPU, positions that the table does not have, and slots behind the cache.

    Examples:
        >>> angles = torch.arange(16.0)[:, None] / 10000 ** (torch.arange(32) / 32)
        >>> table = torch.cat([angles.cos(), angles.sin()], -1)
        >>> cache = torch.zeros(4, 64, 656, dtype=torch.uint8)
        >>> q_pe, k_pe = torch.randn(3, 16, 64).bfloat16(), torch.randn(3, 64).bfloat16()
        >>> kv_c, slots = torch.randn(3, 512).bfloat16(), torch.tensor([70, 71, -1])
        >>> positions = torch.tensor([4, 5, 6])
        >>> concat_and_cache_mla_rope_fused(positions, q_pe, k_pe, kv_c, table, False, slots, cache, "fp8_ds_mla")
    """
    for name, x, rank in (("positions", positions, 1), ("q_pe", q_pe, 3), ("slot_mapping", slot_mapping, 1)):
        checks.tensor(name, x, rank)
    kv_c, k_pe, kv_cache = _checked(kv_c, k_pe, kv_cache, kv_cache_dtype)
    if kv_cache_dtype == _QUANTIZED:
        kind = latent_formats.FORMATS["v3.2"]
        rotation = Rotation(q_pe, positions, cos_sin_cache, checks.flag("is_neox", is_neox), True)
        latent_writer.append(_VLLM_ROTATED, kv_c, k_pe, kv_cache, slot_mapping, kind, False, rotation)
        return
    scale = kv_cache_scale if kv_cache.dtype in FP8_DTYPES else None
    ckv_cache, kpe_cache = _parts(kv_cache, kv_c)
    q_pe, k_pe, kv_c, positions = (x[: slot_mapping.size(0)] for x in (q_pe, k_pe, kv_c, positions))
    rope_append_paged_kv_cache_by_slot(
        q_pe,
        k_pe.unsqueeze(1),
        kv_c.unsqueeze(1),
        positions,
        cos_sin_cache,
        kpe_cache,
        ckv_cache,
        slot_mapping,
        scale,
        scale,
        is_neox=is_neox,
        update_key=True,
    )


def _checked(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, kv_cache_dtype: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens ``[tokens, columns]``; and a cache ``[pages, page_size, columns]`` of the dtype that it means, or a
    quantized one ``[pages, page_size, 1, bytes]``."""
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
        return kv_c, k_pe, kv_cache.unsqueeze(2)
    if kv_c.size(1) + k_pe.size(1) != kv_cache.size(2):
        raise ValueError(
            f"kv_c has {kv_c.size(1)} columns and k_pe {k_pe.size(1)}, but kv_cache (shape {tuple(kv_cache.shape)}) "
            f"{kv_cache.size(2)}: it must have those of both."
        )
    if kv_cache_dtype != "auto":
        dtype = checks.dtype(kv_cache_dtype)
        if kv_cache.dtype not in (dtype, torch.uint8):
            raise ValueError(
                f"kv_cache_dtype={kv_cache_dtype!r}, but kv_cache has dtype {kv_cache.dtype}: it must be {dtype}, or "
                "uint8."
            )
        kv_cache = kv_cache.view(dtype)
    return kv_c, k_pe, kv_cache


def _parts(kv_cache: torch.Tensor, kv_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent columns and the others of a cache, ``[pages, page_size, 1, columns]``."""
    return kv_cache[..., : kv_c.size(1)].unsqueeze(2), kv_cache[..., kv_c.size(1) :].unsqueeze(2)


def append_quantized_mla_kv_cache(
    ckv: torch.Tensor,
    kpe: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_format: str | None = None,
    power_of_two_scales: bool | None = None,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    is_neox: bool = True,
    q_pe: torch.Tensor | None = None,
    update_key: bool = False,
) -> None:
    """Quantizes new tokens, and writes them to slots of a latent cache, in place. With ``positions``, it rotates their
    RoPE columns first, and those of queries in place.

    ``attention(kv_format=)`` and ``flash_mla_with_kvcache()`` read such caches. On a GPU this is one kernel, which a
    CUDA graph can capture; PyTorch computes it, with a warning, where addresses and strides are no multiples of 16
    bytes, or columns of ``ckv`` none of 16.

    The scale of a group of columns is its absmax / 448. Numbers are divided by it in float32, and rounded to nearest
    (ties to even). NaN stays NaN; a group with an infinity becomes NaN. Readers multiply by the scale in float32, and
    round to bfloat16.

    Rotated are the last 64 columns of a token, whether the format stores them in bfloat16 (``"v3.2"``, ``"v4"``) or
    quantizes them (``"v4.1_pages"``, ``"v4.1_tokens"``). The results have the same bits as those of
    ``apply_rope_with_cos_sin_cache_inplace`` and then this function without ``positions``. On a GPU, a token whose
    position the table does not have is not written, and its queries are left as they are.

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
        positions: int64 or int32 ``[n or more]``. None: nothing is rotated.
        cos_sin_cache: ``[positions, 64]``, float32 or the dtype of the tokens: in row ``p`` the cosines of position
            ``p``, one per pair, then the sines.
        is_neox: whether pairs are halves of the 64 columns, else neighbours, as in DeepSeek's models.
        q_pe: ``[n or more, heads, 64]``, the RoPE columns of queries, such as ``q[..., -64:]``. The first n rows are
            rotated in place, whatever their slots.
        update_key: whether the RoPE columns of ``kpe``, or of ``ckv`` where it has all, are rotated in place, too.

    A cache carries no gradient: where tokens require one, a warning says so.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or devices that do not fit together; an unknown ``kv_format``; on the CPU, slots
            behind the cache, and positions that the table does not have.

    Examples:
        >>> cache = torch.zeros(4, 64, 1, 584, dtype=torch.uint8)
        >>> ckv, kpe = torch.randn(3, 448, dtype=torch.bfloat16), torch.randn(3, 64, dtype=torch.bfloat16)
        >>> slots = torch.tensor([70, 71, -1])
        >>> append_quantized_mla_kv_cache(ckv, kpe, cache, slots, "v4")
        >>> angles = torch.arange(16.0)[:, None] / 10000 ** (torch.arange(32) / 32)
        >>> rope = dict(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], -1), is_neox=False)
        >>> q = torch.randn(3, 64, 512, dtype=torch.bfloat16)
        >>> positions = torch.tensor([4, 5, 6])
        >>> append_quantized_mla_kv_cache(ckv, kpe, cache, slots, positions=positions, q_pe=q[..., 448:], **rope)
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
    is_neox, update_key = checks.flag("is_neox", is_neox), checks.flag("update_key", update_key)
    rotation = Rotation(q_pe, positions, cos_sin_cache, is_neox, update_key)
    latent_writer.append(_OURS, ckv, kpe, kv_cache, slot_mapping, kind, power, rotation)
