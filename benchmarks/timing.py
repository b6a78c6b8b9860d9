"""Measures several callables fairly: interleaved rounds in one process, each round long enough for the clock.

One turn of one callable is: a pause, a warm-up, then a number of calls between two readings of the clock. All callables
take a turn before the next round starts, in an order drawn anew, so drifts of temperature and clock rates, and what one
leaves behind for the next, meet all of them. What is reported is the median over rounds; the spread says how much to
believe.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

GRAPH_BELOW = 100e-6  # seconds per call below which a CUDA graph takes the host out of the measurement
GRAPH_NODES = 256  # calls in one graph, at most
QUEUE = 256  # calls without a synchronisation when the host is timed: a full launch queue would make it wait


@dataclass(frozen=True)
class Settings:
    """How long to measure, in milliseconds per turn. BURST shows what a cool GPU does, SUSTAINED a busy one."""

    name: str
    rounds: int
    pause_ms: float
    warm_ms: float
    round_ms: float
    graph: str = "auto"  # auto, on, off
    seed: int = 0  # of the orders in which callables take their turns


BURST = Settings("burst", rounds=7, pause_ms=50.0, warm_ms=10.0, round_ms=20.0)
SUSTAINED = Settings("sustained", rounds=5, pause_ms=0.0, warm_ms=500.0, round_ms=2000.0)


@dataclass(frozen=True)
class Sample:
    """The GPU while it worked: SM clock in MHz, power in W, temperature in degrees Celsius."""

    clock: float
    power: float
    temperature: float


@dataclass
class Timed:
    """One callable to measure. ``context`` is entered around its calls, once, outside the measured time.

    ``output`` turns what the call returns into the output ``[tokens, heads, dim]``; it is not measured.
    """

    call: Callable[[], Any]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    output: Callable[[Any], torch.Tensor] = lambda returned: returned


@dataclass
class Series:
    """Seconds per call, one number per round."""

    launches: int
    mode: str  # graph, launch, host
    seconds: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest minus fastest round, over the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    def gpu(self) -> Sample | None:
        """The medians of the samples."""
        if not self.samples:
            return None
        columns = zip(*((s.clock, s.power, s.temperature) for s in self.samples))
        return Sample(*map(statistics.median, columns))


class Clock(Protocol):
    """Reads the time that ``repeats`` runs of ``unit`` take."""

    mode: str

    def time(self, unit: Callable[[], Any], repeats: int, monitor: Monitor | None) -> float: ...

    def graph(self, timed: Timed, count: int) -> Callable[[], Any] | None: ...


class DeviceClock:
    """CUDA events around the calls: the time of the device, from the first kernel's start to the last one's end."""

    mode = "launch"

    def time(self, unit: Callable[[], Any], repeats: int, monitor: Monitor | None) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            unit()
        end.record()
        if monitor is not None:
            monitor.read()  # the device is still at work
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def graph(self, timed: Timed, count: int) -> Callable[[], Any] | None:
        """Replays a graph of ``count`` calls, or None where they cannot be captured."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        try:
            with timed.context():
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    timed.call()
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(graph, stream=stream):
                    for _ in range(count):
                        timed.call()
        except Exception:  # a library that synchronises, or allocates behind torch's back
            torch.cuda.synchronize()
            return None
        return graph.replay


class HostClock:
    """The host's time until the calls return; the device is idle before and drained after."""

    mode = "host"

    def __init__(self, synchronize: Callable[[], Any] = lambda: None) -> None:
        self.synchronize = synchronize

    def time(self, unit: Callable[[], Any], repeats: int, monitor: Monitor | None) -> float:
        elapsed = 0.0
        while repeats > 0:
            calls = min(repeats, QUEUE)
            self.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                unit()
            elapsed += time.perf_counter() - start
            repeats -= calls
        self.synchronize()
        return elapsed

    def graph(self, timed: Timed, count: int) -> Callable[[], Any] | None:
        return None


class Monitor:
    """Reads clock, power and temperature of the current GPU through NVML, where that can be imported."""

    def __init__(self) -> None:
        self.last: Sample | None = None
        self._nvml: Any = None
        with contextlib.suppress(Exception):
            pynvml = importlib.import_module("pynvml")  # of the package nvidia-ml-py

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml

    @property
    def driver(self) -> str:
        return str(self._nvml.nvmlSystemGetDriverVersion()) if self._nvml else "unknown"

    def read(self) -> None:
        self.last = None
        if self._nvml is None:
            return
        with contextlib.suppress(Exception):
            nvml, device = self._nvml, self._device
            self.last = Sample(
                nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
                nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            )


@dataclass
class _Turn:
    timed: Timed
    series: Series
    unit: Callable[[], Any]
    calls_per_unit: int
    warm: int  # units
    repeats: int  # units


def interleave(
    calls: dict[str, Timed],
    settings: Settings,
    clock: Clock,
    order: random.Random,
    monitor: Monitor | None = None,
    tick: Callable[[str], None] = lambda name: None,
) -> dict[str, Series]:
    """Measures ``calls`` in ``settings.rounds`` rounds; each has been called before.

    ``order`` draws the order of every round; ``tick`` is told each turn. A turn lasts ``round_ms`` or one call,
    whichever is longer. Where the fastest call is short, all are measured as CUDA graphs, except those that cannot be
    captured.
    """
    cost = {name: _estimate(timed, timed.call, clock) for name, timed in calls.items()}
    if not cost:
        return {}
    graph = settings.graph == "on" or (settings.graph == "auto" and min(cost.values()) < GRAPH_BELOW)
    turns = {name: _prepare(timed, cost[name], settings, clock, graph) for name, timed in calls.items()}
    for _ in range(settings.rounds):
        for name in order.sample(list(calls), len(calls)):
            _take(turns[name], settings, clock, monitor)
            tick(name)
    return {name: turn.series for name, turn in turns.items()}


def _estimate(timed: Timed, unit: Callable[[], Any], clock: Clock) -> float:
    """Seconds per unit, roughly."""
    with timed.context():
        clock.time(unit, 2, None)
        count = 1
        while True:
            elapsed = clock.time(unit, count, None)
            if elapsed > 1e-3 or count >= 1024:
                return max(elapsed / count, 1e-9)
            count *= 4


def _prepare(timed: Timed, cost: float, settings: Settings, clock: Clock, graph: bool) -> _Turn:
    unit, calls_per_unit, mode = timed.call, 1, clock.mode
    if graph:
        nodes = max(1, min(GRAPH_NODES, math.ceil(settings.round_ms / 1e3 / cost)))
        replay = clock.graph(timed, nodes)
        if replay is not None:
            unit, calls_per_unit, mode = replay, nodes, "graph"
            cost = _estimate(timed, unit, clock)
    warm = math.ceil(settings.warm_ms / 1e3 / cost)
    repeats = max(1, math.ceil(settings.round_ms / 1e3 / cost))
    return _Turn(timed, Series(repeats * calls_per_unit, mode), unit, calls_per_unit, warm, repeats)


def _take(turn: _Turn, settings: Settings, clock: Clock, monitor: Monitor | None) -> None:
    time.sleep(settings.pause_ms / 1e3)
    with turn.timed.context():
        clock.time(turn.unit, turn.warm, None)
        elapsed = clock.time(turn.unit, turn.repeats, monitor)
    turn.series.seconds.append(elapsed / (turn.repeats * turn.calls_per_unit))
    if monitor is not None and monitor.last is not None:
        turn.series.samples.append(monitor.last)
