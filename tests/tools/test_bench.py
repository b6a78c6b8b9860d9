"""The benchmark without a GPU: its clocks, the whole way from a case to a report, and its command line."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
import bench
import measure
import report as reporting
import timing
from backend import Backend, Case
from commands import invoke, words
from inputs import Inputs
from operations import OPERATIONS, WORKLOADS
from operations.host import Host
from problem import Problem, with_pages

CPU = torch.device("cpu")
PREFILL = OPERATIONS["prefill"].backends
FAST = timing.Settings("test", rounds=3, pause_ms=0.0, warm_ms=0.0, round_ms=0.01)
SMALL = Problem("small", "one", (40,), (70,), 4, 2, 16, 16, window_left=9, soft_cap=5.0, sinks=True)


# --- timing ------------------------------------------------------------------------------------------------------


class FakeClock:
    """Every call takes the seconds that its callable has as attribute; nothing is called but units."""

    mode = "launch"

    def __init__(self, captures: bool = True) -> None:
        self.captures = captures
        self.order: list[str] = []

    def time(self, unit: Callable[[], Any], repeats: int, monitor: timing.Monitor | None) -> float:
        return sum(unit() for _ in range(repeats))

    def graph(self, timed: timing.Timed, count: int) -> Callable[[], Any] | None:
        return (lambda: sum(timed.call() for _ in range(count))) if self.captures else None


def test_turns_interleave_and_are_long_enough() -> None:
    turns: list[str] = []
    calls = {"slow": timing.Timed(lambda: 0.004), "quick": timing.Timed(lambda: 0.0005)}
    settings = timing.Settings("test", rounds=4, pause_ms=0.0, warm_ms=1.0, round_ms=5.0)
    series = timing.interleave(calls, settings, FakeClock(), random.Random(0), tick=turns.append)
    assert [set(turns[i : i + 2]) for i in range(0, 8, 2)] == [{"slow", "quick"}] * 4
    assert series["slow"].launches == 2
    assert series["quick"].launches == 10
    assert series["quick"].median == pytest.approx(0.0005)
    assert series["quick"].spread == pytest.approx(0.0)
    assert series["quick"].mode == "launch"
    assert len(series["slow"].seconds) == 4


def test_the_order_of_every_round_is_drawn() -> None:
    def orders(seed: int) -> list[tuple[str, ...]]:
        turns: list[str] = []
        calls = {name: timing.Timed(lambda: 1e-3) for name in "abc"}
        settings = timing.Settings("test", rounds=50, pause_ms=0.0, warm_ms=0.0, round_ms=1.0, graph="off")
        timing.interleave(calls, settings, FakeClock(), random.Random(seed), tick=turns.append)
        return [tuple(turns[i : i + 3]) for i in range(0, 150, 3)]

    first = orders(1)
    assert set(first) == set(itertools.permutations("abc"))
    assert orders(1) == first
    assert orders(2) != first


def test_short_calls_are_measured_as_graphs() -> None:
    calls = {"short": timing.Timed(lambda: 1e-5), "other": timing.Timed(lambda: 1e-3)}
    settings = timing.Settings("test", rounds=2, pause_ms=0.0, warm_ms=0.0, round_ms=1.0)
    series = timing.interleave(calls, settings, FakeClock(), random.Random(0))
    assert {name: s.mode for name, s in series.items()} == {"short": "graph", "other": "graph"}
    assert series["short"].median == pytest.approx(1e-5)
    assert series["short"].launches >= 100
    refused = timing.interleave(calls, settings, FakeClock(captures=False), random.Random(0))
    assert refused["short"].mode == "launch"
    off = timing.interleave(calls, dataclasses.replace(settings, graph="off"), FakeClock(), random.Random(0))
    assert off["short"].mode == "launch"


def test_host_clock_counts_calls_only() -> None:
    events: list[str] = []
    clock = timing.HostClock(lambda: events.append("synchronize"))
    assert clock.time(lambda: events.append("call"), timing.QUEUE + 1, None) > 0
    assert events.count("call") == timing.QUEUE + 1
    assert events[0] == events[timing.QUEUE + 1] == events[-1] == "synchronize"


# --- the whole way -----------------------------------------------------------------------------------------------


def made_up(name: str, factor: float) -> Backend:
    """A peer that computes the reference's result times ``factor``, and honours nothing but causal masks and GQA."""

    def make(case: Problem, x: Inputs) -> timing.Timed:
        ours = PREFILL["reference"].make(case, x)
        return timing.Timed(lambda: ours.call() * factor)

    return Backend(name, False, frozenset({"causal", "gqa"}), lambda device: None, make)


