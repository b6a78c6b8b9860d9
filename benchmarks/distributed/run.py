"""One case: every column is made, run once and checked, on all ranks together; what is right is measured."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from timing import Clock, DeviceClock, HostClock, Settings, Timed

from . import compare
from .columns import ONE, Column, Operation, column
from .ranks import Ranks
from .rounds import Call, capture, measure
from .table import Result


@dataclass
class Case:
    """A case of an operation while it runs."""

    ranks: Ranks
    operation: Operation
    case: Any
    modes: list[str]  # eager, graph
    results: dict[str, Result] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    wants: dict[str, torch.Tensor | None] = field(default_factory=dict)  # what each call must return

    def run(self, columns: list[Column], settings: Settings, order: random.Random) -> list[Result]:
        """Results of all columns and modes. Raises Stuck."""
        inputs, fault = self.ranks.attempt(lambda: self.operation.inputs(self.ranks, self.case))
        by_layout: dict[str, torch.Tensor] = {}
        for col in columns:
            reason = col.refuses(self.case, self.ranks)
            if fault is not None or reason is not None:
                self._add_without_figure(col, fault or reason or "", fault is not None)
                continue
            if col.name != ONE and col.layout not in by_layout:
                make = functools.partial(self.operation.want, self.ranks, self.case, inputs, col.layout)
                want, reason = self.ranks.attempt(make)
                if want is None:
                    self._add_without_figure(col, f"no result of one GPU: {reason}", True)
                    continue
                by_layout[col.layout] = want
            self._prepare(col, inputs, by_layout[col.layout] if col.name != ONE else None)
        clock: Clock = DeviceClock() if self.ranks.on_gpu else HostClock()
        faults = measure(self.ranks, self.calls, settings, clock, order)
        for name, call in self.calls.items():
            reason = faults.get(name) or self._check(call.output, self.wants[name])  # still right after all that
            if reason is None:
                self.results[name].series = call.series
            else:
                self._fail(self.results[name], reason)
        return list(self.results.values())

    def _prepare(self, col: Column, inputs: Any, want: torch.Tensor | None) -> None:
        """Makes the calls of a column, if they return the right result."""
        timed, note, reason = self._first_right(col, inputs, want)
        for mode in self.modes:
            result = self._add(col, mode)
            result.note = note
            if timed is None:
                self._fail(result, reason)
                continue
            if mode == "graph" and not col.captures:
                result.reason = "not captured in a graph"
                continue
            call, fault = self._call(timed, mode, want)
            if call is None:
                self._fail(result, fault)
                continue
            self.calls[result.name], self.wants[result.name] = call, want

    def _first_right(self, col: Column, inputs: Any, want: torch.Tensor | None) -> tuple[Timed | None, str, str | None]:
        """The first attempt with a right result, and a note; else why all failed."""
        reasons: list[str] = []
        for attempt in col.attempts:
            timed, reason = self.ranks.attempt(functools.partial(attempt.make, self.ranks, self.case, inputs))
            if timed is not None:
                reason = self._check(Call(timed, timed.call, 1, "eager").output, want)
            if reason is None:
                return timed, f"{attempt.note}, since {'; '.join(reasons)}" if reasons else attempt.note, None
            reasons.append(reason)
        return None, "", "; ".join(dict.fromkeys(reasons))

    def _call(self, timed: Timed, mode: str, want: torch.Tensor | None) -> tuple[Call | None, str | None]:
        if mode == "eager":
            return Call(timed, timed.call, 1, mode), None
        count = self.operation.calls_per_graph
        replay, reason = self.ranks.attempt(lambda: capture(timed, count))
        if replay is None:
            return None, f"while capturing a graph: {reason}"
        call = Call(timed, replay, count, mode)
        reason = self._check(call.output, want)
        return (call, None) if reason is None else (None, f"in a graph: {reason}")

    def _check(self, output: Callable[[], torch.Tensor], want: torch.Tensor | None) -> str | None:
        """Runs it once and compares; None if it is right on every rank."""
        out, reason = self.ranks.attempt(output)
        if out is None or want is None:
            return reason
        _, reason = self.ranks.attempt(lambda: compare.check(out, want))
        return reason

    def _add(self, col: Column, mode: str) -> Result:
        result = Result(self.case.column, col.name, mode, col.ours)
        self.results[result.name] = result
        return result

    def _add_without_figure(self, col: Column, reason: str, failed: bool) -> None:
        for mode in self.modes:
            result = self._add(col, mode)
            result.reason, result.failed = reason, failed

    @staticmethod
    def _fail(result: Result, reason: str | None) -> None:
        result.reason, result.failed = reason or "", True


def release() -> None:
    """Frees what a case has held: graphs above all."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def one(operation: Operation) -> list[Column]:
    """The column of one GPU, where the operation has it."""
    return [] if operation.one is None else [column(ONE, operation.one)]
