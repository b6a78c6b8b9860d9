"""New keys and values written to slots of a paged cache, converted to its type."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch

from .._compute import kernels
from .._core import autograd, checks, hints, native
from .._core.problems import FP8_DTYPES
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from . import scatter

Scale = float | torch.Tensor | None

_NAME = "append_paged_kv_cache_by_slot"


def append_paged_kv_cache_by_slot(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Scale = None,
    v_scale: Scale = None,
    kv_layout: str = "NHD",
) -> None:
    """Writes new keys and values to slots of a paged cache, in place: what vLLM calls reshape_and_cache_flash.

    Token ``i`` goes to entry ``slot_mapping[i] % page_size`` of page ``slot_mapping[i] // page_size``. Stored is
    ``key / k_scale`` and ``value / v_scale``: the quotient by the scale as fp32 holds it, in fp32, rounded to nearest
    (ties to even) in the type of the cache. To multiply by the reciprocal gives other bytes in places. In an fp8 cache,
    what lies beyond the largest finite number becomes that number, and NaN stays NaN. Attention over it then takes
    ``k_descale=k_scale`` and ``v_descale=v_scale``. On a GPU this is one kernel, which a CUDA graph can capture. On the
    CPU, PyTorch stores the same bits.

    Args:
        key: ``[tokens, num_kv_heads, head_dim_qk]``, any strides. Rows behind the last slot are not read.
        value: ``[tokens, num_kv_heads, head_dim_vo]``, of the same dtype.
        key_cache, value_cache: ``[pages, page_size, num_kv_heads, head_dim]`` (NHD), or num_kv_heads before page_size
            (HND), any strides: the dtype of the keys, float8_e4m3fn or float8_e5m2.
        slot_mapping: int64 or int32 ``[n]``, ``n <= tokens``. Tokens of a negative slot are skipped; on a GPU, those of
            a slot that the cache does not have, too.
        k_scale, v_scale: numbers other than 0, or fp32 tensors with one element or one per head; default 1. Tensors on
            a GPU are read there.
        kv_layout: "NHD" or "HND".

    A cache carries no gradient: where keys or values require one, a warning says so.

    Raises:
        KeyError: unknown ``kv_layout``.
        TypeError: an argument is no tensor, or a scale no number.
        ValueError: shapes, dtypes or devices that do not fit together; a number of 0 as scale; on the CPU, slots behind
            the cache.

    Examples:
        >>> k_cache, v_cache = torch.zeros(2, 8, 16, 4, 64).to(torch.float8_e4m3fn)
        >>> k, v = torch.randn(2, 3, 4, 64, dtype=torch.bfloat16)
        >>> append_paged_kv_cache_by_slot(k, v, k_cache, v_cache, torch.tensor([17, 18, -1]), k_scale=0.5)
    """
    given = key, value, key_cache, value_cache, slot_mapping
    traced = is_traced()
    direct = not (traced or autograd.wants_grad(key, value, key_cache, value_cache, k_scale, v_scale))
    if direct and native.append_by_slot(*given, k_scale, v_scale, kv_layout):
        autograd.written(key_cache, value_cache)
        return
    checks.kv_layout(kv_layout)
    if traced or have_own_dispatch(key, key_cache, slot_mapping):
        key, value = autograd.without_grad(key, value, _NAME, k_scale, v_scale)
        _in_graph(**dict(zip(_TYPES, (key, value, *given[2:], k_scale, v_scale, kv_layout))))
        return
    places = checked(*given, (k_scale, v_scale), kv_layout)
    k_cache, v_cache, count = places.k_cache, places.v_cache, slot_mapping.size(0)
    key, value = autograd.without_grad(key, value, _NAME, k_scale, v_scale)
    if count == 0 or k_cache.numel() == 0:
        return
    if kernels.move(k_cache, v_cache) and native.append_by_slot(rows(key[:count]), *places.of(value)):
        autograd.written(key_cache, value_cache)
        return
    slots, scales = places.slots, places.scales
    _write(key[:count], k_cache, slots.long(), scales[0])
    _write(value[:count], v_cache, slots.long(), scales[1])


@dataclass(frozen=True)
class Places:
    """Checked caches ``[pages, page_size, heads, dim]``, slots on their device, and scales of keys and values."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    scales: tuple[float | torch.Tensor, float | torch.Tensor]

    def of(self, value: torch.Tensor) -> tuple[Any, ...]:
        """Arguments of the compiled functions: the values, and these places."""
        return rows(value[: len(self.slots)]), self.k_cache, self.v_cache, self.slots, *self.scales, "NHD"


