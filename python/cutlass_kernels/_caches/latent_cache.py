"""Writing to caches of latent attention: both parts of a token in one kernel, that of ``append_paged_kv_cache``."""

from __future__ import annotations

from typing import Any

import torch

from .._core import checks
from .._core.problems import FP8_DTYPES
from .slots_of_tokens import Scale, append_paged_kv_cache_by_slot

_FP8_NAMES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


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
            name of an fp8 type.
        slot_mapping: int64 or int32 ``[n]``, ``n <= tokens``. Tokens of a negative slot are skipped; on a GPU, those of
            a slot that the cache does not have, too.
        kv_cache_dtype: ``"auto"`` is the dtype of ``kv_cache``; else ``"fp8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
            ``"fp8_ds_mla"``, the 656 bytes per token of sparse attention, is refused.
        scale: a number other than 0, or a float32 tensor of one element; default 1. An fp8 cache alone has one:
            16-bit caches ignore it, as vLLM's do.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or devices that do not fit together; an unknown ``kv_cache_dtype``; a number of 0 as
            scale; on the CPU, slots behind the cache.
        NotImplementedError: ``kv_cache_dtype="fp8_ds_mla"``.

    Examples:
        >>> cache = torch.zeros(4, 64, 576, dtype=torch.bfloat16)
        >>> kv_c, k_pe = torch.randn(3, 512, dtype=torch.bfloat16), torch.randn(3, 64, dtype=torch.bfloat16)
        >>> concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([70, 71, -1]))
    """
    if kv_cache_dtype == "fp8_ds_mla":
        raise NotImplementedError(
            "concat_and_cache_mla does not serve kv_cache_dtype='fp8_ds_mla', the format of sparse attention: use "
            "'fp8_e4m3', with one scale."
        )
    if kv_cache_dtype != "auto" and kv_cache_dtype not in _FP8_NAMES:
        raise ValueError(f"kv_cache_dtype={kv_cache_dtype!r} is unknown: use one of auto, {', '.join(_FP8_NAMES)}.")
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe), ("kv_cache", kv_cache)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}, not a tensor.")
    k_pe = k_pe.squeeze(1) if k_pe.dim() == 3 and k_pe.size(1) == 1 else k_pe
    checks.tensor("kv_c", kv_c, 2)
    checks.tensor("k_pe", k_pe, 2)
    checks.tensor("kv_cache", kv_cache, 3)
    rank, columns = kv_c.size(1), kv_cache.size(2)
    if rank + k_pe.size(1) != columns:
        raise ValueError(
            f"kv_c has {rank} columns and k_pe {k_pe.size(1)}, but kv_cache (shape {tuple(kv_cache.shape)}) {columns}: "
            "it must have those of both."
        )
    if kv_cache_dtype != "auto":
        kv_cache = _as_fp8(kv_cache, kv_cache_dtype)
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


def _as_fp8(kv_cache: torch.Tensor, name: str) -> torch.Tensor:
    dtype = _FP8_NAMES[name]
    if kv_cache.dtype == torch.uint8:
        return kv_cache.view(dtype)
    if kv_cache.dtype != dtype:
        raise ValueError(
            f"kv_cache_dtype={name!r}, but kv_cache has dtype {kv_cache.dtype}: it must be {dtype}, or uint8."
        )
    return kv_cache


def parts_of_cache(
    append_ckv: Any, append_kpe: Any, ckv_cache: Any, kpe_cache: Any
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """New tokens and their caches with a dimension of one head, or an error."""
    for name, x in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
        checks.tensor(name, x, 3)
    if ckv_cache.shape[:2] != kpe_cache.shape[:2]:
        raise ValueError(
            f"ckv_cache has shape {tuple(ckv_cache.shape)} and kpe_cache {tuple(kpe_cache.shape)}: they may differ in "
            "the last dimension alone."
        )
    for name, x, cache in (("append_ckv", append_ckv, ckv_cache), ("append_kpe", append_kpe, kpe_cache)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}, not a tensor.")
        if x.dim() != 2 or x.size(1) != cache.size(2) or x.size(0) != append_ckv.size(0):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but this cache takes [tokens, {cache.size(2)}], and as many "
                "tokens of both parts."
            )
    caches = (ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2))
    return append_ckv.unsqueeze(1), append_kpe.unsqueeze(1), caches
