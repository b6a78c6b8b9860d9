"""Calls that repeat an earlier one at other addresses.

The layers of a model make one call after another that differ in nothing but where tensors lie. The first goes through
all checks and is remembered under everything that these, and the launch, depend on: shapes, strides, dtypes and devices
of the tensors, options and scales. One with an equal key allocates and launches.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import torch

from . import _found
from ._plan import Result
from ._problem import Problem, RaggedKv

T = TypeVar("T")


def facts(x: Any) -> Any:
    """What checks and launches read of a tensor besides its address; AttributeError or TypeError where it is none."""
    return type(x), x.shape, x.stride(), x.dtype, x.device


class Repeat:
    """A call to be made again. ``v`` is None where ``k`` is a cache that holds the values too."""

    __slots__ = ("call", "clear", "like_q", "lse_shape", "out_dtype", "out_shape", "outside_graphs", "v_offset")

    def __init__(
        self, call: Any, problem: Problem, clear: bool = False, outside_graphs: bool = False, first_row: bool = False
    ) -> None:
        """With ``first_row``, q and results are given without the dimension of rows, of which there is one."""
        q, kv, out, lse = problem.q, problem.kv, problem.output.out, problem.output.lse
        k, v = (kv.k, kv.v) if isinstance(kv, RaggedKv) else (kv.k_cache, kv.v_cache)
        self.call = call
        self.like_q = q.is_contiguous() and (q.shape, q.dtype) == (out.shape, out.dtype)
        self.out_shape, self.out_dtype = tuple(out.shape)[first_row:], out.dtype
        self.lse_shape = None if lse is None else tuple(lse.shape)[first_row:]
        self.v_offset = v.data_ptr() - k.data_ptr()
        self.clear = clear  # new outputs have rows that no kernel writes
        self.outside_graphs = outside_graphs  # a captured call would do more

    def with_call(self, call: Any) -> Repeat:
        """The same for another call."""
        other = object.__new__(Repeat)
        other.call = call
        other.like_q, other.out_shape, other.out_dtype = self.like_q, self.out_shape, self.out_dtype
        other.lse_shape, other.v_offset = self.lse_shape, self.v_offset
        other.clear, other.outside_graphs = self.clear, self.outside_graphs
        return other

    def found_in(
        self,
        calls: _found.Calls,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        sinks: Any,
        return_lse: bool,
        *others: Any,
    ) -> Result | None:
        """:meth:`run` of what a key has found in ``calls``; like calls are found there at once from now on."""
        result = self.run(q, k, v, out, lse, sinks, return_lse)
        if result is not None:
            direct = None
            if not self.outside_graphs and (lse is not None or self.lse_shape is None):
                direct = self.call.direct(self.like_q and not self.clear, self.v_offset)
            calls.found(self, direct, q, k, v, out, lse, sinks, return_lse, *others)
        return result

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        return_lse: bool,
    ) -> Result | None:
        """Makes the call; does nothing and returns None where it has to go the long way."""
        call = self.call
        if not call.is_possible(self.outside_graphs):
            return None
        q_at, k_at = q.data_ptr(), k.data_ptr()
        v_at = k_at + self.v_offset if v is None else v.data_ptr()
        if (q_at | k_at | v_at) & 15:
            return None
        if out is None:
            # empty_like takes 0.5 us less
            out = torch.empty_like(q) if self.like_q else q.new_empty(self.out_shape, dtype=self.out_dtype)
            if self.clear:
                out.zero_()
        elif out.data_ptr() & 15:
            return None
        if lse is None and self.lse_shape is not None:
            lse = q.new_empty(self.lse_shape, dtype=torch.float32)
            if self.clear:
                lse.fill_(-math.inf)
        call.again(
            q_at,
            k_at,
            v_at,
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
        )
        return (out, lse) if return_lse else out


class Resumable(NamedTuple):
    """A run of a plan that is not in force any more, and what of a new plan of the same kind decides whether the new
    one's run would be no other: the first run of every plan would take 45 us, and one that is resumed takes 5."""

    repeat: Repeat
    backend: str
    general: bool  # tiles of the schedule
    as_is: bool  # fp8 tensors
    page_size: int | None
    rows: int  # of the tensors
    keys: int  # of k and v; pages where there are such


def remember(known: dict[Any, T], key: Any, value: T) -> None:
    """Adds a call, or what else is to be found again, in place of all others where there are too many."""
    if len(known) >= _found.MOST:
        known.clear()
    known[key] = value
