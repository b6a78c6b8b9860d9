"""Interleaved rounds over ranks: all columns take a turn before the next round, in an order drawn anew.

The method of ``timing.interleave()``, with what ranks add to it: they make the same number of calls, start each turn
together, and the slowest one counts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from timing import Clock, Series, Settings, Timed

from .ranks import Ranks

MOST_CALLS = 200  # of a turn


@dataclass
class Call:
    """What is timed: ``unit`` makes ``per_unit`` calls and returns what the last of them returned."""

    timed: Timed
    unit: Callable[[], Any]
    per_unit: int
    mode: str  # eager, graph
    warm: int = 1
    repeats: int = 1
    series: Series = field(init=False)

    def output(self) -> torch.Tensor:
        with self.timed.context():
            return self.timed.output(self.unit())


def capture(timed: Timed, count: int) -> Callable[[], Any]:
    """Replays a graph of ``count`` calls and returns the output of the last. They have run before."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with timed.context(), torch.cuda.stream(stream):
        timed.call()  # what is kept for a stream is made outside the graph
    torch.cuda.synchronize()
    # Other threads may call CUDA meanwhile: NCCL's watchdog does.
    with timed.context(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(count):
            returned = timed.call()

    def replay() -> Any:
        graph.replay()
        return returned

    return replay


def measure(
    ranks: Ranks, calls: dict[str, Call], settings: Settings, clock: Clock, order: random.Random
) -> dict[str, str]:
    """Fills the series of all calls. Returns faults, by name: what fails takes no more turns."""
    faults: dict[str, str] = {}

    def turn(name: str, warm: int, repeats: int) -> float:
        """Seconds of a call, on the slowest rank."""
        call = calls[name]

        def take() -> float:
            with call.timed.context():
                for _ in range(warm):
                    call.unit()
                ranks.align()
                return clock.time(call.unit, repeats, None) / (repeats * call.per_unit)

        seconds, fault = ranks.attempt(take)
        if fault is not None:
            faults[name] = fault
        return ranks.worst(seconds or 0.0)[0]

    for name, call in calls.items():
        cost = turn(name, 1, 1)
        if 0 < cost * call.per_unit < 1e-3:  # too short for one reading
            cost = turn(name, 1, 10)
        unit = max(cost * call.per_unit, 1e-6)
        call.warm = min(MOST_CALLS, max(1, math.ceil(settings.warm_ms / 1e3 / unit)))
        call.repeats = min(MOST_CALLS, max(1, math.ceil(settings.round_ms / 1e3 / unit)))
        call.series = Series(call.repeats * call.per_unit, call.mode)
    for _ in range(settings.rounds):
        for name in order.sample(list(calls), len(calls)):
            if name in faults:
                continue
            time.sleep(settings.pause_ms / 1e3)
            seconds = turn(name, calls[name].warm, calls[name].repeats)
            if name not in faults:
                calls[name].series.seconds.append(seconds)
    return faults
