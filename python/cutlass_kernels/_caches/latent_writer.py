"""Tokens of latent attention quantized into slots of a cache: checks, the kernel, PyTorch in its place."""

from __future__ import annotations

from typing import NamedTuple, get_type_hints

import torch

from .._core import autograd, checks, errors, native
from .._core.autograd import without_autocast
from .._core.problems import HALF_DTYPES
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from . import latent_formats, rotary
from .latent_formats import Format
from .slots_of_tokens import check_slots

_ROPE = 64  # columns that are rotated, the last of a token


class Names(NamedTuple):
    """Of a function, and of its arguments for the first columns of tokens and for the others."""

    function: str
    ckv: str
    kpe: str


class Rotation(NamedTuple):
    """What is rotated, and by which angles: arguments of ``append_quantized_mla_kv_cache``."""

    q_pe: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    cos_sin_cache: torch.Tensor | None = None
    is_neox: bool = True
    update_key: bool = False


def append(
    names: Names,
    ckv: torch.Tensor,
    kpe: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kind: Format,
    power_of_two: bool,
    rotation: Rotation,
) -> None:
    """Checks and writes tokens."""
    cache = latent_formats.as_bytes("kv_cache", checks.last_dim_contiguous("kv_cache", kv_cache), kind)
    if any(cache.size(d) > 1 and cache.stride(d) == 0 for d in (0, 1)):
        raise ValueError(f"kv_cache has strides {tuple(kv_cache.stride())}: its tokens share memory.")
    tokens = dict(zip(names[1:], (ckv, kpe)))
    for name, x in tokens.items():
        if x is not None and (x.dtype not in HALF_DTYPES or x.dtype != ckv.dtype):
            raise ValueError(
                f"{name} has dtype {x.dtype}: {' and '.join(tokens)} must be bfloat16 or float16, of one dtype."
            )
    checks.same_device(cache.device, "kv_cache is", **tokens)
    own, others = ckv.size(1), 0 if kpe is None else kpe.size(1)
    without_rope = own == kind.latent == latent_formats.VALUES and others == 0
    if (own + others != kind.columns and not without_rope) or (kind.rope and others not in (0, kind.rope)):
        each = f", {kind.latent} and {kind.rope}" if kind.rope else ""
        raise ValueError(
            f"{names.ckv} has {own} columns and {names.kpe} {others}, but kv_format={kind.name!r} has "
            f"{kind.columns} columns{each}."
        )
    checks.tensors(slot_mapping=slot_mapping)
    _check_rotation(names, ckv, kpe, slot_mapping, kind, rotation)
    ckv, _ = autograd.without_grad(ckv, ckv, names.function)
    if kpe is not None:
        kpe, _ = autograd.without_grad(kpe, kpe, names.function)
    if rotation.q_pe is not None:
        rotation = rotation._replace(q_pe=autograd.without_grad(rotation.q_pe, rotation.q_pe, names.function)[0])
    apart = is_traced() or have_own_dispatch(ckv, kpe, cache, slot_mapping)
    in_graph = _in_graph if rotation.positions is None else _rotated_in_graph
    given = ckv, kpe, cache, slot_mapping, kind.name, power_of_two, *rotation
    if apart:
        in_graph(**dict(zip(_TYPES, given)))
    else:
        _write(*given)


