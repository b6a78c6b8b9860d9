"""Rotary position embeddings, and writing rotated keys and values to slots of a paged cache."""

from __future__ import annotations

from typing import get_type_hints

import torch

from .._compute import kernels
from .._core import autograd, checks, hints, native
from .._core.autograd import without_autocast
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from . import slots_of_tokens
from .slots_of_tokens import Scale

_IN_PLACE = "apply_rope_with_cos_sin_cache_inplace"
_FUSED = "rope_append_paged_kv_cache_by_slot"


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys rotated by their positions, in new tensors: see ``apply_rope_with_cos_sin_cache_inplace``.

    Examples:
        >>> angles = torch.arange(16.0)[:, None] / 10000 ** (torch.arange(32) / 32)
        >>> table = torch.cat([angles.cos(), angles.sin()], -1)
        >>> q, k = torch.randn(3, 8 * 64), torch.randn(3, 2 * 64)
        >>> q, k = apply_rope_with_cos_sin_cache(torch.tensor([4, 5, 6]), q, k, 64, table)
    """
    hints.tensors(query=query, key=key)
    query, key = (x.clone(memory_format=torch.contiguous_format) for x in (query, key))
    apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Rotates queries and keys by their positions, in place (Su et al., 2021, arXiv:2104.09864).

    The first ``rotary_dim`` elements of each head are pairs (a, b). They become ``(a cos - b sin, b cos + a sin)``,
    computed in fp32. Pair ``i`` is ``(x[i], x[i + rotary_dim / 2])``, or ``(x[2 i], x[2 i + 1])`` without ``is_neox``.
    On a GPU this is one kernel, which a CUDA graph can capture. A token whose position the table does not have is left
    as it is.

    Args:
        positions: int64 or int32 ``[tokens]``.
        query: ``[tokens, num_qo_heads * head_size]`` or ``[tokens, num_qo_heads, head_size]``, any strides with a
            contiguous last dimension.
        key: the same with ``num_kv_heads``.
        head_size: elements of a head.
        cos_sin_cache: ``[positions, rotary_dim]``, fp32 or the dtype of the queries: in row ``p`` the cosines of
            position ``p``, one per pair, then the sines.
        is_neox: whether pairs are halves of the rotated elements, else neighbours.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; on the CPU, positions that the table does not
            have.

    Examples:
        >>> angles = torch.arange(16.0)[:, None] / 10000 ** (torch.arange(32) / 32)
        >>> table = torch.cat([angles.cos(), angles.sin()], -1)
        >>> q, k = torch.randn(3, 8 * 64), torch.randn(3, 2 * 64)
        >>> apply_rope_with_cos_sin_cache_inplace(torch.tensor([4, 5, 6]), q, k, 64, table)
    """
    given = positions, query, key, head_size, cos_sin_cache, is_neox
    traced = is_traced()
    direct = not (traced or autograd.wants_grad(query, key, cos_sin_cache))
    if direct and native.rope(*given):
        autograd.written(query, key)
        return
    if traced or have_own_dispatch(query, key, positions):
        _rope_in_graph(**dict(zip(_TYPES_OF_ROPE, given)))
        return
    is_neox = checks.flag("is_neox", is_neox)
    q, k = _heads("query", query, head_size), _heads("key", key, head_size)
    _check(positions, q, k, cos_sin_cache)
    if q.size(0) == 0:
        return
    angles = head_size, cos_sin_cache, is_neox
    if kernels.move(q, k, cos_sin_cache) and native.rope(positions.contiguous(), q, k, *angles):
        autograd.written(query, key)
        return
    for x in (q, k):
        x.copy_(rotated(x, positions, cos_sin_cache, is_neox))