def run(cases: list[Case], backends: list[Backend], operation: str = "prefill") -> reporting.Report:
    settings, clock = FAST, timing.HostClock()
    results = measure.measure(OPERATIONS[operation], cases, backends, settings, CPU, clock)
    op = OPERATIONS[operation]
    names, ours = [b.name for b in backends], [b.name for b in backends if b.ours]
    facts = {**measure.environment(settings, "bfloat16", None), "gpu": "none"}
    return reporting.Report(op.unit, op.higher_is_better, names, ours, ["best", "good"], facts, results)


def test_cases_are_measured_and_gaps_have_reasons() -> None:
    plain = Problem("small", "plain", (16, 16), (16, 16), 4, 2, 16, 16)
    backends = [
        PREFILL["reference"],
        PREFILL["fa2"],
        made_up("good", 1.0),
        made_up("bad", 1.5),
        PREFILL["torch_fa2"],
    ]
    report = run([plain, SMALL], backends)
    assert report.shown() == ["reference", "good"]
    first, second = report.cases()
    assert report.figure(first, "reference") is not None
    assert report.figure(second, "reference") is not None
    assert report.figure(first, "good") is not None
    assert report.figure(second, "good") is None
    bad = report.result(first, "bad")
    assert bad is not None and bad.failed and bad.reason.startswith("wrong result: ")
    reasons = "\n".join(report.reasons())
    assert "good, 1 of 2 cases: does not honour append, sinks, soft_cap, window" in reasons
    assert "torch_fa2, 2 of 2 cases: needs a CUDA device" in reasons
    assert "fa2, 2 of 2 cases: backend='fa2' needs CUDA tensors" in reasons
    result = report.result(first, "reference")
    assert result is not None and result.series is not None
    assert result.checked == "all rows"
    assert len(result.series.seconds) == FAST.rounds


def test_host_operation_measures_every_call() -> None:
    hosts = [c for c in WORKLOADS["calls"].cases("bfloat16") if isinstance(c, Host) and c.indptr == "cpu"]
    cases = [c for c in hosts if c.call.endswith("_plan") or c.batch <= 8]
    report = run(list(cases), [OPERATIONS["host"].backends["auto"]], "host")
    figures = [report.figure(case, "auto") for case in report.cases()]
    assert len(figures) == len(cases) == 9
    assert all(figure is not None and figure > 0 for figure in figures)


def test_pages_masks_and_alibi_are_measured() -> None:
    plain = Problem("small", "", (7, 1), (40, 33), 4, 2, 16, 16)
    single = Problem("small", "causal", (20,), (33,), 4, 2, 16, 16)
    cases: list[Case] = [
        *with_pages(plain, (1, 5)),
        dataclasses.replace(plain, column="two tensors", head_dim_vo=8, page_size=16),
        *with_pages(dataclasses.replace(single, group="one"), (16,)),
        *(dataclasses.replace(single, column=f"{m} bits", causal=False, custom_mask=m) for m in ("causal", "random")),
        dataclasses.replace(single, column="alibi", alibi=True),
    ]
    report = run(cases, [PREFILL["reference"], made_up("good", 1.0)])
    assert [r.reason for r in report.results if r.backend == "reference"] == [""] * len(cases)
    assert all(report.figure(case, "reference") is not None for case in report.cases())
    assert "good, 2 of 9 cases: does not honour custom_mask" in report.reasons()
    assert "good, 1 of 9 cases: does not honour alibi, append" in report.reasons()
    assert "good, 2 of 9 cases: does not honour append, paged, ragged" in report.reasons()


