"""Compares this library with its peers, in one process and on the same tensors.

    python benchmarks/bench.py prefill --workload paper --backends fa2,torch_fa2,cudnn --out results
    python benchmarks/bench.py prefill --workload llama3-8b --workload gemma2 --mode sustained
    python benchmarks/bench.py prefill --workload append --unit us,GB/s --backends fa3,fa2
    python benchmarks/bench.py mla_decode --dtype float8_e4m3fn          # e4m3 caches
    python benchmarks/bench.py merge --dtype float16
    python benchmarks/bench.py host
    python benchmarks/bench.py decode --against ../old/python            # beside another build of this library
    python benchmarks/bench.py prefill --workload paper --dry-run        # lists the cases; needs no GPU

How to read the output, and what was measured so far: benchmarks/results/README.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import platform
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import other_build
import report as reporting
import torch
import typer
from backend import Backend, Case, Operation
from measure import Tick, environment, measure
from operations import OPERATIONS, WORKLOADS, cases_of
from report import UNITS, Report, Result
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from timing import BURST, SUSTAINED, Clock, DeviceClock, HostClock, Monitor

stdout, stderr = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


class Mode(str, enum.Enum):
    burst = "burst"
    sustained = "sustained"


class Graph(str, enum.Enum):
    auto = "auto"
    on = "on"
    off = "off"


@contextlib.contextmanager
def progress(cases: Sequence[Case], turns: int) -> Iterator[tuple[Callable[[Case], Tick], Callable[..., None]]]:
    """A bar on a terminal; elsewhere one line per case."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=stderr,
        disable=not stderr.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=len(cases) * turns)
        done = 0

        def begin(case: Case) -> Tick:
            def tick(name: str) -> None:
                bar.update(task, advance=1, description=f"{case.label}: {name}")

            bar.update(task, description=f"{case.label}: checking")
            return tick

        def end(case: Case, results: list[Result]) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done * turns)
            if not stderr.is_terminal:
                figures = ", ".join(f"{r.backend} {r.figure:.1f}" for r in results if r.figure is not None)
                stderr.print(f"[{done}/{len(cases)}] {case.label}: {figures or 'nothing ran'}", markup=False)

        yield begin, end


# --- command line ------------------------------------------------------------------------------------------------


def _list(text: str) -> list[str]:
    return [part for part in re.split(r"[,\s]+", text) if part]


def _choose(what: str, names: list[str], known: dict[str, Any]) -> list[Any]:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{what} {name!r} does not exist here: use {', '.join(known)}.")
    return [known[name] for name in names]


def _ratios(items: list[str], operation: Operation) -> tuple[list[str], Path | None]:
    """The items of --against, with "other" for a folder; and that folder."""

    def is_folder(item: str) -> bool:
        return item != "best" and not set(item.split("+")) & set(operation.backends) and Path(item).exists()

    folders = [item for item in items if is_folder(item) or "/" in item]
    if len(folders) > 1:
        raise typer.BadParameter(
            f"--against names the folders {', '.join(folders)}: one other build fits in a process."
        )
    return ["other" if item in folders else item for item in items], Path(folders[0]) if folders else None