def rope_append_paged_kv_cache_by_slot(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Scale = None,
    v_scale: Scale = None,
    kv_layout: str = "NHD",
    is_neox: bool = True,
    update_key: bool = False,
) -> None:
    """Rotates queries in place and writes rotated keys, and values, to slots of a paged cache: one kernel on a GPU.

    The same bits as ``apply_rope_with_cos_sin_cache_inplace`` and then ``append_paged_kv_cache_by_slot``, but that
    ``key`` keeps what it holds unless ``update_key``. A token whose position the table does not have is not appended.

    Args:
        query: ``[tokens, num_qo_heads, head_dim]``, rotated in place.
        key, value: ``[tokens, num_kv_heads, head_dim]``; values may have another head dimension.
        positions, cos_sin_cache, is_neox: as in ``apply_rope_with_cos_sin_cache_inplace``.
        key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_layout: as in ``append_paged_kv_cache_by_slot``.
            There must be a slot for each token; -1 where a token is not to be stored.
        update_key: whether ``key`` is rotated in place, too.

    Raises:
        KeyError: unknown ``kv_layout``.
        TypeError: an argument is no tensor, or a scale no number.
        ValueError: shapes, dtypes or devices that do not fit together; on the CPU, positions that the table does not
            have, and slots behind the cache.

    Examples:
        >>> angles = torch.arange(16.0)[:, None] / 10000 ** (torch.arange(32) / 32)
        >>> table = torch.cat([angles.cos(), angles.sin()], -1)
        >>> q, k, v = (torch.randn(3, heads, 64) for heads in (8, 2, 2))
        >>> k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64)
        >>> places = torch.tensor([4, 5, 6]), torch.tensor([20, 21, 22])
        >>> rope_append_paged_kv_cache_by_slot(q, k, v, places[0], table, k_cache, v_cache, places[1])
    """
    traced = is_traced()
    new = query, key, value, cos_sin_cache
    if not (traced or autograd.wants_grad(*new, key_cache, value_cache, k_scale, v_scale)):
        places = value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_layout
        if native.rope_append_by_slot(query, key, positions, cos_sin_cache, is_neox, update_key, *places):
            autograd.written(query, key_cache, value_cache, key if update_key else None)
            return
    checks.kv_layout(kv_layout)
    if traced or have_own_dispatch(query, key, key_cache, slot_mapping):
        query, key, value = (autograd.without_grad(x, x, _FUSED)[0] for x in (query, key, value))
        given = query, key, value, positions, cos_sin_cache, key_cache, value_cache, slot_mapping
        _append_in_graph(**dict(zip(_TYPES, (*given, k_scale, v_scale, kv_layout, is_neox, update_key))))
        return
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, torch.Tensor) or x.dim() != 3:
            raise ValueError(f"{name} has shape {getattr(x, 'shape', x)}: it must be [tokens, heads, head_dim].")
    _check(positions, query, key, cos_sin_cache)
    checked = slots_of_tokens.checked(key, value, key_cache, value_cache, slot_mapping, (k_scale, v_scale), kv_layout)
    if slot_mapping.size(0) != key.size(0) or value.size(0) != key.size(0):
        raise ValueError(
            f"slot_mapping has {slot_mapping.size(0)} entries and value {value.size(0)} tokens, but key has "
            f"{key.size(0)}: pass one of each per token, and slot -1 where none is to be stored."
        )
    is_neox, update_key = checks.flag("is_neox", is_neox), checks.flag("update_key", update_key)
    if key.size(0) == 0:
        return
    if kernels.move(*new, key_cache, value_cache):
        angles = positions.contiguous(), cos_sin_cache, is_neox
        if native.rope_append_by_slot(query, key, *angles, update_key, *checked.of(value)):
            autograd.written(query, key_cache, value_cache, key if update_key else None)
            return
    query.copy_(rotated(query, positions, cos_sin_cache, is_neox))
    new_key = rotated(key, positions, cos_sin_cache, is_neox)
    if update_key:
        key.copy_(new_key)
    slots = torch.where(has_row(positions, cos_sin_cache), slot_mapping.to(key.device), -1)
    slots_of_tokens.append_paged_kv_cache_by_slot(
        new_key, value, key_cache, value_cache, slots, k_scale, v_scale, kv_layout
    )


