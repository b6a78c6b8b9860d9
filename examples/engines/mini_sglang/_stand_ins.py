"""Plain torch in place of what mini-sglang takes from FlashInfer beside attention, and of its own compiled kernels.

They have FlashInfer's names and arguments, as far as mini-sglang passes them. ``compiled()`` fuses them with
``torch.compile``: without it, a decode step spends most of its time in small kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


# --- norms, activations and RoPE ---


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype), total.to(x.dtype)


def _silu_product(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def _gelu_product(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (F.gelu(gate) * up).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, head_size: int) -> Tensor:
    first, second = x.unflatten(-1, (-1, head_size)).float().chunk(2, -1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.flatten(-2).to(x.dtype)


def _rotate_both(positions: Tensor, q: Tensor, k: Tensor, head_size: int, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, -1)  # [rows, 1, head_size / 2]
    return _rotate(q, cos, sin, head_size), _rotate(k, cos, sin, head_size)


class _Functions:
    """The functions above, or compiled ones."""

    norm: Callable[..., Tensor] = staticmethod(_norm)
    add_norm: Callable[..., tuple[Tensor, Tensor]] = staticmethod(_add_norm)
    silu_product: Callable[..., Tensor] = staticmethod(_silu_product)
    gelu_product: Callable[..., Tensor] = staticmethod(_gelu_product)
    rotate_both: Callable[..., tuple[Tensor, Tensor]] = staticmethod(_rotate_both)


_functions = _Functions()


def compiled() -> None:
    """From now on, the functions are compiled for any number of rows."""
    for name in ("norm", "add_norm", "silu_product", "gelu_product", "rotate_both"):
        setattr(_functions, name, torch.compile(getattr(_Functions, name), dynamic=True))


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """``input / rms(input) * weight`` over the last dimension."""
    return _into(out, _functions.norm(input, weight, eps))


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """``residual += input``, then ``input = rmsnorm(residual)``, both in place."""
    normed, total = _functions.add_norm(input, residual, weight, eps)
    input.copy_(normed)
    residual.copy_(total)


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(first half) * second half`` of the last dimension."""
    return _into(out, _functions.silu_product(input))


def gelu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """``gelu(first half) * second half`` of the last dimension."""
    return _into(out, _functions.gelu_product(input))


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """Rotates query and key ``[rows, heads * head_size]`` in place. ``cos_sin_cache``: ``[positions, head_size]``."""
    if not is_neox:
        raise NotImplementedError("is_neox=False: mini-sglang rotates halves.")
    # Query and key lie in one tensor, which a compiled function should not write to.
    rotated = _functions.rotate_both(positions, query, key, head_size, cos_sin_cache)
    query.copy_(rotated[0])
    key.copy_(rotated[1])


# --- flashinfer.sampling ---


def softmax(logits: Tensor, temperature: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """Probabilities ``[batch, vocab]``; ``temperature``: ``[batch]``."""
    return (logits if temperature is None else logits / temperature[:, None]).softmax(-1)


def sampling_from_probs(probs: Tensor) -> Tensor:
    """A token of each row, int32: the largest of p / e, e drawn from the exponential distribution."""
    noise = torch.empty_like(probs).exponential_(1).clamp_(min=1e-10)
    return (probs / noise).argmax(-1).int()


def top_k_sampling_from_probs(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """A token among the ``top_k`` most probable ones."""
    return sampling_from_probs(_top_k(probs, top_k))


def top_p_sampling_from_probs(probs: Tensor, top_p: Tensor | float) -> Tensor:
    """A token among the fewest whose probabilities sum up to ``top_p``."""
    return sampling_from_probs(_top_p(probs, top_p))


def top_k_top_p_sampling_from_probs(probs: Tensor, top_k: Tensor | int, top_p: Tensor | float) -> Tensor:
    """``top_k`` first, then ``top_p`` of what is left."""
    kept = _top_k(probs, top_k)
    return sampling_from_probs(_top_p(kept / kept.sum(-1, keepdim=True), top_p))


def _top_k(probs: Tensor, top_k: Tensor | int) -> Tensor:
    ordered = probs.sort(-1, descending=True).values
    last = torch.as_tensor(top_k, device=probs.device).long().expand(len(probs)) - 1
    return probs.where(probs >= ordered.gather(1, last[:, None]), 0.0)


def _top_p(probs: Tensor, top_p: Tensor | float) -> Tensor:
    ordered, order = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    limit = torch.as_tensor(top_p, device=probs.device, dtype=probs.dtype).expand(len(probs))
    kept = ordered.where(before < limit[:, None], 0.0)
    return torch.zeros_like(probs).scatter(1, order, kept)


# --- minisgl.kernel ---


def store_cache(k_cache: Tensor, v_cache: Tensor, indices: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes keys and values ``[rows, width]`` to slots of caches ``[slots, heads, dim]``."""
    slots = indices.long()
    k_cache.view(len(k_cache), -1)[slots] = k
    v_cache.view(len(v_cache), -1)[slots] = v


def indexing(
    weights: Tensor, indices: Tensor, *, output: Tensor | None = None, vocab_range: tuple[int, int] | None = None
) -> Tensor:
    """Rows of ``weights``. With ``(start, length)``, indices outside of it give rows of 0."""
    if vocab_range is None:
        return _into(output, F.embedding(indices, weights))
    local = indices - vocab_range[0]
    inside = (local >= 0) & (local < vocab_range[1])
    return _into(output, F.embedding(local * inside, weights) * inside[:, None])


def fast_compare_key(x: Tensor, y: Tensor) -> int:
    """Length of the common prefix of two vectors on the CPU."""
    length = min(len(x), len(y))
    differs = (x[:length] != y[:length]).nonzero()
    return int(differs[0]) if len(differs) else length


FLASHINFER: dict[str, Any] = {
    "rmsnorm": rmsnorm,
    "fused_add_rmsnorm": fused_add_rmsnorm,
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "apply_rope_with_cos_sin_cache_inplace": apply_rope_with_cos_sin_cache_inplace,
}
SAMPLING: dict[str, Any] = {
    "softmax": softmax,
    "sampling_from_probs": sampling_from_probs,
    "top_k_sampling_from_probs": top_k_sampling_from_probs,
    "top_p_sampling_from_probs": top_p_sampling_from_probs,
    "top_k_top_p_sampling_from_probs": top_k_top_p_sampling_from_probs,
}
KERNELS: dict[str, Any] = {
    "store_cache": store_cache,
    "indexing": indexing,
    "fast_compare_key": fast_compare_key,
}
