"""Latent attention (MLA) whose last columns of queries or keys, those of the position, lie in tensors of their own.

A kernel reads ``q_rope`` and ``k_rope`` beside ``q`` and ``k``. What follows is for all else: two views of one tensor
become that tensor again, without a copy, and PyTorch joins rows where no kernel reads them apart.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core import checks
from .._core.autograd import without_autocast
from .._core.call_table import Call
from .._core.problems import FP8_DTYPES


def checked(call: Call) -> Call:
    """The call with ``q_rope`` and ``k_rope`` None where they are views of the same rows as ``q`` and ``k``.

    ValueError or TypeError where they do not fit.
    """
    if call.q_rope is not None:
        _check("q_rope", call.q_rope, "q", call.q)
        call = call._replace(q_rope=checks.last_dim_contiguous("q_rope", call.q_rope))
    if call.k_rope is not None:
        _check("k_rope", call.k_rope, "k", call.k)
        if not starts_with(call.k, call.v):
            raise ValueError(
                f"k_rope is given, but v (shape {tuple(call.v.shape)}) is not k in the same memory: keys of two "
                "tensors have values that are columns of the first. Pass v=k."
            )
        call = call._replace(k_rope=checks.last_dim_contiguous("k_rope", call.k_rope))
    q, k = _view_of_both(call.q, call.q_rope), _view_of_both(call.k, call.k_rope)
    if q is not None:
        call = call._replace(q=q, q_rope=None)
    if k is not None:
        call = call._replace(k=k, k_rope=None)
    return call


def head_dim(x: torch.Tensor, rope: torch.Tensor | None) -> int:
    """Columns of queries or keys."""
    return x.size(-1) if rope is None else x.size(-1) + rope.size(-1)


def with_whole_queries(call: Call) -> Call:
    """The call with queries in one tensor: a copy of them."""
    return call if call.q_rope is None else call._replace(q=joined(call.q, call.q_rope), q_rope=None)


def whole(x: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
    """``x`` and ``rope`` side by side: the view that they are of, or a copy."""
    if rope is None:
        return x
    both = _view_of_both(x, rope)
    return joined(x, rope) if both is None else both


@without_autocast
def joined(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rows of ``x``, each followed by that of ``rope``."""
    if x.dtype in FP8_DTYPES:  # not every torch release concatenates fp8
        return torch.cat([x.view(torch.uint8), rope.view(torch.uint8)], -1).view(x.dtype)
    return torch.cat([x, rope], -1)


def _check(name: str, rope: Any, of: str, x: torch.Tensor) -> None:
    if not isinstance(rope, torch.Tensor):
        raise TypeError(f"{name} is {type(rope).__name__}, not a tensor.")
    if rope.dim() != x.dim() or rope.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{name} has shape {tuple(rope.shape)} and {of} {tuple(x.shape)}: they may differ in the last dimension "
            "alone, 64 and 512 columns in DeepSeek's models."
        )
    if rope.dtype != x.dtype:
        raise ValueError(f"{name} has dtype {rope.dtype} and {of} {x.dtype}: they must be equal.")
    checks.same_device(x.device, f"{of} is", **{name: rope})


def starts_with(x: torch.Tensor, columns: torch.Tensor) -> bool:
    """Whether ``columns`` are the first ones of ``x``, in the same memory."""
    fits = columns.dim() == x.dim() and columns.shape[:-1] == x.shape[:-1] and columns.size(-1) <= x.size(-1)
    return fits and (x.numel() == 0 or (columns.data_ptr() == x.data_ptr() and _same_strides(x, columns)))


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(
        size < 2 or stride == other for size, stride, other in zip(a.shape[:-1], a.stride()[:-1], b.stride()[:-1])
    )


def _view_of_both(x: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor | None:
    """``x`` and ``rope`` as one view, where they are views of one tensor side by side."""
    if rope is None or x.numel() == 0 or rope.numel() == 0 or not _same_strides(x, rope):
        return None
    if x.untyped_storage().data_ptr() != rope.untyped_storage().data_ptr():
        return None
    if rope.data_ptr() != x.data_ptr() + x.size(-1) * x.element_size() or x.stride(-1) != 1:
        return None
    return x.as_strided((*x.shape[:-1], x.size(-1) + rope.size(-1)), x.stride())
