"""``check``: the reference against closed forms, then every compiled kernel of this GPU against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import _cases, _closed_forms, _info

Pair = tuple[torch.Tensor, torch.Tensor]

# Largest error allowed against exact results, atol + rtol * |x|, for inputs drawn from N(0, 1).
TOLERANCE = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1e-2, 1e-2),
    torch.float8_e4m3fn: (1e-1, 0.13),  # probabilities are e4m3 too
    torch.float8_e5m2: (1e-1, 0.26),
}
LSE_TOLERANCE = (1e-3, 1e-5)
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
    faults: list[str] = field(default_factory=list)
    skipped: str | None = None

    def add(self, case: str, computed: Pair, known: Pair) -> None:
        """Compares one result with what is known about it."""
        self.cases += 1
        worst_out, out_fits = _compare(computed[0], known[0], self.tolerance)
        worst_lse, lse_fits = _compare(computed[1], known[1], self.lse_tolerance)
        self.out_error = max(self.out_error, worst_out)
        self.lse_error = max(self.lse_error, worst_lse)
        for what, worst, fits in (("output", worst_out, out_fits), ("LSE", worst_lse, lse_fits)):
            if not fits:
                self.faults.append(f"{self.name}, {case}: largest {what} error {worst:.3g}")

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
    run: Callable[[], Iterable[tuple[Pair, Pair]]]


def command(
    device: Annotated[str, typer.Option(help="auto (a CUDA device if there is one), cpu, cuda, cuda:1, ...")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A few cases per kernel instead of all.")] = False,
) -> None:
    """Check the reference against closed forms, and every compiled kernel of the GPU against the reference.

    Exit code 1 if an error exceeds its tolerance.
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
    for fault in faults:
        console.print(f"[red]failed[/] {escape(fault)}", highlight=False, soft_wrap=True)
    if faults:
        raise typer.Exit(1)
    console.print(f"{sum(row.cases for row in rows)} cases, all within tolerance.", highlight=False)


def reference_jobs(device: torch.device, quick: bool = False) -> tuple[list[Row], list[Job]]:
    """The closed forms, in every type the reference computes (quick: float32 and float16)."""
    dtypes = [torch.float32, torch.float16] if quick else [torch.float32, torch.float16, torch.bfloat16]
    rows, jobs = [], []
    for dtype in dtypes:
        name = f"reference {str(dtype).removeprefix('torch.')}"
        row = Row(f"{name} on {device.type}", TOLERANCE[dtype])
        rows.append(row)
        jobs += [Job(row, form.name, lambda form=form, dtype=dtype: form.run(device, dtype))  # type: ignore[misc]
                 for form in _closed_forms.forms()]  # fmt: skip
    return rows, jobs


def kernel_jobs(
    kernels: list[dict[str, Any]], device: torch.device, capability: int, quick: bool = False
) -> tuple[list[Row], list[Job]]:
    """The cases of every kernel that a GPU of ``capability`` can run."""
    rows, jobs = [], []
    for kernel in kernels:
        dtype = getattr(torch, kernel["q_dtype"])
        row = Row(_info.kernel_name(kernel), TOLERANCE[dtype])
        if dtype.itemsize == 1:
            row.lse_tolerance = LSE_TOLERANCE_FP8
        rows.append(row)
        low, high = kernel["min_compute_capability"], kernel["max_compute_capability"]
        if capability < low or (high and capability > high):
            row.skipped = f"runs on {_info.capability_range(kernel)}"
            continue
        jobs += [
            Job(row, case.name, lambda case=case, kernel=kernel: [_both(case, kernel, device)])  # type: ignore[misc]
            for case in _cases.CASES
            if case.quick or not quick
        ]
    return rows, jobs


def _both(case: _cases.Case, kernel: dict[str, Any], device: torch.device) -> tuple[Pair, Pair]:
    inputs = _cases.draw(case, kernel, device)
    return _cases.compute(case, inputs, kernel["backend"]), _cases.expected(case, inputs)


def run_jobs(jobs: list[Job], console: Console) -> None:
    """Runs all jobs under a progress bar and collects errors in their rows."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=f"{escape(job.row.name)}: {escape(job.name)}")
            try:
                for computed, known in job.run():
                    job.row.add(job.name, computed, known)
            except Exception as error:  # a kernel that raises is a row of the table, not the end of it
                job.row.fail(job.name, error)
            progress.advance(task)


def _compare(actual: torch.Tensor, known: torch.Tensor, tolerance: tuple[float, float]) -> tuple[float, bool]:
    """Largest error, and whether all are within tolerance; infinite where shape, NaN or infinity differ."""
    if actual.shape != known.shape:
        return math.inf, False
    if actual.numel() == 0:
        return 0.0, True
    actual, known = actual.double(), known.double()
    same = actual == known  # equal infinities are no error, and have no difference
    error = torch.where(same, 0.0, (actual - known).abs())
    if bool(error.isnan().any()):
        return math.inf, False
    atol, rtol = tolerance
    bound = atol + rtol * torch.where(same, 0.0, known.abs())
    return float(error.max()), bool(((error <= bound) & error.isfinite()).all())


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("kernel", "cases", "max abs error", "max LSE error", "tolerance"):
        left = name == "kernel"
        table.add_column(name, justify="left" if left else "right", no_wrap=left or name == "tolerance")
    table.add_column("status", overflow="fold")
    for row in rows:
        if row.skipped is not None:
            table.add_row(row.name, "0", "", "", "", f"[yellow]skipped[/]: {row.skipped}")
            continue
        atol, rtol = row.tolerance
        limits = f"{atol:g}+{rtol:g}|x|"
        status = f"[red]FAILED ({len(row.faults)})[/]" if row.faults else "[green]ok[/]"
        table.add_row(row.name, str(row.cases), f"{row.out_error:.2e}", f"{row.lse_error:.2e}", limits, status)
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
