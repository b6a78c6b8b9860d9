"""What takes part: a column of the results, and an operation with its cases and columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timing import Timed

from .ranks import Ranks

Make = Callable[[Ranks, Any, Any], Timed]
ONE = "one"  # one GPU with the whole problem: every rank computes it, the slowest counts


@dataclass(frozen=True)
class Attempt:
    """One way to make the call of a column. ``make`` communicates nothing, so that it may fail on one rank alone."""

    make: Make
    note: str = ""


@dataclass(frozen=True)
class Column:
    """One backend. Of several attempts, the first that computes the right result is measured."""

    name: str
    ours: bool
    attempts: tuple[Attempt, ...]
    refuses: Callable[[Any, Ranks], str | None] = lambda case, ranks: None
    layout: str = "zigzag"  # of this rank's rows
    captures: bool = True  # whether its calls can be part of a CUDA graph


@dataclass(frozen=True)
class Operation:
    """``inputs(ranks, case)`` makes tensors; ``want(ranks, case, inputs, layout)`` is what a rank must compute."""

    name: str
    unit: str  # ms, us
    workloads: dict[str, Callable[[], Sequence[Any]]]
    columns: Sequence[Column]
    inputs: Callable[[Ranks, Any], Any]
    want: Callable[[Ranks, Any, Any, str], torch.Tensor]
    one: Make | None = None
    calls_per_graph: int = 1
    only_graphs: bool = False  # on GPUs; a step of decode never runs any other way
    default: Sequence[str] = ()  # workloads


def column(name: str, make: Make, ours: bool = False, **options: Any) -> Column:
    """With one attempt."""
    return Column(name, ours, (Attempt(make),), **options)