def test_units() -> None:
    case = Problem("small", "one", (16,), (40,), 4, 2, 16, 16)
    report = run([case], [PREFILL["reference"]])
    assert report.unit == "TFLOP/s"
    ((key,), name) = report.cases(), "reference"
    result = report.result(key, name)
    assert result is not None and result.series is not None
    seconds = result.series.median
    times, rates = (report.in_unit(reporting.UNITS[unit]) for unit in ("us", "GB/s"))
    assert report.figure(key, name) == pytest.approx(1e-12 * case.work / seconds)
    assert times.figure(key, name) == pytest.approx(1e6 * seconds)
    assert rates.figure(key, name) == pytest.approx(1e-9 * case.bytes / seconds)
    assert (times.unit, times.higher_is_better, rates.higher_is_better) == ("us", False, True)
    assert reporting.cell(dataclasses.replace(result, figure=4321.9), "GB/s") == "4322"
    assert reporting.cell(dataclasses.replace(result, figure=4321.9), "us") == "4321.9"


# --- command line ------------------------------------------------------------------------------------------------


def run_bench(*arguments: str, code: int = 0) -> str:
    return invoke(bench.app, *arguments, code=code)


def test_dry_run_lists_cases_and_work() -> None:
    output = run_bench("prefill", "--workload", "quick,gpt-oss", "--only", "16k", "--dry-run")
    lines = output.splitlines()
    assert lines[0].startswith("hd128 full 16k")
    assert "2,199.0 GFLOP" in lines[0]
    assert lines[-1].startswith("4 cases, ")
    window = next(line for line in lines if line.startswith("gpt-oss window"))
    assert window.endswith("honoured by fa2 fa3")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("decoding",), "'decoding'"),
        (("prefill", "--workload", "nothing"), "use quick, paper"),
        (("prefill", "--backends", "fa2,fa9"), "'fa9'"),
        (("prefill", "--dtype", "float64"), "'float64'"),
        (("prefill", "--only", "nothing"), "leaves no case"),
        (("prefill", "--unit", "GFLOP/s"), "use TFLOP/s, GB/s, us"),
        (("host", "--unit", "GB/s"), "'GB/s'"),
        (("merge", "--dtype", "float8_e4m3fn"), "no type of states"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[str, ...], says: str) -> None:
    assert says in words(run_bench(*arguments, code=2))


def test_dry_run_of_memory_bound_cases_lists_bytes() -> None:
    output = run_bench("prefill", "--workload", "append", "--only", "1x 1 over 4k", "--dry-run")
    lines = output.splitlines()
    assert len(lines) == 3
    assert "16.8 MB" in lines[0]
    assert "torch_fa2" in lines[0]
    assert lines[1].endswith("honoured by fa2 fa3 flashinfer_fa2 flashinfer_fa3 flash_attn_3")
    assert "MB" not in run_bench("host", "--dry-run")


def test_list() -> None:
    output = run_bench("list")
    for name in (*OPERATIONS, *WORKLOADS, *PREFILL):
        assert name in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    output = run_bench("prefill", "--workload", "quick", code=2)
    assert "no CUDA device" in output and "--dry-run" in output


@pytest.mark.gpu
def test_runs_on_a_gpu(tmp_path: Path) -> None:
    arguments = ("--only", "full 2k", "--rounds", "2", "--backends", "fa2,torch_fa2", "--out", str(tmp_path))
    run_bench("prefill", "--workload", "quick", *arguments)
    assert (tmp_path / "prefill-quick.csv").exists()
    run_bench("host", "--backends", "fa2", "--rounds", "2", "--round-ms", "2")
    run_bench("merge", "--backends", "auto,torch", "--rounds", "2", "--round-ms", "2")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("workload", "only", "tables"),
    [
        ("paged", "hd128 16x1k (ragged|page 5)", ["TFLOP/s"]),
        ("append", "^(64x 1 over 4k|1x 16 over 32k), (64/8|8/1)", ["us", "GB/s"]),
        ("masks", "hd64", ["us", "TFLOP/s"]),
    ],
)
def test_workloads_of_pages_and_masks_run_on_a_gpu(tmp_path: Path, workload: str, only: str, tables: list[str]) -> None:
    arguments = ("--only", only, "--rounds", "2", "--backends", "fa2,torch_fa2", "--out", str(tmp_path))
    run_bench("prefill", "--workload", workload, *arguments)
    text = (tmp_path / f"prefill-{workload}.md").read_text()
    assert [unit for unit in ("us", "GB/s", "TFLOP/s") if f"| {unit} |" in text] == tables