def _show(report: Report, as_markdown: bool) -> None:
    if as_markdown:
        stdout.print(reporting.markdown(report), markup=False, highlight=False)
    else:
        header, rows = reporting.table(report)
        facts = report.environment
        gpu, seed = facts.get("gpu", platform.processor()), facts["settings"]["seed"]
        where = f"{gpu}, {facts['dtype']}, {facts['mode']}, seed {seed}"
        table = Table(title=f"{report.unit} on {where}", title_justify="left")
        for index, name in enumerate(header):
            table.add_column(name, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console(width=max(stdout.width, sum(map(len, header)) + 30 + 4 * len(header))).print(table)
        for sentence in report.means():
            stdout.print(sentence, highlight=False)


def _show_gaps(report: Report) -> None:
    for sentence in report.reasons():
        stderr.print(f"no figure: {sentence}", markup=False, highlight=False)


def _dry_run(cases: Sequence[Case], operation: Operation, backends: list[Backend]) -> None:
    unit, scale = ("calls", 1.0) if operation.host_clock else ("GFLOP", 1e-9)
    width = max(len(case.label) for case in cases)
    for case in cases:
        honour = " ".join(b.name for b in backends if not case.features - b.honours)
        moved = "" if operation.host_clock else f"{case.bytes * 1e-6:10,.1f} MB"
        line = f"{case.label:{width}} {case.work * scale:12,.1f} {unit}{moved}   {case.detail}"
        stdout.print(f"{line}; honoured by {honour or 'nobody'}", markup=False, highlight=False)
    total = sum(case.work for case in cases)
    stdout.print(f"{len(cases)} cases, {total * scale:,.1f} {unit} in all", highlight=False)


def _listing() -> str:
    lines = []
    for name, operation in OPERATIONS.items():
        lines += [f"{name}: {operation.about}", f"  backends: {', '.join(operation.backends)}", "  workloads:"]
        lines += [f"    {key:12} {workload.about}" for key, workload in operation.workloads.items()]
    return "\n".join(lines)


@app.command()
def main(
    operation: Annotated[str, typer.Argument(help=f"what to measure: {', '.join(OPERATIONS)}; or list")],
    workload: Annotated[list[str] | None, typer.Option(help="named shapes; repeat it, or separate by commas")] = None,
    backends: Annotated[str, typer.Option(help="who takes part, in this order; default: everybody")] = "",
    against: Annotated[
        str,
        typer.Option(
            help="ratios to show: to the best peer, to one, to the best of several joined by +; or to another build of "
            "this library, by the folder it is in, whose columns then are added (see other_build.py)"
        ),
    ] = "best,torch_fa2",
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float8_e4m3fn")] = "bfloat16",
    unit: Annotated[
        str, typer.Option(help="of the figures: TFLOP/s, GB/s, us; several give a table each; default: of the workload")
    ] = "",
    only: Annotated[str, typer.Option(help="regular expression that the label of a case must contain")] = "",
    mode: Annotated[Mode, typer.Option(help="burst: pauses between turns; sustained: seconds of load")] = Mode.burst,
    rounds: Annotated[int, typer.Option(help="rounds, if not those of the mode")] = 0,
    round_ms: Annotated[float, typer.Option(help="measured time of a turn, if not that of the mode")] = 0.0,
    pause_ms: Annotated[float, typer.Option(help="pause before a turn, if not that of the mode")] = -1.0,
    seed: Annotated[int, typer.Option(help="of the orders of turns; default: drawn, and noted in the report")] = -1,
    graph: Annotated[Graph, typer.Option(help="CUDA graphs: for calls below 100 us, always, never")] = Graph.auto,
    out: Annotated[Path | None, typer.Option(help="directory for CSV, JSON, Markdown and plot")] = None,
    name: Annotated[str, typer.Option(help="name of those files; default: operation and workloads")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="print Markdown instead of a table")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the cases and their work; needs no GPU")] = False,
) -> None:
    if operation == "list":
        stdout.print(_listing(), markup=False, highlight=False)
        return
    (chosen,) = _choose("operation", [operation], OPERATIONS)
    names = [part for item in workload or [chosen.default_workload] for part in _list(item)]
    if dtype not in ("float16", "bfloat16", "float8_e4m3fn"):
        raise typer.BadParameter(f"dtype {dtype!r} is not measured: use float16, bfloat16 or float8_e4m3fn.")
    try:
        cases = [case for case in cases_of(operation, names, dtype) if re.search(only, case.label)]
    except (ValueError, re.error) as error:
        raise typer.BadParameter(str(error)) from None
    units = _list(unit) or [u for item in names for u in WORKLOADS[item].units or chosen.units[:1]]
    _choose("unit", units, {name: UNITS[name] for name in chosen.units})
    chosen = dataclasses.replace(chosen, units=tuple(dict.fromkeys(units)))
    parties = _choose("backend", _list(backends) or list(chosen.default_backends), chosen.backends)
    ratios, folder = _ratios(_list(against), chosen)
    twins: dict[str, Backend] = {}
    if folder is not None:
        try:
            twins = chosen.twins(other_build.load(folder), [party.name for party in parties if party.ours])
        except ValueError as error:
            raise typer.BadParameter(f"--against: {error}") from None
        parties = [each for party in parties for each in (party, twins.get(party.name)) if each is not None]
    if not cases:
        raise typer.BadParameter(f"--only {only!r} leaves no case.")
    if dry_run:
        _dry_run(cases, chosen, parties)
        return
    if not torch.cuda.is_available():
        stderr.print(
            "There is no CUDA device here, and times of the PyTorch reference on a CPU say nothing: run this on a "
            "machine with a GPU. --dry-run lists the cases.",
            highlight=False,
        )
        raise typer.Exit(2)
    settings = BURST if mode is Mode.burst else SUSTAINED
    settings = dataclasses.replace(
        settings,
        rounds=rounds or settings.rounds,
        round_ms=round_ms or settings.round_ms,
        pause_ms=settings.pause_ms if pause_ms < 0 else pause_ms,
        graph=graph.value,
        seed=seed if seed >= 0 else random.SystemRandom().randrange(1 << 32),
    )
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is fp32
    device = torch.device("cuda", torch.cuda.current_device())
    monitor = Monitor()
    clock: Clock = HostClock(torch.cuda.synchronize) if chosen.host_clock else DeviceClock()
    with progress(cases, settings.rounds * len(parties)) as (begin, end):
        results = measure(chosen, cases, parties, settings, device, clock, monitor, begin, end)
    report = Report(
        chosen.unit,
        chosen.higher_is_better,
        [b.name for b in parties],
        [b.name for b in parties if b.ours],
        ratios,
        environment(settings, dtype, monitor, folder),
        results,
        {name: twin.name for name, twin in twins.items()},
        chosen.yardstick,
    )
    reports = [report.in_unit(UNITS[item]) for item in chosen.units]
    for each in reports:
        _show(each, markdown)
    _show_gaps(report)
    if out is not None:
        for path in reporting.write(report, out, name or "-".join([operation, *names]), reports[1:]):
            stderr.print(f"wrote {path}", markup=False, highlight=False)
    if any(r.failed for r in results if r.backend in report.ours):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