def _heads(name: str, x: torch.Tensor, head_size: int) -> torch.Tensor:
    """``[tokens, heads, head_size]`` over the same memory."""
    if not isinstance(x, torch.Tensor) or x.dim() not in (2, 3) or not isinstance(head_size, int) or head_size <= 0:
        raise ValueError(
            f"{name} has shape {getattr(x, 'shape', x)} with head_size={head_size}: pass [tokens, heads * head_size] "
            "or [tokens, heads, head_size]."
        )
    if x.dim() == 2 and x.size(1) % head_size == 0:
        return x.unflatten(1, (x.size(1) // head_size, head_size))
    if x.dim() == 3 and x.size(2) == head_size:
        return x
    raise ValueError(f"{name} has shape {tuple(x.shape)}, which has no heads of head_size={head_size}.")


def _check(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> None:
    if not isinstance(positions, torch.Tensor) or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions is {getattr(positions, 'dtype', positions)}: it must be an int64 or int32 tensor.")
    if positions.dim() != 1 or positions.size(0) != q.size(0) or q.size(0) != k.size(0):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}, query {q.size(0)} tokens and key {k.size(0)}: each token "
            "has one position."
        )
    if not isinstance(table, torch.Tensor) or table.dim() != 2 or table.dtype not in (torch.float32, q.dtype):
        raise ValueError(
            f"cos_sin_cache has shape {tuple(getattr(table, 'shape', ()))} and dtype {getattr(table, 'dtype', table)}: "
            f"it must be [positions, rotary_dim], float32 or {q.dtype} like the queries."
        )
    if q.dtype != k.dtype or not q.is_floating_point() or q.element_size() < 2 or q.size(-1) != k.size(-1):
        raise ValueError(
            f"query and key have dtypes {q.dtype} and {k.dtype} and head dimensions {q.size(-1)} and {k.size(-1)}: "
            "both must have the same, of 16 bits or more."
        )
    dim = table.size(1)
    if dim % 2 or not 0 < dim <= q.size(-1):
        raise ValueError(
            f"cos_sin_cache has rotary_dim={dim}: it must be even, and at most the head dimension, {q.size(-1)}."
        )
    checks.same_device(q.device, positions=positions, key=k, cos_sin_cache=table)
    check_rows(positions, table)


def check_rows(positions: torch.Tensor, table: torch.Tensor) -> None:
    """ValueError if positions on the CPU have no row in the table."""
    if not positions.is_cuda and not bool(has_row(positions, table).all()):
        low, high = int(positions.min()), int(positions.max())
        raise ValueError(
            f"positions lie between {low} and {high}, but cos_sin_cache has rows 0 to {table.size(0) - 1}."
        )


def has_row(positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (positions >= 0) & (positions < table.size(0))


@without_autocast
def rotated(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """``[tokens, heads, dim]`` rotated, by PyTorch."""
    if table.size(0) == 0:
        return x
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = table[positions.long().clamp(0, table.size(0) - 1)].to(wide).unsqueeze(1)
    cos, sin = rows.chunk(2, -1)
    dim = table.size(1)
    turned, rest = x[..., :dim].to(wide), x[..., dim:]
    a, b = turned.chunk(2, -1) if is_neox else (turned[..., ::2], turned[..., 1::2])
    first, second = a * cos - b * sin, b * cos + a * sin
    both = torch.cat([first, second], -1) if is_neox else torch.stack([first, second], -1).flatten(-2)
    return torch.where(has_row(positions, table)[:, None, None], torch.cat([both.to(x.dtype), rest], -1), x)


_TYPES_OF_ROPE = get_type_hints(apply_rope_with_cos_sin_cache_inplace)
_rope_in_graph = operators.in_place("rope", _TYPES_OF_ROPE, apply_rope_with_cos_sin_cache_inplace, ("query", "key"))
_TYPES = get_type_hints(rope_append_paged_kv_cache_by_slot)
_append_in_graph = operators.in_place(
    "rope_append_by_slot",
    _TYPES,
    rope_append_paged_kv_cache_by_slot,
    ("query", "key", "key_cache", "value_cache"),
)
