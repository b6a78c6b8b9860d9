"""``check``: the reference against closed forms, then every compiled kernel of this GPU against the reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import _cases, _closed_forms, _info, _list_cases
from .comparison import LSE_TOLERANCE, TOLERANCE, Errors, fault

Pair = tuple[torch.Tensor, torch.Tensor]
Comparison = tuple[Pair, Pair] | tuple[Pair, Pair, Errors]  # computed, known, errors of plain PyTorch

# Of kernels that read fp8 queries, by the type of those.
FP8_TOLERANCE = {
    torch.float8_e4m3fn: (1e-1, 0.13),  # probabilities are e4m3 too
    torch.float8_e5m2: (1e-1, 0.26),
}
LSE_TOLERANCE_FP8 = (5e-3, 1e-3)  # tensor cores add products of fp8 with about 14 bits


@dataclass
class Row:
    """One row of the table: the worst of its cases."""

    name: str
    tolerance: tuple[float, float]
    lse_tolerance: tuple[float, float] = LSE_TOLERANCE
    cases: int = 0
    out_error: float = 0.0
    lse_error: float = 0.0
    plain_error: float | None = None  # of plain PyTorch in the same precision
    faults: list[str] = field(default_factory=list)
    skipped: str | None = None

    def add(self, case: str, computed: Pair, known: Pair, plain: Errors | None = None) -> None:
        """Compares one result with what is known about it, and its errors with those of plain PyTorch."""
        self.cases += 1
        exact = [x if x.dtype == torch.float64 else x.float() for x in known]
        self.out_error = max(self.out_error, _largest(computed[0], exact[0]))
        self.lse_error = max(self.lse_error, _largest(computed[1], exact[1]))
        if plain is not None:
            self.plain_error = max(self.plain_error or 0.0, plain.largest)
        found = {
            "output": fault(computed[0], exact[0], plain=plain, tolerance=self.tolerance),
            # 0 is an ordinary LSE: of no row of them is it required.
            "LSE": fault(computed[1].flatten(), exact[1].flatten(), tolerance=self.lse_tolerance),
        }
        self.faults += [f"{self.name}, {case}: {what}: {text}" for what, text in found.items() if text is not None]

    def fail(self, case: str, error: Exception) -> None:
        """Counts a case that raised."""
        self.cases += 1
        self.out_error = self.lse_error = math.inf
        self.faults.append(f"{self.name}, {case}: {type(error).__name__}: {error}")


@dataclass
class Job:
    """One case of one row, to be run."""

    row: Row
    name: str
    run: Callable[[], Iterable[Comparison]]


def command(
    device: Annotated[str, typer.Option(help="auto (a CUDA device if there is one), cpu, cuda, cuda:1, ...")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A few cases per kernel instead of all.")] = False,
) -> None:
    """Check the reference against closed forms, and every compiled kernel of the GPU against the reference.

    Errors of a kernel have to stay within a tolerance, and within twice those of plain PyTorch in the same precision
    plus half a unit in the last place (fp8 queries: a tolerance alone). Exit code 1 if one does not.
    """
    where = _device(device)
    console = Console()
    kernels, missing = _info.compiled_kernels()
    rows, jobs = reference_jobs(where, quick)
    if where.type == "cuda":
        major, minor = torch.cuda.get_device_capability(where)
        console.print(f"{torch.cuda.get_device_name(where)}, sm_{major}{minor}", markup=False, highlight=False)
        more_rows, more_jobs = kernel_jobs(kernels, where, 10 * major + minor, quick)
        rows, jobs = rows + more_rows, jobs + more_jobs
    if missing is not None:
        console.print(f"No compiled kernels to check: {missing}.", markup=False, highlight=False)
    elif where.type != "cuda":
        console.print(
            f"{len(kernels)} compiled kernels need a CUDA device and are not checked on {where}.", highlight=False
        )
    run_jobs(jobs, console)
    faults = [fault for row in rows for fault in row.faults]
    console.print(_table(rows))
    console.print()
    for sentence in faults:
        console.print(f"[red]failed[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    if faults:
        raise typer.Exit(1)
    console.print(f"{sum(row.cases for row in rows)} cases, all within their bounds.", highlight=False)


def reference_jobs(device: torch.device, quick: bool = False) -> tuple[list[Row], list[Job]]:
    """The closed forms, in every type the reference computes (quick: float32 and float16)."""
    dtypes = [torch.float32, torch.float16] if quick else [torch.float32, torch.float16, torch.bfloat16]
    rows, jobs = [], []
    for dtype in dtypes:
        name, at = f"reference {str(dtype).removeprefix('torch.')}", _closed_forms.Place(device, dtype)
        row = Row(f"{name} on {device.type}", TOLERANCE[dtype])
        rows.append(row)
        jobs += [Job(row, form, functools.partial(pairs, at)) for form, pairs in _closed_forms.FORMS.items()]
    return rows, jobs


def kernel_jobs(
    kernels: list[dict[str, Any]], device: torch.device, capability: int, quick: bool = False
) -> tuple[list[Row], list[Job]]:
    """The cases of every kernel that a GPU of ``capability`` can run."""
    rows, jobs = [], []
    for kernel in kernels:
        dtype = getattr(torch, kernel["q_dtype"])
        row = Row(_info.kernel_name(kernel), (TOLERANCE | FP8_TOLERANCE)[dtype])
        if dtype.itemsize == 1:
            row.lse_tolerance = LSE_TOLERANCE_FP8
        rows.append(row)
        low, high = kernel["min_compute_capability"], kernel["max_compute_capability"]
        if capability < low or (high and capability > high):
            row.skipped = f"runs on {_info.capability_range(kernel)}"
            continue
        if not _list_cases.is_quantized(kernel):
            jobs += [
                Job(row, case.name, functools.partial(_compared, case, kernel, device))
                for case in _cases.CASES
                if case.quick or not quick
            ]
        if _list_cases.are_for(kernel):
            jobs += [
                Job(row, case.name, functools.partial(_compared_lists, case, kernel, device))
                for case in _list_cases.CASES
                if (case.quick or not quick) and _list_cases.is_served(case, kernel)
            ]
    return rows, jobs


def _compared(case: _cases.Case, kernel: dict[str, Any], device: torch.device) -> Iterator[Comparison]:
    inputs = _cases.draw(case, kernel, device)
    known, computed = _cases.expected(case, inputs), _cases.compute(case, inputs, kernel["backend"])
    if inputs.q.dtype in FP8_TOLERANCE:
        # Where a row sees few keys, one of them has most of the weight. Whether e4m3 holds that weight exactly depends
        # on the scale that the order of keys gives it: errors of equally good computations differ by a factor of 7.
        yield computed, known
    else:
        yield computed, known, Errors.of(_cases.plain(case, inputs), known[0])


def _compared_lists(case: _list_cases.Case, kernel: dict[str, Any], device: torch.device) -> Iterator[Comparison]:
    inputs = _list_cases.draw(case, kernel, device)
    known, computed = _list_cases.expected(inputs), _list_cases.compute(inputs, kernel["backend"])
    yield computed, known, Errors.of(_list_cases.plain(inputs), known[0])


def run_jobs(jobs: list[Job], console: Console) -> None:
    """Runs all jobs and collects errors in their rows. Shows a bar on a terminal; elsewhere a line per row."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(jobs))
        for i, job in enumerate(jobs):
            if not console.is_terminal and (i == 0 or jobs[i - 1].row is not job.row):
                console.print(f"[{i + 1}/{len(jobs)}] {job.row.name}", markup=False, highlight=False)
            progress.update(task, description=f"{escape(job.row.name)}: {escape(job.name)}")
            try:
                for comparison in job.run():
                    job.row.add(job.name, *comparison)
            except Exception as error:  # a kernel that raises is a row of the table, not the end of it
                job.row.fail(job.name, error)
            progress.advance(task)