def rows(x: torch.Tensor) -> torch.Tensor:
    """``[tokens, heads, dim]`` as kernels read it: its last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def checked(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[Scale, Scale],
    kv_layout: str,
) -> Places:
    """Where new keys and values go, or an error."""
    checks.tensors(key_cache=key_cache, value_cache=value_cache)
    k_cache, v_cache = checks.paged_cache((key_cache, value_cache), kv_layout, names=("key_cache", "value_cache"))
    _check_new(key, value, k_cache, v_cache, kv_layout)
    check_slots(slot_mapping, min(key.size(0), value.size(0)), k_cache)
    device, heads = k_cache.device, k_cache.size(2)
    slots = slot_mapping.to(device, non_blocking=True).contiguous()
    k_scale, v_scale = (_scale(name, x, heads, device) for name, x in zip(("k_scale", "v_scale"), scales))
    return Places(k_cache, v_cache, slots, (k_scale, v_scale))


def _check_new(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str
) -> None:
    for name, new, cache in (("key", key, k_cache), ("value", value, v_cache)):
        checks.tensors(**{name: new})
        if new.dim() != 3 or new.shape[1:] != cache.shape[2:]:
            swapped = new.dim() == 3 and new.shape[1:] == (cache.size(1), cache.size(3))
            raise ValueError(
                f"{name} has shape {tuple(new.shape)}, but this cache takes [tokens, {cache.size(2)}, {cache.size(3)}] "
                f"with kv_layout={kv_layout!r}." + hints.other_layout(kv_layout, swapped)
            )
        checks.same_device(k_cache.device, "key_cache is", **{name: new, f"{name}_cache": cache})
        if not new.is_floating_point() or (cache.dtype != new.dtype and cache.dtype not in FP8_DTYPES):
            raise ValueError(
                f"{name} has dtype {new.dtype} and its cache {cache.dtype}: use float16 or bfloat16 for both, or fp8 "
                "caches."
            )
    if key.dtype != value.dtype or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"key and value have dtypes {key.dtype} and {value.dtype}, their caches {k_cache.dtype} and "
            f"{v_cache.dtype}: each pair must have one."
        )


def check_slots(slots: torch.Tensor, tokens: int, cache: torch.Tensor) -> None:
    checks.tensors(slot_mapping=slots)
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"slot_mapping has shape {tuple(slots.shape)} and dtype {slots.dtype}: it must be 1-D, int64 or int32."
        )
    if slots.size(0) > tokens:
        raise ValueError(
            f"slot_mapping has {slots.size(0)} entries, but key and value have only {tokens} tokens: pass one slot per "
            "token."
        )
    room = cache.size(0) * cache.size(1)
    if slots.device.type == "cpu" and slots.numel() and int(slots.max()) >= room:
        raise ValueError(
            f"slot_mapping holds {int(slots.max())}, but the cache has {room} slots, pages * page_size. Tokens to skip "
            "have slot -1."
        )


def _scale(name: str, value: Scale, heads: int, device: torch.device) -> float | torch.Tensor:
    """A number, or fp32 factors ``[1]`` or ``[heads]`` on the device."""
    if not isinstance(value, torch.Tensor) or (value.numel() == 1 and value.device.type == "cpu"):
        factor = checks.scale(value, name)
        if not isinstance(factor, torch.Tensor) and ctypes.c_float(factor).value in (0.0, math.inf, -math.inf):
            raise ValueError(
                f"{name}={factor} is {ctypes.c_float(factor).value} in fp32, and no value can be divided by it: pass 1 "
                "for no scale."
            )
        return factor
    if value.numel() not in (1, heads) or value.dim() > 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: pass one number, or one per head, [{heads}].")
    checks.same_device(device, "key_cache is", **{name: value})
    return value.detach().reshape(-1).to(torch.float32)


def _write(new: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float | torch.Tensor) -> None:
    if isinstance(scale, torch.Tensor):
        scale = scale.view(1, -1, 1)
    wide = (new.double() if new.dtype == torch.float64 else new.float()) / scale
    if cache.dtype in FP8_DTYPES:
        limit = torch.finfo(cache.dtype).max
        wide = wide.clamp(-limit, limit)
    stored = bits(wide.to(cache.dtype))
    if stored.dtype != cache.dtype:
        # The NaN of a GPU's conversions. Those of CPUs keep the sign, or not, depending on the length of a row.
        stored = stored.masked_fill(wide.isnan(), torch.iinfo(stored.dtype).max)
    scatter.write(stored, bits(cache), slots)


def bits(x: torch.Tensor) -> torch.Tensor:
    """``x``, with elements of 8 and 16 bits seen as integers: not every torch release can index fp8."""
    integers = {1: torch.int8, 2: torch.int16}
    return x.view(integers[x.element_size()]) if x.element_size() in integers else x


_TYPES = get_type_hints(append_paged_kv_cache_by_slot)
_in_graph = operators.in_place("append_by_slot", _TYPES, append_paged_kv_cache_by_slot, ("key_cache", "value_cache"))
