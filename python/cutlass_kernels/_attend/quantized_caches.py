"""Checks of quantized latent caches (``kv_format``).

PyTorch reads the bytes of the tokens that a call names, and no others: a page may hold anything elsewhere.
"""

from __future__ import annotations

import torch

from .._caches import latent_formats
from .._caches.latent_formats import FORMATS, VALUES, Format
from .._core import checks, hints
from .._core.call_table import Call
from . import latent_parts


def checked(call: Call) -> tuple[Call, Format | None]:
    """The call with quantized caches as uint8, and the format of k. ValueError where they do not fit."""
    latent_formats.check_name(call.kv_format)
    caches = [("k", call.k)]
    if call.extra_k is not None:
        checks.tensors(extra_k=call.extra_k)
        if call.extra_k.dim() not in (3, 4):
            raise ValueError(f"extra_k has shape {tuple(call.extra_k.shape)}: it must have 3 or 4 dimensions.")
        caches.append(("extra_k", call.extra_k))
    quantized = {name: x for name, x in caches if latent_formats.is_quantized(x, call.kv_format)}
    if call.kv_format is not None:
        size = FORMATS[call.kv_format].bytes
        if all(x.size(-1) != size for x in quantized.values()):
            name, x = next(iter(quantized.items()), caches[0])
            raise ValueError(
                f"{name} has dtype {x.dtype} and shape {tuple(x.shape)}, but a cache of kv_format={call.kv_format!r} "
                f"is uint8 with {size} bytes per token."
            )
    if "k" not in quantized:
        return call, None
    if call.k_rope is not None:
        raise ValueError(
            f"k_rope={hints.shown(call.k_rope)} is given, but a quantized latent cache holds the RoPE columns itself: "
            "leave it out."
        )
    kind = latent_formats.format_of("k", call.k, call.kv_format)
    if call.v.shape != call.k.shape or not latent_parts.starts_with(call.k, call.v):
        raise ValueError(
            f"v has shape {tuple(call.v.shape)}, but k is a quantized latent cache of {kind.bytes} bytes per token, "
            "which holds the values, too: pass v=k."
        )
    check_columns("k", call.k, kind, latent_parts.head_dim(call.q, call.q_rope))
    cache = call.k.transpose(-3, -2) if call.kv_layout == "HND" else call.k
    cache = latent_formats.as_bytes("k", cache, kind)
    k = cache.transpose(-3, -2) if call.kv_layout == "HND" else cache
    return call._replace(k=k, v=k), kind


def check_columns(name: str, cache: torch.Tensor, kind: Format, head_dim: int) -> None:
    if head_dim not in kind.reads:
        raise ValueError(
            f"q has head_dim {head_dim}, but {name} (shape {tuple(cache.shape)}, kv_format={kind.name!r}) has keys of "
            f"{' or '.join(map(str, kind.reads))} columns: they must be equal."
        )


def are_given(call: Call) -> bool:
    """Whether k is a quantized latent cache."""
    return latent_formats.is_quantized(call.k, call.kv_format)


def kind_of(call: Call, name: str = "k") -> Format | None:
    """The format of k or ``extra_k`` in a checked call; None for numbers."""
    cache = getattr(call, name)
    if cache is None or not latent_formats.is_quantized(cache, call.kv_format):
        return None
    return latent_formats.format_of(name, cache, call.kv_format)


def values_dim(call: Call) -> int:
    """Columns of the values."""
    return VALUES if are_given(call) else call.v.shape[-1]


def stand_ins(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """One dummy token with the columns of q in e4m3, to ask for a backend."""
    k = call.k.new_zeros((1, 1, latent_parts.head_dim(call.q, call.q_rope))).view(torch.float8_e4m3fn)
    return k, k[..., :VALUES]