def _check_rotation(
    names: Names, ckv: torch.Tensor, kpe: torch.Tensor | None, slots: torch.Tensor, kind: Format, rotation: Rotation
) -> None:
    """ValueError if the columns of these tokens cannot be rotated so. Values of positions are not read."""
    q, positions, table, _, update_key = rotation
    if positions is None:
        given = {"q_pe": q is not None, "cos_sin_cache": table is not None, "update_key": update_key}
        for name in (name for name, is_given in given.items() if is_given):
            raise ValueError(
                f"{name} is given, but positions is None: pass the positions of the tokens to rotate them."
            )
        return
    checks.tensor("positions", positions, 1)
    table = checks.tensor("cos_sin_cache", table, 2)
    checks.tensor("slot_mapping", slots, 1)
    keys = ckv if kpe is None else kpe
    if kind.name == "v3.2_nope" or ckv.size(1) + (0 if kpe is None else kpe.size(1)) != kind.columns:
        raise ValueError(
            f"{names.ckv} has {ckv.size(1)} columns, all of them latent, so there is nothing to rotate with "
            f"kv_format={kind.name!r}: leave positions out."
        )
    if kpe is not None and kpe.size(1) != _ROPE:
        raise ValueError(f"{names.kpe} has {kpe.size(1)} columns: the {_ROPE} that are rotated, or None.")
    count = slots.size(0)
    if positions.dtype not in (torch.int32, torch.int64) or positions.size(0) < count:
        raise ValueError(
            f"positions has shape {tuple(positions.shape)} and dtype {positions.dtype}: it must be int64 or int32, "
            f"with one for each of the {count} slots."
        )
    if table.size(1) != _ROPE or table.dtype not in (torch.float32, ckv.dtype):
        raise ValueError(
            f"cos_sin_cache has shape {tuple(table.shape)} and dtype {table.dtype}: it must be [positions, {_ROPE}], "
            f"float32 or {ckv.dtype} like the tokens."
        )
    if q is not None:
        checks.tensor("q_pe", q, 3)
        if q.size(0) < count or q.size(2) != _ROPE or q.dtype != ckv.dtype:
            raise ValueError(
                f"q_pe has shape {tuple(q.shape)} and dtype {q.dtype}: it must be [tokens, heads, {_ROPE}] of "
                f"{ckv.dtype}, with a token for each of the {count} slots."
            )
    checks.same_device(keys.device, f"{names.ckv} is", positions=positions, cos_sin_cache=table, q_pe=q)


@without_autocast
def _write(
    ckv: torch.Tensor,
    kpe: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_format: str,
    power_of_two: bool,
    q_pe: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    is_neox: bool,
    update_key: bool,
) -> None:
    """Writes checked tokens, some of whose slots the cache may not have."""
    keys = ckv if kpe is None else kpe
    angles = positions, cos_sin_cache, is_neox, update_key
    if native.append_quantized(ckv, kpe, kv_cache, slot_mapping, kv_format, power_of_two, q_pe, *angles) is not None:
        autograd.written(kv_cache, q_pe, keys if update_key else None)
        return
    if kv_cache.is_cuda:
        errors.warn(
            "Tokens of a quantized latent cache are written with PyTorch: the kernel needs columns in multiples of 16, "
            "and addresses and strides of 16 bytes.",
            errors.PerformanceWarning,
        )
    check_slots(slot_mapping, min(ckv.size(0), keys.size(0)), kv_cache)
    count, kind = slot_mapping.size(0), latent_formats.FORMATS[kv_format]
    slots = slot_mapping.to(kv_cache.device)
    x = ckv[:count] if kpe is None else torch.cat([ckv[:count], kpe[:count]], -1)
    if positions is not None and cos_sin_cache is not None:
        positions = positions[:count]
        rotary.check_rows(positions, cos_sin_cache)
        rope = rotary.rotated(x[:, None, -_ROPE:], positions, cos_sin_cache, is_neox).squeeze(1)
        x = torch.cat([x[:, :-_ROPE], rope], -1)
        slots = torch.where(rotary.has_row(positions, cos_sin_cache), slots, -1)
        if update_key:
            keys[:count, -_ROPE:].copy_(rope)
        if q_pe is not None:
            q_pe[:count].copy_(rotary.rotated(q_pe[:count], positions, cos_sin_cache, is_neox))
    x = torch.nn.functional.pad(x, (0, kind.columns - x.size(1)))
    latent_formats.write(x, kv_cache, slots, kind, power_of_two)


_TYPES = get_type_hints(_write)
_in_graph = operators.in_place("write_latent", _TYPES, _write, ("kv_cache",))
_rotated_in_graph = operators.in_place("rotate_and_write_latent", _TYPES, _write, ("kv_cache", "q_pe", "ckv", "kpe"))
