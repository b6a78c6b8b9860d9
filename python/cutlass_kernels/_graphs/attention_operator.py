"""``attention()`` as an operator: see ``operators``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core import call_table, checks
from .._core.call_table import Call
from .._core.problems import FP8_DTYPES
from .._core.run_options import Result
from . import operators

_SCHEMA = call_table.schema()


def traced(call: Call) -> Result:
    """The call in a graph."""
    return_lse = checks.flag("return_lse", call.return_lse)
    call_table.is_natural(call.lse_base)
    call = call._replace(window=call_table.window(call.window), sinks=operators.one(call.sinks), return_lse=return_lse)
    return operators.call("attention", call_table.to_operator(call), call.out, None, return_lse)


def define(attend: Callable[[Call], Any]) -> None:
    """Registers the operator, whose calls ``attend`` computes."""

    def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        call, out, lse = _read(args)
        return operators.new_results(attend(call), call.q, call.return_lse, out, lse)

    operators.define("attention", _SCHEMA, run, _fake)


def _read(args: tuple[Any, ...]) -> tuple[Call, Any, Any]:
    """The call, and ``out`` and ``lse``, which not every form of the operator has."""
    count = _SCHEMA.count(",") + 1
    out, lse = (args[count], args[count + 1]) if len(args) > count else (None, None)
    return call_table.from_operator(args[:count], out), out, lse


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call, out, lse = _read(args)
    q = call.q
    dtype = call.o_dtype or (torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype)
    shape = q.shape[:-1]
    if call.lse_heads_first:
        rows = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
        shape = torch.Size((q.shape[-2], rows))
    wanted = call.return_lse and lse is None
    return (
        q.new_empty((*q.shape[:-1], call.v.shape[-1]) if out is None else (0,), dtype=dtype),
        q.new_empty(shape if wanted else (0,), dtype=torch.float32),
    )
