"""Results as Markdown and JSON: cases across, backends down, ratios below them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from timing import Series

from .columns import ONE

SCALE = {"ms": 1e3, "us": 1e6}


@dataclass
class Result:
    """What one backend did with one case, in one mode."""

    case: str
    backend: str
    mode: str  # eager, graph
    ours: bool
    series: Series | None = None
    reason: str = ""  # why there is no figure
    failed: bool = False  # it should have run, but raised or computed something else
    note: str = ""

    @property
    def name(self) -> str:
        return self.backend if self.mode == "eager" else f"{self.backend}, graph"

    @property
    def seconds(self) -> float:
        return self.series.median if self.series is not None else math.nan


@dataclass
class Report:
    operation: str
    unit: str
    world: int
    environment: dict[str, Any]
    results: list[Result]

    def cases(self) -> list[str]:
        return list(dict.fromkeys(r.case for r in self.results))

    def names(self) -> dict[str, bool]:
        """In order; whether it is ours."""
        return {r.name: r.ours for r in self.results}

    def result(self, case: str, name: str) -> Result | None:
        return next((r for r in self.results if (r.case, r.name) == (case, name)), None)

    def best(self, case: str, names: list[str]) -> Result | None:
        found = [self.result(case, name) for name in names]
        return min((r for r in found if r is not None and r.series is not None), key=lambda r: r.seconds, default=None)

    def of_linear(self, result: Result) -> float:
        """Time of one GPU over W times that of W: 1 where nothing is lost. Of one GPU the faster mode counts."""
        one = self.best(result.case, [n for n in self.names() if n.split(",")[0] == ONE])
        return one.seconds / self.world / result.seconds if one else math.nan

    def best_peer(self, result: Result) -> Result | None:
        """Of the same mode; beside a graph of ours, eager peers too."""
        modes = ("eager",) if result.mode == "eager" else ("eager", "graph")
        peers = {r.name for r in self.results if not r.ours and r.backend != ONE and r.mode in modes}
        return self.best(result.case, list(peers))

    def against_peers(self, result: Result) -> float:
        peer = self.best_peer(result)
        return peer.seconds / result.seconds if peer is not None else math.nan


def _cell(report: Report, result: Result | None) -> str:
    if result is None or result.series is None:
        return "failed" if result is not None and result.failed else "-"
    figure = result.seconds * SCALE[report.unit]
    return f"{figure:.{3 if figure < 10 else 2 if figure < 100 else 1}f}"


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def markdown(report: Report) -> str:
    cases = report.cases()
    lines = [f"| {report.unit} | " + " | ".join(cases) + " |", "|---|" + "---|" * len(cases)]

    def row(title: str, cells: list[str]) -> None:
        if any(cell != "-" for cell in cells):
            lines.append(f"| {title} | " + " | ".join(cells) + " |")

    for name, ours in report.names().items():
        row(f"**{name}**" if ours else name, [_cell(report, report.result(case, name)) for case in cases])
    for title, figure in (("of linear: {}", report.of_linear), ("best peer / {}", report.against_peers)):
        for name in (name for name, ours in report.names().items() if ours):
            found = [report.result(case, name) for case in cases]
            row(title.format(name), [_ratio(figure(r)) if r is not None and r.series else "-" for r in found])
    peers = [name for name, ours in report.names().items() if not ours and name.split(",")[0] != ONE]
    best = [report.best(case, peers) for case in cases]
    row("best peer", [r.name if r is not None else "-" for r in best])
    spreads = [[r.series.spread for r in report.results if r.case == case and r.series is not None] for case in cases]
    row("largest spread", [f"{100 * max(s):.1f} %" if s else "-" for s in spreads])
    return "\n".join(lines) + "\n"


def remarks(report: Report) -> list[str]:
    """Why there are gaps, and how what ran differs: a line per backend and reason, with its cases."""
    cases: dict[tuple[str, str], list[str]] = {}
    for r in report.results:
        text = f"failed: {r.reason}" if r.failed else r.reason or r.note
        if text:
            cases.setdefault((r.name, text), []).append(r.case)
    return [f"{name}: {text} [{'; '.join(found)}]" for (name, text), found in cases.items()]


def write(report: Report, directory: Path, name: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    records = []
    for r in report.results:
        seconds = None if r.series is None else r.series.median
        spread = None if r.series is None else r.series.spread
        linear = report.of_linear(r) if r.series is not None and r.ours else math.nan
        records.append(
            {**asdict(r), "seconds": seconds, "spread": spread, "of_linear": None if math.isnan(linear) else linear}
        )
    content = {"operation": report.operation, "environment": report.environment, "results": records}
    (directory / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    text = markdown(report) + "".join(f"\n- {line}" for line in remarks(report)) + "\n"
    (directory / f"{name}.md").write_text(text)
