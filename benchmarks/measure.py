"""Checks, then times, backends on cases; and what a reader has to know to repeat that."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import platform
import random
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import check
import torch
from backend import Backend, Case, Operation
from report import Result
from timing import Clock, Monitor, Settings, Timed, interleave

import cutlass_kernels as ck
from cutlass_kernels._core import native

# By module: how the names of its columns begin, and what it is.
PEERS = {
    "flashinfer": ("flashinfer", "FlashInfer"),
    "flash_attn_interface": ("flash_attn_3", "FlashAttention-3"),
    "vllm_fa3": ("flash_attn_3", "FlashAttention-3 of vLLM"),
    "flash_mla": ("flash_mla", "FlashMLA"),
    "vllm.third_party.flashmla.flash_mla_interface": ("flash_mla", "FlashMLA of vLLM"),
}
ROOT = Path(__file__).resolve().parent.parent
Tick = Callable[[str], None]


def measure_case(
    operation: Operation,
    case: Case,
    backends: list[Backend],
    settings: Settings,
    device: torch.device,
    clock: Clock,
    order: random.Random,
    monitor: Monitor | None,
    tick: Tick,
) -> list[Result]:
    """Checks, then times, every backend on one case; one result each. ``order`` draws who goes first."""
    results = {b.name: Result(b.name, case.group, case.column, case.work, bytes=case.bytes) for b in backends}
    willing = []
    for backend in backends:
        reason = backend.why_not(case, device)
        if reason is None:
            willing.append(backend)
        else:
            results[backend.name].reason = reason
    if not willing:
        return list(results.values())
    inputs = operation.inputs(case, device)
    expected = operation.expect(case, inputs)
    calls: dict[str, Timed] = {}
    for backend in willing:
        with _failures(results[backend.name]):
            timed = backend.make(case, inputs)
            _call_and_check(timed, expected, results[backend.name])
            calls[backend.name] = timed
    for name, series in interleave(calls, settings, clock, order, monitor, tick).items():
        with _failures(results[name]):
            _call_and_check(calls[name], expected, results[name])  # still right after all those launches
            results[name].series = series
            results[name].figure = operation.figure(case, series.median)
    return list(results.values())


def _call_and_check(timed: Timed, expected: check.Expected, result: Result) -> None:
    with warnings.catch_warnings(), timed.context():
        warnings.simplefilter("ignore")  # torch warns why it has no kernel; the exception suffices
        returned = timed.call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if returned is None:  # plan() has no output
        return
    fault = check.fault(timed.output(returned), expected)
    if fault is not None:
        raise ArithmeticError(f"wrong result: {fault}")
    result.checked = expected.coverage


@contextlib.contextmanager
def _failures(result: Result) -> Iterator[None]:
    """Notes an exception in ``result``: a peer may fail in any way, and the others go on."""
    try:
        yield
    except Exception as error:
        result.failed = True
        result.reason = (" ".join(str(error).split()) or type(error).__name__)[:300]


def measure(
    operation: Operation,
    cases: Sequence[Case],
    backends: list[Backend],
    settings: Settings,
    device: torch.device,
    clock: Clock,
    monitor: Monitor | None = None,
    begin: Callable[[Case], Tick] = lambda case: lambda name: None,
    end: Callable[[Case, list[Result]], None] = lambda case, results: None,
) -> list[Result]:
    """All results. ``begin`` hears of each case and returns what hears of its turns; ``end`` hears of its results."""
    every: list[Result] = []
    order = random.Random(settings.seed)
    for case in cases:
        tick = begin(case)
        results = measure_case(operation, case, backends, settings, device, clock, order, monitor, tick)
        end(case, results)
        every += results
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return every


def environment(settings: Settings, dtype: str, monitor: Monitor | None, other: Path | None = None) -> dict[str, Any]:
    """What a reader needs to repeat the run; ``other`` is where another build of this library comes from."""
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "commit": getattr(native._C, "commit", "") or commit_of(ROOT),  # of the compiled code, where that knows it
        "cutlass_kernels": ck.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "dtype": dtype,
        "mode": settings.name,
        "settings": dataclasses.asdict(settings),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["driver"] = monitor.driver if monitor else "unknown"
    if other is not None:
        facts["other"] = {"folder": str(other.resolve()), "commit": commit_of(other)}
    facts["peers"] = {
        columns: f"{name} {getattr(sys.modules[module], '__version__', '')}".strip()
        for module, (columns, name) in PEERS.items()
        if module in sys.modules
    }
    return facts


def commit_of(folder: Path) -> str:
    """Of a checkout; "unknown" elsewhere."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    with contextlib.suppress(OSError):
        if folder != ROOT and not git("ls-files", "cutlass_kernels/__init__.py"):
            return "unknown"  # an installation, perhaps within a repository
        commit = git("rev-parse", "--short=12", "HEAD")
        return f"{commit} with local changes" if commit and git("status", "--porcelain") else commit or "unknown"
    return "unknown"
