"""Results as a table, Markdown, CSV, JSON and a plot."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from timing import Series

NONE = "-"


@dataclass(frozen=True)
class Unit:
    """How a time becomes a figure: FLOPs or bytes per second, or the time itself."""

    name: str
    scale: float
    per_second: str = ""  # work, bytes; "" is the time

    @property
    def higher_is_better(self) -> bool:
        return bool(self.per_second)

    def figure(self, work: float, moved: float, seconds: float) -> float:
        if not self.per_second:
            return self.scale * seconds
        return self.scale * (work if self.per_second == "work" else moved) / seconds


UNITS = {
    u.name: u
    for u in (
        Unit("TFLOP/s", 1e-12, "work"),
        Unit("GB/s", 1e-9, "bytes"),
        Unit("TB/s", 1e-12, "bytes"),
        Unit("us", 1e6),
    )
}


@dataclass
class Result:
    """What one backend did with one case: a figure, or the reason why there is none."""

    backend: str
    group: str
    column: str
    work: float
    figure: float | None = None
    reason: str = ""
    failed: bool = False  # it should have run, but raised or computed something else
    series: Series | None = None
    checked: str = ""  # which rows of the output were compared
    bytes: float = 0.0  # of the tensors, each once


@dataclass
class Report:
    """All results of a run, cases in order, and how they were obtained."""

    unit: str
    higher_is_better: bool
    backends: list[str]
    ours: list[str]
    against: list[str]  # "best", peers joined by +, or "other": the column of another build
    environment: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    twins: dict[str, str] = field(default_factory=dict)  # columns of ours and those of another build
    yardstick: str = ""  # a column that does something else, and is no peer

    def in_unit(self, unit: Unit) -> Report:
        """The same measurements in another unit."""

        def convert(r: Result) -> Result:
            if r.figure is None or r.series is None:
                return r
            return replace(r, figure=unit.figure(r.work, r.bytes, r.series.median))

        results = [convert(r) for r in self.results]
        return replace(self, unit=unit.name, higher_is_better=unit.higher_is_better, results=results)

    # --- looking up ---

    def cases(self) -> list[tuple[str, str]]:
        """(group, column) of every case, in order."""
        return list(dict.fromkeys((r.group, r.column) for r in self.results))

    def result(self, case: tuple[str, str], backend: str) -> Result | None:
        return next((r for r in self.results if (r.group, r.column) == case and r.backend == backend), None)

    def figure(self, case: tuple[str, str], backend: str) -> float | None:
        result = self.result(case, backend)
        return None if result is None else result.figure

    def shown(self) -> list[str]:
        """The backends with a figure anywhere."""
        return [b for b in self.backends if any(r.figure is not None for r in self.results if r.backend == b)]

    # --- ratios ---

    def peers(self, ours: str, against: str) -> list[str]:
        if against == "other":
            return [self.twins[ours]] if ours in self.twins else []
        others = {*self.ours, *self.twins.values(), self.yardstick}
        names = [b for b in self.backends if b not in others]
        return names if against == "best" else [b for b in against.split("+") if b in self.backends]

    def ratio(self, case: tuple[str, str], ours: str, against: str) -> float | None:
        """How much better ours is than the best of those in ``against``; above 1 is better, whatever the unit."""
        figure = self.figure(case, ours)
        found = [f for f in (self.figure(case, peer) for peer in self.peers(ours, against)) if f is not None]
        if figure is None or not found:
            return None
        return figure / max(found) if self.higher_is_better else min(found) / figure

    def ratio_columns(self) -> list[tuple[str, str]]:
        """(ours, against) for which there is a ratio anywhere."""
        pairs = [(ours, against) for ours in self.ours for against in self.against]
        return [pair for pair in pairs if any(self.ratio(case, *pair) is not None for case in self.cases())]

    def mean_ratio(self, ours: str, against: str) -> tuple[float, float, int]:
        """Geometric mean and minimum over the cases that have the ratio, and how many those are."""
        ratios = [r for r in (self.ratio(case, ours, against) for case in self.cases()) if r is not None]
        if not ratios:
            return math.nan, math.nan, 0
        return math.exp(sum(map(math.log, ratios)) / len(ratios)), min(ratios), len(ratios)

    # --- sentences ---

    def reasons(self) -> list[str]:
        """Why there are gaps: one line per backend and reason, with the number of cases."""
        counts: dict[tuple[str, str], int] = {}
        for r in self.results:
            if r.figure is None:
                counts[r.backend, r.reason] = counts.get((r.backend, r.reason), 0) + 1
        return [f"{backend}, {count} of {len(self.cases())} cases: {why}" for (backend, why), count in counts.items()]

    def means(self) -> list[str]:
        lines = []
        for ours, against in self.ratio_columns():
            mean, least, count = self.mean_ratio(ours, against)
            what = "the best peer" if against == "best" else against.replace("+", " or ")
            lines.append(f"{ours} / {what}: geometric mean {mean:.3f}, least {least:.3f}, {count} cases")
        return lines


def cell(result: Result | None, unit: str) -> str:
    if result is None or result.figure is None:
        return "failed" if result is not None and result.failed else NONE
    if unit == "TB/s":
        return f"{result.figure:.2f}"
    return f"{result.figure:.0f}" if unit != "us" and result.figure >= 99.5 else f"{result.figure:.1f}"


def ratio_title(ours: str, against: str) -> str:
    return f"{ours} / {'best peer' if against == 'best' else against}"


# --- forms -------------------------------------------------------------------------------------------------------


def table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one row per case, the figures of all backends, then the ratios."""
    header = ["case", *report.shown(), *(ratio_title(*pair) for pair in report.ratio_columns()), "spread"]
    rows = []
    for case in report.cases():
        found = [report.result(case, backend) for backend in report.shown()]
        figures = [cell(result, report.unit) for result in found]
        ratios = [report.ratio(case, *pair) for pair in report.ratio_columns()]
        spreads = [r.series.spread for r in found if r is not None and r.series is not None]
        spread = f"{100 * max(spreads):.1f} %" if spreads else NONE
        rows.append([" ".join(case), *figures, *(NONE if r is None else f"{r:.2f}" for r in ratios), spread])
    return header, rows


