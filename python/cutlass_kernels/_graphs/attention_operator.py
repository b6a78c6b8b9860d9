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
_COUNT = _SCHEMA.count(",") + 1


def traced(call: Call) -> Result:
    """The call in a graph."""
    return_lse = checks.flag("return_lse", call.return_lse)
    call_table.is_natural(call.lse_base)
    call = call._replace(window=call_table.window(call.window), sinks=operators.one(call.sinks), return_lse=return_lse)
    return operators.call("attention", call_table.to_operator(call), call.out, None, return_lse)


def define(attend: Callable[[Call], Any]) -> None:
    """Registers the operator, whose calls ``attend`` computes."""

    def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = args[_COUNT:] or (None, None)  # not every form of the operator has them
        call = call_table.from_operator(args[:_COUNT], out)
        return operators.new_results(attend(call), call.q, call.return_lse, out, lse)

    operators.define("attention", _SCHEMA, run, _fake)


def _fake(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q = x.q
    dtype = x.o_dtype or (torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype)
    shape = q.shape[:-1]
    if x.lse_heads_first:
        rows = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
        shape = torch.Size((q.shape[-2], rows))
    wanted = x.return_lse and x.lse is None
    return (
        q.new_empty((*q.shape[:-1], x.v.shape[-1]) if x.out is None else (0,), dtype=dtype),
        q.new_empty(shape if wanted else (0,), dtype=torch.float32),
    )
