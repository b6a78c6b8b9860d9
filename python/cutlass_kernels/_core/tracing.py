"""Detects traced calls, and keeps fake tensors out of caches.

A traced call must put one operator into the graph (``_graphs``). Otherwise the graph holds the steps of the reference,
or a constant result, and kernels read tensors without memory. ``torch.compile`` traces with dynamo. Non-strict
``torch.export``, ``make_fx`` and ``FakeTensorMode`` run the Python code under a torch dispatch mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils import _python_dispatch

R = TypeVar("R")

_count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_PYTHON = torch._C.DispatchKey.Python
_DEFAULT_DISPATCH = torch.Tensor.__torch_dispatch__


def is_traced() -> bool:
    """Whether dynamo traces this call, or a dispatch mode is active. Every call asks: 0.1 us.

    False inside an operator: torch removes a mode, or excludes the Python key, before it runs the implementation.
    """
    return is_dynamo_compiling() or (_count_modes() != 0 and not _is_excluded(_PYTHON))


def have_own_dispatch(*tensors: Any) -> bool:
    """Whether a tensor's class has its own ``__torch_dispatch__``: a fake tensor outside its mode, or a wrapper of
    other tensors. Only an operator reaches the tensors inside."""
    for x in tensors:
        if isinstance(x, torch.Tensor) and type(x).__torch_dispatch__ is not _DEFAULT_DISPATCH:
            return not _is_excluded(_PYTHON)
    return False


def is_captured(x: torch.Tensor) -> bool:
    """Whether a CUDA graph captures this call: what it computes holds nothing before a replay."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def without_modes() -> AbstractContextManager[Any]:
    """Tensors that are created in it are real ones, whatever a caller's mode would make of them."""
    return _python_dispatch._disable_current_modes()


def cache_of_real_tensors(maxsize: int) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """``functools.lru_cache`` for functions that create tensors. They run without dispatch modes: a cached fake tensor
    would break later calls."""

    def decorate(create: Callable[..., R]) -> Callable[..., R]:
        @functools.lru_cache(maxsize)
        @functools.wraps(create)
        def cached(*args: Any) -> R:
            with without_modes():
                return create(*args)

        return cached

    return decorate