def markdown(report: Report) -> str:
    """Groups down, columns across; below each group's backends the ratios."""
    columns = list(dict.fromkeys(column for _, column in report.cases()))
    lines = [f"| {report.unit} | | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]

    def line(group: str, name: str, cells: Iterable[str]) -> None:
        lines.append(f"| {group} | {name} | " + " | ".join(cells) + " |")

    for group in dict.fromkeys(group for group, _ in report.cases()):
        for backend in report.shown():
            cells = [cell(report.result((group, column), backend), report.unit) for column in columns]
            if any(text != NONE for text in cells):
                line(group, f"**{backend}**" if backend in report.ours else backend, cells)
        for pair in report.ratio_columns():
            ratios = [report.ratio((group, column), *pair) for column in columns]
            if any(ratio is not None for ratio in ratios):
                line(group, ratio_title(*pair), (NONE if r is None else f"{r:.2f}" for r in ratios))
    means = "".join(f"- {sentence}\n" for sentence in report.means())
    return "\n".join(lines) + "\n" + (f"\n{means}" if means else "")


def records(report: Report) -> list[dict[str, Any]]:
    """One flat record per case and backend."""
    flat = []
    for r in report.results:
        series = r.series
        sample = None if series is None else series.gpu()
        flat.append(
            {
                "group": r.group,
                "column": r.column,
                "backend": r.backend,
                "figure": r.figure,
                "unit": report.unit,
                "work": r.work,
                "bytes": r.bytes,
                "seconds": None if series is None else series.median,
                "spread": None if series is None else series.spread,
                "rounds": None if series is None else len(series.seconds),
                "launches": None if series is None else series.launches,
                "mode": None if series is None else series.mode,
                "sm_clock_mhz": None if sample is None else sample.clock,
                "power_w": None if sample is None else sample.power,
                "temperature_c": None if sample is None else sample.temperature,
                "checked": r.checked,
                "reason": r.reason,
            }
        )
    return flat


def write(report: Report, directory: Path, name: str, more: Sequence[Report] = ()) -> list[Path]:
    """Writes ``name``.csv, .json, .md and, with matplotlib, .png; returns what was written.

    ``more`` is the same in other units, for the Markdown.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.{suffix}" for suffix in ("csv", "json", "md")]
    rows = records(report)
    with paths[0].open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["group"])
        writer.writeheader()
        writer.writerows(rows)
    details = [{**row, "series": asdict(r.series) if r.series else None} for row, r in zip(rows, report.results)]
    paths[1].write_text(json.dumps({"environment": report.environment, "results": details}, indent=1) + "\n")
    paths[2].write_text("\n".join(map(markdown, (report, *more))))
    plotted = plot(report, directory / f"{name}.png")
    return [*paths, *([plotted] if plotted else [])]


def plot(report: Report, path: Path) -> Path | None:
    """The figures against the columns, one panel per group; None without matplotlib or without figures."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    backends = report.shown()
    groups = [g for g in dict.fromkeys(g for g, _ in report.cases()) if _has_figures(report, g)]
    if not groups:
        return None
    across = min(len(groups), 2)
    down = -(-len(groups) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(6.5 * across, 3.6 * down), squeeze=False)
    for panel in axes.flat[len(groups) :]:
        panel.set_visible(False)
    for panel, group in zip(axes.flat, groups):
        columns = [column for g, column in report.cases() if g == group]
        for index, backend in enumerate(backends):
            _curve(report, panel, group, columns, backend, index)
        panel.set_title(group)
        panel.set_xticks(range(len(columns)), columns)
        panel.set_ylim(bottom=0)
        panel.set_ylabel(report.unit)
        panel.grid(alpha=0.3)
    axes.flat[0].legend(fontsize="small")
    words = (str(report.environment.get(key, "")) for key in ("gpu", "dtype", "mode", "commit"))
    figure.suptitle(", ".join(word for word in words if word))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _has_figures(report: Report, group: str) -> bool:
    return any(r.figure is not None for r in report.results if r.group == group)


def _curve(report: Report, panel: Any, group: str, columns: Sequence[str], backend: str, index: int) -> None:
    points = [(x, report.figure((group, column), backend)) for x, column in enumerate(columns)]
    drawn = [(x, y) for x, y in points if y is not None]
    if drawn:
        ours = backend in report.ours
        style = {"linewidth": 2.4, "marker": "o"} if ours else {"linewidth": 1.2, "marker": ".", "linestyle": "--"}
        panel.plot(*zip(*drawn), color=f"C{index}", label=backend, **style)