def _largest(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error; infinite where there is none to tell."""
    if actual.shape != exact.shape:
        return math.inf
    largest = Errors.of(actual, exact).largest
    return largest if math.isfinite(largest) else math.inf


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)  # fits into 80 columns
    for name in ("kernel", "cases", "max abs error", "of plain PyTorch", "max LSE error", "tolerance"):
        left = name == "kernel"
        wide = left or name == "tolerance"
        width = 7 if "max" in name or "plain" in name else None  # of 1.2e-03
        table.add_column(name, justify="left" if left else "right", no_wrap=wide, min_width=width)
    table.add_column("status", overflow="fold", min_width=6)
    for row in rows:
        if row.skipped is not None:
            table.add_row(row.name, "0", "", "", "", "", f"[yellow]skipped[/]: {row.skipped}")
            continue
        atol, rtol = row.tolerance
        limits = f"{atol:g}+{rtol:g}|x|"
        status = f"[red]FAILED ({len(row.faults)})[/]" if row.faults else "[green]ok[/]"
        plain = "" if row.plain_error is None else f"{row.plain_error:.1e}"
        errors = (f"{row.out_error:.1e}", plain, f"{row.lse_error:.1e}")
        table.add_row(row.name, str(row.cases), *errors, limits, status)
    return table


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(f"--device {name} is no device: use auto, cpu, cuda or cuda:<number>.") from None
    if device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device {name} is not supported: use auto, cpu or cuda.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise typer.BadParameter(f"--device {name}: torch sees {count} CUDA devices here. Use --device cpu.")
    return device
